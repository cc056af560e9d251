"""`llmrun batch --at` as it is typed: a server's only model needs no name, and what it can't be told is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from support import remote_server
from support.remote_server import MODEL, FarServer
from typer.testing import CliRunner

from llmrun.cli.batch import batch
from llmrun.errors import ModelNotFoundError, UsageError

app = typer.Typer()
app.command()(batch)


@pytest.fixture
def server(server: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarServer:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    remote_server.forget_variables(monkeypatch)
    Path("rows.jsonl").write_text("".join(json.dumps({"id": f"r{n}", "prompt": f"row {n}"}) + "\n" for n in range(5)))
    server.models = remote_server.listed(MODEL)
    return server


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
