"""The decision how many tokens to draft, by the cost of decode steps and the acceptance rates so far. Pure.

Must not know models or clocks: the decision depends on a table of step times and on the tokens so far alone, so that
the same answer takes the same steps again.

The first token of a draft after a match of m tokens is accepted with probability p(m), the second with p(m + 1), and so
on. Every token of the answer teaches these: it shows of any draft, verified or not, whether it was right. The tokens of
a draft model all have one probability; its steps cost time, even if it turns out to be unsure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from llmrun.protocol.speculation import Speculation, StepTimes

MODEL = -1  # The length of a match, for drafts of a draft model
_MULTIPLE = 4  # kernels compute this many rows at once, and handle a remainder badly
_MIN_GAIN = 1.1  # expected: a table is never quite right
_ALLOWED_LOSS = 0.01  # of the decoding time ...
_ALLOWED_FAILURES = 5  # ... plus the extra time of this many steps whose drafts were rejected
_PRIOR = (0.15, 0.3, 0.45, 0.65, 0.8, 0.9)  # acceptance after a match of 1, 2, 3-4, 5-8, 9-16, more tokens
_MODEL_PRIOR = 0.8  # acceptance of a token that the draft model is sure of
_SURE_PRIOR = 0.7  # how often the draft model is sure
_PRIOR_WEIGHT = 4  # outcomes
_NEWEST_SHARE = 0.1  # minimum weight of the newest outcome


class StepShape(NamedTuple):
    """A decode step to which a draft may be added."""

    rows: int  # tokens that it decodes without drafts
    sampled: int  # tokens that it yields without drafts: one per sequence
    depth: int  # tokens in the KV cache before it


class DraftChoice(NamedTuple):
    """The number of tokens to draft, and the expected tokens/s (a relative figure without step times)."""

    length: int
    rate: float


NO_DRAFT = DraftChoice(0, 0.0)


class _AcceptanceRate:
    """A running probability in which the newest outcomes weigh most."""

    def __init__(self, prior: float) -> None:
        self.value = prior
        self._outcomes = _PRIOR_WEIGHT

    def learn(self, accepted: bool) -> None:
        self._outcomes += 1
        self.value += max(1 / self._outcomes, _NEWEST_SHARE) * (accepted - self.value)


class Gate:
    """The draft lengths of one answer.

    Args:
        speculation: without step times, drafts are as long as possible.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._limit = speculation.most
        self._times = StepTimes(speculation.times) if speculation.times else None
        self._draft_times = StepTimes(speculation.draft_times) if speculation.draft_times else None
        self._rates = [*map(_AcceptanceRate, _PRIOR), _AcceptanceRate(_MODEL_PRIOR)]
        self._sure = _AcceptanceRate(_SURE_PRIOR)
        # Seconds by the table: of all steps, gained by drafts, and the largest extra time of a step.
        self._decoding = self._gain = self._trial = 0.0

    def choose(self, match: int, limit: int, step: StepShape) -> DraftChoice:
        """Choose the number of tokens to draft, up to `limit`.

        Args:
            match: the number of last tokens that the draft has followed before, or MODEL.
        """
        limit, first = min(limit, self._limit), self._rates[_kind(match)].value
        if self._times is None:
            return DraftChoice(max((step.rows + limit) // _MULTIPLE * _MULTIPLE - step.rows, 0) or limit, first)
        if self._gain < -_ALLOWED_LOSS * self._decoding - _ALLOWED_FAILURES * self._trial:
            return NO_DRAFT
        if match == MODEL and self._draft_times is None:
            return NO_DRAFT
        seconds, depth = self._times.seconds, step.depth
        plain = seconds(step.rows, depth)
        best, best_rate = 0, _MIN_GAIN * step.sampled / plain
        sure = self._sure.value if match == MODEL else 1.0
        for width in self._times.widths:
            length = width - step.rows
            if not 0 < length <= limit:
                continue
            duration = seconds(width, depth)
            if match == MODEL:
                duration = sure * duration + (1 - sure) * plain + self.draft_seconds(step, 1 + sure * (length - 1))
            if step.sampled + sure * first * length > best_rate * duration:  # an upper bound, quickly computed
                rate = (step.sampled + sure * self.expected(match, length)) / duration
                if rate > best_rate:
                    best, best_rate = length, rate
        return DraftChoice(best, best_rate) if best else NO_DRAFT

    def expected(self, match: int, length: int) -> float:
        """Return the expected number of accepted tokens of a draft."""
        total, probability = 0.0, 1.0
        for kind in _kinds(match, length):
            probability *= self._rates[kind].value
            total += probability
        return total

    def draft_seconds(self, step: StepShape, length: float) -> float:
        """Return one sequence's share of the draft model's time for a draft of this length.

        All sequences of the step take part. The first step of the draft model usually decodes two tokens per sequence.
        """
        if self._draft_times is None:
            return 0.0
        seconds, n_sequences = self._draft_times.seconds, step.sampled
        first, other = (seconds(rows * n_sequences, step.depth) for rows in (2, 1))
        return (first + (length - 1) * other) / n_sequences

    def is_worth_prefill(self, n_tokens: int, step: StepShape) -> bool:
        """Return whether the draft model should prefill tokens that it has not seen.

        The answer is expected to take as long again as it took so far, prefill included. What drafts gain in that time
        has to pay for the prefill.
        """
        if self._times is None:
            return True
        choice = self.choose(MODEL, self._limit, step)
        if not choice.length or self._draft_times is None:
            return False
        saved = 1 - step.sampled / self._times.seconds(step.rows, step.depth) / choice.rate
        cost, prefill = (_prefill_seconds(times, n_tokens, step.depth) for times in (self._draft_times, self._times))
        return cost <= saved * (prefill + self._decoding)

    def learn(self, match: int, n_accepted: int, *, missed: bool) -> None:
        """Learn from a draft: its first n_accepted tokens were right, and if missed, the next one was wrong."""
        for index, kind in enumerate(_kinds(match, n_accepted + missed)):
            self._rates[kind].learn(index < n_accepted)

    def learn_sureness(self, *, sure: bool) -> None:
        """Learn whether the draft model was sure of the first token of a draft."""
        self._sure.learn(sure)

    def record_step(self, step: StepShape, n_drafted: int, n_accepted: int, drafting: float = 0.0) -> None:
        """Account for a step, with the seconds of the draft model in `drafting`."""
        if self._times is None:
            return
        plain = self._times.seconds(step.rows, step.depth)
        extra = drafting
        if n_drafted:
            extra += self._times.seconds(step.rows + n_drafted, step.depth) - plain
        self._decoding += plain + extra
        self._gain += n_accepted * plain / step.sampled - extra
        self._trial = max(self._trial, extra)


def _kinds(match: int, length: int) -> Iterator[int]:
    """Return the index of the acceptance rate for each token of a draft."""
    return repeat(_kind(MODEL), length) if match == MODEL else map(_kind, range(match, match + length))


def _kind(match: int) -> int:
    return len(_PRIOR) if match == MODEL else min((match - 1).bit_length(), len(_PRIOR) - 1)


def _prefill_seconds(times: StepTimes, n_tokens: int, depth: int) -> float:
    """Return an upper bound: a wide step takes no longer per row than the widest one in the table."""
    widest = times.widths[-1]
    return n_tokens * times.seconds(widest, depth) / widest
