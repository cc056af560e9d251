"""The job `embed`: embeddings of texts, or scores of texts against a query."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class EmbedTexts:
    """Embed texts, or score them."""

    texts: tuple[str, ...]  # not empty
    pooling: str  # "mean", "cls", "last" or "rank"
    query: str | None = None  # score the texts against it, with a model that has a ranking head
    tokens: tuple[tuple[int, ...], ...] = ()  # token ids instead of texts, used unchanged
    truncates: bool = True  # cut the end of a text longer than the context window, or else raise an error


@dataclass(frozen=True, slots=True)
class TextsEmbedded:
    """The embeddings or scores."""

    vectors: str  # of all texts, concatenated: float32, little endian, in base64; not normalized
    tokens: tuple[int, ...]  # number of tokens computed for each text
    truncated: tuple[int, ...] = ()  # indexes of the truncated texts


EMBED = JobKind("embed", EmbedTexts, Empty, TextsEmbedded, needs_model=True)
