"""A file on its way: its length is what has arrived, and what is installed is right."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.stand_in_hub import sha256

from llmrun.models.download.download import DownloadPart, WrongBytesError, arrived_bytes, part_path

CONTENT = random.Random(4).randbytes(1_000_003)
SIZE = len(CONTENT)
HASH = sha256(CONTENT)


def complete(part: DownloadPart) -> None:
    while not part.complete:
        part.append(CONTENT[part.arrived :][:50_000])


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
            part.append(CONTENT[part.arrived :][: dice.randrange(1, 40_000)])
            copy = tmp_path / f"killed-{step}"
            copy.mkdir()
            shutil.copy(part_path(target), copy)
            assert arrived_bytes(copy / "file", SIZE) == part.arrived
            with DownloadPart(copy / "file", SIZE, HASH) as resumed:
                assert resumed.arrived == part.arrived
                complete(resumed)
                install(resumed)
            assert (copy / "file").read_bytes() == CONTENT
            if part.complete:
                break
    assert step > 20


def test_wrong_bytes_are_deleted(tmp_path: Path) -> None:
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
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_what_is_beyond_the_end_is_dropped(tmp_path: Path) -> None:
    with DownloadPart(tmp_path / "file", 100, sha256(CONTENT[:100])) as part:
        part.append(CONTENT[:1000])
        install(part)
    assert (tmp_path / "file").read_bytes() == CONTENT[:100]


def test_empty_part_does_not_stay(tmp_path: Path) -> None:
    interrupted(tmp_path / "file", lambda part: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", ["", "x" * 5000, "Ünicode"])
def test_without_hash_and_version_nothing_stays(tmp_path: Path, version: str) -> None:
    def work(part: DownloadPart) -> None:
        part.remember(version)
        part.append(CONTENT[:1000])

    interrupted(tmp_path / "file", work, None, None)
    assert not list(tmp_path.iterdir())


def test_version_is_remembered(tmp_path: Path) -> None:
    def work(part: DownloadPart) -> None:
        part.remember('"one"')
        part.append(CONTENT[:1000])

    interrupted(tmp_path / "file", work, None, None)
    with DownloadPart(tmp_path / "file", None, None) as part:
        assert (part.version, part.arrived) == ('"one"', 1000)
