"""`llmrun bench --speculate` as it is typed, over the fake engine: the table, JSON, an engine that dies, refusals."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import typer
from support.engines import fake_client
from support.gguf_writer import runnable_model, write
from typer.testing import CliRunner

from llmrun.errors import EngineCrashedError, UsageError
from llmrun.lab.bench import speculation
from llmrun.lab.cli import bench as command
from llmrun.runner.client import EngineClient

pytestmark = pytest.mark.usefixtures("package_on_path", "home")
app = typer.Typer()
app.command()(command.bench)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write(tmp_path / "tiny.gguf", runnable_model({"llama.context_length": 2048})))


def answered_by(monkeypatch: pytest.MonkeyPatch, mode: str) -> list[str]:
    """A fake engine of this mode takes the place of the real one; gives what was loaded."""
    started: list[str] = []

    def start(model: object) -> EngineClient:
        started.append(mode)
        return fake_client(mode)

    monkeypatch.setattr("llmrun.lab.cli.bench.measure_gains", partial(speculation.measure, start=start))
    return started


def test_a_table(model: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered_by(monkeypatch, "long")
    done = CliRunner().invoke(app, [model, "--speculate", "-r", "2"])
    assert done.exception is None
    heading, *rows = done.stdout.splitlines()[: 1 + len(speculation.PROMPTS)]
    assert heading.split() == ["KIND", "OFF", "ON", "GAIN", "EXPECTED", "ACCEPTED", "A", "STEP"]
    assert [row.split()[0] for row in rows] == [kind.split()[0] for kind in speculation.PROMPTS]
    assert rows[0].split()[1:] == ["50.0", "100.0", "×2.00", "(2.00", "to", "2.00)", "×2.50", "97%", "35.0"]
    assert "all but free text: ×2.00" in done.stdout


def test_as_json(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered_by(monkeypatch, "long")
    done = CliRunner().invoke(app, [model, "--speculate", "-r", "1", "--no-warmup", "--json", "--machine", "desk"])
    found = json.loads(done.stdout)
    assert (found["model"], found["is_partial"], found["machine"]["name"]) == ("tiny", False, "desk")
    assert [row["kind"] for row in found["rows"]] == list(speculation.PROMPTS)
    row = found["rows"][0]
    assert (row["tokens"], row["is_same"], row["verdict"]["kind"]) == (70, True, "noisy")
    assert "one sample tells nothing" in done.stderr


def test_an_engine_that_dies_is_told(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered_by(monkeypatch, "die:decode:SIGSEGV")
    done = CliRunner().invoke(app, [model, "--speculate", "-r", "1"])
    assert isinstance(done.exception, EngineCrashedError)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "8"], "--speculate and -p can't be used together"),
        (["--clients", "2"], "--clients and --speculate can't be used together"),
        (["-t", "1,2"], "--speculate takes one number of threads"),
        (["-r", "0"], "invalid --repetitions 0"),
        (["--tokens", "1"], "invalid --tokens 1"),
        (["another"], "--speculate measures one model"),
    ],
)
def test_refused_before_anything_runs(
    model: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    started = answered_by(monkeypatch, "long")
    done = CliRunner().invoke(app, [model, "--speculate", *arguments])
    assert isinstance(done.exception, UsageError)
    assert words in done.exception.what
    assert started == []
