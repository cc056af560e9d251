"""Speculative decoding of one answer: tokens drafted in advance, so that one step can verify several.

Owns the choice between drafters; must not know batches, samplers or contexts. _native.Gate learns their success rates
and decides how many tokens pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from llmrun._native import DraftChoice, Gate, StepShape, SuffixAutomaton
from llmrun.engine.core.draft_model import ModelDrafter
from llmrun.engine.core.mtp_model import HeadDrafter
from llmrun.protocol.messages import DraftSource
from llmrun.protocol.speculation import Speculation, StepTimes

_CHEAP_PREFILL = 8  # tokens that a draft model reads in the step that drafts, at hardly more cost
_MAX_PREFILL = 64  # with more missing tokens, the step only prefills
_MIN_GAIN = 1.1  # expected of drafts together, as in gate.cpp
_STEPS_A_LENGTH = 2  # steps that several answers take with drafts of one length before they try a longer one
_MOST_REFUSED = 8  # consecutive steps in which the model's drafts don't pay, after which it rests
_REST, _LONGEST_REST = 64, 512  # tokens without it, more each time
_WARM_UP = 16  # tokens after a rest whose hidden states the heads see before they draft


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

    Attributes:
        source, probabilities: of what take() has returned; no probabilities if it is from the text.
    """

    def __init__(
        self,
        speculation: Speculation,
        drafter: Drafter,
        prompt: Sequence[int],
        model: ModelDrafter | HeadDrafter | None = None,
    ) -> None:
        self.model, self.speculation = model, speculation
        self.source: DraftSource = "prompt"
        self.probabilities: Sequence[float] = ()
        self._n_prompt = len(prompt)
        self._drafter = drafter
        self._drafters: list[Drafter] = [drafter, *([model] if model is not None else ())]
        for source in self._drafters:
            source.extend(prompt)
        tables = speculation.times, speculation.draft_times
        self._gate = Gate(speculation.most, *(StepTimes(times).lines for times in tables))
        self._step = StepShape(1, 1, 0)  # the planned one,
        self._drafted: list[int] = []  # its draft, ...
        self._taken: list[int] = []  # what take() has returned, and the seconds that drafting it takes
        self._seconds = 0.0
        self._share: float | None = None  # seconds that the planned step takes for drafts together with others'
        self.n_together = 0  # steps with plan_together()
        self._n_refused = 0  # consecutive steps in which the model's drafts did not pay
        self._rest, self._rests_until = _REST, 0  # the next rest, and the length with which the last one ends
        self._match = self._length = 0  # ... the length of the match before it, and how much of it is verified

    def plan(self, tokens: Sequence[int], limit: int, step: StepShape) -> int:
        """Return the maximum number of tokens that take() will return; mostly 0.

        If the model's n_requested is not None afterwards, DraftModel.compute() has to run before take().
        """
        self._catch_up(tokens)
        self._step, self._share = step, None
        self._drafted, self._match = self._drafter.draft(self._gate.n_compared)
        choice = self._gate.plan(self._drafted, self._match, step, limit)
        self._length = choice.length
        if self.model is not None:
            self.model.n_requested = self._model_request(self.model, limit, choice) if limit > 0 else None
            self._length = max(self._length, self.model.n_requested or 0)
        return self._length

    def plan_together(self, tokens: Sequence[int], length: int, share: float, step: StepShape) -> None:
        """Plan a step in which several sequences draft `length` tokens each with their heads; compute() has to follow.

        Args:
            share: this sequence's of the seconds that the drafts take.
        """
        assert self.model is not None
        self._catch_up(tokens)
        self._step, self._length = step, length
        self._note_use(is_used=True)
        self._share = share
        if self.speculation.times:  # the gate adds what this draft alone would take
            times = StepTimes(self.speculation.times)
            self._share -= times.seconds(step.rows + length, step.depth) - times.seconds(step.rows, step.depth)
        self._drafted, self._match = [], 0
        self.n_together += 1
        self._gate.plan([], 0, step, 0)
        self.model.n_requested = length

    def refuse(self) -> None:
        """Count a step in which the heads' drafts did not pay."""
        self._note_use(is_used=False)

    def expected(self, length: int) -> float:
        """Return the expected number of accepted tokens of a draft by the model."""
        return self._gate.expected(Gate.MODEL, length)

    def credit(self, step: StepShape) -> float:
        """Return the seconds that a draft by the model may cost in a step."""
        return self._gate.credit(Gate.MODEL, step)

    @property
    def is_native(self) -> bool:
        """Whether native code can plan the drafts."""
        has_model = self.model is not None and len(self._drafter) >= self._rests_until
        return not has_model and isinstance(self._drafter, SuffixAutomaton)

    @property
    def can_ask_model(self) -> bool:
        """Whether the model does not rest, nor has just rested: heads that were left out have lost the text."""
        return not self._rests_until or len(self._drafter) >= self._rests_until + _WARM_UP

    def _note_use(self, *, is_used: bool) -> None:
        """Count consecutive steps without a draft by the model; it rests after several."""
        self._n_refused = 0 if is_used else self._n_refused + 1
        if is_used:
            self._rest = _REST
        if self._n_refused >= _MOST_REFUSED:
            self._n_refused, self._rests_until = 0, len(self._drafter) + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)

    def natively(self, tokens: Sequence[int]) -> tuple[SuffixAutomaton, Gate]:
        """Return what native code needs to plan the drafts after these tokens, and after its own samples."""
        assert isinstance(self._drafter, SuffixAutomaton)
        self._catch_up(tokens)
        return self._drafter, self._gate

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Give the new tokens to the drafters, and compare the last drafts with them."""
        new = tokens[len(self._drafter) :]
        for drafter in self._drafters:  # native code extends the first one alone
            drafter.extend(tokens[len(drafter) :])
        self._gate.compare(new)

    def take(self, count_allowed: Callable[[list[int]], int]) -> list[int]:
        """Return the tokens to verify in the planned step.

        Args:
            count_allowed: returns how many first tokens of a draft the grammar allows.
        """
        tokens, match, length = self._drafted, self._match, self._length
        self.source, self.probabilities = self._text_source, ()
        gate, model, seconds = self._gate, self.model, 0.0
        if model is not None and model.n_requested:
            tokens, match = model.draft(gate.n_compared)
            self.source, self.probabilities = model.source, model.probabilities
            gate.add_model_draft(tokens)
            length = len(tokens)
            gate.learn_sureness(sure=length > 0)
            seconds = gate.draft_seconds(self._step, max(length, 1)) if self._share is None else self._share
        if length:
            n_allowed = count_allowed(tokens[:length])
            if n_allowed < length and self._share is not None:
                length = n_allowed
            elif n_allowed < length:
                length = gate.choose(match, n_allowed, self._step).length if n_allowed else 0
        gate.set_length(length, seconds)
        self._taken, self._seconds = tokens[:length], seconds
        return self._taken

    @property
    def _text_source(self) -> DraftSource:
        """What a draft by the drafter is a copy of."""
        begin = self._drafter.draft_begin if isinstance(self._drafter, SuffixAutomaton) else 0
        return "prompt" if begin < self._n_prompt else "answer"

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

    def _model_request(self, model: ModelDrafter | HeadDrafter, limit: int, choice: DraftChoice) -> int | None:
        """Return ModelDrafter.n_requested: None if the model would gain less than this choice, or nothing."""
        if isinstance(model, HeadDrafter):
            if self._step.sampled > 1:
                return None  # together with others, they are asked by plan_together()
            limit = min(limit, model.n_most)
        if not self.can_ask_model:
            return None
        missing = model.count_missing()
        if missing is None or (missing > _CHEAP_PREFILL and not self._gate.is_worth_prefill(missing, self._step)):
            return None
        if missing > _MAX_PREFILL:
            return 0
        by_model = self._gate.choose(Gate.MODEL, limit, self._step)
        if not by_model.waits:
            self._note_use(is_used=by_model.length > 0)
        return by_model.length if by_model.rate > choice.rate else None


def choose_together(drafting: Sequence[Drafting], n_sequences: int, limit: int, depth: int) -> tuple[int, float]:
    """Choose one length for the drafts of several sequences, by what all gain and what their common step costs.

    Args:
        drafting: of the sequences that draft.
        n_sequences: of the step.
        limit: of the length.

    Returns:
        The length, 0 if none pays, and each sequence's share of the additional seconds.
    """
    speculation = drafting[0].speculation
    limit = min(limit, speculation.most)
    if not speculation.times:
        return limit, 0.0
    limit = min(limit, 1 + min(draft.n_together for draft in drafting) // _STEPS_A_LENGTH)
    if not speculation.draft_times:
        return 0, 0.0
    times, heads, n = StepTimes(speculation.times), StepTimes(speculation.draft_times), len(drafting)
    plain, step = times.seconds(n_sequences, depth), StepShape(n_sequences, n_sequences, depth)
    most_seconds = plain + sum(draft.credit(step) for draft in drafting)
    best, best_rate, share = 0, _MIN_GAIN * n_sequences / plain, 0.0
    for length in range(1, limit + 1):
        width = n_sequences + n * length
        if width > times.widths[-1]:
            break
        seconds = times.seconds(width, depth) + heads.seconds(2 * n, depth) + (length - 1) * heads.seconds(n, depth)
        rate = (n_sequences + sum(draft.expected(length) for draft in drafting)) / seconds
        if rate > best_rate and seconds <= most_seconds:
            best, best_rate, share = length, rate, (seconds - plain) / n
    return best, share
