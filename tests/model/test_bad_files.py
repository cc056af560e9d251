"""Files that are no model: one line of why, nothing on stdout, no hang, no crash of the engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import Installed, only_error_line

Refused = Callable[[Path], tuple[int, str]]

SECONDS = 20.0
USAGE, NOT_FOUND, BAD_MODEL = 2, 3, 7


@pytest.fixture
def refused(llmrun: Installed, tmp_path: Path) -> Refused:
    """refused(path): exit status and stderr of running it, after the checks that hold for all of them."""

    def run(path: Path) -> tuple[int, str]:
        done = llmrun.run("run", str(path), "hi", seconds=SECONDS)
        stderr = done.stderr.decode()
        assert done.stdout == b""
        assert path.name in only_error_line(stderr)
        assert "  why: " in stderr or "  try: " in stderr
        assert "engine died" not in stderr
        return done.returncode, stderr

    return run


@pytest.mark.parametrize("share", [0.00001, 0.001, 0.01, 0.5, 0.999999])
def test_truncated(refused: Refused, model_path: Path, tmp_path: Path, share: float) -> None:
    whole = model_path.read_bytes()
    bad = tmp_path / "truncated.gguf"
    bad.write_bytes(whole[: int(len(whole) * share)])
    assert refused(bad)[0] == BAD_MODEL


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"Once upon a time.\n" * 1000,
        b"\x7fELF" + bytes(4096),
        b"GGUF" + bytes(4096),
        b"GGUF" + b"\xff" * 4096,
    ],
    ids=["empty", "magic only", "text", "program", "zeros", "ones"],
)
def test_something_else(refused: Refused, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "something.gguf"
    bad.write_bytes(content)
    assert refused(bad)[0] == BAD_MODEL


def test_damaged_weights_offsets(refused: Refused, model_path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "damaged.gguf"
    shutil.copyfile(model_path, bad)
    with bad.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 8)  # the number of tensors
    assert refused(bad)[0] == BAD_MODEL


def test_directory(refused: Refused, tmp_path: Path) -> None:
    bad = tmp_path / "directory.gguf"
    bad.mkdir()
    assert refused(bad)[0] in {NOT_FOUND, BAD_MODEL}


def test_fifo(refused: Refused, tmp_path: Path) -> None:
    bad = tmp_path / "fifo.gguf"
    os.mkfifo(bad)
    assert refused(bad)[0] in {NOT_FOUND, BAD_MODEL}


def test_device(refused: Refused) -> None:
    assert refused(Path("/dev/zero"))[0] in {NOT_FOUND, BAD_MODEL}


def test_missing(refused: Refused, tmp_path: Path) -> None:
    assert refused(tmp_path / "missing.gguf")[0] == NOT_FOUND


def test_dangling_link(refused: Refused, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "nothing.gguf")
    assert refused(link)[0] == NOT_FOUND


def test_unreadable(refused: Refused, tmp_path: Path) -> None:
    bad = tmp_path / "unreadable.gguf"
    bad.write_bytes(b"GGUF")
    bad.chmod(0)
    status, stderr = refused(bad)
    assert status in {NOT_FOUND, BAD_MODEL}
    if os.geteuid() != 0:  # root may read it, and finds that it is cut short
        assert "ermission" in stderr


def test_terminal_controls_in_a_file_name_are_not_obeyed(llmrun: Installed, tmp_path: Path) -> None:
    bad = tmp_path / "evil\x1b]0;pwned\x07.gguf"
    bad.write_bytes(b"no model")
    done = llmrun.run("run", str(bad), "hi", seconds=SECONDS)
    assert done.returncode in {USAGE, BAD_MODEL}
    assert b"\x1b" not in done.stderr
    assert b"\x07" not in done.stderr


def test_the_model_under_another_name_and_through_a_link(llmrun: Installed, model_path: Path, tmp_path: Path) -> None:
    link = tmp_path / "ein Modell é 模型.gguf"
    link.symlink_to(model_path)
    assert llmrun.run("run", str(link), "--max-tokens", "1", "hi").returncode == 0
