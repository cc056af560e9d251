"""`llmrun watermark detect`, with a real engine and a vocabulary of a few hundred tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import SPELLING_VOCABULARY, spelling_model, write
from typer.testing import CliRunner

from llmrun import _native
from llmrun.cli.app import app
from llmrun.cli.sampling import WATERMARK_OPTIONS, read_key, read_value, sampling_flags, shown_value
from llmrun.errors import UsageError
from llmrun.protocol.watermark import fingerprint, read_watermark
from llmrun.runner import client

KEY = "a long secret"
LETTERS = "abcdefgjklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # each is a token

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def detect(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    model = str(write(tmp_path / "tiny.gguf", spelling_model()))
    engine = client.EngineClient()
    monkeypatch.setattr(client, "prestarted", lambda: engine)
    command = ["watermark", "detect", "--model", model]
    yield lambda *arguments, **more: CliRunner().invoke(app, [*command, *arguments], **more)
    engine.close()


def marked_text() -> str:
    """Letters, each green behind the one before, and no pair twice."""
    mark = read_watermark("green").native(KEY)
    letters = {letter: SPELLING_VOCABULARY.index(f"<0x{ord(letter):02X}>") for letter in LETTERS}
    text, left = "a", set(product(LETTERS, LETTERS))
    while len(text) < 100:
        pairs = [pair for pair in sorted(left) if pair[0] == text[-1]]
        pair = next(pair for pair in pairs if mark.count(len(SPELLING_VOCABULARY), [letters[each] for each in pair])[1])
        left.remove(pair)
        text += pair[1]
    return text


def test_a_marked_text_is_found(detect: Callable[..., Any]) -> None:
    text = marked_text()
    done = detect("-", "--watermark-key", KEY, input=text)
    assert "almost certainly" in done.stdout
    assert KEY not in done.output
    found = json.loads(detect("-", "--json", "--watermark-key", KEY, input=text).stdout)
    assert found["verdict"] == "marked"
    assert found["p"] < 1e-4
    assert found["hits"] >= found["judged"] - 2  # the space that the tokenizer puts in front is of no colour


def test_another_key_finds_nothing(detect: Callable[..., Any]) -> None:
    done = detect("-", "--watermark-key", "15485863", input=marked_text())
    assert "no sign" in done.stdout
    assert "may be marked and not show it" in done.stderr
    assert "the mark proves nothing" in done.stderr


def test_a_file_and_a_key_of_the_environment(detect: Callable[..., Any], tmp_path: Path) -> None:
    file = write(tmp_path / "answer.txt", marked_text().encode())
    done = detect(str(file), env={"LLMRUN_WATERMARK_KEY": KEY})
    assert "almost certainly" in done.stdout
    secret = write(tmp_path / "key", f"{KEY}\n".encode())
    assert "almost certainly" in detect(str(file), "--watermark-key", f"@{secret}").stdout


def test_what_is_refused(detect: Callable[..., Any], tmp_path: Path) -> None:
    done = detect(str(tmp_path / "missing.txt"), "--watermark-key", KEY)
    assert isinstance(done.exception, UsageError)
    assert "there is no file" in str(done.exception)
    done = detect("-", "--watermark-key", KEY, "--watermark", "green,selfhash=9", input="hi")
    assert "too short" in str(done.exception)
    done = detect("-", "--watermark-key", KEY, "--watermark", "red", input="hi")
    assert "invalid --watermark red" in str(done.exception)


def test_keys(tmp_path: Path) -> None:
    assert read_key("secret", "--watermark-key") == "secret"
    with pytest.raises(UsageError, match="can't be read"):
        read_key(f"@{tmp_path / 'missing'}", "--watermark-key")
    with pytest.raises(UsageError, match="needs a key"):
        read_key(f"@{write(tmp_path / 'empty', b'')}", "--watermark-key")
    assert read_value("watermark-key", "secret") == ("watermark_key", "secret")
    assert shown_value("watermark_key", "secret") == fingerprint("secret")


def test_the_environment_gives_a_key_only_to_a_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_WATERMARK_KEY", KEY)
    assert sampling_flags() == {}
    assert sampling_flags(watermark="green") == {"watermark": "green", "watermark_key": KEY}
    assert sampling_flags(watermark="green", watermark_key="other")["watermark_key"] == "other"


def test_a_server_needs_a_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WATERMARK_OPTIONS() == {}
    assert WATERMARK_OPTIONS(watermark="green", watermark_key=KEY)["watermark_key"] == KEY
    with pytest.raises(UsageError, match="needs a key"):
        WATERMARK_OPTIONS(watermark="green")


def test_permuted_is_what_is_counted() -> None:
    mark = _native.Watermark(15485863)
    green = set(_native.permuted(15485863 * 10, 20, 5))
    assert {token for token in range(20) if mark.count(20, [10, token])[1]} == green
