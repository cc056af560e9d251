"""The job `embed`: texts become tokens as the model's makers lay them out, then vectors.

Owns that layout, and what is cut off of a text that is too long; embedding.py owns the model's part.
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
        ContextOverflowError: a text is too long, and may not be cut; or a query leaves no room for any.
        OutOfMemoryError: there is no memory for the longest one.
        UsageError: there is nothing to embed, or no such token.
    """
    vocabulary, embedder = loaded.weights.vocabulary, loaded.embedder
    sequences = _sequences(vocabulary, command, loaded.weights.rerank_template)
    cut = [each.within(embedder.n_ctx) for each in sequences]
    truncated = tuple(index for index, each in enumerate(sequences) if len(each) > embedder.n_ctx)
    if truncated and not command.truncates:
        worst = max(truncated, key=lambda index: len(sequences[index]))
        raise ContextOverflowError(
            f"text {worst + 1} has {len(sequences[worst]):,} tokens, the context window {embedder.n_ctx:,}",
            hint="shorten it, or let its end be cut off",
        )
    vectors = embedder.embed(cut, command.pooling)
    return TextsEmbedded(base64.b64encode(b"".join(vectors)).decode(), tuple(map(len, cut)), truncated)


class _Sequence:
    """A text's tokens, and those around it that are never cut off."""

    def __init__(self, before: Sequence[int], tokens: Sequence[int], behind: Sequence[int]) -> None:
        self._before, self._tokens, self._behind = before, tokens, behind

    def __len__(self) -> int:
        return len(self._before) + len(self._tokens) + len(self._behind)

    def within(self, most: int) -> list[int]:
        """All of it, without as much of the text's end as is too much.

        Raises:
            ContextOverflowError: what stands around the text is too long already.
            UsageError: it has no tokens.
        """
        kept = len(self._tokens) - max(len(self) - most, 0)
        if kept < 0:
            raise ContextOverflowError("the query leaves no room for a document", hint="shorten it")
        if not len(self):
            raise UsageError("a text has no tokens", why="the model's vocabulary has none for any of its characters")
        return [*self._before, *self._tokens[:kept], *self._behind]


def _sequences(vocabulary: LlamaVocabulary, command: EmbedTexts, template: str) -> list[_Sequence]:
    if command.tokens:
        known = range(vocabulary.n_tokens)
        wrong = next((each for tokens in command.tokens for each in tokens if each not in known), None)
        if wrong is not None:
            raise UsageError(f"there is no token {wrong}", why=f"the vocabulary has {vocabulary.n_tokens:,}")
        return [_Sequence((), tokens, ()) for tokens in command.tokens]
    if command.query is not None and template:
        return _templated(vocabulary, template, command.query, command.texts)
    before, behind = vocabulary.around_text
    if command.query is not None:
        before = [*before, *vocabulary.tokenize(command.query, special=False), *vocabulary.between_texts]
    return [_Sequence(before, vocabulary.tokenize(text, special=False), behind) for text in command.texts]


def _templated(vocabulary: LlamaVocabulary, template: str, query: str, texts: Sequence[str]) -> list[_Sequence]:
    """As the file's template for ranking says. Only its own text may be control tokens, not what is put into it.

    What stands between two of those goes through the tokenizer in one piece, because words are joined across its parts.
    """
    control = ControlTexts(vocabulary.control_texts).pattern

    def tokens(part: str) -> list[int]:
        pieces = re.split(f"({control.pattern})", part)
        return [
            token
            for number, piece in enumerate(pieces)
            for token in vocabulary.tokenize(piece.replace("{query}", query), special=number % 2 == 1)
        ]

    start, _, end = template.partition("{document}")
    left = max((found.end() for found in control.finditer(start)), default=0)
    found = control.search(end)
    right = found.start() if found else len(end)
    before, behind, asked = tokens(start[:left]), tokens(end[right:]), start[left:].replace("{query}", query)
    plain = (vocabulary.tokenize(asked + text + end[:right], special=False) for text in texts)
    return [_Sequence(before, found, behind) for found in plain]
