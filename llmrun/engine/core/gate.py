"""How many tokens are worth drafting, by what decode steps cost and how often drafts came true. Pure.

Owns that decision; must not know models or clocks: it depends on a table of step times and on the tokens so far alone,
so that the same answer takes the same steps again.

A draft that follows a match of m tokens comes true with the probability that its first token does, times that of a
token behind a match of m + 1, and so on. Those are learned from every token of the answer, for what the sampler chose
tells of any draft whether it would have come true, verified or not. What a draft model guesses comes true with one
probability for all of its tokens; it costs steps of that model, also where it turns out to be unsure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from llmrun.protocol.speculation import Speculation, StepTimes

MODEL = -1
"""In place of the length of a match: a draft model guessed."""
_MULTIPLE = 4  # kernels compute so many rows at once, and handle a remainder badly
_LEAST_GAIN = 1.1  # expected: a table is never quite right
_ALLOWED_LOSS = 0.01  # of the time that decoding took ...
_ALLOWED_FAILURES = 5  # ... and what so many steps that verified in vain took longer
_PRIOR = (0.15, 0.3, 0.45, 0.65, 0.8, 0.9)  # how often a token comes true behind a match of 1, 2, 3-4, 5-8, 9-16, more
_MODEL_PRIOR = 0.8  # ... and one of which a draft model is sure
_SURE_PRIOR = 0.7  # how often it is
_PRIOR_WEIGHT = 4  # outcomes
_NEWEST_SHARE = 0.1  # of the newest outcome, at least


class StepShape(NamedTuple):
    """A decode step to which a draft may be added.

    Attributes:
        rows: tokens that it computes anyway.
        drawn: tokens that it gives anyway: one for each sequence.
        depth: tokens in the KV cache before it.
    """

    rows: int
    drawn: int
    depth: int


class DraftChoice(NamedTuple):
    """How many tokens to draft, and what is expected of that: the larger the better."""

    length: int
    rate: float


NOTHING = DraftChoice(0, 0.0)


class _AcceptanceRate:
    """How often something happens: of the outcomes so far, the newest ones count most."""

    def __init__(self, prior: float) -> None:
        self.value = prior
        self._outcomes = _PRIOR_WEIGHT

    def learn(self, happened: bool) -> None:
        self._outcomes += 1
        self.value += max(1 / self._outcomes, _NEWEST_SHARE) * (happened - self.value)


class Gate:
    """Decides for one answer.

    Args:
        speculation: without step times, as much is drafted as can be had.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._most = speculation.most
        self._times = StepTimes(speculation.times) if speculation.times else None
        self._draft_times = StepTimes(speculation.draft_times) if speculation.draft_times else None
        self._chances = [*map(_AcceptanceRate, _PRIOR), _AcceptanceRate(_MODEL_PRIOR)]
        self._sure = _AcceptanceRate(_SURE_PRIOR)
        # Seconds by the table: what steps took, what verifying gained, and what it takes longer.
        self._decoding = self._gain = self._trial = 0.0

    def choose(self, match: int, most: int, step: StepShape) -> DraftChoice:
        """How many tokens to draft.

        Args:
            match: how many last tokens are known to have been followed by the draft, or MODEL.
            most: how many can be had.
            step: what they are added to.
        """
        most, first = min(most, self._most), self._chances[_kind(match)].value
        if self._times is None:
            return DraftChoice(max((step.rows + most) // _MULTIPLE * _MULTIPLE - step.rows, 0) or most, first)
        if self._gain < -_ALLOWED_LOSS * self._decoding - _ALLOWED_FAILURES * self._trial:
            return NOTHING
        if match == MODEL and self._draft_times is None:
            return NOTHING
        seconds, depth = self._times.seconds, step.depth
        plain = seconds(step.rows, depth)
        best, best_rate = 0, _LEAST_GAIN * step.drawn / plain
        sure = self._sure.value if match == MODEL else 1.0
        for width in self._times.widths:
            length = width - step.rows
            if not 0 < length <= most:
                continue
            taken = seconds(width, depth)
            if match == MODEL:
                taken = sure * taken + (1 - sure) * plain + self.draft_seconds(step, 1 + sure * (length - 1))
            if step.drawn + sure * first * length > best_rate * taken:  # no later token comes true without the first
                rate = (step.drawn + sure * self.expected(match, length)) / taken
                if rate > best_rate:
                    best, best_rate = length, rate
        return DraftChoice(best, best_rate) if best else NOTHING

    def expected(self, match: int, length: int) -> float:
        """How many tokens of a draft will come true."""
        total, chance = 0.0, 1.0
        for kind in _kinds(match, length):
            chance *= self._chances[kind].value
            total += chance
        return total

    def draft_seconds(self, step: StepShape, length: float) -> float:
        """What a sequence's share of a draft model's steps takes, for so many tokens.

        All sequences of the step take part. The first of these steps computes two tokens, as a rule: what came last.
        """
        if self._draft_times is None:
            return 0.0
        seconds, n_sequences = self._draft_times.seconds, step.drawn
        first, other = (seconds(rows * n_sequences, step.depth) for rows in (2, 1))
        return (first + (length - 1) * other) / n_sequences

    def is_worth_prefill(self, n_tokens: int, step: StepShape) -> bool:
        """Whether a draft model is to read so many tokens that it has not seen.

        Nobody knows how long the answer goes on. As long again as it did so far is a fair guess, prefill included; so
        what its drafts would gain in that time has to pay for reading.
        """
        if self._times is None:
            return True
        choice = self.choose(MODEL, self._most, step)
        if not choice.length or self._draft_times is None:
            return False
        saved = 1 - step.drawn / self._times.seconds(step.rows, step.depth) / choice.rate
        reading, read = (_prefill_seconds(times, n_tokens, step.depth) for times in (self._draft_times, self._times))
        return reading <= saved * (read + self._decoding)

    def learn(self, match: int, came_true: int, *, missed: bool) -> None:
        """So many first tokens of a draft came true, and perhaps the next one did not."""
        for index, kind in enumerate(_kinds(match, came_true + missed)):
            self._chances[kind].learn(index < came_true)

    def asked(self, *, sure: bool) -> None:
        """A draft model was asked, and sure of the next token, or not."""
        self._sure.learn(sure)

    def stepped(self, step: StepShape, drafted: int, came_true: int, drafting: float = 0.0) -> None:
        """A step was computed, with so many tokens drafted, of which so many came true; drafting took so long."""
        if self._times is None:
            return
        plain = self._times.seconds(step.rows, step.depth)
        longer = drafting
        if drafted:
            longer += self._times.seconds(step.rows + drafted, step.depth) - plain
        self._decoding += plain + longer
        self._gain += came_true * plain / step.drawn - longer
        self._trial = max(self._trial, longer)


def _kinds(match: int, length: int) -> Iterator[int]:
    """Which chance each token of a draft has."""
    return repeat(_kind(MODEL), length) if match == MODEL else map(_kind, range(match, match + length))


def _kind(match: int) -> int:
    """Which of a gate's chances is about matches of this length."""
    return len(_PRIOR) if match == MODEL else min((match - 1).bit_length(), len(_PRIOR) - 1)


def _prefill_seconds(times: StepTimes, n_tokens: int, depth: int) -> float:
    """At most: a wide step takes no longer for each of its rows than a narrow one."""
    widest = times.widths[-1]
    return n_tokens * times.seconds(widest, depth) / widest
