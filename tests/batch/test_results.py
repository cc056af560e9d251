"""The file of answers: whatever ends the process, whole lines stay, and what is half written is gone."""

from __future__ import annotations

import csv
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support import answers

from llmrun.batch.results import OutputFiles, ResultFile, WrittenRow, write_table
from llmrun.batch.rows import Row, result_of
from llmrun.errors import DiskFullError, UsageError
from llmrun.protocol.messages import Stats

RESULT = {"answer": "ja, ü", "error": None}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.add(3, "k3", RESULT)
        assert lines(path) == [{"row": 3, **RESULT, "key": "k3"}]
        assert results.written == {3: WrittenRow("k3", failed=False)}


def test_what_is_done_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.add(3, "k3", RESULT)
        results.add(1, "k1", {"answer": None, "error": {"code": "usage"}})
    with ResultFile(path) as results:
        assert results.written == {3: WrittenRow("k3", failed=False), 1: WrittenRow("k1", failed=True)}
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


CHAT_BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "row",
    [
        Row(12, {"prompt": "Hi"}),
        Row(12, {"prompt": "Hi", "id": [7]}),
        Row(12, {"prompt": "Hi", "custom_id": "c"}),
        Row(12, {"custom_id": "c", "url": "/v1/chat/completions", "body": CHAT_BODY}),
    ],
    ids=str,
)
@pytest.mark.parametrize("error", [None, UsageError("it is broken")])
def test_a_first_line_that_was_cut_anywhere_is_known_as_ours(
    tmp_path: Path, row: Row, error: UsageError | None
) -> None:
    path = tmp_path / "out.jsonl"
    parts = (answers.started(1, 0), answers.text("Hello"), answers.finished("stop", Stats(1)))
    with ResultFile(path) as results:
        results.add(12, "k", result_of(row, answers.accumulated(() if error else parts), error, "k"))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with ResultFile(path) as results:
            assert not results.written
        assert path.read_bytes() == whole[:length], "it is only read before a row is written"


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize(
    "content",
    [
        *("hello", "[]", '{"row": 1}', "1", '{"a": 1}', '{"row": 1, "text": "a', "\0" * 100, '{"row": ' * 100_000),
        *('{"row": "1", "key": "", "error": null}', '{"row": [1], "key": "", "error": null}'),
        '\ufeff{"row": 1, "answer": "',
    ],
    ids=lambda content: content[:40],
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: str, end: str) -> None:
    path = tmp_path / "out.jsonl"
    ours = json.dumps({"row": 1, **RESULT, "key": "k"}) + "\n"
    for before in ("", ours) if content.strip("\0") else ("",):
        path.write_text(before + content + end, encoding="utf-8")
        path.chmod(0o400)
        with pytest.raises(UsageError, match="not a batch's file") as raised:
            ResultFile(path)
        assert f"line {2 if before else 1} " in raised.value.why
        path.chmod(0o600)
        assert path.read_text(encoding="utf-8") == before + content + end


def test_zeros_that_a_power_loss_left_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.add(1, "k1", RESULT)
    whole = path.read_bytes()
    for left in (b"", b'{"row": 2, "ans'):
        path.write_bytes(whole + left + b"\0" * 5000)
        with ResultFile(path) as results:
            assert set(results.written) == {1}
            results.add(2, "k2", RESULT)
        assert [line["row"] for line in lines(path)] == [1, 2]


def test_nothing_is_made_before_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.require_writable()
    assert not path.exists()
    with pytest.raises(UsageError, match="no folder"), ResultFile(tmp_path / "missing" / "out.jsonl") as results:
        results.require_writable()


def test_two_batches_dont_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as first, ResultFile(path) as late:
        first.add(1, "k1", RESULT)
        before = path.read_bytes()
        with pytest.raises(UsageError, match="another batch writes"):
            ResultFile(path)
        with pytest.raises(UsageError, match="another batch writes"):
            late.add(1, "k1", RESULT)
        assert path.read_bytes() == before
    with ResultFile(path), pytest.raises(UsageError, match="another batch writes"):
        ResultFile(path)


def test_a_new_file_is_locked_before_the_work_begins(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as first, ResultFile(path) as second:
        first.require_writable()
        with pytest.raises(UsageError, match="another batch writes"):
            second.require_writable()
        with pytest.raises(UsageError, match="another batch writes"):
            ResultFile(path)
        first.add(1, "k1", RESULT)
    assert len(lines(path)) == 1
    with ResultFile(tmp_path / "empty.jsonl") as results:
        results.require_writable()
    assert not (tmp_path / "empty.jsonl").exists()


def test_a_file_that_another_program_changed_meanwhile_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for content in ("", json.dumps({"row": 1, **RESULT, "key": "k"}) + "\n"):
        path.write_text(content)
        with ResultFile(path) as results:
            path.write_text(content + "notes")
            with pytest.raises(UsageError, match="another program changed"):
                results.add(2, "k2", RESULT)
        assert path.read_text() == content + "notes"


# ---- errors that are tried again ----

FAILED = {"answer": None, "error": {"code": "usage"}}


@pytest.fixture
def with_errors(tmp_path: Path) -> Path:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        for number in range(1, 6):
            results.add(number, f"k{number}", RESULT if number % 2 else FAILED)
        assert results.n_failed == 2
    path.write_bytes(path.read_bytes() + b'{"row": 6, "ans')
    path.chmod(0o640)
    return path


def test_errors_go_when_the_first_row_is_tried_again(with_errors: Path) -> None:
    before = with_errors.read_bytes()
    with ResultFile(with_errors, retry_errors=True) as results:
        assert (set(results.written), results.n_failed) == ({1, 3, 5}, 0)
        results.require_writable()
        assert with_errors.read_bytes() == before
        results.add(4, "new", RESULT)
        with pytest.raises(UsageError, match="another batch writes"):
            ResultFile(with_errors)
        results.add(2, "k2", FAILED)
        assert results.n_failed == 1
    assert [(line["row"], line["key"]) for line in lines(with_errors)] == [
        (1, "k1"), (3, "k3"), (5, "k5"), (4, "new"), (2, "k2"),
    ]  # fmt: skip
    assert with_errors.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_while_errors_go_changes_nothing(with_errors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = with_errors.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ResultFile(with_errors, retry_errors=True) as results:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError):
            results.add(4, "new", RESULT)
        monkeypatch.undo()
    assert with_errors.read_bytes() == before
    assert list(with_errors.parent.iterdir()) == [with_errors]


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
        assert synced == [0, 64, 128], "the folder of a new file, then its lines"
        now = 1.5
        results.add(131, "k", RESULT)
        assert synced[-1] == 131
        results.add(132, "k", RESULT)
    assert synced[-1] == 132


def test_columns_of_mixed_types_and_odd_texts(tmp_path: Path) -> None:
    values: list[Any] = [1, "two", None, 2**70, {"a": []}, True, "\ud800", 1.5]
    rows = [Row(number, {"value": value}) for number, value in enumerate(values, 1)]
    lines = tmp_path / "out.jsonl"
    results = ({"row": row.number, "answer": f"{row.number}", "error": None, "key": ""} for row in reversed(rows))
    lines.write_text("".join(json.dumps(each) + "\n" for each in results))
    shown = ["1", "two", "", str(2**70), '{"a": []}', "true", "?", "1.5"]
    for name in ("out.csv", "out.parquet"):
        files = OutputFiles(lines, tmp_path / name)
        write_table(files, tmp_path / "in.jsonl", rows)
        if name == "out.csv":
            found = [*csv.DictReader((tmp_path / name).read_text(encoding="utf-8").splitlines())]
            assert [row["value"] for row in found] == shown
            assert [row["answer"] for row in found] == [str(row.number) for row in rows]
        else:
            assert [value or "" for value in parquet.read_table(tmp_path / name).column("value").to_pylist()] == shown
