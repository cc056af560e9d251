"""The job `tokenize`: a text as a model's tokens, of its vocabulary alone; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class TokenizeText:
    """What to tokenize.

    Attributes:
        model: path of the model's (first) file, absolute.
        text: whatever it is.
        special: text of control tokens becomes those, and the begin-of-sequence token is put in front.
    """

    model: str
    text: str
    special: bool = True


@dataclass(frozen=True, slots=True)
class VocabularyPiece:
    """What a token stands for.

    Attributes:
        token: its id.
        data: UTF-8 bytes in hex, maybe not whole characters; of a control token its name.
        is_control: it steers the model, and is no text.
    """

    token: int
    data: str
    is_control: bool = False


@dataclass(frozen=True, slots=True)
class TextTokens:
    """A text's tokens.

    Attributes:
        tokens: ids in the order of the text.
        pieces: of all tokens that occur, each once.
        n_vocab: tokens of the vocabulary.
    """

    tokens: tuple[int, ...]
    pieces: tuple[VocabularyPiece, ...]
    n_vocab: int


TOKENIZE = JobKind("tokenize", TokenizeText, Empty, TextTokens, lambda command: (command.model,))
