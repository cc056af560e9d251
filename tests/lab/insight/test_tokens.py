"""Tokens that share characters, and what each script costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gguf_writer import SPELLING_VOCABULARY, spelling_model, write

from llmrun.__main__ import _load_vocabulary_ahead
from llmrun.errors import BadModelError
from llmrun.lab.insight.tokens import (
    ScriptCount,
    Token,
    groups,
    script_counts,
    tokenize_text,
)
from llmrun.runner import client


def tokens(*pieces: bytes) -> list[Token]:
    return [Token(number, piece, is_control=False) for number, piece in enumerate(pieces)]


def test_tokens_that_share_a_character_are_together() -> None:
    hand = "🤷".encode()
    found = list(groups([*tokens(b"a", b" " + hand[:2], hand[2:] + b"b", b"c"), Token(9, b"</s>", is_control=True)]))
    assert [(len(group.tokens), group.text) for group in found] == [(1, "a"), (2, " 🤷b"), (1, "c"), (1, "</s>")]


def test_what_is_no_character_at_all_is_replaced_and_never_eats_a_control_token() -> None:
    found = list(groups([*tokens(b"\xf0\x9f"), Token(9, b"</s>", is_control=True), *tokens(b"\xe4")]))
    assert [(len(group.tokens), group.text) for group in found] == [(1, "\ufffd"), (1, "</s>"), (1, "\ufffd")]


def test_scripts_are_counted_by_characters_tokens_and_words() -> None:
    found = script_counts(tokens(b"Don't", b" stop", b", 1 ", "мир".encode(), "你".encode()[:1], "你".encode()[1:]))
    assert found == [
        ScriptCount("Latin", 8, 8, 2, 2),
        ScriptCount("Chinese", 1, 3, 2, None),
        ScriptCount("digits, signs, spaces", 6, 6, 1, None),
        ScriptCount("Cyrillic", 3, 6, 1, 1),
    ]


def test_a_mark_has_its_letters_script_and_control_tokens_count_nowhere() -> None:
    found = script_counts([Token(1, b"<s>", is_control=True), *tokens("e\u0301t".encode())])
    assert found == [ScriptCount("Latin", 3, 4, 1, 1)]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[client.EngineClient]:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    found = client.EngineClient()
    monkeypatch.setattr(client, "prestarted", lambda: found)
    yield found
    found.close()


@pytest.mark.usefixtures("package_on_path")
def test_a_vocabulary_opened_ahead_gives_the_same_tokens(engine: client.EngineClient, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", spelling_model())
    _load_vocabulary_ahead(str(path))
    found = tokenize_text(engine, path, "hi", special=False)
    assert [token.id for token in found.tokens] == [SPELLING_VOCABULARY.index("\u2581hi")]


@pytest.mark.usefixtures("package_on_path")
@pytest.mark.parametrize("name", ["not-a-model-at-all", "--json"])
def test_a_wrong_guess_is_no_error(engine: client.EngineClient, tmp_path: Path, name: str) -> None:
    _load_vocabulary_ahead(name)
    bad = write(tmp_path / "bad.gguf", b"GGUF nothing")
    _load_vocabulary_ahead(str(bad))
    with pytest.raises(BadModelError):
        tokenize_text(engine, bad, "hi", special=False)
