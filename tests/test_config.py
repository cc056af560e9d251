"""Variables of the environment mean what they mean to huggingface_hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.config import load_settings
from llmrun.errors import UsageError

_ASK = """
import json
import os
from huggingface_hub import constants
print(json.dumps([constants.HF_HUB_CACHE, constants.ENDPOINT, constants.HF_HUB_OFFLINE]))
"""
_NAMES = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HUB_CACHE": "/a/hub", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"},
        {"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"},
        {"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"},
        {"XDG_CACHE_HOME": "/d"},
        {"HF_HOME": "$DISK/models"},
        {"HF_HOME": "~/models"},
        {"HF_HUB_CACHE": "~/${DISK}/hub"},
        {"HUGGINGFACE_HUB_CACHE": "$DISK/hub"},
        {"HF_HOME": "$NOWHERE/models"},
        {"HF_ENDPOINT": "https://hub.test/", "HF_HUB_OFFLINE": "yes"},
        {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"},
        {"TRANSFORMERS_OFFLINE": "true"},
    ],
    ids=str,
)
def test_as_huggingface_hub_reads_them(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"DISK": "/disk", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NOWHERE", raising=False)
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    cache, endpoint, offline = json.loads(done.stdout)
    ours = load_settings()
    assert (str(ours.hub_cache), ours.endpoint, ours.offline) == (str(Path(cache).absolute()), endpoint, offline)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLMRUN_KV_BYTES", "1GB"),
        ("LLMRUN_KV_BYTES", "-1"),
        ("LLMRUN_KV_BYTES", "1e9"),
        ("LLMRUN_KV_BYTES", "²"),
        ("LLMRUN_KV_BYTES", "9" * 30),
        ("LLMRUN_DEBUG", "maybe"),
        ("HF_ENDPOINT", "127.0.0.1:9"),
    ],
)
def test_an_invalid_variable_is_an_error_that_names_it(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"invalid {name}={value}") as caught:
        load_settings({name: value})
    assert caught.value.hint.removeprefix("e.g. ").startswith(f"{name}=")


@pytest.mark.parametrize(("value", "n_bytes"), [("", 4_000_000_000), ("0", 0), (" 1000000000 ", 1_000_000_000)])
def test_the_size_of_saved_states(value: str, n_bytes: int) -> None:
    assert load_settings({"LLMRUN_KV_BYTES": value}).states_bytes == n_bytes


@pytest.mark.parametrize(("value", "debug"), [("1", True), ("on", True), ("0", False), ("no", False), ("", False)])
def test_debugging(value: str, debug: bool) -> None:
    assert load_settings({"LLMRUN_DEBUG": value}).debug is debug


def test_a_command_reports_an_invalid_variable() -> None:
    command = [sys.executable, "-m", "llmrun", "list"]
    environment = {**os.environ, "LLMRUN_KV_BYTES": "1GB"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "invalid LLMRUN_KV_BYTES=1GB" in done.stderr
    assert "Traceback" not in done.stderr
