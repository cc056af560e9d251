"""The job `tokenize`: of a vocabulary alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_writer import SPELLING_VOCABULARY, spelling_model, write

from llmrun import _native
from llmrun.engine.jobs.tokenize import run
from llmrun.errors import BadModelError
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.tokenize import TextTokens, TokenizeText, VocabularyPiece

HI, SPACE = SPELLING_VOCABULARY.index("\u2581hi"), SPELLING_VOCABULARY.index("\u2581")


def tokenized(path: Path, text: str, *, special: bool = True) -> TextTokens:
    told: list[Empty] = []
    return run(TokenizeText(str(path), text, special), told.append, _native.CancelFlag())


def test_a_file_without_weights_will_do(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", spelling_model())
    found = tokenized(path, "hi hi</s>")
    assert found.tokens == (1, HI, HI, 2)
    assert found.pieces == (
        VocabularyPiece(1, b"<s>".hex(), is_control=True),
        VocabularyPiece(HI, b" hi".hex()),
        VocabularyPiece(2, b"</s>".hex(), is_control=True),
    )
    assert found.n_vocab == len(SPELLING_VOCABULARY)


def test_a_vocabulary_that_was_opened_ahead_is_not_read_again(tmp_path: Path) -> None:
    path, flag = write(tmp_path / "tiny.gguf", spelling_model()), _native.CancelFlag()
    opened = run(TokenizeText(str(path), "", special=False), lambda update: None, flag)
    assert (opened.tokens, opened.n_vocab) == ((), len(SPELLING_VOCABULARY))
    path.unlink()
    assert run(TokenizeText(str(path), "hi"), lambda update: None, flag).tokens == (1, HI)


def test_plain_text_has_no_control_tokens(tmp_path: Path) -> None:
    found = tokenized(write(tmp_path / "tiny.gguf", spelling_model()), "</s>", special=False)
    assert found.tokens == (SPACE, *(SPELLING_VOCABULARY.index(f"<0x{byte:02X}>") for byte in b"</s>"))
    assert not any(piece.is_control for piece in found.pieces)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelError):
        tokenized(write(tmp_path / "bad.gguf", b"GGUF nothing"), "hi")
