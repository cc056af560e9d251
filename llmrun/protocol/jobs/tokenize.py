"""The job `tokenize`: the tokens of a text. It loads a model's vocabulary, not its weights."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class TokenizeText:
    """Tokenize a text."""

    model: str  # path of the model's (first) file, absolute
    text: str
    special: bool = True  # turn the texts of control tokens into these, and begin with the begin-of-sequence token


@dataclass(frozen=True, slots=True)
class VocabularyPiece:
    """The text of a token."""

    token: int
    data: str  # UTF-8 bytes in hex, possibly not whole characters; for a control token its name
    is_control: bool = False


@dataclass(frozen=True, slots=True)
class TextTokens:
    """A text's tokens."""

    tokens: tuple[int, ...]
    pieces: tuple[VocabularyPiece, ...]  # of all tokens that occur, each once
    n_vocab: int


TOKENIZE = JobKind("tokenize", TokenizeText, Empty, TextTokens, lambda command: (command.model,))
