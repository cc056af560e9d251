"""`llmrun tokenize`, with a real engine and a vocabulary of a few hundred tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import SPELLING_VOCABULARY, spelling_model, write
from typer.testing import CliRunner

from llmrun.cli.app import app
from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.runner import client

HI = SPELLING_VOCABULARY.index("\u2581hi")

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def tokenize(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    model = write(tmp_path / "tiny.gguf", spelling_model())
    engine = client.EngineClient()
    monkeypatch.setattr(client, "prestarted", lambda: engine)
    yield lambda *arguments, **more: CliRunner().invoke(app, ["tokenize", str(model), *arguments], **more)
    engine.close()


def test_a_pipe_gets_ids(tokenize: Callable[..., Any], tmp_path: Path) -> None:
    assert tokenize("hi hi").stdout == f"1\n{HI}\n{HI}\n"
    assert tokenize("--plain", "hi").stdout == f"{HI}\n"
    assert tokenize("-", input=b"hi").stdout == f"1\n{HI}\n"
    assert tokenize("--plain", "").stdout == "", "no token, no line"
    for number, data in enumerate((b"\xef\xbb\xbfhi", "hi".encode("utf-16"))):
        assert tokenize(str(write(tmp_path / f"{number}.txt", data))).stdout == f"1\n{HI}\n", "a mark is no text"
    guessed = tokenize(str(write(tmp_path / "text.txt", "café".encode("cp1252"))))
    assert (guessed.exit_code, "read as windows-1252" in guessed.stderr) == (0, True)
    refused = tokenize(str(write(tmp_path / "text.txt", b"hi\0\xff")))
    assert isinstance(refused.exception, UsageError)
    assert refused.exception.why == "it is binary, not text"


def test_json(tokenize: Callable[..., Any]) -> None:
    found = json.loads(tokenize("--json", "--merges", "hi").stdout)
    assert found["tokens"][1] == {"id": HI, "text": " hi", "bytes": "206869", "control": False}
    assert found["tokens"][0]["control"]
    assert found["scripts"][0]["script"] == "Latin"
    assert found["merges"]["rule"] == "SentencePiece"
    assert [tree["tokens"] for tree in found["merges"]["trees"]] == [1, 1]


def test_beside_another_model(tokenize: Callable[..., Any], tmp_path: Path) -> None:
    other = write(tmp_path / "other.gguf", spelling_model({"tokenizer.ggml.add_bos_token": False}))
    done = tokenize("--compare", str(other), "hi hi")
    assert done.stdout.splitlines()[-1].split() == ["all", "3", "2"]
    assert [len(each["tokens"]) for each in json.loads(tokenize("--json", "--compare", str(other), "hi").stdout)] == [
        2,
        1,
    ]


def test_wrong_input(tokenize: Callable[..., Any], tmp_path: Path) -> None:
    assert isinstance(tokenize("--compare", "not-a-model-at-all", "hi").exception, ModelNotFoundError)
    with (tmp_path / "long.txt").open("wb") as file:
        file.truncate(5 << 20)
    assert isinstance(tokenize(str(tmp_path / "long.txt")).exception, UsageError)
