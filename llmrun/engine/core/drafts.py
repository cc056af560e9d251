"""Speculative decoding of one answer: tokens drafted in advance, so that one step can verify several.

Owns the choice between drafters; must not know batches, samplers or contexts. _native.Gate learns their success rates
and decides how many tokens pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from llmrun._native import DraftChoice, Gate, StepShape, SuffixAutomaton
from llmrun.engine.core.draft_model import ModelDrafter
from llmrun.protocol.speculation import Speculation, StepTimes

_CHEAP_PREFILL = 8  # tokens that a draft model reads in the step that drafts, at hardly more cost
_MAX_PREFILL = 64  # with more missing tokens, the step only prefills


class Drafter(Protocol):
    """A source of drafts for one sequence. Deterministic, so that a repeated request takes the same steps."""

    def __len__(self) -> int:
        """Return the length of the sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""

    def rewind(self, length: int) -> None:
        """Cut the sequence to its first tokens."""

    def draft(self, limit: int, /) -> tuple[list[int], int]:
        """Return at most `limit` tokens, and the length of the match that they follow (or Gate.MODEL)."""


class Drafting:
    """The drafts of one answer.

    Args:
        drafter: new; it gets the prompt here.
        model: new; drafts when its expected gain is larger than the drafter's.
    """

    def __init__(
        self,
        speculation: Speculation,
        drafter: Drafter,
        prompt: Sequence[int],
        model: ModelDrafter | None = None,
    ) -> None:
        self.model = model
        self._drafter = drafter
        self._drafters: list[Drafter] = [drafter, *([model] if model is not None else ())]
        for each in self._drafters:
            each.extend(prompt)
        tables = speculation.times, speculation.draft_times
        self._gate = Gate(speculation.most, *(StepTimes(times).lines for times in tables))
        self._step = StepShape(1, 1, 0)  # the planned one,
        self._drafted: list[int] = []  # its draft, ...
        self._taken: list[int] = []  # what take() has returned, and the seconds that drafting it takes
        self._seconds = 0.0
        self._match = self._length = 0  # ... the length of the match before it, and how much of it is verified

    def plan(self, tokens: Sequence[int], limit: int, step: StepShape) -> int:
        """Return the maximum number of tokens that take() will return; mostly 0.

        If the model's n_requested is not None afterwards, DraftModel.compute() has to run before take().
        """
        self._catch_up(tokens)
        self._step = step
        self._drafted, self._match = self._drafter.draft(self._gate.n_compared)
        choice = self._gate.plan(self._drafted, self._match, step, limit)
        self._length = choice.length
        if self.model is not None:
            self.model.n_requested = self._model_request(self.model, limit, choice) if limit > 0 else None
            self._length = max(self._length, self.model.n_requested or 0)
        return self._length

    @property
    def is_native(self) -> bool:
        """Whether native code can plan the drafts."""
        return self.model is None and isinstance(self._drafter, SuffixAutomaton)

    def natively(self, tokens: Sequence[int]) -> tuple[SuffixAutomaton, Gate]:
        """Return what native code needs to plan the drafts after these tokens, and after its own samples."""
        assert isinstance(self._drafter, SuffixAutomaton)
        self._catch_up(tokens)
        return self._drafter, self._gate

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Give the new tokens to the drafters, and compare the last drafts with them."""
        new = tokens[len(self._drafter) :]
        for drafter in self._drafters:
            drafter.extend(new)
        self._gate.compare(new)

    def take(self, count_allowed: Callable[[list[int]], int]) -> list[int]:
        """Return the tokens to verify in the planned step.

        Args:
            count_allowed: returns how many first tokens of a draft the grammar allows.
        """
        tokens, match, length = self._drafted, self._match, self._length
        gate, model, seconds = self._gate, self.model, 0.0
        if model is not None and model.n_requested:
            tokens, match = model.draft(gate.n_compared)
            gate.add_model_draft(tokens)
            length = len(tokens)
            gate.learn_sureness(sure=length > 0)
            seconds = gate.draft_seconds(self._step, max(length, 1))
        if length:
            n_allowed = count_allowed(tokens[:length])
            if n_allowed < length:
                length = gate.choose(match, n_allowed, self._step).length if n_allowed else 0
        gate.set_length(length, seconds)
        self._taken, self._seconds = tokens[:length], seconds
        return self._taken

    def shorten(self, length: int) -> list[int]:
        """Return the first tokens of what take() has returned; no others are verified."""
        if length < len(self._taken):
            self._taken = self._taken[:length]
            self._gate.set_length(length, self._seconds)
        return self._taken

    def rewind(self, length: int) -> None:
        """Cut the sequence to its first tokens after a retraction."""
        for drafter in self._drafters:
            drafter.rewind(length)
        self._gate.forget()

    def close(self) -> None:
        if self.model is not None:
            self.model.close()

    def _model_request(self, model: ModelDrafter, limit: int, choice: DraftChoice) -> int | None:
        """Return ModelDrafter.n_requested: None if the model would gain less than this choice, or nothing."""
        missing = model.count_missing()
        if missing is None or (missing > _CHEAP_PREFILL and not self._gate.is_worth_prefill(missing, self._step)):
            return None
        if missing > _MAX_PREFILL:
            return 0
        by_model = self._gate.choose(Gate.MODEL, limit, self._step)
        return by_model.length if by_model.rate > choice.rate else None
