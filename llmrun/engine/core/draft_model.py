"""A smaller model that drafts tokens for several sequences in one batch.

Owns the draft model's context and its KV cache; must not know the target model, nor which drafts are accepted. Drafts
are the likeliest tokens: deterministic, and as good as sampled ones for an answer that is sampled itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from llmrun._native import BadLogits, Sampler
from llmrun.engine.core.draft_source import WeightsDrafter
from llmrun.engine.core.policy import POLICY, Policy
from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import DraftSource

_UNSURE = math.log(0.75)  # llama.cpp's p_min
_MULTIPLE = 4  # rows: see gate.cpp


@dataclass(slots=True, eq=False)
class _Slot:
    """A sequence of the draft model's context."""

    number: int  # llama.cpp's sequence id
    tokens: list[int] = field(default_factory=list)  # in its KV cache
    owner: ModelDrafter | None = None  # None after its answer ended
    last_used: int = 0


class ModelDrafter(WeightsDrafter):
    """The drafter of one sequence; its drafts come from DraftModel.compute()."""

    source: DraftSource = "model"

    def __init__(self, model: DraftModel) -> None:
        super().__init__(model)
        self._model = model
        self._n_cached = 0  # tokens in the slot's KV cache
        self._slot: _Slot | None = None
        self._is_unsure = False
        self._can_read = True

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self._can_read = self._can_read and self._model.has_tokens(tokens)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._n_cached = min(self._n_cached, length)

    def close(self) -> None:
        """Release the slot when the answer ends; its KV cache stays for the next sequence."""
        if self._slot is not None:
            self._slot.owner = None

    def count_missing(self) -> int | None:
        """Return the number of tokens to prefill before drafting; None if drafting is impossible."""
        if not self._can_read or self._model.has_failed:
            return None
        if self._slot is None or self._slot.owner is not self:
            self._slot, self._n_cached = self._model.take_slot(self, self._tokens), 0
        slot = self._slot
        start = min(self._n_cached, len(slot.tokens))
        start += common_prefix(slot.tokens[start:], self._tokens[start : len(slot.tokens)])
        start = min(start, len(self._tokens) - 1)  # the last token is decoded again, for its logits
        self._n_cached = self._model.cut(slot, start)
        return len(self._tokens) - self._n_cached

    @property
    def slot(self) -> _Slot:
        """The slot that count_missing() took."""
        assert self._slot is not None
        return self._slot

    def next_input(self, limit: int) -> tuple[list[int], bool]:
        """Return the next tokens to decode, and whether their logits start a draft."""
        self._draft, self._is_unsure, self.probabilities = [], False, []
        tokens = self._tokens[self._n_cached : self._n_cached + limit]
        self._n_cached += len(tokens)
        return tokens, bool(self.n_requested) and self._n_cached == len(self._tokens)

    def push(self, token: int, logprob: float) -> int | None:
        """Add the likeliest token to the draft; return it if another one should be drafted after it.

        An unsure first token ends the draft, empty. After an unsure later one, the draft ends at the next number of
        rows that kernels compute well.
        """
        is_unsure = logprob < _UNSURE
        if is_unsure and not self._draft:
            return None
        self._add(token, logprob)
        self._is_unsure |= is_unsure
        n_rows = len(self._draft) + 1
        is_complete = n_rows > (self.n_requested or 0) or (self._is_unsure and n_rows % _MULTIPLE == 0)
        return None if is_complete else token


class DraftModel:
    """The draft model's context, and its slots.

    Args:
        context: has as many sequences as the target model's, and an equally long window.

    Attributes:
        has_failed: llama.cpp could not compute with it; answers continue without drafts.
    """

    drafts_together = False
    n_most = None

    def __init__(self, context: Context, n_vocab: int, policy: Policy = POLICY) -> None:
        self.context, self.contexts = context, (context,)
        self._policy = policy
        self._n_vocab = min(context.vocabulary.n_tokens, n_vocab)
        self._logits = Sampler(context.vocabulary.n_tokens)
        self._slots = [_Slot(number) for number in range(context.n_seq_max)]
        self._n_taken = 0
        self.has_failed = False

    def switch_on(self) -> None:
        """Do nothing: it reads what it needs before it drafts."""

    def drafter(self) -> ModelDrafter:
        """Return a drafter for a new sequence."""
        return ModelDrafter(self)

    def has_tokens(self, tokens: Sequence[int]) -> bool:
        """Return whether all of these tokens are in both vocabularies."""
        return max(tokens, default=0) < self._n_vocab

    def take_slot(self, drafter: ModelDrafter, tokens: list[int]) -> _Slot:
        """Return the free slot with the longest cached prefix of a sequence; of equal ones the least recently used."""
        free = [slot for slot in self._slots if slot.owner is None] or self._slots
        slot = max(free, key=lambda slot: (common_prefix(slot.tokens, tokens), -slot.last_used))
        self._n_taken += 1
        slot.owner, slot.last_used = drafter, self._n_taken
        return slot

    def cut(self, slot: _Slot, length: int) -> int:
        """Cut a slot to its first tokens, or to none if the model can't; return the number left."""
        if not self.context.forget(slot.number, length):
            length = 0
            self.context.forget(slot.number, 0)
        del slot.tokens[length:]
        return length

    def compute(self, drafters: Sequence[ModelDrafter]) -> None:
        """Prefill and draft what some drafters request, each with a slot. On failure their drafts stay empty."""
        owners = [drafter for drafter in drafters if drafter.slot.owner is drafter]
        drafters = sorted(owners, key=attrgetter("slot.number"))
        try:
            drafting = self._prefill(drafters)
            while drafting:
                batch = [
                    Entry(token, len(drafter.slot.tokens), drafter.slot.number, True) for drafter, token in drafting
                ]
                drafting = self._decode(batch, [(drafter, [token]) for drafter, token in drafting])
            return
        except CacheFull:
            for slot in self._slots:
                if slot.owner is None:
                    self.cut(slot, 0)
        except Aborted:
            pass
        except (LlmrunError, BadLogits):
            self.has_failed = True
        for drafter in drafters:
            drafter.draft(0)
            self.cut(drafter.slot, len(drafter.slot.tokens))  # the failed batch may be half written

    def _prefill(self, drafters: Sequence[ModelDrafter]) -> list[tuple[ModelDrafter, int]]:
        """Decode missing tokens, as many as one step may; return as _decode()."""
        batch: list[Entry] = []
        inputs: list[tuple[ModelDrafter, list[int]]] = []
        limit = min(self._policy.draft_prefill, self.context.n_batch)
        for drafter in drafters:
            tokens, drafts = drafter.next_input(limit - len(batch))
            start, number = len(drafter.slot.tokens), drafter.slot.number
            batch += [Entry(token, position, number, False) for position, token in enumerate(tokens, start)]
            if drafts:
                batch[-1] = batch[-1]._replace(wants_logits=True)
            inputs.append((drafter, tokens))
        return self._decode(batch, inputs) if batch else []

    def _decode(
        self, batch: list[Entry], inputs: Sequence[tuple[ModelDrafter, list[int]]]
    ) -> list[tuple[ModelDrafter, int]]:
        """Decode a batch; return the drafters that continue, with their newest token."""
        self.context.decode(batch)
        drafting: list[tuple[ModelDrafter, int]] = []
        end = 0
        for drafter, tokens in inputs:
            end += len(tokens)
            drafter.slot.tokens += tokens
            drafter.n_steps += bool(tokens)
            if tokens and batch[end - 1].wants_logits:
                address = self.context.logits(end - 1)
                likeliest, logprob = self._logits.log_probabilities(address, 0, 1)[1]
                token = drafter.push(likeliest, logprob) if likeliest < self._n_vocab else None
                drafting += [(drafter, token)] if token is not None else []
        return drafting
