"""A file on its way: at every moment what is noted is there, and what is installed is right."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.stand_in_hub import sha256

from llmrun.models.download import part as module
from llmrun.models.download.part import Claim, ClaimLostError, DownloadPart, WrongBytesError, arrived_bytes, part_path

CONTENT = random.Random(4).randbytes(1_000_003)
SIZE = len(CONTENT)
HASH = sha256(CONTENT)
PIECE = 1 << 17


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEVERAL_PIECES_BYTES", SIZE)
    monkeypatch.setattr(module, "_SMALLEST_PIECE", PIECE)


def claim(part: DownloadPart) -> Claim:
    found = part.claim()
    assert found is not None
    return found


def write(part: DownloadPart, wanted: Claim, n_bytes: int, content: bytes = CONTENT) -> None:
    at = wanted.piece.position
    part.write(wanted, content[at : at + n_bytes])


def complete(part: DownloadPart) -> None:
    while (wanted := part.claim()) is not None:
        while not wanted.piece.whole:
            write(part, wanted, 50_000)
        part.release(wanted)


def hash_all(part: DownloadPart) -> None:
    while part.hash_some():
        pass


def interrupted(
    target: Path, work: Callable[[DownloadPart], None], sha: str | None = HASH, size: int | None = SIZE
) -> None:
    with suppress(KeyboardInterrupt), DownloadPart(target, size, sha) as part:
        work(part)
        raise KeyboardInterrupt


def test_pieces_in_any_order(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with DownloadPart(target, SIZE, HASH) as part:
        claims = [claim(part) for _ in range(8)]
        assert part.claim() is None
        for wanted in reversed(claims):
            assert not part.complete
            assert not part.hash_some()
            write(part, wanted, PIECE)
        assert part.complete
        hash_all(part)
        part.install()
    assert target.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_noted_is_there_at_every_moment(tmp_path: Path) -> None:
    """As if killed after each write: a copy of the two files is a download that can go on, with nothing lost."""
    dice = random.Random(5)
    target = tmp_path / "file"
    with DownloadPart(target, SIZE, HASH) as part:
        claims: list[Claim] = []
        step = 0
        while not part.complete:
            if len(claims) < 4 and (wanted := part.claim()):
                claims.append(wanted)
            busy = dice.choice(claims)
            write(part, busy, dice.randrange(1, 40_000))
            if busy.piece.whole:
                part.release(busy)
                claims.remove(busy)
            step += 1
            copy = tmp_path / f"killed-{step}"
            copy.mkdir()
            for path in tmp_path.glob("file.part*"):
                shutil.copy(path, copy)
            assert arrived_bytes(copy / "file", SIZE) == part.arrived
            with DownloadPart(copy / "file", SIZE, HASH) as resumed:
                assert resumed.arrived == part.arrived
                complete(resumed)
                hash_all(resumed)
                resumed.install()
            assert (copy / "file").read_bytes() == CONTENT
        assert part.arrived == SIZE
        assert step > 20


def test_first_bytes_of_a_plain_part_are_taken_over(tmp_path: Path) -> None:
    target = tmp_path / "file"
    part_path(target).write_bytes(CONTENT[:300_000])
    assert arrived_bytes(target, SIZE) == 300_000
    with DownloadPart(target, SIZE, HASH) as part:
        assert part.in_pieces
        assert part.arrived == 300_000
        assert claim(part).piece.position == 300_000


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\xff" * 200])
def test_damaged_map_costs_bytes_but_not_the_file(tmp_path: Path, damage: bytes) -> None:
    target = tmp_path / "file"
    interrupted(target, lambda part: write(part, claim(part), 90_000))
    (tmp_path / "file.part.map").write_bytes(damage)
    with DownloadPart(target, SIZE, HASH) as part:
        assert part.arrived == 90_000  # read as a plain part
        complete(part)
        hash_all(part)
        part.install()
    assert target.read_bytes() == CONTENT


def test_map_that_claims_more_than_is_there(tmp_path: Path) -> None:
    target = tmp_path / "file"
    interrupted(target, lambda part: write(part, claim(part), 90_000))
    with part_path(target).open("r+b") as file:
        file.truncate(10_000)
    with DownloadPart(target, SIZE, HASH) as part:
        assert part.arrived == 10_000


def test_map_of_another_size_is_not_believed(tmp_path: Path) -> None:
    target = tmp_path / "file"
    interrupted(target, lambda part: write(part, claim(part), 90_000))
    with DownloadPart(target, SIZE + 1, HASH) as part:
        assert part.arrived == 90_000


def test_wrong_bytes_are_deleted(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with pytest.raises(WrongBytesError, match="sha256"), DownloadPart(target, SIZE, sha256(b"other")) as part:  # noqa: PT012
        complete(part)
        hash_all(part)
        part.install()
    assert not list(tmp_path.iterdir())


def test_missing_bytes_are_not_installed(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with pytest.raises(WrongBytesError, match="expected"), DownloadPart(target, SIZE, HASH) as part:
        part.install()
    assert not list(tmp_path.iterdir())


def test_piece_that_was_taken_away(tmp_path: Path) -> None:
    with DownloadPart(tmp_path / "file", SIZE, HASH) as part:
        slow = claim(part)
        write(part, slow, 1000)
        part.release(slow)
        quick = claim(part)
        assert quick.piece.position == 1000
        with pytest.raises(ClaimLostError):
            write(part, slow, 1000)


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    with DownloadPart(tmp_path / "file", SIZE, HASH) as part:
        slow = claim(part)
    with pytest.raises(ClaimLostError):
        write(part, slow, 1000)


def test_restart_keeps_only_the_one_who_asks(tmp_path: Path) -> None:
    with DownloadPart(tmp_path / "file", SIZE, HASH) as part:
        first, second = claim(part), claim(part)
        write(part, first, 1000)
        part.hash_some()
        part.restart(second)
        assert (part.arrived, part.in_pieces, second.piece.end) == (0, False, SIZE)
        with pytest.raises(ClaimLostError):
            write(part, first, 1000)
        while not part.complete:
            write(part, second, 70_000)
        hash_all(part)
        part.install()
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_what_is_beyond_the_end_is_dropped(tmp_path: Path) -> None:
    with DownloadPart(tmp_path / "file", 100, sha256(CONTENT[:100])) as part:
        part.write(claim(part), CONTENT[:1000])
        hash_all(part)
        part.install()
    assert (tmp_path / "file").read_bytes() == CONTENT[:100]


def test_empty_part_does_not_stay(tmp_path: Path) -> None:
    interrupted(tmp_path / "file", lambda part: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", ["", "x" * 5000, "Ünicode"])
def test_without_hash_and_version_nothing_stays(tmp_path: Path, version: str) -> None:
    def work(part: DownloadPart) -> None:
        part.remember(version)
        write(part, claim(part), 1000)

    interrupted(tmp_path / "file", work, None, None)
    assert not list(tmp_path.iterdir())


def test_version_is_remembered(tmp_path: Path) -> None:
    def work(part: DownloadPart) -> None:
        part.remember('"one"')
        write(part, claim(part), 1000)

    interrupted(tmp_path / "file", work, None, None)
    with DownloadPart(tmp_path / "file", None, None) as part:
        assert (part.version, part.arrived) == ('"one"', 1000)


def test_sizes_of_pieces_grow_with_the_file() -> None:
    for size, wanted in ((SIZE, PIECE), (10**10, 148 << 20), (10**8, 1 << 20)):
        found = module._Map(Path("x.part"), size).piece_bytes
        assert found == min(max(wanted, PIECE), module._LARGEST_PIECE)
        assert found < 1 << 32
