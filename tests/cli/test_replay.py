"""`llmrun replay` on a pseudo-terminal, over the fake engine: drafts are those of the record, or as an option says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write
from support.installed import Terminal
from typer.testing import CliRunner

from llmrun.chat.replay import read
from llmrun.cli.app import app
from llmrun.errors import UsageError

FRONT = Path(__file__).parents[1] / "support/front.py"
Start = Callable[..., Terminal]

pytestmark = [
    pytest.mark.usefixtures("package_on_path"),
    pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal"),
]


@pytest.fixture
def environment(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.gguf", tiny_model())
    return {**os.environ, "TERM": "xterm-256color"}


@pytest.fixture
def end(environment: dict[str, str]) -> Iterator[Callable[..., list[str]]]:
    """end(argument, ...): the lines of a command with the fake engine that succeeded."""
    opened: list[Terminal] = []

    def run(*arguments: str) -> list[str]:
        opened.append(Terminal([sys.executable, str(FRONT), "normal", *arguments], environment))
        assert opened[-1].end() == 0, opened[-1].lines
        return opened[-1].lines

    yield run
    for terminal in opened:
        terminal.close()


def test_drafts_are_recorded_and_replayed(end: Callable[..., list[str]]) -> None:
    recorded = end("run", "./tiny.gguf", "hi", "--ctx", "256", "--speculate", "7", "--record", "record.json")
    assert any("drafted 70, accepted 68" in line for line in recorded)
    again = end("replay", "record.json")
    assert any("drafted 70, accepted 68" in line for line in again)
    assert "The same bytes as recorded." in again
    without = end("replay", "record.json", "--speculate", "off")
    assert not any("drafted" in line for line in without)
    assert "The same bytes as recorded." in without


def test_a_model_with_a_short_window(end: Callable[..., list[str]], tmp_path: Path) -> None:
    write(tmp_path / "short.gguf", tiny_model({"llama.context_length": 128}))
    end("run", "./short.gguf", "hi", "-n", "8", "--record", "record.json")
    assert read(tmp_path / "record.json").place["context"] == "128"
    assert "The same bytes as recorded." in end("replay", "record.json")


def test_the_answer_ends_its_line_in_a_pipe_too(
    end: Callable[..., list[str]], environment: dict[str, str], tmp_path: Path
) -> None:
    end("run", "./tiny.gguf", "hi", "--ctx", "256", "--record", "record.json")
    words = [sys.executable, str(FRONT), "normal", "replay", "record.json"]
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == read(tmp_path / "record.json").answer.content + "\n"
    assert done.stderr.splitlines()[-1] == b"The same bytes as recorded."


def test_a_watermark_needs_its_key_again(end: Callable[..., list[str]]) -> None:
    mark = ("--watermark", "green", "--watermark-key", "a long secret")
    end("run", "./tiny.gguf", "hi", "--ctx", "256", *mark, "--record", "record.json")
    recorded = Path("record.json").read_text(encoding="utf-8")
    assert "green" in recorded
    assert "a long secret" not in recorded
    assert "The same bytes as recorded." in end("replay", "record.json", "--watermark-key", "a long secret")
    for key, what in ((), "needs a key"), (("--watermark-key", "another one"), "another --watermark-key"):
        failed = CliRunner().invoke(app, ["replay", "record.json", *key]).exception
        assert isinstance(failed, UsageError)
        assert what in str(failed)
