"""The jobs `tokenize` and `embed`: tokens of texts; embeddings of texts, or their scores against a query.

Owns the token layout of embedding models and rerankers, and the truncation of long texts; embedding.py computes.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from llmrun import _native
from llmrun.engine.llama.base import Vocabulary, check_tokens, vocabulary_pieces
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.vocabulary import LlamaVocabulary
from llmrun.engine.prompt.control_texts import ControlTexts
from llmrun.errors import CancelledError, ContextOverflowError, UsageError
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.text import EmbedTexts, TextsEmbedded, TextTokens, TokenizeText

if TYPE_CHECKING:  # a text is tokenized without a loaded model
    from llmrun.engine.loaded import LoadedModel
    from llmrun.engine.slices import TimeShare


def run_tokenize(command: TokenizeText, report: Callable[[Empty], None], flag: _native.CancelFlag) -> TextTokens:
    """Tokenize a text.

    Raises:
        BadModelError: the vocabulary can't be loaded, or can't tokenize the text.
    """
    vocabulary = _vocabulary(command.model, flag)
    tokens = vocabulary.tokenize(command.text, special=command.special)
    tokens = vocabulary.with_bos(tokens) if command.special else tokens
    return TextTokens(tuple(tokens), vocabulary_pieces(vocabulary, tokens), vocabulary.n_tokens)


@lru_cache(1)
def _vocabulary(model: str, flag: _native.CancelFlag) -> Vocabulary:
    """Load the vocabulary of a model's file. It is never closed: that would wait for the thread that reads it."""
    return LlamaModel(model, 0, flag, vocabulary_only=True).vocabulary


def run_embed(
    command: EmbedTexts, loaded: LoadedModel, share: TimeShare, is_wanted: Callable[[], bool]
) -> Generator[None, None, TextsEmbedded]:
    """Embed texts, or score them against a query; yield when they are tokenized, and after each slice.

    Args:
        is_wanted: returns False after a cancel.

    Raises:
        CancelledError: the job was cancelled.
        ContextOverflowError: a text is too long and must not be truncated, or the query leaves no room for a document.
        OutOfMemoryError: there is no memory for the longest text.
        UsageError: a text has no tokens, or a token id is invalid.
    """
    vocabulary, embedder = loaded.weights.vocabulary, loaded.embedder
    whole, limit = command, embedder.n_ctx
    command = command._replace(
        texts=tuple(vocabulary.cut(text, limit) for text in whole.texts),
        query=None if whole.query is None else vocabulary.cut(whole.query, limit),
    )
    sequences = _sequences(vocabulary, command, loaded.weights.rerank_template, limit, is_wanted)
    cut = [sequence.within(limit) for sequence in sequences]
    truncated = tuple(index for index, sequence in enumerate(sequences) if len(sequence) > limit)
    if truncated and not command.truncates:
        worst = max(truncated, key=lambda index: len(sequences[index]))
        alone = whole._replace(texts=whole.texts[worst : worst + 1], tokens=whole.tokens[worst : worst + 1])
        (longest,) = _sequences(vocabulary, alone, loaded.weights.rerank_template, sys.maxsize, is_wanted)
        raise ContextOverflowError(
            f"text {worst + 1} has {len(longest):,} tokens, the context window {limit:,}",
            hint="shorten it, or allow truncation",
            size=(len(longest), limit),
        )
    yield
    vectors = yield from embedder.embed(cut, command.pooling, share)
    return TextsEmbedded(base64.b64encode(b"".join(vectors)).decode(), tuple(map(len, cut)), truncated)


class _Sequence:
    """A text's tokens, and the tokens around it that are never truncated."""

    def __init__(self, before: Sequence[int], tokens: Sequence[int], after: Sequence[int]) -> None:
        self._before, self._tokens, self._after = before, tokens, after

    def __len__(self) -> int:
        return len(self._before) + len(self._tokens) + len(self._after)

    def within(self, limit: int) -> list[int]:
        """Return at most `limit` tokens; cut the end of the text if there are more.

        Raises:
            ContextOverflowError: the tokens around the text alone exceed the limit.
            UsageError: there are no tokens.
        """
        length = len(self._tokens) - max(len(self) - limit, 0)
        if length < 0:
            raise ContextOverflowError("the query leaves no room for a document", hint="shorten it")
        if not len(self):
            raise UsageError("a text has no tokens", why="the model's vocabulary has none for any of its characters")
        return [*self._before, *self._tokens[:length], *self._after]


def _joined(vocabulary: LlamaVocabulary, parts: Iterable[int | str], limit: int) -> list[int]:
    """Return token ids, with those of the texts between them; of a text that has more than the limit only the first."""
    tokens: list[int] = []
    for part in parts:
        text = vocabulary.cut(part, limit) if isinstance(part, str) else ""
        tokens += [part] if isinstance(part, int) else vocabulary.tokenize(text, special=True, begins=not tokens)
    return tokens


def _sequences(
    vocabulary: LlamaVocabulary, command: EmbedTexts, template: str, limit: int, is_wanted: Callable[[], bool]
) -> list[_Sequence]:
    def wanted_texts() -> Iterator[str]:
        for text in command.texts:
            if not is_wanted():
                raise CancelledError("it was cancelled")
            yield text

    if command.tokens:
        parts = chain.from_iterable(command.tokens)
        check_tokens((part for part in parts if isinstance(part, int)), vocabulary.n_tokens)
        return [_Sequence((), _joined(vocabulary, parts, limit), ()) for parts in command.tokens]
    if command.query is not None and template:
        return _templated(vocabulary, template, command.query, wanted_texts())
    before, after = vocabulary.around_text
    if command.query is not None:
        before = [*before, *vocabulary.tokenize(command.query, special=False), *vocabulary.between_texts]
    return [_Sequence(before, vocabulary.tokenize(text, special=False), after) for text in wanted_texts()]


def _templated(vocabulary: LlamaVocabulary, template: str, query: str, texts: Iterable[str]) -> list[_Sequence]:
    """Lay out query and documents by the file's reranking template. Only the template's text can be control tokens.

    The text between two control tokens is tokenized as a whole, because words may span template and document.
    """
    control = ControlTexts((*vocabulary.control_texts, *vocabulary.shown_control_texts)).pattern

    def tokens(part: str, *, begins: bool) -> list[int]:
        pieces = re.split(f"({control.pattern})", part)
        return [
            token
            for number, piece in enumerate(pieces)
            for token in vocabulary.tokenize(
                piece.replace("{query}", query), special=number % 2 == 1, begins=begins and not number
            )
        ]

    start, _, end = template.partition("{document}")
    left = max((match.end() for match in control.finditer(start)), default=0)
    match = control.search(end)
    right = match.start() if match else len(end)
    before, after = tokens(start[:left], begins=True), tokens(end[right:], begins=False)
    prefix = start[left:].replace("{query}", query)
    plain = (vocabulary.tokenize(prefix + text + end[:right], special=False, begins=not left) for text in texts)
    return [_Sequence(before, tokens_of_text, after) for tokens_of_text in plain]
