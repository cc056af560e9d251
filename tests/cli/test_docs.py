"""`--docs FOLDER` of `llmrun run` and `llmrun chat`, over the fake engine."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.embedding_models import gguf_of
from support.gguf_writer import tiny_model, write
from support.installed import Terminal
from typer.testing import CliRunner

from llmrun.cli.app import app

FRONT = Path(__file__).parents[1] / "support/front.py"
ENGINES = "echo,normal"  # of the model that answers, which is started first, and of the embedding model

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.gguf", tiny_model())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/tea.md").write_text("# Kitchen\nTea is in the kitchen.\n")
    (tmp_path / "notes/hours.txt").write_text("The office closes at five on Fridays.\n")
    path = os.environ["PYTHONPATH"] + os.pathsep + str(FRONT.parents[1])
    home = {"LLMRUN_HOME": str(tmp_path / "home"), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **home, "PYTHONPATH": path}


def run(environment: dict[str, str], mode: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(FRONT), mode, "run", "./tiny.gguf", *arguments]
    return subprocess.run(words, input="", capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture
def chat(environment: dict[str, str]) -> Iterator[type[Terminal]]:
    """chat(mode, option, ...): a chat at its first prompt."""
    opened: list[Terminal] = []

    def make(mode: str, *options: str) -> Terminal:
        opened.append(Terminal([sys.executable, str(FRONT), mode, "chat", "./tiny.gguf", *options], environment))
        opened[-1].wait(opened[-1].at_prompt)
        return opened[-1]

    yield make  # type: ignore[misc]
    for each in opened:
        each.close()


def test_passages_go_before_the_prompt(environment: dict[str, str]) -> None:
    done = run(environment, ENGINES, "Where is the tea?", "--docs", "notes", "--docs-model", "./tiny.gguf")
    assert done.returncode == 0
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("Passages of my documents")
    assert last == "Where is the tea?"
    assert "[1] tea.md, lines 1-2:\n```\n# Kitchen\nTea is in the kitchen.\n```" in done.stdout
    assert "Documents: 2 passages of 2 files; 2 files new or changed." in done.stderr
    assert "Sent with 1 passage of 1 file: tea.md, lines 1-2." in done.stderr
    again = run(environment, ENGINES, "Where is the tea?", "--docs", "notes", "--docs-model", "./tiny.gguf")
    assert again.stdout == done.stdout
    assert "new or changed" not in again.stderr


def test_without_an_embedding_model_the_words_find_passages(environment: dict[str, str]) -> None:
    done = run(environment, "echo", "the tea", "--docs", "notes", "--docs-model", "none")
    assert "[1] tea.md" in done.stdout
    assert (
        "No passage fits the question."
        in run(environment, "echo", "xyz", "--docs", "notes", "--docs-model", "none").stderr
    )


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        (("--docs", "nowhere"), "'nowhere' is not a folder", "-f FILE"),
        (("--docs", "notes/tea.md"), "'notes/tea.md' is not a folder", "-f FILE"),
        (("--docs-model", "bge-small"), "--docs-model needs --docs", "--docs FOLDER"),
        (("--docs", "notes", "--docs-model", "./no.gguf"), "no file", "check the path"),
    ],
)
def test_mistakes_are_said_before_a_model_is_loaded(
    environment: dict[str, str], options: tuple[str, ...], what: str, hint: str
) -> None:
    done = run(environment, "echo", "hi", *options)
    assert done.returncode in (2, 3)
    assert (done.stdout, what in done.stderr, hint in done.stderr) == ("", True, True), done.stderr


def test_every_file_that_is_left_out_is_named(environment: dict[str, str]) -> None:
    for name in ("a.png", "b.png", "c.png"):
        Path("notes", name).write_bytes(b"\x89PNG\r\n\x1a\n")
    Path("notes/old.txt").write_bytes("für Gäste".encode("cp1252"))
    options = ("Where is the tea?", "--docs", "notes", "--docs-model", "none")
    done = run(environment, "echo", *options)
    assert "Left out: a.png: it is an image, not text; and 2 more (--docs-list names them)" in done.stderr
    assert "Note: old.txt: read as windows-1252" in done.stderr
    done = run(environment, "echo", *options, "--docs-list")
    named = [line for line in done.stderr.splitlines() if line.startswith(("Left out", "Note"))]
    assert named == [
        *(f"Left out: {name}: it is an image, not text" for name in ("a.png", "b.png", "c.png")),
        "Note: old.txt: read as windows-1252",
    ]
    for name in ("a.png", "b.png", "c.png"):
        Path("notes", name).unlink()
    assert "No file is left out." in run(environment, "echo", *options, "--docs-list").stderr
    alone = run(environment, "echo", "Why?", "--docs-list")
    assert (alone.returncode, "--docs-list needs --docs" in alone.stderr) == (2, True)


def test_while_the_hub_cannot_be_reached_the_words_find_passages(environment: dict[str, str]) -> None:
    done = run(environment, "echo", "the tea", "--docs", "notes")
    assert "[1] tea.md" in done.stdout
    assert "bge-small can't be downloaded" in done.stderr
    named = run(environment, "echo", "the tea", "--docs", "notes", "--docs-model", "bge-small")
    assert (named.returncode, "bge-small" in named.stderr) == (5, True)


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_chat_shows_its_sources_and_keeps_them(chat: type[Terminal]) -> None:
    Path("notes/photo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    talk = chat(ENGINES, "--docs", "notes", "--docs-model", "./tiny.gguf", "--session", "tea")
    assert "There is no question yet." in talk.ask("/sources")
    asked = talk.ask("Where is the tea?")
    assert any("Sent with 1 passage of 1 file (/sources)." in line for line in asked)
    shown = talk.ask("/sources")
    assert any("Left out: photo.png: it is an image, not text" in line for line in shown)
    assert any(line.startswith("[1] tea.md, lines 1-2 (Kitchen), score 0.") for line in shown)
    assert any("Tea is in the kitchen." in line for line in shown)
    assert any("[1 passage] Where is the tea?" in line for line in talk.ask("/context")), "not the passage's words"
    edited = " ".join(talk.ask("/edit When does the office close?"))
    assert "[1] hours.txt, line 1:" in edited, "other passages go along with another question"
    assert "tea.md" not in edited
    assert any(line.startswith("[1] hours.txt, line 1, score 0.") for line in talk.ask("/sources"))
    assert "[1] hours.txt, line 1:" in " ".join(talk.ask("/retry"))
    talk.type("/bye")
    assert talk.end() == 0
    again = chat("echo", "--session", "tea")  # without --docs
    assert any(line.startswith("[1] hours.txt, line 1, score 0.") for line in again.ask("/sources"))
    kept = " ".join(again.ask("/edit Who?"))
    assert "[1] hours.txt, line 1:" in kept, "without documents a question keeps its passages"
    again.ask("Why is that so?")
    assert any("No passage was sent" in line for line in again.ask("/sources"))


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_an_embedding_model_that_dies_does_not_end_the_chat(chat: type[Terminal]) -> None:
    talk = chat("echo,dying_of_queries,normal", "--docs", "notes", "--docs-model", "./tiny.gguf")
    assert any("the engine died" in line for line in talk.ask("Where is the tea?"))
    assert "[1] tea.md, lines 1-2:" in " ".join(talk.ask("Where is the tea?")), "a new engine embeds"


def test_a_real_embedding_model_computes_the_vectors(
    own_engines: None, random_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/one.txt").write_text("the model runs\n" + "a b " * 200)  # more than BERT's window
    (tmp_path / "notes/two.txt").write_text("b b\n")
    bert = str(gguf_of("bert, mean", tmp_path / "bert"))
    options = ("--docs", str(tmp_path / "notes"), "--docs-model", bert, "--raw", "--max-tokens", "1", "--ctx", "512")
    done = CliRunner().invoke(app, ["run", str(random_qwen), "the model", *options])
    assert done.exit_code == 0, done.stderr
    assert "Documents: 2 passages of 2 files; 2 files new or changed." in done.stderr
    with closing(sqlite3.connect(*(tmp_path / "home/docs").glob("*.db"))) as index:
        vectors = [np.frombuffer(row[0], "<f2").astype(float) for row in index.execute("SELECT vector FROM passages")]
    assert [np.linalg.norm(each) for each in vectors] == pytest.approx([1.0] * 2, abs=1e-2)
