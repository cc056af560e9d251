"""The job `embed`: embeddings of texts, or scores of texts against a query.

Owns the model's token layout and the truncation of long texts; embedding.py computes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence

from llmrun import _native
from llmrun.engine.llama.vocabulary import LlamaVocabulary
from llmrun.engine.loaded import LoadedModel
from llmrun.engine.prompt.template import ControlTexts
from llmrun.errors import ContextOverflowError, UsageError
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.embed import EmbedTexts, TextsEmbedded


def run(
    command: EmbedTexts, report: Callable[[Empty], None], flag: _native.CancelFlag, loaded: LoadedModel
) -> TextsEmbedded:
    """Embed texts, or score them against a query.

    Raises:
        CancelledError: the flag was set.
        ContextOverflowError: a text is too long and must not be truncated, or the query leaves no room for a document.
        OutOfMemoryError: there is no memory for the longest text.
        UsageError: a text has no tokens, or a token id is invalid.
    """
    vocabulary, embedder = loaded.weights.vocabulary, loaded.embedder
    sequences = _sequences(vocabulary, command, loaded.weights.rerank_template)
    cut = [each.within(embedder.n_ctx) for each in sequences]
    truncated = tuple(index for index, each in enumerate(sequences) if len(each) > embedder.n_ctx)
    if truncated and not command.truncates:
        worst = max(truncated, key=lambda index: len(sequences[index]))
        raise ContextOverflowError(
            f"text {worst + 1} has {len(sequences[worst]):,} tokens, the context window {embedder.n_ctx:,}",
            hint="shorten it, or allow truncation",
        )
    vectors = embedder.embed(cut, command.pooling)
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


def _sequences(vocabulary: LlamaVocabulary, command: EmbedTexts, template: str) -> list[_Sequence]:
    if command.tokens:
        valid = range(vocabulary.n_tokens)
        invalid = next((each for tokens in command.tokens for each in tokens if each not in valid), None)
        if invalid is not None:
            raise UsageError(f"there is no token {invalid}", why=f"the vocabulary has {vocabulary.n_tokens:,}")
        return [_Sequence((), tokens, ()) for tokens in command.tokens]
    if command.query is not None and template:
        return _templated(vocabulary, template, command.query, command.texts)
    before, after = vocabulary.around_text
    if command.query is not None:
        before = [*before, *vocabulary.tokenize(command.query, special=False), *vocabulary.between_texts]
    return [_Sequence(before, vocabulary.tokenize(text, special=False), after) for text in command.texts]


def _templated(vocabulary: LlamaVocabulary, template: str, query: str, texts: Sequence[str]) -> list[_Sequence]:
    """Lay out query and documents by the file's reranking template. Only the template's text can be control tokens.

    The text between two control tokens is tokenized as a whole, because words may span template and document.
    """
    control = ControlTexts(vocabulary.control_texts).pattern

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
    left = max((found.end() for found in control.finditer(start)), default=0)
    found = control.search(end)
    right = found.start() if found else len(end)
    before, after = tokens(start[:left], begins=True), tokens(end[right:], begins=False)
    prefix = start[left:].replace("{query}", query)
    plain = (vocabulary.tokenize(prefix + text + end[:right], special=False, begins=not left) for text in texts)
    return [_Sequence(before, found, after) for found in plain]
