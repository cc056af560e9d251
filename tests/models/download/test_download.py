"""Transfers: whatever the server does, the target is either not there or has the promised bytes."""

from __future__ import annotations

import errno
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from support.stand_in_hub import COMMIT, StandInHub, retrying, sha256, stand_in_hub

from llmrun import storage
from llmrun.errors import (
    DiskFullError,
    IntegrityError,
    ModelNotFoundError,
    NetworkError,
    ResourceError,
)
from llmrun.models.download import download as module
from llmrun.models.download.download import (
    DownloadPart,
    WrongBytesError,
    arrived_bytes,
    download,
    ignore_progress,
    part_path,
)
from llmrun.models.download.transfer import RetryPolicy, TransferSource, ignore_note

CONTENT = random.Random(1).randbytes(3_000_000)
QUICK = RetryPolicy(connect_seconds=30, stall_seconds=30, retries=2, backoff_seconds=0.0)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    with stand_in_hub() as server:
        server.files["tiny.gguf"] = CONTENT
        yield server


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "blobs" / sha256(CONTENT)


def part_of(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def source(hub: StandInHub, **changes: Any) -> TransferSource:
    url = f"{hub.url}/{hub.repository}/resolve/{COMMIT}/tiny.gguf"
    fields = {"label": "tiny.gguf", "sha256": sha256(CONTENT), "size": len(CONTENT), **changes}
    return TransferSource(url, **fields)


def fetch(
    hub: StandInHub,
    target: Path,
    *,
    policy: RetryPolicy = QUICK,
    on_progress: Any = ignore_progress,
    on_note: Any = ignore_note,
    **changes: Any,
) -> None:
    lock = target.parent.with_name("tiny.lock")
    wanted = source(hub, **changes)
    with retrying(policy):
        download(wanted, target, lock=lock, on_progress=on_progress, on_note=on_note)


def test_whole_file(hub: StandInHub, target: Path) -> None:
    seen: list[tuple[int, int]] = []
    fetch(hub, target, on_progress=lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_nothing_is_asked_when_it_is_there(hub: StandInHub, target: Path) -> None:
    fetch(hub, target)
    asked = len(hub.requests)
    fetch(hub, target)
    assert len(hub.requests) == asked


def test_a_cut_is_resumed_within_the_run(hub: StandInHub, target: Path) -> None:
    hub.faults.cut_after = [1_000_000, 1_000_000]
    fetch(hub, target)
    assert target.read_bytes() == CONTENT
    assert hub.sent == len(CONTENT)
    assert [request.headers.get("range") for request in hub.transfers()[:2]] == [None, "bytes=1000000-"]


def test_a_whole_part_needs_no_transfer(hub: StandInHub, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT)
    fetch(hub, target)
    assert target.read_bytes() == CONTENT
    assert not hub.requests


def test_server_that_lies_once_costs_nothing(hub: StandInHub, target: Path) -> None:
    """A part is not thrown away for a single bad answer."""
    hub.faults.cut_after = [1_500_000]
    hub.faults.statuses = [0, 416]
    fetch(hub, target)
    assert target.read_bytes() == CONTENT
    assert hub.sent == len(CONTENT)


def test_range_that_can_not_be_satisfied(hub: StandInHub, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT + b"more")
    fetch(hub, target, size=None)  # without a size only the server can tell
    assert target.read_bytes() == CONTENT


def test_retry_after_is_heeded(hub: StandInHub, target: Path) -> None:
    hub.faults.statuses = [429]
    hub.faults.headers = {"Retry-After": "1"}
    began = time.monotonic()
    fetch(hub, target)
    assert time.monotonic() - began > 0.9


@pytest.mark.parametrize("date", [False, True], ids=["seconds", "date"])
def test_long_wait_is_said(hub: StandInHub, target: Path, date: bool) -> None:
    hub.faults.statuses = [429]
    hub.faults.headers = {"Retry-After": formatdate(time.time() + 100, usegmt=True) if date else "60"}
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        raise KeyboardInterrupt  # nobody waits for this

    with pytest.raises(KeyboardInterrupt):
        fetch(hub, target, on_note=note)
    assert "429" in notes[0]
    (seconds,) = re.findall(r"again in (\d+) seconds", notes[0])
    assert 60 <= int(seconds) <= 100 if date else seconds == "60"


def test_back_off_grows(hub: StandInHub, target: Path) -> None:
    hub.faults.statuses = [503] * 10
    began = time.monotonic()
    with pytest.raises(NetworkError):
        fetch(hub, target, policy=RetryPolicy(retries=3, backoff_seconds=0.1))
    assert time.monotonic() - began >= (0.1 + 0.2 + 0.4) * 0.75
    assert len(hub.faults.statuses) == 10 - (3 + 1)


def test_stall_is_noticed_within_thirty_seconds_by_default() -> None:
    assert RetryPolicy().stall_seconds <= 29


def test_progress_comes_while_nothing_arrives(hub: StandInHub, target: Path) -> None:
    hub.faults.stall_after = 1000
    seen: list[int] = []
    with pytest.raises(NetworkError):
        fetch(
            hub,
            target,
            policy=RetryPolicy(stall_seconds=2.0, retries=0),
            on_progress=lambda done, total: seen.append(done),
        )
    assert len(seen) >= 4


@pytest.mark.parametrize("status", [400, 403])
def test_expired_link_is_asked_for_again(hub: StandInHub, target: Path, status: int) -> None:
    hub.faults.cut_after = [1_000_000]
    hub.faults.statuses = [0, status]
    fetch(hub, target)
    assert target.read_bytes() == CONTENT
    assert hub.sent == len(CONTENT)
    assert [request.path.startswith("/cdn/") for request in hub.requests] == [False, True] * 3


def test_token_follows_on_the_same_host(hub: StandInHub, target: Path) -> None:
    hub.faults.same_host = True
    fetch(hub, target, token="canary")
    assert {request.headers.get("authorization") for request in hub.requests} == {"Bearer canary"}


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_hash_and_version_nothing_is_resumed(hub: StandInHub, target: Path, etag: str | None) -> None:
    hub.faults.cut_after = [1000]
    hub.faults.etag = etag
    with pytest.raises(NetworkError):
        fetch(hub, target, sha256=None, size=None, policy=RetryPolicy(retries=0))
    assert not list(target.parent.iterdir())
    fetch(hub, target, sha256=None, size=None)
    assert target.read_bytes() == CONTENT


def test_without_a_hash_the_version_allows_to_resume(hub: StandInHub, target: Path) -> None:
    hub.faults.cut_after = [1_000_000]
    hub.faults.etag = '"one"'
    with pytest.raises(NetworkError):
        fetch(hub, target, sha256=None, size=None, policy=RetryPolicy(retries=0))
    fetch(hub, target, sha256=None, size=None)
    assert target.read_bytes() == CONTENT
    assert hub.sent == len(CONTENT)
    assert hub.transfers()[-1].headers["if-range"] == '"one"'
    assert list(target.parent.iterdir()) == [target]


def test_another_version_is_not_mixed_in(hub: StandInHub, target: Path) -> None:
    hub.faults.cut_after = [1_000_000]
    hub.faults.etag = '"one"'
    with pytest.raises(NetworkError):
        fetch(hub, target, sha256=None, size=None, policy=RetryPolicy(retries=0))
    hub.faults.etag = '"two"'
    hub.files["tiny.gguf"] = CONTENT[::-1]
    fetch(hub, target, sha256=None, size=None)
    assert target.read_bytes() == CONTENT[::-1]


def test_cut_without_a_hash_is_noticed_and_repeated(hub: StandInHub, target: Path) -> None:
    hub.faults.cut_after = [1000]
    fetch(hub, target, sha256=None, size=None)
    assert target.read_bytes() == CONTENT


def test_full_disk_is_noticed_before(hub: StandInHub, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskFullError) as caught:
        fetch(hub, target)
    assert "3,000,000 bytes are needed, 1,000 are free" in caught.value.why
    assert not hub.requests


def test_what_is_there_needs_no_room(hub: StandInHub, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT[:2_500_000])
    monkeypatch.setattr(storage, "free_bytes", lambda path: 500_000)
    fetch(hub, target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_disk_that_fills_up_meanwhile(
    hub: StandInHub, target: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "No space left on device")

    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(module.DownloadPart, "append", full)
        elif where == "fsync":
            patch.setattr(module.os, "fsync", full)
        else:
            patch.setattr(module.Path, "replace", full)
        with pytest.raises(DiskFullError, match=r"no space is left|not allowed there") as caught:
            fetch(hub, target)
    assert caught.value.exit_status == 6
    assert "are free" in caught.value.why
    assert ("3,000,000 more bytes are needed" in caught.value.why) == (where == "write")
    assert not target.exists()
    fetch(hub, target)  # room was made
    assert target.read_bytes() == CONTENT
    assert hub.sent == len(CONTENT) or where == "write"
    assert list(target.parent.iterdir()) == [target]


def test_place_that_can_not_be_written(hub: StandInHub, target: Path) -> None:
    target.parent.write_text("a file where the folder should be")
    with pytest.raises(ResourceError):
        fetch(hub, target)


def test_links_stay_out_of_messages(hub: StandInHub, target: Path) -> None:
    secret = TransferSource(f"{hub.url}/nowhere?signature=canary", "tiny.gguf")
    with retrying(QUICK), pytest.raises(ModelNotFoundError) as caught:
        download(secret, target, lock=target.with_name("l"))
    assert "canary" not in f"{caught.value} {caught.value.hint}"


# ---- several connections


@pytest.fixture
def in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if three megabytes were a lot: ranges of 256 kB."""
    monkeypatch.setattr(module, "LARGE_FILE_BYTES", 1_000_000)
    monkeypatch.setattr(module, "RANGE_BYTES", 1 << 18)


@pytest.mark.usefixtures("in_ranges")
def test_large_files_come_over_several_connections(hub: StandInHub, target: Path) -> None:
    hub.faults.bytes_per_second = 5_000_000
    seen: list[int] = []
    fetch(hub, target, on_progress=lambda done, total: seen.append(done))
    assert target.read_bytes() == CONTENT
    assert hub.sent == len(CONTENT)
    assert hub.most_busy == module.CONNECTIONS
    assert seen == sorted(seen)
    assert list(target.parent.iterdir()) == [target]
    # The signed link is asked for once, not for every range.
    assert len(hub.requests) - len(hub.transfers()) == 1


@pytest.mark.usefixtures("in_ranges")
@pytest.mark.parametrize(
    "faults",
    [
        {"cut_after": [1000, 100_000, 0, 50_000, 250_000]},
        {"statuses": [0, 503, 0, 403, 0, 500, 429]},
        {"most_connections": 2},
    ],
    ids=str,
)
def test_ranges_and_faults(hub: StandInHub, target: Path, faults: dict[str, Any]) -> None:
    for name, value in faults.items():
        setattr(hub.faults, name, value)
    fetch(hub, target, policy=RetryPolicy(stall_seconds=1, retries=8, backoff_seconds=0.01))
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.usefixtures("in_ranges")
def test_one_flipped_byte_in_a_range(hub: StandInHub, target: Path) -> None:
    hub.faults.content = CONTENT[:1_500_000] + bytes([CONTENT[1_500_000] ^ 1]) + CONTENT[1_500_001:]
    with pytest.raises(IntegrityError, match="sha256"):
        fetch(hub, target)
    assert not list(target.parent.iterdir())


# ---- a file on its way: its length is what has arrived, and what is installed is right


PART_CONTENT = random.Random(4).randbytes(1_000_003)
SIZE = len(PART_CONTENT)
HASH = sha256(PART_CONTENT)


def complete(part: DownloadPart) -> None:
    while not part.complete:
        part.append(PART_CONTENT[part.arrived :][:50_000])


def install(part: DownloadPart) -> None:
    while part.hash_some():
        pass
    part.install()


def interrupted(
    target: Path, work: Callable[[DownloadPart], None], sha: str | None = HASH, size: int | None = SIZE
) -> None:
    with suppress(KeyboardInterrupt), DownloadPart(target, size, sha) as part:
        work(part)
        raise KeyboardInterrupt


def test_what_has_arrived_is_there_at_every_moment(tmp_path: Path) -> None:
    """As if killed after each write: a copy of the part is a download that can go on, with nothing lost."""
    dice = random.Random(5)
    target = tmp_path / "file"
    with DownloadPart(target, SIZE, HASH) as part:
        for step in range(SIZE):
            part.append(PART_CONTENT[part.arrived :][: dice.randrange(1, 40_000)])
            copy = tmp_path / f"killed-{step}"
            copy.mkdir()
            shutil.copy(part_path(target), copy)
            assert arrived_bytes(copy / "file", SIZE) == part.arrived
            with DownloadPart(copy / "file", SIZE, HASH) as resumed:
                assert resumed.arrived == part.arrived
                complete(resumed)
                install(resumed)
            assert (copy / "file").read_bytes() == PART_CONTENT
            if part.complete:
                break
    assert step > 20


def test_a_part_of_wrong_bytes_is_deleted(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with pytest.raises(WrongBytesError, match="sha256"), DownloadPart(target, SIZE, sha256(b"other")) as part:  # noqa: PT012
        complete(part)
        install(part)
    assert not list(tmp_path.iterdir())


def test_missing_bytes_are_not_installed(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with pytest.raises(WrongBytesError, match="expected"), DownloadPart(target, SIZE, HASH) as part:
        part.install()
    assert not list(tmp_path.iterdir())


def test_restart_discards_bytes_and_their_hash(tmp_path: Path) -> None:
    with DownloadPart(tmp_path / "file", SIZE, HASH) as part:
        part.append(b"x" * 1000)
        part.hash_some()
        part.restart()
        assert part.arrived == 0
        complete(part)
        install(part)
    assert (tmp_path / "file").read_bytes() == PART_CONTENT


def test_what_is_beyond_the_end_is_dropped(tmp_path: Path) -> None:
    with DownloadPart(tmp_path / "file", 100, sha256(PART_CONTENT[:100])) as part:
        part.append(PART_CONTENT[:1000])
        install(part)
    assert (tmp_path / "file").read_bytes() == PART_CONTENT[:100]


def test_empty_part_does_not_stay(tmp_path: Path) -> None:
    interrupted(tmp_path / "file", lambda part: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", ["", "x" * 5000, "Ünicode"])
def test_without_hash_and_version_nothing_stays(tmp_path: Path, version: str) -> None:
    def work(part: DownloadPart) -> None:
        part.remember(version)
        part.append(PART_CONTENT[:1000])

    interrupted(tmp_path / "file", work, None, None)
    assert not list(tmp_path.iterdir())


def test_version_is_remembered(tmp_path: Path) -> None:
    def work(part: DownloadPart) -> None:
        part.remember('"one"')
        part.append(PART_CONTENT[:1000])

    interrupted(tmp_path / "file", work, None, None)
    with DownloadPart(tmp_path / "file", None, None) as part:
        assert (part.version, part.arrived) == ('"one"', 1000)
