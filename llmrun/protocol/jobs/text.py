"""The jobs on texts: `tokenize`, by the vocabulary of a model's file without its weights, and `embed`."""

from __future__ import annotations

from typing import NamedTuple

from llmrun.protocol.jobs import Empty, JobKind


class TokenizeText(NamedTuple):
    """Tokenize a text."""

    model: str  # path of the model's (first) file, absolute; "" for the loaded model
    text: str
    special: bool = True  # turn the texts of control tokens into these; a file also adds the begin-of-sequence token
    adds_bos: bool = False  # the loaded model adds it, if its prompts have one
    has_pieces: bool = False  # the loaded model tells the pieces, as a file always does


class VocabularyPiece(NamedTuple):
    """The text of a token."""

    token: int
    data: str  # UTF-8 bytes in hex, possibly not whole characters; for a control token its name
    is_control: bool = False


class TextTokens(NamedTuple):
    """A text's tokens."""

    tokens: tuple[int, ...]
    pieces: tuple[VocabularyPiece, ...]  # of all tokens that occur, each once
    n_vocab: int


TOKENIZE = JobKind("tokenize", TokenizeText, Empty, TextTokens, lambda command: (command.model,))


class EmbedTexts(NamedTuple):
    """Embed texts, or score them."""

    texts: tuple[str, ...]  # not empty
    pooling: str  # "mean", "cls", "last" or "rank"
    query: str | None = None  # score the texts against it, with a model that has a ranking head
    tokens: tuple[tuple[int | str, ...], ...] = ()  # instead of texts: token ids, and texts between them
    truncates: bool = True  # cut the end of a text longer than the context window, or else raise an error


class TextsEmbedded(NamedTuple):
    """The embeddings or scores."""

    vectors: str  # of all texts, concatenated: float32, little endian, in base64; not normalized
    tokens: tuple[int, ...]  # number of tokens computed for each text
    truncated: tuple[int, ...] = ()  # indexes of the truncated texts


EMBED = JobKind("embed", EmbedTexts, Empty, TextsEmbedded, needs_model=True)
