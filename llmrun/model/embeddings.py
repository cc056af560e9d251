"""Embeddings and reranking: prompts before texts, jobs for the engine, and vectors or scores from their results.

Must not know engines. Requests become many small jobs, so that other requests are answered in between.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from llmrun.errors import TEXT, BadModelError, EngineCrashedError, UsageError, require
from llmrun.gguf.header import Header
from llmrun.gguf.pooling import POOLINGS, makes_embeddings, pooling_of, stated_pooling
from llmrun.models.registry import EmbeddingAdvice
from llmrun.protocol.arguments import check_fields
from llmrun.protocol.jobs.text import EmbedTexts, TextsEmbedded

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

Role = Literal["query", "document"]
"""Role of a text in a search."""
MOST_TEXTS = 128  # in a job
MOST_CHARACTERS = 1 << 12
"""Characters of the texts of a job, about 1,000 tokens: all other requests wait for its end."""
_TOKEN_CHARACTERS = 4
_Text = TypeVar("_Text", str, Sequence[int | str])


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """Options of embeddings."""

    role: Role | None = "document"  # chooses the makers' prompt before each text; None is no prompt
    prompt: str | None = None  # before each text, instead of the makers'
    pooling: str | None = None  # "mean", "cls" or "last"; None is the file's
    dimensions: int | None = None  # of the truncated vectors; None is all
    normalize: bool = True  # to length 1
    truncate: bool = True  # cut a text longer than the context window, or else raise an error

    def __post_init__(self) -> None:
        check_fields(self)


class TextVectors(NamedTuple):
    """The vectors of texts."""

    vectors: NDArray[numpy.float32]  # a row for each text
    tokens: tuple[int, ...]  # number of computed tokens of each text
    truncated: tuple[int, ...] = ()  # indexes of texts that were cut


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """The relevance of a document to a query."""

    index: int  # in the list of documents
    score: float  # of a ranking model, else the cosine of the two vectors; higher is better


class Embedding:
    """Embeddings by one model: texts become jobs, and their results vectors.

    Attributes:
        pooling: combines the vectors of all tokens into one.
        notes: messages for the user.

    Raises:
        UsageError: the options are invalid, or not for this model.
    """

    def __init__(self, header: Header, advice: EmbeddingAdvice | None, options: EmbedOptions) -> None:
        if options.pooling is not None and options.pooling not in POOLINGS[1:-1]:
            raise UsageError(f"invalid pooling {options.pooling!r}", why=f"must be one of {', '.join(POOLINGS[1:-1])}")
        self.pooling = options.pooling or pooling_of(header)
        if self.pooling == "rank":
            raise UsageError(f"{header.name} ranks documents, and gives no vectors", hint="llmrun rerank")
        self._options = options
        self._prompt = _prompt(header, advice, options)
        self._check_dimensions(header, advice)
        self.notes: tuple[str, ...] = ()
        if not makes_embeddings(header):
            self.notes = (f"{header.name} was not made for embeddings: they are poor; see llmrun search embedding",)
        elif not options.pooling and stated_pooling(header) not in POOLINGS[1:]:
            self.notes = (f"{header.name} does not say how its tokens are pooled: {self.pooling} (--pooling)",)

    def _check_dimensions(self, header: Header, advice: EmbeddingAdvice | None) -> None:
        dimensions, width = self._options.dimensions, header.model_count("embedding_length_out") or header.n_embd
        if dimensions is None or dimensions == width:
            return
        minimum = 1 if advice is None else advice.least_dimensions
        if not minimum:
            raise UsageError(f"{header.name}'s vectors can't be cut", why="its makers did not train it for that")
        if not minimum <= dimensions < width:
            raise UsageError(f"invalid dimensions {dimensions}", why=f"must be {minimum} to {width} for {header.name}")

    def commands(self, texts: Iterable[str]) -> Iterator[EmbedTexts]:
        """Yield the jobs that embed texts, in order.

        Raises:
            UsageError: a text is blank.
        """
        for chunk in _chunks(checked(texts)):
            prompted = tuple(self._prompt + text for text in chunk)
            yield EmbedTexts(prompted, self.pooling, truncates=self._options.truncate)

    def of_tokens(self, tokens: Sequence[Sequence[int | str]]) -> Iterator[EmbedTexts]:
        """Yield the jobs that embed texts given as token ids, with texts between them, without a prompt."""
        for chunk in _chunks(tokens, MOST_CHARACTERS // _TOKEN_CHARACTERS):
            yield EmbedTexts((), self.pooling, tokens=tuple(map(tuple, chunk)), truncates=self._options.truncate)

    def read(self, done: TextsEmbedded) -> TextVectors:
        """Return the vectors in a job's result.

        Raises:
            BadModelError: they are not numbers.
        """
        import numpy as np

        vectors = read_vectors(done)[:, : self._options.dimensions]
        if self._options.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return TextVectors(vectors, done.tokens, done.truncated)


def _prompt(header: Header, advice: EmbeddingAdvice | None, options: EmbedOptions) -> str:
    if options.prompt is not None:
        return options.prompt
    if advice is None or options.role is None:
        return ""
    return advice.query if options.role == "query" else advice.document


def read_vectors(done: TextsEmbedded) -> NDArray[numpy.float32]:
    """Return the vectors in a job's result, as computed.

    Raises:
        BadModelError: they are not numbers.
        EngineCrashedError: the data are invalid; a compromised engine may send anything.
    """
    import numpy as np

    try:
        found = np.frombuffer(base64.b64decode(done.vectors), "<f4").reshape(len(done.tokens), -1)
    except ValueError as error:
        raise EngineCrashedError("the engine sent no vectors", why=f"it sent garbage ({error})") from error
    if not np.isfinite(found).all():
        raise BadModelError("the model computes no numbers", why="its vectors hold NaN or infinity")
    return found


def joined(parts: Iterable[TextVectors]) -> TextVectors:
    """Return the vectors of several jobs as one result."""
    import numpy as np

    found, start, truncated = list(parts), 0, []
    for part in found:
        truncated += [start + index for index in part.truncated]
        start += len(part.tokens)
    vectors = np.concatenate([part.vectors for part in found]) if found else np.empty((0, 0), np.float32)
    return TextVectors(vectors, tuple(count for part in found for count in part.tokens), tuple(truncated))


def checked(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts.

    Raises:
        UsageError: one is blank, or not a text.
    """
    for number, text in enumerate(texts, 1):
        require(f"text {number}", text, TEXT)
        if not text.strip():
            raise UsageError(f"text {number} is empty", why="an empty text has no meaning that could be a vector")
        yield text


def _chunks(texts: Iterable[_Text], limit: int = MOST_CHARACTERS) -> Iterator[list[_Text]]:
    """Yield the texts of each job; `limit` is the length of all, unless there is only one."""
    chunk: list[_Text] = []
    size = 0
    for text in texts:
        if chunk and (len(chunk) == MOST_TEXTS or size + len(text) > limit):
            yield chunk
            chunk, size = [], 0
        chunk.append(text)
        size += len(text)
    if chunk:
        yield chunk


class Ranking:
    """Ranking by one model: by its ranking head, or by the cosine of vectors without one.

    Attributes:
        notes: messages for the user.
    """

    def __init__(self, header: Header, advice: EmbeddingAdvice | None) -> None:
        self._embeds: tuple[Embedding, Embedding] | None = None
        self.notes: tuple[str, ...] = ()
        if pooling_of(header) != "rank":
            options = EmbedOptions()
            query = Embedding(header, advice, replace(options, role="query"))
            self._embeds = query, Embedding(header, advice, options)
            self.notes = (*query.notes, f"{header.name} has no ranking head: the score is the cosine of the vectors")

    def commands(self, query: str, documents: Iterable[str]) -> Iterator[EmbedTexts]:
        """Yield the jobs, in order.

        Raises:
            UsageError: a text is blank.
        """
        if not query.strip():
            raise UsageError("the query is empty")
        if self._embeds is None:
            for chunk in _chunks(checked(documents)):
                yield EmbedTexts(tuple(chunk), "rank", query)
            return
        yield from self._embeds[0].commands([query])
        yield from self._embeds[1].commands(documents)

    def read(self, results: Sequence[TextsEmbedded]) -> list[RankedDocument]:
        """Return the documents of the jobs' results, the best first.

        Raises:
            BadModelError: the scores are not numbers.
        """
        scores: Iterable[Any]
        if self._embeds is None:
            scores = (row[0] for done in results for row in read_vectors(done))
        else:
            found = joined(map(self._embeds[1].read, results)).vectors
            scores = found[1:] @ found[0]
        ranked = [RankedDocument(index, float(score)) for index, score in enumerate(scores)]
        return sorted(ranked, key=lambda one: -one.score)
