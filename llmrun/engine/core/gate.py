"""How many tokens are worth drafting, by what decode steps cost and how often drafts came true. Pure.

Owns that decision; must not know models or clocks: it depends on a table of step times and on the tokens so far alone,
so that the same answer takes the same steps again.

A draft that follows a match of m tokens comes true with the probability that its first token does, times that of a
token behind a match of m + 1, and so on. Those are learned from every token of the answer, for what the sampler chose
tells of any draft whether it would have come true, verified or not.
"""

from __future__ import annotations

from typing import NamedTuple

from llmrun.protocol.speculation import Speculation, StepTimes

_MULTIPLE = 4  # kernels compute so many rows at once, and handle a remainder badly
_LEAST_GAIN = 1.1  # expected: a table is never quite right
_ALLOWED_LOSS = 0.01  # of the time that decoding took ...
_ALLOWED_FAILURES = 5  # ... and what so many steps that verified in vain took longer
_PRIOR = (0.15, 0.3, 0.45, 0.65, 0.8, 0.9)  # how often a token comes true behind a match of 1, 2, 3-4, 5-8, 9-16, more
_PRIOR_WEIGHT = 4  # outcomes
_NEWEST_SHARE = 0.1  # of the newest outcome, at least


class Step(NamedTuple):
    """A decode step to which a draft may be added.

    Attributes:
        rows: tokens that it computes anyway.
        drawn: tokens that it gives anyway: one for each sequence.
        depth: tokens in the KV cache before it.
    """

    rows: int
    drawn: int
    depth: int


class Gate:
    """Decides for one answer.

    Args:
        speculation: without step times, as much is drafted as can be had.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._most = speculation.most
        self._times = StepTimes(speculation.times) if speculation.times else None
        self._chances = list(_PRIOR)
        self._outcomes = [_PRIOR_WEIGHT] * len(_PRIOR)
        # Seconds by the table: what steps took, what verifying gained, and what it takes longer.
        self._decoding = self._gain = self._trial = 0.0

    def length(self, match: int, most: int, step: Step) -> int:
        """How many tokens to draft.

        Args:
            match: how many last tokens are known to have been followed by the draft.
            most: how many can be had.
            step: what they are added to.
        """
        most = min(most, self._most)
        if self._times is None:
            return max((step.rows + most) // _MULTIPLE * _MULTIPLE - step.rows, 0) or most
        if self._gain < -_ALLOWED_LOSS * self._decoding - _ALLOWED_FAILURES * self._trial:
            return 0
        seconds, depth = self._times.seconds, step.depth
        best, best_rate = 0, _LEAST_GAIN * step.drawn / seconds(step.rows, depth)
        first = self._chances[_kind(match)]  # no later token comes true without the first one
        for width in self._times.widths:
            length = width - step.rows
            if 0 < length <= most and step.drawn + first * length > best_rate * seconds(width, depth):
                rate = (step.drawn + self.expected(match, length)) / seconds(width, depth)
                if rate > best_rate:
                    best, best_rate = length, rate
        return best

    def expected(self, match: int, length: int) -> float:
        """How many tokens of a draft will come true."""
        total, chance = 0.0, 1.0
        for known in range(match, match + length):
            chance *= self._chances[_kind(known)]
            total += chance
        return total

    def learn(self, match: int, came_true: int, *, missed: bool) -> None:
        """So many first tokens of a draft came true, and perhaps the next one did not."""
        for known in range(match, match + came_true + missed):
            kind = _kind(known)
            self._outcomes[kind] += 1
            share = max(1 / self._outcomes[kind], _NEWEST_SHARE)
            self._chances[kind] += share * ((known < match + came_true) - self._chances[kind])

    def stepped(self, step: Step, drafted: int, came_true: int) -> None:
        """A step was computed, with so many tokens drafted, of which so many came true."""
        if self._times is None:
            return
        plain = self._times.seconds(step.rows, step.depth)
        longer = self._times.seconds(step.rows + drafted, step.depth) - plain if drafted else 0.0
        self._decoding += plain + longer
        self._gain += came_true * plain / step.drawn - longer
        self._trial = max(self._trial, longer)


def _kind(match: int) -> int:
    """Which of _PRIOR is about matches of this length."""
    return min((match - 1).bit_length(), len(_PRIOR) - 1)
