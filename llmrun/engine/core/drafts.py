"""Speculative decoding of one answer: tokens drafted in advance, so that one step can verify several.

Owns the choice between drafters, and their success rates; must not know batches, samplers or contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from llmrun.engine.core.draft_model import ModelDrafter
from llmrun.engine.core.gate import MODEL, NO_DRAFT, DraftChoice, Gate, StepShape
from llmrun.engine.core.prefix import common_prefix
from llmrun.protocol.speculation import Speculation

_MIN_COMPARED = 15  # drafted tokens that are compared with the answer, verified by a step or not
_CHEAP_PREFILL = 8  # tokens that a draft model reads in the step that drafts, at hardly more cost
_MAX_PREFILL = 64  # with more missing tokens, the step only prefills


class Drafter(Protocol):
    """A source of drafts for one sequence. Deterministic, so that a repeated request takes the same steps."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""

    def rewind(self, length: int) -> None:
        """Cut the sequence to its first tokens."""

    def draft(self, limit: int, /) -> tuple[list[int], int]:
        """Return at most `limit` tokens, and the length of the match that they follow (or gate.MODEL)."""


class _Draft(NamedTuple):
    """Drafted tokens."""

    start: int  # index of the first one in the sequence
    tokens: list[int]  # all of them
    match: int  # as from Drafter.draft()


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
        self._gate = Gate(speculation)
        self._n_known = len(prompt)  # tokens that the drafters have
        self._n_compared = max(speculation.most, _MIN_COMPARED)
        self._drafts: list[_Draft] = []  # all with the same start
        self._step = StepShape(1, 1, 0)  # the last one that a draft could have been added to ...
        self._length = 0  # ... the number of drafted tokens in it ...
        self._seconds = 0.0  # ... and the draft model's time for them, by the table

    def plan(self, tokens: Sequence[int], limit: int, step: StepShape) -> int:
        """Return the maximum number of tokens that take() will return; mostly 0.

        If the model's n_requested is not None afterwards, DraftModel.compute() has to run before take().
        """
        for drafter in self._drafters:
            drafter.extend(tokens[self._n_known :])
        self._n_known = len(tokens)
        self._learn(tokens)
        drafted, match = self._drafter.draft(self._n_compared)
        choice = self._gate.choose(match, min(limit, len(drafted)), step) if match and limit > 0 else NO_DRAFT
        self._drafts = [_Draft(len(tokens), drafted, match)]
        self._step, self._length, self._seconds = step, choice.length, 0.0
        if self.model is not None:
            self.model.n_requested = self._model_request(self.model, limit, choice) if limit > 0 else None
            self._length = max(self._length, self.model.n_requested or 0)
        return self._length

    def take(self, count_allowed: Callable[[list[int]], int]) -> list[int]:
        """Return the tokens to verify in the planned step.

        Args:
            count_allowed: returns how many first tokens of a draft the grammar allows.
        """
        start, tokens, match = self._drafts[0]
        model, length = self.model, self._length
        if model is not None and model.n_requested:
            tokens, match = model.draft(self._n_compared)
            self._drafts.append(_Draft(start, tokens, match))
            length = len(tokens)
            self._gate.learn_sureness(sure=length > 0)
            self._seconds = self._gate.draft_seconds(self._step, max(length, 1))
        if length:
            n_allowed = count_allowed(tokens[:length])
            if n_allowed < length:
                length = self._gate.choose(match, n_allowed, self._step).length if n_allowed else 0
        self._length = length
        return tokens[:length]

    def rewind(self, length: int) -> None:
        """Cut the sequence to its first tokens after a retraction."""
        for drafter in self._drafters:
            drafter.rewind(length)
        self._n_known = min(self._n_known, length)
        self._drafts = []

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
        by_model = self._gate.choose(MODEL, limit, self._step)
        return by_model.length if by_model.rate > choice.rate else None

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compare the last drafts with the answer; skip this when a failed batch is tried again."""
        drafts, self._drafts = self._drafts, []
        if not drafts or len(tokens) == drafts[0].start:
            return
        actual = list(tokens[drafts[0].start :])
        n_same = 0
        for _, drafted, match in drafts:
            n_same = common_prefix(actual, drafted)
            if match:
                self._gate.learn(match, n_same, missed=n_same < min(len(actual), len(drafted)))
        self._gate.record_step(self._step, self._length, min(n_same, self._length), self._seconds)
