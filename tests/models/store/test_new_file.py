"""The new file is there whole or not at all: faults at every step, other people's leftovers, files that are read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmrun.errors import DiskFullError, LlmrunError, ResourceError, UsageError
from llmrun.models.store import new_file

OLD, NEW = b"old file", b"new file"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(OLD)
    return path


def write(target: Path) -> None:
    with new_file.arriving(target) as path:
        path.write_bytes(NEW)


def test_a_file_arrives(target: Path) -> None:
    write(target)
    assert target.read_bytes() == NEW
    assert list(target.parent.iterdir()) == [target]


def test_until_then_the_old_one_is_there(target: Path) -> None:
    with new_file.arriving(target) as path:
        path.write_bytes(NEW)
        assert target.read_bytes() == OLD
        assert path.parent == target.parent


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_every_step_can_fail(target: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int) -> None:
    def fail(*arguments: Any, **others: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((Path, "replace") if step == "replace" else (os, step)), fail)
    with pytest.raises(ResourceError) as error:
        write(target)
    monkeypatch.undo()
    assert isinstance(error.value, DiskFullError) == (number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    assert "what has arrived is kept" not in error.value.hint
    assert target.read_bytes() == OLD
    assert list(target.parent.iterdir()) == [target]


def test_a_disk_that_is_full_while_writing(target: Path) -> None:
    with pytest.raises(DiskFullError) as error, new_file.arriving(target):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "OUT" in error.value.hint
    assert target.read_bytes() == OLD


def test_no_room(target: Path) -> None:
    new_file.require_room(target, 1)
    with pytest.raises(DiskFullError, match="too full"):
        new_file.require_room(target, 1 << 60)


def test_asking_the_system_again_why_it_refused(target: Path) -> None:
    new_file.probe(target)
    assert target.stat().st_size > len(OLD)
    with pytest.raises(OSError, match="No space"):
        new_file.probe(Path("/dev/full"))


# ---- files that are read ---------------------------------------------------------------------------


def test_no_input_is_overwritten(tmp_path: Path, target: Path) -> None:
    link, hard = tmp_path / "link.gguf", tmp_path / "hard.gguf"
    link.symlink_to(target)
    hard.hardlink_to(target)
    for name in (target, link, hard, tmp_path / "." / "model.gguf"):
        with pytest.raises(UsageError, match="while it is read"):
            new_file.refuse_inputs(name, [target])
    new_file.refuse_inputs(tmp_path / "other.gguf", [target])


def test_no_part_of_a_split_model_is_overwritten(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(OLD)
    second.write_bytes(OLD)
    with pytest.raises(UsageError):
        new_file.refuse_inputs(second, [first])


# ---- leftovers -------------------------------------------------------------------------------------


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("name", [".model.gguf.{}.tmp", ".model.converted.gguf.{0}.tmp", "..m.gguf.{0}.tmp.{0}.tmp"])
def test_leftovers_of_the_dead_are_removed(tmp_path: Path, name: str) -> None:
    left = tmp_path / name.format(dead_process())
    left.write_bytes(NEW)
    new_file.remove_leftovers(tmp_path)
    assert not left.exists()


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    dead = dead_process()
    names = [
        f".model.gguf.{os.getpid()}.tmp",
        f"model.gguf.{dead}.tmp",
        f".notes.txt.{dead}.tmp",
        ".model.gguf",
        f".x.gguf.{dead}",
    ]
    for name in names:
        (tmp_path / name).write_bytes(NEW)
    (tmp_path / f".folder.gguf.{dead}.tmp").mkdir()
    new_file.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names, f".folder.gguf.{dead}.tmp"}


def test_a_file_that_somebody_in_another_container_writes_stays(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / f".model.gguf.{dead_process()}.tmp"
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        new_file.remove_leftovers(tmp_path)
        assert path.exists()
    new_file.remove_leftovers(tmp_path)
    assert not path.exists()


def test_a_folder_that_can_not_be_read_is_no_matter(tmp_path: Path) -> None:
    new_file.remove_leftovers(tmp_path / "not there")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LlmrunError, match="can't write"):
        write(tmp_path / "nowhere" / "model.gguf")
