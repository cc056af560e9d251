"""`llmrun batch -o` with a table: the input's columns, then the answer's, in the input's order; other suffixes."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import typer
from pyarrow import parquet
from support import remote_server
from support.remote_server import MODEL, FarServer
from typer.testing import CliRunner, Result

from llmrun.batch.results import OutputFiles, write_table
from llmrun.batch.rows import Row
from llmrun.cli.batch import batch
from llmrun.errors import RowsFailedError, UsageError

app = typer.Typer()
app.command()(batch)

TEXTS = ["zebra", 'a "quoted", text', "two\nlines", "ünï"]


@pytest.fixture
def server(server: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarServer:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    remote_server.forget_variables(monkeypatch)
    server.models = remote_server.listed(MODEL)
    with Path("in.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["id", "text", "answer"])
        table.writerows([str(number), text, f"gold {number}"] for number, text in enumerate(TEXTS))
    return server


def run(server: FarServer, rows: str, out: str, *options: str) -> Result:
    return CliRunner().invoke(app, [rows, "--at", server.url, "-o", out, *options])


def table_of(path: str, delimiter: str = ",") -> list[dict[str, str]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


@pytest.mark.parametrize(("out", "delimiter"), [("out.csv", ","), ("out.CSV", ","), ("out.tsv", "\t")])
def test_a_table_has_the_columns_and_the_order_of_the_input(server: FarServer, out: str, delimiter: str) -> None:
    done = run(server, "in.csv", out, "--prompt", "{text}", "-np", "4")
    assert done.exception is None, done.stderr
    found = table_of(out, delimiter)
    names = ["llmrun_answer", "finish_reason", "prompt_tokens", "completion_tokens", "error"]
    assert list(found[0]) == ["id", "text", "answer", *names]
    assert [row["text"] for row in found] == TEXTS
    assert [row["answer"] for row in found] == [f"gold {number}" for number in range(4)], "the input's own column"
    assert {row["llmrun_answer"] for row in found} == {"Hello there"}
    assert {row["error"] for row in found} == {""}
    assert out in done.stderr
    before = Path(out).stat().st_ino
    again = run(server, "in.csv", out, "--prompt", "{text}")
    assert "nothing to do" in again.stderr
    assert Path(out).stat().st_ino == before, "it is not written again"


def test_a_run_that_was_cut_says_how_to_continue(server: FarServer) -> None:
    assert run(server, "in.csv", "whole.csv", "--prompt", "{text}").exception is None
    lines = Path("whole.csv.jsonl").read_text().splitlines(keepends=True)
    Path("out.csv.jsonl").write_text("".join(reversed(lines[:2])))
    dry = run(server, "in.csv", "out.csv", "--prompt", "{text}", "--dry-run")
    assert dry.exception is None
    assert not Path("out.csv").exists()
    done = run(server, "in.csv", "out.csv", "--prompt", "{text}")
    assert done.exception is None
    assert "2 of 4 rows are already answered in out.csv.jsonl" in done.stderr
    assert table_of("out.csv") == table_of("whole.csv")


@pytest.mark.parametrize("out", ["out.txt", "out.json", "out.xlsx", "answers"])
def test_other_suffixes_are_refused_by_name(server: FarServer, out: str) -> None:
    done = run(server, "in.csv", out, "--prompt", "{text}")
    assert isinstance(done.exception, UsageError)
    assert f"can't write {Path(out).suffix or 'a file without a suffix'}" in str(done.exception)
    assert ".csv" in done.exception.hint
    assert not server.answered()
    assert not Path(out).exists()


def test_another_file_is_never_overwritten(server: FarServer) -> None:
    Path("out.csv").write_text("mine\n")
    for options in ((), ("--dry-run",)):
        done = run(server, "in.csv", "out.csv", "--prompt", "{text}", *options)
        assert isinstance(done.exception, UsageError)
        assert "'out.csv' exists" in str(done.exception)
    assert isinstance(run(server, "in.csv", "in.csv", "--prompt", "{text}").exception, UsageError)
    assert Path("out.csv").read_text() == "mine\n"
    assert not server.answered()


def test_failed_rows_have_their_error_in_the_table(server: FarServer) -> None:
    rows: list[Any] = [
        {"prompt": "one", "n": 1},
        {"text": "no prompt"},
        {"prompt": "three", "tags": ["a", {"b": None}]},
    ]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n")
    done = run(server, "in.jsonl", "out.csv")
    assert isinstance(done.exception, RowsFailedError)
    found = table_of("out.csv")
    assert [row["prompt"] for row in found] == ["one", "", "three", ""]
    assert [row["n"] for row in found] == ["1", "", "", ""]
    assert json.loads(found[2]["tags"]) == rows[2]["tags"]
    assert [bool(row["error"]) for row in found] == [False, True, False, True]
    assert "not JSON" in found[3]["error"]


def test_parquet_keeps_the_types_of_parquet(server: FarServer) -> None:
    days = [datetime.date(2024, 1, day) for day in (3, 1, 2)]
    source = pyarrow.table({"prompt": ["c", "a", "b"], "day": days, "tags": [["x"], [], None]})
    parquet.write_table(source, "in.parquet")
    assert run(server, "in.parquet", "out.parquet").exception is None
    found = parquet.read_table("out.parquet")
    assert found.select(["prompt", "day", "tags"]).equals(source)
    assert found.column("answer").to_pylist() == ["Hello there"] * 3
    assert found.schema.field("completion_tokens").type == pyarrow.int64()
    assert run(server, "in.parquet", "out.csv").exception is None
    assert [row["day"] for row in table_of("out.csv")] == [day.isoformat() for day in days]


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
            found = table_of(str(tmp_path / name))
            assert [row["value"] for row in found] == shown
            assert [row["answer"] for row in found] == [str(row.number) for row in rows]
        else:
            assert [value or "" for value in parquet.read_table(tmp_path / name).column("value").to_pylist()] == shown
