"""The job `tokenize`: the tokens of a text and their pieces, from llama.cpp's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from llmrun import _native
from llmrun.engine.llama.base import Vocabulary
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.tokenize import TextTokens, TokenizeText, VocabularyPiece


def run(command: TokenizeText, report: Callable[[Empty], None], flag: _native.CancelFlag) -> TextTokens:
    """Tokenize a text.

    Raises:
        BadModelError: the vocabulary can't be loaded, or can't tokenize the text.
    """
    vocabulary = _vocabulary(command.model, flag)
    tokens = vocabulary.tokenize(command.text, special=command.special)
    tokens = vocabulary.with_bos(tokens) if command.special else tokens
    return TextTokens(tuple(tokens), pieces(vocabulary, tokens), vocabulary.n_tokens)


@lru_cache(1)
def _vocabulary(model: str, flag: _native.CancelFlag) -> Vocabulary:
    """Load the vocabulary of a model's file. It is never closed: that would wait for the thread that reads it."""
    return LlamaModel(model, 0, flag, vocabulary_only=True).vocabulary


def pieces(vocabulary: Vocabulary, tokens: list[int]) -> tuple[VocabularyPiece, ...]:
    """Return the pieces of tokens, each once, in the order of first occurrence."""
    return tuple(_piece(vocabulary, token) for token in dict.fromkeys(tokens))


def _piece(vocabulary: Vocabulary, token: int) -> VocabularyPiece:
    text = vocabulary.piece(token)
    return VocabularyPiece(token, (text or vocabulary.control_piece(token)).hex(), is_control=not text)
