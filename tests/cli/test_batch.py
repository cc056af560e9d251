"""`llmrun batch` as it is typed: what it asks and refuses, tables, and hostile files, of which it changes none."""

from __future__ import annotations

import csv
import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from support import remote_server
from support.commands import app_of
from support.remote_server import MODEL, FarServer
from typer.testing import CliRunner, Result

from llmrun.errors import LlmrunError, ModelNotFoundError, RowsFailedError, UsageError

app = app_of("batch")

TEXTS = ["zebra", 'a "quoted", text', "two\nlines", "ünï"]
OURS = json.dumps({"row": 1, "answer": "a", "error": None, "key": "0123456789abcdef"}) + "\n"
CUT = '{"row": 1, "answer": "half an an'


@pytest.fixture
def server(server: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarServer:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    remote_server.forget_variables(monkeypatch)
    Path("rows.jsonl").write_text("".join(json.dumps({"id": f"r{n}", "prompt": f"row {n}"}) + "\n" for n in range(5)))
    with Path("in.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["id", "text", "answer"])
        table.writerows([str(number), text, f"gold {number}"] for number, text in enumerate(TEXTS))
    server.models = remote_server.listed(MODEL)
    return server


def run(server: FarServer, rows: str, *options: str) -> Result:
    return CliRunner().invoke(app, [rows, "--at", server.url, *options])


def succeed(done: Result) -> None:
    assert done.exception is None, (done.exception, done.stderr)


def refused(done: Result, words: str, kind: type[LlmrunError] = LlmrunError) -> None:
    """See that a command ended in an error of ours, of one line."""
    assert isinstance(done.exception, kind), done.exception
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)


def answers(path: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda line: int(line["row"]))


# ---- what is asked ----


@pytest.mark.parametrize("words", [["rows.jsonl"], [MODEL, "rows.jsonl"]])
def test_a_file_of_prompts(server: FarServer, words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "--at", server.url, "--max-tokens", "9", "--temp", "0.8"])
    assert done.exception is None, done.stderr
    answers = [json.loads(line) for line in Path("rows.answers.jsonl").read_text().splitlines()]
    assert sorted(line["id"] for line in answers) == [f"r{n}" for n in range(5)]
    assert {line["answer"] for line in answers} == {"Hello there"}
    for request in server.answered():
        assert (request.body["max_tokens"], request.body["temperature"]) == (9, 0.8)
        assert "top_p" not in request.body, "it is the server's"


def test_a_dry_run_asks_nothing(server: FarServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_SERVER", server.url)
    done = CliRunner().invoke(app, ["rows.jsonl", "--dry-run"])
    assert done.exception is None, done.stderr
    assert not server.answered()
    assert not Path("rows.answers.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["--top-k", "5"], UsageError, "can't be told top_k"),
        (["--threads", "1"], UsageError, "--at and --threads can't be used together"),
        (["--ray", "local"], UsageError, "--at and --ray can't be used together"),
        (["another", "rows.jsonl"], ModelNotFoundError, "has no model 'another'"),
    ],
)
def test_refused_before_a_row_is_asked(
    server: FarServer, arguments: list[str], kind: type[Exception], words: str
) -> None:
    rows = [] if "rows.jsonl" in arguments else ["rows.jsonl"]
    done = CliRunner().invoke(app, [*rows, *arguments, "--at", server.url])
    assert type(done.exception) is kind
    assert words in str(done.exception)
    assert not server.answered()


def test_stdin_is_refused() -> None:
    done = CliRunner().invoke(app, [MODEL, "-"])
    assert isinstance(done.exception, UsageError)
    assert "does not read stdin" in str(done.exception)


def test_an_engine_here_needs_a_model(server: FarServer) -> None:
    done = CliRunner().invoke(app, ["rows.jsonl"])
    assert isinstance(done.exception, UsageError)
    assert "a model and a file of rows" in str(done.exception)


# ---- `llmrun batch -o` with a table: the input's columns, then the answer's, in the input's order; other suffixes


def table_of(path: str, delimiter: str = ",") -> list[dict[str, str]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


@pytest.mark.parametrize(("out", "delimiter"), [("out.csv", ","), ("out.CSV", ","), ("out.tsv", "\t")])
def test_a_table_has_the_columns_and_the_order_of_the_input(server: FarServer, out: str, delimiter: str) -> None:
    done = run(server, "in.csv", "-o", out, "--prompt", "{text}", "-np", "4")
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
    again = run(server, "in.csv", "-o", out, "--prompt", "{text}")
    assert "nothing to do" in again.stderr
    assert Path(out).stat().st_ino == before, "it is not written again"


def test_a_run_that_was_cut_says_how_to_continue(server: FarServer) -> None:
    assert run(server, "in.csv", "-o", "whole.csv", "--prompt", "{text}").exception is None
    lines = Path("whole.csv.jsonl").read_text().splitlines(keepends=True)
    Path("out.csv.jsonl").write_text("".join(reversed(lines[:2])))
    dry = run(server, "in.csv", "-o", "out.csv", "--prompt", "{text}", "--dry-run")
    assert dry.exception is None
    assert not Path("out.csv").exists()
    done = run(server, "in.csv", "-o", "out.csv", "--prompt", "{text}")
    assert done.exception is None
    assert "2 of 4 rows are already answered in out.csv.jsonl" in done.stderr
    assert table_of("out.csv") == table_of("whole.csv")


@pytest.mark.parametrize("out", ["out.txt", "out.json", "out.xlsx", "answers"])
def test_other_suffixes_are_refused_by_name(server: FarServer, out: str) -> None:
    done = run(server, "in.csv", "-o", out, "--prompt", "{text}")
    assert isinstance(done.exception, UsageError)
    assert f"can't write {Path(out).suffix or 'a file without a suffix'}" in str(done.exception)
    assert ".csv" in done.exception.hint
    assert not server.answered()
    assert not Path(out).exists()


def test_another_file_is_never_overwritten(server: FarServer) -> None:
    Path("out.csv").write_text("mine\n")
    for options in ((), ("--dry-run",)):
        done = run(server, "in.csv", "-o", "out.csv", "--prompt", "{text}", *options)
        assert isinstance(done.exception, UsageError)
        assert "'out.csv' exists" in str(done.exception)
    assert isinstance(run(server, "in.csv", "-o", "in.csv", "--prompt", "{text}").exception, UsageError)
    assert Path("out.csv").read_text() == "mine\n"
    assert not server.answered()


def test_failed_rows_have_their_error_in_the_table(server: FarServer) -> None:
    rows: list[Any] = [
        {"prompt": "one", "n": 1},
        {"text": "no prompt"},
        {"prompt": "three", "tags": ["a", {"b": None}]},
    ]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n")
    done = run(server, "in.jsonl", "-o", "out.csv")
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
    assert run(server, "in.parquet", "-o", "out.parquet").exception is None
    found = parquet.read_table("out.parquet")
    assert found.select(["prompt", "day", "tags"]).equals(source)
    assert found.column("answer").to_pylist() == ["Hello there"] * 3
    assert found.schema.field("completion_tokens").type == pyarrow.int64()
    assert run(server, "in.parquet", "-o", "out.csv").exception is None
    assert [row["day"] for row in table_of("out.csv")] == [day.isoformat() for day in days]


# ---- hostile outputs ----


def write(content: str | bytes, mode: int = 0o600) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(mode)

    return make


def symlink(target: str, content: str = "") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        if content:
            Path(target).write_text(content)
        path.symlink_to(target)

    return make


# Contents that are no rows of ours are in test_results.py.
FOREIGN: dict[str, Callable[[Path], None]] = {
    "json without a newline": write('{"a": 1}'),
    "binary": write(bytes(range(256)) * 500),
    "invalid utf-8": write(b'{"row": 1, "\xff\xfe": 1}\n'),
    "answers of another batch": write(OURS),
    "read-only": write("notes", 0o400),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a symbolic link to a foreign file": symlink("other.txt", "notes"),
    "a symbolic link to /dev/null": symlink("/dev/null"),
}


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--retry-errors",)], ids=str)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_output_is_refused_and_stays_as_it_is(server: FarServer, name: str, options: tuple[str, ...]) -> None:
    Path("in.txt").write_text("one\ntwo\nthree\n")
    path = Path("out.jsonl")
    FOREIGN[name](path)
    before = path.read_bytes() if path.is_file() else None
    status = path.stat()
    refused(run(server, "in.txt", "-o", "out.jsonl", *options), "out.jsonl" if "another" not in name else "")
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_mode) == (status.st_ino, status.st_mtime_ns, status.st_mode)
    assert before is None or path.read_bytes() == before
    assert not server.answered()


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/full", "/dev/stdin"])
def test_a_device_is_refused(server: FarServer, device: str) -> None:
    if not Path(device).exists() or Path(device).is_file():
        pytest.skip(f"no device {device} here")
    Path("in.txt").write_text("one\n")
    refused(run(server, "in.txt", "-o", device), "is not a regular file", UsageError)
    refused(run(server, device, "-o", "out.jsonl"), "is not a regular file", UsageError)
    assert not Path("out.jsonl").exists()


def test_the_rows_are_never_the_output(server: FarServer) -> None:
    Path("in.txt").write_text("one\n")
    Path("link.txt").symlink_to("in.txt")
    os.link("in.txt", "same.txt")
    for name in ("in.txt", "link.txt", "same.txt"):
        refused(run(server, "in.txt", "-o", name), "is the file with the rows", UsageError)
    assert Path("in.txt").read_text() == "one\n"


@pytest.mark.parametrize("content", ["", CUT, '{"', '{"row": 1, "id'])
def test_a_file_of_ours_that_ends_early_is_completed(server: FarServer, content: str) -> None:
    Path("in.txt").write_text("one\ntwo\nthree\n")
    Path("real.jsonl").write_text(content)
    Path("out.jsonl").symlink_to("real.jsonl")
    succeed(run(server, "in.txt", "-o", "out.jsonl", "--dry-run"))
    assert Path("real.jsonl").read_text() == content
    succeed(run(server, "in.txt", "-o", "out.jsonl"))
    assert [line["row"] for line in answers("real.jsonl")] == [1, 2, 3]
    whole = Path("real.jsonl").read_bytes()
    Path("real.jsonl").write_bytes(whole[:-20])
    succeed(run(server, "in.txt", "-o", "out.jsonl"))
    assert [line["row"] for line in answers("real.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("model", ["nosuchmodel", "./missing.gguf"])
@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
def test_a_model_that_is_mistyped_changes_nothing(server: FarServer, model: str, options: tuple[str, ...]) -> None:
    Path("in.txt").write_text("one\n")
    Path("foreign.jsonl").write_text('{"a": 1}')
    Path("ours.jsonl").write_text(CUT)
    for name in ("foreign.jsonl", "ours.jsonl", "new.jsonl"):
        before = Path(name).read_bytes() if Path(name).exists() else None
        done = CliRunner().invoke(app, [model, "in.txt", "-o", name, *options])
        assert isinstance(done.exception, UsageError if name == "foreign.jsonl" else ModelNotFoundError)
        assert (Path(name).read_bytes() if Path(name).exists() else None) == before


def test_a_prompt_that_fits_no_row_leaves_no_file_and_is_named_after_a_finished_run(server: FarServer) -> None:
    Path("in.csv").write_text("text\none\ntwo\n")
    wrong = ("-o", "out.jsonl", "--prompt", "{txt}")
    refused(run(server, "in.csv", *wrong), "no column 'txt'", UsageError)
    assert not Path("out.jsonl").exists()
    succeed(run(server, "in.csv", "-o", "out.jsonl", "--prompt", "{text}"))
    before = Path("out.jsonl").read_bytes()
    refused(run(server, "in.csv", *wrong), "no column 'txt'", UsageError)
    assert Path("out.jsonl").read_bytes() == before


# ---- hostile inputs ----

INPUTS: dict[str, tuple[str, bytes, list[bool]]] = {
    "deeply nested": ("in.jsonl", b'"a"\n{"prompt": ' + b"[" * 100_000 + b"\n", [True, False]),
    "nested in a column": ("in.jsonl", b'"a"\n' + b'{"prompt": "b", "x": ' * 500 + b"\n", [True, False]),
    "nul bytes": ("in.txt", b"a\0b\nc\n", [True, True]),
    "nul bytes in json": ("in.jsonl", b'"a"\n"b\0"\n"\\u0000"\n', [True, False, True]),
    "half a character": ("in.jsonl", b'"\\ud800"\n', [True]),
    "a byte order mark": ("in.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\n', [True]),
    "duplicate ids": ("in.jsonl", b'{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', [True, True]),
    "a missing column": ("in.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', [True, False]),
    "values of another kind": ("in.jsonl", b'[1]\n7\nnull\n"a"\n{"prompt": 7}\n', [False, False, False, True, False]),
    "messages of nonsense": ("in.jsonl", b'"a"\n{"messages": 7}\n{"messages": [{}]}\n', [True, False, False]),
    "a body of nonsense": ("in.jsonl", b'"a"\n{"body": []}\n{"url": 1, "body": {}}\n', [True, False, False]),
    "windows line ends": ("in.txt", b"a\r\nb\r\n", [True, True]),
    "no newline at the end": ("in.jsonl", b'"a"\n"b"', [True, True]),
    "a ragged table": ("in.csv", b"prompt,x\na\nb,1,2,3\n", [True, True]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_each_row_has_its_answer_or_its_error(server: FarServer, name: str) -> None:
    file, content, expected = INPUTS[name]
    Path(file).write_bytes(content)
    for options in ((), ("--retry-errors",), ()):
        done = run(server, file, "-o", "out.jsonl", *options)
        if all(expected):
            succeed(done)
        else:
            refused(done, f"{expected.count(False)} of {len(expected)} rows failed", RowsFailedError)
        assert [line["error"] is None for line in answers("out.jsonl")] == expected
    assert Path(file).read_bytes() == content


REFUSED: dict[str, tuple[str, bytes]] = {
    "nothing": ("in.jsonl", b""),
    "only blanks": ("in.txt", b"\n \n"),
    "invalid utf-8": ("in.jsonl", b'"a"\n"\xff\xfe"\n'),
    "utf-16": ("in.txt", "a\nb\n".encode("utf-16")),
    "binary": ("in.csv", bytes(range(256)) * 50),
    "every row broken": ("in.jsonl", b"{\n{\n"),
    "no parquet": ("in.parquet", b"PAR1 but not really PAR1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_input_that_cant_be_read_leaves_no_file(server: FarServer, name: str) -> None:
    file, content = REFUSED[name]
    Path(file).write_bytes(content)
    refused(run(server, file, "-o", "out.jsonl"), "", UsageError)
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("name", ["folder", "pipe", "missing", "file/below"])
def test_an_input_that_is_no_file_is_refused(server: FarServer, name: str) -> None:
    Path("folder").mkdir()
    Path("file").write_text("x")
    os.mkfifo("pipe")
    refused(run(server, name, "-o", "out.jsonl"), name, UsageError)
    assert not Path("out.jsonl").exists()


def test_a_row_that_failed_is_corrected(server: FarServer) -> None:
    Path("in.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n{"text": "c"}\n')
    done = run(server, "in.jsonl", "-o", "out.jsonl")
    refused(done, "2 of 3 rows failed", RowsFailedError)
    assert isinstance(done.exception, RowsFailedError)
    assert (done.exception.exit_status, done.exception.code) == (10, "rows-failed")
    first = answers("out.jsonl")[0]
    Path("in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"text": "c"}\n')
    before = Path("out.jsonl").read_bytes()
    refused(run(server, "in.jsonl", "-o", "out.jsonl"), "row 2 failed", UsageError)
    succeed(run(server, "in.jsonl", "-o", "out.jsonl", "--retry-errors", "--dry-run"))
    assert Path("out.jsonl").read_bytes() == before
    refused(run(server, "in.jsonl", "-o", "out.jsonl", "--retry-errors"), "1 of 3 rows failed", RowsFailedError)
    assert [line["error"] is None for line in answers("out.jsonl")] == [True, True, False]
    Path("in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    succeed(run(server, "in.jsonl", "-o", "out.jsonl", "--retry-errors"))
    assert [line["row"] for line in answers("out.jsonl")] == [1, 2, 3]
    assert answers("out.jsonl")[0] == first
    succeed(run(server, "in.jsonl", "-o", "out.jsonl", "--retry-errors"))
