"""A smaller model that drafts tokens.

Owns the draft model's context and its KV cache; must not know the target model, nor which drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from llmrun.engine.core.draft_source import DraftedSequence, DraftWeights
from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.llama.base import CacheFull, Context, Entry
from llmrun.protocol.messages import DraftSource


@dataclass(slots=True, eq=False)
class _Slot:
    """A sequence of the draft model's context."""

    number: int  # llama.cpp's sequence id
    tokens: list[int] = field(default_factory=list)  # in its KV cache
    owner: DraftedSequence | None = None  # None after its answer ended
    last_used: int = 0
    n_same: int = 0  # first tokens that were read as the owner's
    can_read: bool = True  # what follows in the owner


class DraftModel(DraftWeights):
    """The draft model's context, and its slots.

    Args:
        context: has as many sequences as the target model's, and an equally long window.
        n_vocab: tokens of the target model.
    """

    source: DraftSource = "model"
    sure = 0.75  # llama.cpp's p_min

    def __init__(self, context: Context, n_vocab: int) -> None:
        super().__init__(context.vocabulary.n_tokens, min(context.vocabulary.n_tokens, n_vocab))
        self.context, self.contexts = context, (context,)
        self._slots = [_Slot(number) for number in range(context.n_seq_max)]
        self._n_taken = 0

    def count_missing(self, sequence: DraftedSequence) -> int | None:
        if self.has_failed:
            return None
        tokens, slot = sequence.tokens, self._slot_of(sequence)
        if not slot.can_read:
            return None
        start = min(slot.n_same, len(slot.tokens))
        start += common_prefix(slot.tokens[start:], tokens[start : len(slot.tokens)])
        self._cut(slot, min(start, len(tokens) - 1))  # the last token is decoded again, for its logits
        slot.n_same = len(slot.tokens)
        return len(tokens) - slot.n_same

    def rewind(self, sequence: DraftedSequence, length: int) -> None:
        for _, slot in self._owned((sequence,)):
            slot.n_same = min(slot.n_same, length)

    def close(self, sequence: DraftedSequence) -> None:
        """Release the slot when the answer ends; its KV cache stays for the next sequence."""
        for _, slot in self._owned((sequence,)):
            slot.owner = None

    def _slot_of(self, sequence: DraftedSequence) -> _Slot:
        """Return the sequence's slot, or a free one with the longest prefix of it; of equal ones the oldest."""
        own = next((slot for _, slot in self._owned((sequence,))), None)
        if own is not None:
            return own
        free = [slot for slot in self._slots if slot.owner is None] or self._slots
        slot = max(free, key=lambda slot: (common_prefix(slot.tokens, sequence.tokens), -slot.last_used))
        self._n_taken += 1
        slot.owner, slot.last_used, slot.n_same = sequence, self._n_taken, 0
        slot.can_read = max(sequence.tokens, default=0) < self._n_known
        return slot

    def _cut(self, slot: _Slot, length: int) -> None:
        """Cut a slot to its first tokens, or to none if the model can't."""
        if not self.context.forget(slot.number, length):
            length = 0
            self.context.forget(slot.number, 0)
        del slot.tokens[length:]

    def _begin(self, asked: Mapping[DraftedSequence, int]) -> list[tuple[DraftedSequence, int]]:
        """Decode missing tokens, as many as one step may."""
        inputs: list[tuple[_Slot, list[int], bool]] = []
        limit = min(POLICY.draft_prefill, self.context.n_batch)
        for sequence, slot in self._owned(asked):
            start, end = slot.n_same, len(sequence.tokens)
            tokens = sequence.tokens[start : start + limit]
            slot.can_read = slot.can_read and max(tokens, default=0) < self._n_known
            if tokens and slot.can_read:
                limit -= len(tokens)
                slot.n_same += len(tokens)
                inputs.append((slot, tokens, slot.n_same == end and asked[sequence] > 0))
        return self._decode(inputs)

    def _go_on(self, newest: Mapping[DraftedSequence, int]) -> list[tuple[DraftedSequence, int]]:
        return self._decode([(slot, [newest[sequence]], True) for sequence, slot in self._owned(newest)])

    def _owned(self, sequences: Collection[DraftedSequence]) -> list[tuple[DraftedSequence, _Slot]]:
        """Return those sequences whose slot no other one has taken, in the order of their slots."""
        return [(slot.owner, slot) for slot in self._slots if slot.owner is not None and slot.owner in sequences]

    def _decode(self, inputs: Sequence[tuple[_Slot, list[int], bool]]) -> list[tuple[DraftedSequence, int]]:
        """Decode tokens of slots in one batch, with logits for the last one or not; return as _begin()."""
        batch: list[Entry] = []
        ends: list[int] = []
        for slot, tokens, has_logits in inputs:
            start, last = len(slot.tokens), len(slot.tokens) + len(tokens) - 1
            for position, token in enumerate(tokens, start):
                batch.append(Entry(token, position, slot.number, has_logits and position == last))
            ends.append(len(batch) - 1)
        if batch:
            self.context.decode(batch)
        rows: list[tuple[DraftedSequence, int]] = []
        for (slot, tokens, has_logits), end in zip(inputs, ends, strict=True):
            slot.tokens += tokens
            assert slot.owner is not None
            rows.append((slot.owner, self.context.logits(end) if has_logits else 0))
        return rows

    def _recover(self, asked: Collection[DraftedSequence], error: Exception) -> None:
        if isinstance(error, CacheFull):
            for slot in self._slots:
                if slot.owner is None:
                    self._cut(slot, 0)
        for _, slot in self._owned(asked):
            self._cut(slot, len(slot.tokens))
