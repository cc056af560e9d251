"""Speculative decoding of one answer: tokens drafted in advance, so that one step can verify several.

Owns the choice between sources; must not know batches, samplers or contexts. _native.Gate learns their success rates
and decides how many tokens pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from llmrun._native import DraftChoice, Gate, StepShape, SuffixAutomaton
from llmrun.engine.core.draft_source import Draft, DraftedSequence, DraftWeights, Source, TextSource
from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.steps import ON_PROCESSOR, StepCost, StepCosts, cost_of
from llmrun.protocol.speculation import Speculation


class Drafting:
    """The drafts of one answer.

    Args:
        model: drafts when its expected gain is larger than the text's.
        costs: of the engine's steps.
        is_repeatable: draft by the costs that no step has moved, so that the same answer takes the same steps again.
        text: drafts instead of the text; None for the text.

    Attributes:
        draft: the planned step's, whose first tokens take() returns.
        n_requested: tokens that the model should draft for the planned step; 0 only prefills, None does nothing.
        n_model_steps: that the model took for this answer.
    """

    def __init__(
        self,
        speculation: Speculation,
        prompt: Sequence[int],
        model: DraftWeights | None = None,
        costs: StepCosts | None = None,
        *,
        is_repeatable: bool = False,
        text: Source | None = None,
    ) -> None:
        self.model, self.speculation = model, speculation
        self._costs, self._is_repeatable = costs or StepCosts(ON_PROCESSOR), is_repeatable
        self._recorded = deque(speculation.recorded) if speculation.recorded is not None else None
        self._n_prompt, self._lookup = len(prompt), SuffixAutomaton()
        self._lookup.extend(prompt)
        self._text = text or TextSource(self._lookup, len(prompt))
        self._can_be_native = text is None and self._recorded is None
        self._table = self._costs.begin
        self._gate = Gate(speculation.most, self._table, self._draft_costs(1.0), always=not speculation.only_if_it_pays)
        self.draft: Draft | None = None
        self.n_requested: int | None = None
        self.n_model_steps = 0
        self._step = StepShape(1, 1)  # the planned one, ...
        self._length = 0  # ... how much of its draft is verified, ...
        self._drafting = 0.0  # ... and what drafting it costs
        self._is_planned = False  # the next step is
        self._share: float | None = None  # of what the planned step costs for drafts together with others'
        self.n_together = 0  # steps with plan_together()
        self._n_refused = 0  # consecutive steps in which the model's drafts did not pay
        self._rest = POLICY.draft_rest  # the next rest, ...
        self._rests_until = 0  # ... and the length with which the last one ends

    def plan(self, sequence: DraftedSequence, limit: int, step: StepShape) -> int:
        """Return the maximum number of tokens that take() will return; mostly 0.

        If n_requested is not None afterwards, take() needs what the model proposes.
        """
        self._catch_up(sequence.tokens)
        self._step, self._share, self._is_planned, self.n_requested = step, None, True, None
        if self._recorded is not None:
            return self._plan_recorded(sequence, limit)
        self.draft = draft = self._text.propose({sequence: self._gate.n_compared})[sequence]
        choice = self._gate.plan(draft.tokens, draft.match, step, limit)
        if self.model is not None and limit > 0:
            self.n_requested = self._model_request(self.model, sequence, limit, choice)
        self._length = max(choice.length, self.n_requested or 0)
        return self._length

    def _plan_recorded(self, sequence: DraftedSequence, limit: int) -> int:
        """Plan the draft that this step had when the answer was recorded."""
        assert self._recorded is not None
        has_one = self._recorded and self._recorded[0][0] == len(sequence.tokens) - self._n_prompt
        tokens = [*self._recorded.popleft()[1]] if has_one else []
        source = self._text.propose({sequence: 0})[sequence].source
        self.draft = Draft(source, 1, tokens)
        self._gate.plan(tokens, 1, self._step, 0)
        self._length = max(0, min(limit, len(tokens)))
        return self._length

    def plan_together(self, sequence: DraftedSequence, length: int, share: float, step: StepShape) -> None:
        """Plan a step in which several sequences draft `length` tokens each with their heads.

        Args:
            share: this sequence's of what the drafts cost.
        """
        self._catch_up(sequence.tokens)
        self._step, self._length, self._is_planned, self.n_requested = step, length, True, length
        self._note_use(is_used=True)
        # The gate adds what this draft alone would cost.
        self._share = share - self.cost(step.rows + length) + self.cost(step.rows)
        self.draft = None
        self.n_together += 1
        self._gate.plan([], 0, step, 0)

    def refuse(self) -> None:
        """Count a step in which the heads' drafts did not pay."""
        self._note_use(is_used=False)

    def expected(self, length: int) -> float:
        """Return the expected number of accepted tokens of a draft by the model."""
        return self._gate.expected(Gate.MODEL, length)

    def credit(self, step: StepShape) -> float:
        """Return what a draft by the model may cost in a step."""
        return self._gate.credit(Gate.MODEL, step)

    @property
    def widest(self) -> int:
        """Rows of the widest step whose cost is known."""
        return self._table[-1][0]

    def cost(self, rows: int) -> float:
        """Return the cost of a step by its number of rows."""
        return cost_of(self._table, rows)

    def draft_cost(self, rows: int) -> float:
        """Return the cost of such a step of the draft model or the heads."""
        return cost_of(self._draft_costs(self._factor), rows)

    @property
    def speedup(self) -> float:
        """The expected speed of the answer so far, relative to plain decoding."""
        return self._gate.speedup

    def record_plain(self, seconds: Sequence[float]) -> None:
        """Account for decode steps of one row."""
        self._costs.record_plain(seconds)

    def record(self, seconds: float) -> None:
        """Account for a decode step that decoded one token of this sequence alone, and its draft."""
        expected = self._gate.planned_cost if self._is_planned else 0.0
        self._is_planned = False
        if expected > 0:
            self._costs.record(expected / self._factor, seconds)
        else:
            self._costs.record_plain([seconds])

    @property
    def _factor(self) -> float:
        return 1.0 if self._is_repeatable else self._costs.factor

    def _draft_costs(self, factor: float) -> tuple[StepCost, ...]:
        share = factor * self.speculation.draft_cost
        return tuple((width, share * cost) for width, cost in self._costs.begin) if share else ()

    @property
    def is_by_model(self) -> bool:
        """Whether the draft of the planned step is the model's."""
        return self.draft is not None and self.draft.match == Gate.MODEL

    @property
    def is_native(self) -> bool:
        """Whether native code can plan the drafts."""
        return self._can_be_native and (self.model is None or len(self._lookup) < self._rests_until)

    @property
    def can_ask_model(self) -> bool:
        """Whether the model does not rest, nor has just rested: heads that were left out have lost the text."""
        return not self._rests_until or len(self._lookup) >= self._rests_until + POLICY.draft_warm_up

    def _note_use(self, *, is_used: bool) -> None:
        """Count consecutive steps without a draft by the model; it rests after several."""
        self._n_refused = 0 if is_used else self._n_refused + 1
        if is_used:
            self._rest = POLICY.draft_rest
        if self._n_refused >= POLICY.draft_refusals:
            self._n_refused, self._rests_until = 0, len(self._lookup) + self._rest
            self._rest = min(2 * self._rest, 8 * POLICY.draft_rest)

    def natively(self, tokens: Sequence[int]) -> tuple[SuffixAutomaton, Gate]:
        """Return what native code needs to plan the drafts after these tokens, and after its own samples."""
        self._catch_up(tokens)
        return self._lookup, self._gate

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Learn the tokens that native code has not added, and compare the last drafts with them."""
        new = tokens[len(self._lookup) :]
        self._lookup.extend(new)
        self._gate.compare(new)
        if not self._is_repeatable and self._table is not self._costs.table:
            self._table = self._costs.table
            self._gate.set_costs(self._table, self._draft_costs(self._costs.factor))

    def take(self, by_model: Draft | None, count_allowed: Callable[[list[int]], int]) -> list[int]:
        """Return the tokens to verify in the planned step.

        Args:
            by_model: its draft, if one was requested.
            count_allowed: returns how many first tokens of a draft the grammar allows.
        """
        gate, length, self._drafting = self._gate, self._length, 0.0
        self.n_model_steps += by_model.n_steps if by_model is not None else 0
        if by_model is not None and self.n_requested:
            self.draft, length = by_model, len(by_model.tokens)
            gate.add_model_draft(by_model.tokens)
            gate.learn_sureness(sure=length > 0)
            self._drafting = gate.draft_cost(self._step, max(length, 1)) if self._share is None else self._share
        draft = self.draft
        assert draft is not None  # from plan(), or by the model
        if length:
            n_allowed = count_allowed(draft.tokens[:length])
            if n_allowed < length and self._share is not None:
                length = n_allowed
            elif n_allowed < length:
                length = gate.choose(draft.match, n_allowed, self._step).length if n_allowed else 0
        return self.shorten(length)

    def shorten(self, length: int) -> list[int]:
        """Return the first tokens of the draft; no others are verified."""
        assert self.draft is not None
        self._gate.set_length(length, self._drafting)
        return self.draft.tokens[:length]

    def rewind(self, sequence: DraftedSequence, length: int) -> None:
        """Cut the sequence to its first tokens after a retraction."""
        self._lookup.rewind(length)
        if self.model is not None:
            self.model.rewind(sequence, length)
        self._gate.forget()

    def close(self, sequence: DraftedSequence) -> None:
        if self.model is not None:
            self.model.close(sequence)

    def _model_request(
        self, model: DraftWeights, sequence: DraftedSequence, limit: int, choice: DraftChoice
    ) -> int | None:
        """Return the tokens to request: None if the model would gain less than this choice, or nothing."""
        if model.drafts_together and self._step.sampled > 1:
            return None  # it is asked by plan_together()
        limit = limit if model.n_most is None else min(limit, model.n_most)
        if not self.can_ask_model:
            return None
        missing = model.count_missing(sequence)
        if missing is None or (missing > POLICY.few_tokens and not self._gate.is_worth_prefill(missing, self._step)):
            return None
        if missing > POLICY.wide_batch:  # the step only prefills
            return 0
        by_model = self._gate.choose(Gate.MODEL, limit, self._step)
        if not by_model.waits:
            self._note_use(is_used=by_model.length > 0)
        return by_model.length if by_model.rate > choice.rate else None


def choose_together(drafting: Sequence[Drafting], n_sequences: int, limit: int) -> tuple[int, float]:
    """Choose one length for the drafts of several sequences, by what all gain and what their common step costs.

    Args:
        drafting: of the sequences that draft.
        n_sequences: of the step.
        limit: of the length.

    Returns:
        The length, 0 if none pays, and each sequence's share of what the drafts cost.
    """
    first, n = drafting[0], len(drafting)
    limit = min(limit, first.speculation.most)
    if not first.speculation.only_if_it_pays:
        return limit, 0.0
    limit = min(limit, 1 + min(draft.n_together for draft in drafting) // POLICY.draft_trials)
    if not first.speculation.draft_cost:
        return 0, 0.0
    plain, step = first.cost(n_sequences), StepShape(n_sequences, n_sequences)
    most_cost = plain + sum(draft.credit(step) for draft in drafting)
    best, best_rate, share = 0, POLICY.draft_gain * n_sequences / plain, 0.0
    for length in range(1, limit + 1):
        width = n_sequences + n * length
        if width > first.widest:
            break
        cost = first.cost(width) + first.draft_cost(2 * n) + (length - 1) * first.draft_cost(n)
        rate = (n_sequences + sum(draft.expected(length) for draft in drafting)) / cost
        if rate > best_rate and cost <= most_cost:
            best, best_rate, share = length, rate, (cost - plain) / n
    return best, share
