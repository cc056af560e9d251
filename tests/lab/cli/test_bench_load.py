"""`llmrun bench --clients` as it is typed: the table, JSON, Ctrl-C, and refusals before anything runs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import typer
from support import remote_server
from support.gguf_writer import runnable_model, write
from support.remote_server import FarServer
from support.scripted_client import ScriptedClient
from typer.testing import CliRunner

from llmrun.errors import CancelledError, LlmrunError, NetworkError, UsageError
from llmrun.lab.bench import load
from llmrun.lab.cli import bench as command

pytestmark = pytest.mark.usefixtures("home")
app = typer.Typer()
app.command()(command.bench)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write(tmp_path / "tiny.gguf", runnable_model({"llama.context_length": 2048})))


def scripted(monkeypatch: pytest.MonkeyPatch, error: LlmrunError | None = None, after: int = 0) -> ScriptedClient:
    """The client that measures."""
    client = ScriptedClient(error, after)
    monkeypatch.setattr(load, "time", client)
    monkeypatch.setattr("llmrun.lab.cli.bench.run_load", partial(load.measure, start=lambda: client))
    return client


def test_a_table(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = scripted(monkeypatch)
    done = CliRunner().invoke(app, [model, "--clients", "1,2", "--clients", "2", "-r", "2", "-t", "1", "--no-warmup"])
    assert done.exception is None
    heading, *rows = done.stdout.splitlines()[:5]
    assert heading.split() == ["CLIENTS", "PROMPT", "TOKENS/S", "EACH", "TTFT", "P50/95", "ITL", "P50/95/99", "CACHED"]
    assert [row.split()[:2] for row in rows] == [["1", "own"], ["1", "shared"], ["2", "own"], ["2", "shared"]]
    assert rows[0].split()[2:] == ["8.0", "±", "0.0", "30.0", "0.40/0.40", "s", "20.0/70.0/70.0", "ms", "25%"]
    assert "answers of 64" in done.stdout
    assert "threads: 1" in done.stdout
    assert len(client.asked) == 2 * (1 + 1 + 2 + 2)
    assert CliRunner().invoke(app, ["history"]).stdout == ""


def test_as_json(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    done = CliRunner().invoke(app, [model, "--clients", "2", "--tokens", "8", "-r", "1", "--json", "--machine", "desk"])
    found = json.loads(done.stdout)
    assert (found["model"], found["tokens"], found["is_partial"]) == ("tiny", 8, False)
    assert found["machine"]["name"] == "desk"
    assert [(row["clients"], row["shares_prompt"], len(row["samples_ts"])) for row in found["rows"]] == [
        (2, False, 1),
        (2, True, 1),
    ]


def test_as_a_page(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripted(monkeypatch)
    asked = [model, "--clients", "2", "-r", "1", "--machine", "desk"]
    done = CliRunner().invoke(app, [*asked, "-o", "html"])
    assert done.stdout.startswith("<!DOCTYPE html>")
    assert "desk" in done.stdout
    for more, beginning in (
        (["-o", str(tmp_path / "load.html")], "CLIENTS"),
        (["--json", "-o", str(tmp_path / "2.HTML")], "{"),
    ):
        done = CliRunner().invoke(app, [*asked, *more])
        assert done.exception is None
        assert done.stdout.lstrip().startswith(beginning)
        assert Path(more[-1]).read_text().startswith("<!DOCTYPE html>")


def test_a_far_server(server: FarServer) -> None:
    server.replies = [remote_server.told(*[remote_server.chunk("x")] * 8)]
    done = CliRunner().invoke(
        app, ["--at", server.url, "--clients", "1,2,4", "--tokens", "4", "-r", "2", "--no-warmup"]
    )
    assert done.exception is None, done.stderr
    heading, *rows = done.stdout.splitlines()
    assert "CACHED" not in heading, "nobody knows"
    assert [row.split()[:2] for row in rows[:6]] == [[n, kind] for n in "124" for kind in ("own", "shared")]
    assert f"server: {server.url.removeprefix('http://')}" in done.stdout
    assert "prompts of 7 tokens" in done.stdout
    assert "28 of 28 answers ended before 4 tokens" in done.stderr
    assert len(server.answered()) == 2 * 2 * (1 + 2 + 4)
    for request in server.answered():
        assert (request.path, request.body["model"]) == (remote_server.TEXT, remote_server.MODEL)
        assert (request.body["max_tokens"], request.body["ignore_eos"]) == (4, True)


def test_a_far_server_that_counts_nothing(server: FarServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_SERVER", server.url)
    server.models = remote_server.listed("one", "two")
    server.behave("says no usage")
    done = CliRunner().invoke(app, ["two", "--clients", "1", "--tokens", "2", "-r", "1", "--json"])
    found = json.loads(done.stdout)
    assert (found["model"], found["server"]) == ("two", server.url.removeprefix("http://"))
    assert not {"threads", "n_ctx"} & set(found)
    assert "does not count tokens" in done.stderr
    assert all("ignore_eos" not in request.body for request in server.answered())
    done = CliRunner().invoke(app, ["--clients", "1"])
    assert isinstance(done.exception, UsageError)
    assert "2 models: one, two" in str(done.exception)


def test_a_far_server_that_fails_in_the_middle(server: FarServer) -> None:
    server.replies = [*[remote_server.FINE] * 4, *remote_server.WAYS["fails"].replies]
    done = CliRunner().invoke(app, ["--at", server.url, "--clients", "1", "-r", "5"])
    assert isinstance(done.exception, NetworkError)
    assert "kaboom" in str(done.exception)
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [["1", "own"], ["1", "shared"]]


def test_options_that_a_far_server_has_no_use_for(server: FarServer, tmp_path: Path) -> None:
    for arguments, words in (
        (["-t", "1"], "--at and -t can't be used together"),
        (["--rpc", "10.0.0.2"], "--at and --rpc can't be used together"),
        (["-ngl", "0"], "--clients and -ngl can't"),
        (["--vs", "llama-bench"], "--clients and --vs can't"),
        (["--clients", "2000"], "invalid --clients 2000"),
        (["one", "two"], "--clients measures one model"),
    ):
        done = CliRunner().invoke(app, ["--at", server.url, "--clients", "1", *arguments])
        assert isinstance(done.exception, UsageError)
        assert words in done.exception.what
    done = CliRunner().invoke(app, ["--at", server.url])
    assert isinstance(done.exception, UsageError)
    assert done.exception.what == "--at and --key-file need --clients"
    assert not server.asked


def test_ctrl_c_shows_what_was_measured_and_ends_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, CancelledError("stopped by Ctrl-C"), after=1 + 1)
    done = CliRunner().invoke(app, [model, "--clients", "1", "-r", "2"])
    assert isinstance(done.exception, CancelledError)
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:2]] == [["1", "own"]]
    assert "stopped before the end: 0 of 2 rows complete" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "8"], "--clients and -p can't be used together"),
        (["-n", "8"], "--clients and -n can't"),
        (["--chat", "8,8"], "--clients and --chat can't"),
        (["-d", "8"], "--clients and -d can't"),
        (["-ngl", "0"], "--clients and -ngl can't"),
        (["--vs", "llama-bench"], "--clients and --vs can't"),
        (["--compare", "1", "2"], "--clients and --compare can't"),
        (["-o", "csv"], "--clients and -o csv can't"),
        (["-o", "result.json"], "--clients and -o result.json can't"),
        (["--speculate", "-o", "html"], "can't be used together"),
        (["--no-interleave"], "--clients and --no-interleave can't"),
        (["--delay", "1"], "--clients and --delay can't"),
        (["--no-limits"], "--clients and --no-limits can't"),
        (["-t", "1,2"], "--clients takes one number of threads"),
        (["-r", "0"], "invalid --repetitions 0"),
        (["--clients", "0"], "invalid --clients 0"),
        (["--clients", "1000"], "invalid --clients 1000"),
        (["--clients", "x"], "invalid --clients x"),
        (["--tokens", "1"], "invalid --tokens 1"),
        (["--tokens", "2000"], "invalid --tokens 2000"),
        (["another"], "--clients measures one model"),
    ],
)
def test_refused_before_anything_runs(
    model: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    client = scripted(monkeypatch)
    done = CliRunner().invoke(app, [model, "--clients", "1", *arguments])
    assert isinstance(done.exception, UsageError)
    assert words in done.exception.what
    assert client.asked == []


def test_words_in_place_of_a_model_are_refused_too() -> None:
    for arguments in ([], ["history"]):
        done = CliRunner().invoke(app, [*arguments, "--clients", "1"])
        assert isinstance(done.exception, UsageError)
        assert done.exception.what == "--clients measures one model"


def test_tokens_alone_are_refused(model: str) -> None:
    done = CliRunner().invoke(app, [model, "--tokens", "8"])
    assert isinstance(done.exception, UsageError)
    assert done.exception.what == "--tokens needs --clients or --speculate"
