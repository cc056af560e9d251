"""The file of answers: whatever ends the process, whole lines stay, and what is half written is gone."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmrun.batch.results import ResultFile, RowWritten
from llmrun.errors import DiskFullError, UsageError

RESULT = {"answer": "ja, ü", "error": None}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.add(3, "k3", RESULT)
        assert lines(path) == [{"row": 3, **RESULT, "key": "k3"}]
        assert results.written == {3: RowWritten("k3", failed=False)}


def test_what_is_done_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.add(3, "k3", RESULT)
        results.add(1, "k1", {"answer": None, "error": {"code": "usage"}})
    with ResultFile(path) as results:
        assert results.written == {3: RowWritten("k3", failed=False), 1: RowWritten("k1", failed=True)}
        results.add(2, "k2", RESULT)
    assert [line["row"] for line in lines(path)] == [3, 1, 2]


def test_a_line_that_was_cut_anywhere_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.add(1, "k1", RESULT)
        first = path.stat().st_size
        results.add(2, "k2", RESULT)
    whole = path.read_bytes()
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        with ResultFile(path) as results:
            assert set(results.written) == {1}
            results.add(2, "k2", RESULT)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("content", ["hello\n", "[]\n", '{"row": 1}\n', "1\n"])
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="not a batch's file"):
        ResultFile(path)
    assert path.read_text() == content


def test_two_batches_dont_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path), pytest.raises(UsageError, match="another batch writes"):
        ResultFile(path)
    ResultFile(path).__exit__(None, None, None)


@pytest.mark.parametrize("taken", [0, 1, 20])
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    path = tmp_path / "out.jsonl"
    write = os.write
    with ResultFile(path) as results:
        results.add(1, "k1", RESULT)
        before = path.read_bytes()

        def full(descriptor: int, data: bytes) -> int:
            if len(path.read_bytes()) > len(before) or not taken:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[:taken])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(DiskFullError):
            results.add(2, "k2", RESULT)
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert set(results.written) == {1}
        results.add(2, "k2", RESULT)
    assert [line["row"] for line in lines(path)] == [1, 2]


def test_lines_are_synced_in_groups_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    now = 0.0
    with ResultFile(tmp_path / "out.jsonl", clock=lambda: now) as results:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(len(results.written)))
        for number in range(1, 131):
            results.add(number, "k", RESULT)
        assert synced == [64, 128]
        now = 1.5
        results.add(131, "k", RESULT)
        assert synced[-1] == 131
        results.add(132, "k", RESULT)
    assert synced[-1] == 132
