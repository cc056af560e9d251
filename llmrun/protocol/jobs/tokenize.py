"""The job `tokenize`: the tokens of a text, by the vocabulary of a model's file, whose weights are not loaded."""

from __future__ import annotations

from typing import NamedTuple

from llmrun.protocol.jobs import Empty, JobKind


class TokenizeText(NamedTuple):
    """Tokenize a text."""

    model: str  # path of the model's (first) file, absolute; "" for the loaded model
    text: str
    special: bool = True  # turn the texts of control tokens into these; a file also adds the begin-of-sequence token


class VocabularyPiece(NamedTuple):
    """The text of a token."""

    token: int
    data: str  # UTF-8 bytes in hex, possibly not whole characters; for a control token its name
    is_control: bool = False


class TextTokens(NamedTuple):
    """A text's tokens."""

    tokens: tuple[int, ...]
    pieces: tuple[VocabularyPiece, ...]  # of all tokens that occur, each once; none by the loaded model
    n_vocab: int


TOKENIZE = JobKind("tokenize", TokenizeText, Empty, TextTokens, lambda command: (command.model,))
