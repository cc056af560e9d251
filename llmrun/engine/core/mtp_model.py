"""Drafts by the model's own prediction heads (multi-token prediction) for several sequences in one batch.

The same outside as draft_model.py. The heads see the target's hidden states, so they need no prompt of their own: their
context follows the target's in everything. Must not know which drafts are accepted, nor llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from llmrun._native import BadLogits, Sampler
from llmrun.engine.core.draft_source import WeightsDrafter
from llmrun.engine.llama.base import Aborted, CacheFull
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import DraftSource

if TYPE_CHECKING:
    from llmrun.engine.llama.context import LlamaContext
    from llmrun.engine.llama.heads import PredictionHeads


class HeadDrafter(WeightsDrafter):
    """The drafter of one sequence; its drafts come from HeadModel.compute().

    Attributes:
        slot: the sequence's in the target's context.
        n_waiting: tokens of the sequence that the target has not decoded.
    """

    source: DraftSource = "heads"

    def __init__(self, model: HeadModel) -> None:
        super().__init__(model)
        self._model = model
        self.slot, self.n_waiting = -1, 0

    @property
    def newest(self) -> int:
        return self._tokens[-1]

    def place(self, slot: int, n_waiting: int) -> None:
        """Tell where the sequence is, before each step."""
        self.slot, self.n_waiting = slot, n_waiting

    def count_missing(self) -> int | None:
        """Return 0, or None if the heads can't draft after the newest token."""
        return 0 if self._model.can_draft(self) else None

    def push(self, token: int, logprob: float) -> int | None:
        """Add a token to the draft; return it if another one should be drafted after it."""
        self._add(token, logprob)
        self.n_steps += 1
        return token if len(self._draft) < min(self.n_requested or 0, self._model.n_most) else None


class HeadModel:
    """The heads of the target's context.

    Attributes:
        has_failed: llama.cpp could not compute with them; answers continue without drafts.
    """

    drafts_together = True
    contexts = ()

    def __init__(self, target: LlamaContext, heads: PredictionHeads) -> None:
        self._target, self._heads = target, heads
        self._logits = Sampler(target.vocabulary.n_tokens)
        self.has_failed = False

    @property
    def n_most(self) -> int:
        return self._heads.n_most

    def drafter(self) -> HeadDrafter:
        """Return a drafter for a new sequence."""
        return HeadDrafter(self)

    def switch_on(self) -> None:
        """Follow the target's context from now on."""
        self._target.switch_heads(on=True)

    def can_draft(self, drafter: HeadDrafter) -> bool:
        return not self.has_failed and drafter.n_waiting == 1 and self._target.can_use_heads(drafter.slot)

    def compute(self, drafters: Sequence[HeadDrafter]) -> None:
        """Draft what some drafters request. On failure their drafts stay empty."""
        asking = sorted((drafter for drafter in drafters if drafter.n_requested), key=attrgetter("slot"))
        try:
            inputs = [(drafter, drafter.newest) for drafter in asking]
            decode = self._heads.begin
            while inputs:
                rows = decode([(drafter.slot, token) for drafter, token in inputs])
                pushed = [
                    (drafter, drafter.push(*self._likeliest(row)))
                    for (drafter, _), row in zip(inputs, rows, strict=True)
                ]
                inputs = [(drafter, token) for drafter, token in pushed if token is not None]
                decode = self._heads.go_on
            return
        except (Aborted, CacheFull):
            pass
        except (LlmrunError, BadLogits):
            self.has_failed = True
        finally:
            self._heads.end(drafter.slot for drafter in asking)
        for drafter in asking:
            drafter.draft(0)

    def _likeliest(self, row: int) -> tuple[int, float]:
        return self._logits.log_probabilities(self._heads.logits(row), 0, 1)[1]
