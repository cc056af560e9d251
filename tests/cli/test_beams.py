"""`llmrun run --beams`, with a real engine and a tiny model of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llmrun.cli.app import app

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def run(random_qwen: Path, own_engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path))
    command = ["run", str(random_qwen), "--raw", "hello the world"]
    return lambda *arguments: CliRunner().invoke(app, [*command, *arguments])


def test_a_pipe_gets_the_best_answer_and_nothing_else(run: Callable[..., Any]) -> None:
    done = run("--beams", "3", "--max-tokens", "5", "--json")
    found = json.loads(done.stdout)
    assert found["settings"]["beams"] == len(found["answers"]) == 3
    scores = [answer["score"] for answer in found["answers"]]
    assert scores == sorted(scores, reverse=True)
    for answer in found["answers"]:
        assert found["tree"][answer["node"]]["total"] == pytest.approx(answer["total"])
    plain = run("--beams", "3", "--max-tokens", "5")
    assert plain.exit_code == 0, plain.stderr
    assert plain.stdout == "".join(filter(lambda char: char.isprintable() or char == "\n", found["answers"][0]["text"]))
    assert not plain.stderr


def test_an_answer_that_has_to_follow_a_grammar_is_not_cut_off_in_silence(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    grammar = tmp_path / "digits.gbnf"
    grammar.write_text("root ::= [0-9]{20}")
    done = run("--beams", "2", "--max-tokens", "5", "--grammar", str(grammar))
    assert done.stdout.isdigit()
    assert "cut off" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--length-penalty", "2"], "--length-penalty needs --beams"),
        (["--length-penalty", "1"], "--length-penalty needs --beams"),
        (["--beams", "4", "--temp", "0.5"], "--beams and --temp can't be used together"),
        (["--beams", "4", "--seed", "1"], "--beams and --seed can't be used together"),
        (["--beams", "4", "--speculate", "off"], "--beams and --speculate can't be used together"),
        (["--beams", "4", "--think"], "--beams and --think can't be used together"),
        (["--beams", "4", "--prompt-cache"], "--beams and --prompt-cache can't be used together"),
        (["--beams", "1"], "invalid --beams 1"),
    ],
)
def test_what_means_nothing_is_refused(run: Callable[..., Any], arguments: list[str], named: str) -> None:
    assert named in str(run(*arguments).exception)
