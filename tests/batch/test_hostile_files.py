"""`llmrun batch` as it is typed, over hostile files: it works or ends in one error, and changes nothing foreign."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from support import remote_server
from support.remote_server import MODEL, FarServer
from typer.testing import CliRunner, Result

from llmrun.cli.batch import batch
from llmrun.errors import LlmrunError, ModelNotFoundError, RowsFailedError, UsageError

app = typer.Typer()
app.command()(batch)

N_ROWS = 3
OURS = json.dumps({"row": 1, "answer": "a", "error": None, "key": "0123456789abcdef"}) + "\n"
CUT = '{"row": 1, "answer": "half an an'


@pytest.fixture
def server(server: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarServer:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    remote_server.forget_variables(monkeypatch)
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


# ---- outputs ----


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


# ---- inputs ----

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
