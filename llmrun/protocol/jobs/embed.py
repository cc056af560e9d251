"""The job `embed`: texts become vectors, or scores of texts against a query."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class EmbedTexts:
    """What to embed.

    Attributes:
        texts: each becomes a vector; none of them is empty.
        pooling: "mean", "cls", "last" or "rank": what makes one vector of those of all tokens.
        query: what the texts are scored against, by a model with a ranking head; None where there is none.
        tokens: token ids in place of texts, taken as they are.
        truncates: what is longer than the context window loses its end; otherwise it is refused.
    """

    texts: tuple[str, ...]
    pooling: str
    query: str | None = None
    tokens: tuple[tuple[int, ...], ...] = ()
    truncates: bool = True


@dataclass(frozen=True, slots=True)
class TextsEmbedded:
    """What came of it.

    Attributes:
        vectors: of all texts, one behind the other: float32, little endian, in base64; not normalized.
        tokens: how many tokens of each text went through the model.
        truncated: indexes of the texts that lost their end.
    """

    vectors: str
    tokens: tuple[int, ...]
    truncated: tuple[int, ...] = ()


EMBED = JobKind("embed", EmbedTexts, Empty, TextsEmbedded, needs_model=True)
