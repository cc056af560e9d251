"""The model's own prediction heads (multi-token prediction) as a source of drafts.

The heads see the target's hidden states, so they need no prompt of their own: their context follows the target's in
everything. Must not know which drafts are accepted, nor llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from llmrun.engine.core.draft_source import DraftedSequence, DraftWeights
from llmrun.protocol.messages import DraftSource

if TYPE_CHECKING:
    from llmrun.engine.llama.context import LlamaContext
    from llmrun.engine.llama.heads import PredictionHeads


class HeadModel(DraftWeights):
    """The heads of the target's context."""

    source: DraftSource = "heads"
    drafts_together = True

    def __init__(self, target: LlamaContext, heads: PredictionHeads) -> None:
        super().__init__(target.vocabulary.n_tokens, target.vocabulary.n_tokens)
        self._target, self._heads, self.n_most = target, heads, heads.n_most

    def switch_on(self) -> None:
        """Follow the target's context from now on."""
        self._target.switch_heads(on=True)

    def count_missing(self, sequence: DraftedSequence) -> int | None:
        """Return 0, or None if the heads can't draft after the newest token."""
        can_draft = not self.has_failed and sequence.n_waiting == 1 and self._target.can_use_heads(sequence.slot)
        return 0 if can_draft else None

    def _begin(self, asked: Mapping[DraftedSequence, int]) -> list[tuple[DraftedSequence, int]]:
        return self._decode(self._heads.begin, {sequence: sequence.tokens[-1] for sequence in asked})

    def _go_on(self, newest: Mapping[DraftedSequence, int]) -> list[tuple[DraftedSequence, int]]:
        return self._decode(self._heads.go_on, newest)

    def _decode(
        self, decode: Callable[[list[tuple[int, int]]], list[int]], newest: Mapping[DraftedSequence, int]
    ) -> list[tuple[DraftedSequence, int]]:
        sequences = sorted(newest, key=attrgetter("slot"))
        rows = decode([(sequence.slot, newest[sequence]) for sequence in sequences])
        return [(sequence, self._heads.logits(row)) for sequence, row in zip(sequences, rows, strict=True)]

    def _end(self, asked: Collection[DraftedSequence]) -> None:
        self._heads.end(sequence.slot for sequence in asked)
