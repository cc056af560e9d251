"""The script that asks the hub about every entry, against a stand-in that has three of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stand_in_hub import StandInHub, stand_in_hub

SCRIPT = Path(__file__).with_name("catalogue.py")
ENTRY = """
[models.{alias}]
title = "Tiny"
parameters = "1M"
repository = "{repository}"
file = "tiny-{{quant}}.gguf"
quants = ["Q4_0", "Q8_0"]
quant = "Q4_0"
size_mb = {size}
license = "MIT"
kind = "chat"
context = 512
released = "2026-01"
checked = "2026-01-02"
source = "this test"
"""

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    with stand_in_hub("maker/tiny-GGUF") as server:
        server.files = {"tiny-Q4_0.gguf": bytes(10**6), "tiny-Q8_0.gguf": bytes(2 * 10**6)}
        yield server


def told(hub: StandInHub, folder: Path, status: int, **entries: tuple[str, int]) -> list[str]:
    """What is said of entries: alias -> (repository, megabytes)."""
    texts = [ENTRY.format(alias=alias, repository=repo, size=size) for alias, (repo, size) in entries.items()]
    path = folder / "models.toml"
    path.write_text(f'default = "{next(iter(entries))}"\n' + "".join(texts))
    done = subprocess.run(
        [sys.executable, SCRIPT, path], capture_output=True, text=True, env={**os.environ, "HF_ENDPOINT": hub.url}
    )
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines()


def test_entries_that_are_right(hub: StandInHub, tmp_path: Path) -> None:
    assert told(hub, tmp_path, 0, tiny=("maker/tiny-GGUF", 1)) == ["ok    tiny: right, at 01234567"]


def test_entries_that_are_wrong(hub: StandInHub, tmp_path: Path) -> None:
    del hub.files["tiny-Q8_0.gguf"]
    lines = told(hub, tmp_path, 1, tiny=("maker/tiny-GGUF", 3), gone=("maker/gone-GGUF", 1))
    assert lines[0] == "WRONG tiny: no tiny-Q8_0.gguf; Q4_0 has 1 MB, not 3"
    assert lines[1].startswith("WRONG gone: the hub has no repository maker/gone-GGUF")


def test_what_is_newer_is_told(hub: StandInHub, tmp_path: Path) -> None:
    hub.faults.updated = "2026-03-04T05:06:07.000Z"
    lines = told(hub, tmp_path, 0, tiny=("maker/tiny-GGUF", 1))
    assert lines == ["ok    tiny: right, at 01234567; changed on 2026-03-04, checked 2026-01-02"]


def test_it_asks_about_every_entry_of_our_own(hub: StandInHub) -> None:
    """The stand-in has none of them; each is asked for once."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == len(hub.requests) >= 40
