"""The costs of decode steps: what wide ones are expected to take, and attention with and without flash attention."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from llmrun.engine.core.policy import POLICY
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry
from llmrun.protocol.speculation import AttentionTime

StepCost = tuple[int, float]
"""Rows of a decode step, and its time relative to a step of one row."""

ON_PROCESSOR: tuple[StepCost, ...] = ((1, 1.0), (2, 1.3), (3, 1.65), (4, 2.0), (8, 3.0), (16, 4.2))
"""Of a processor with our own kernels: between models of 135M and 1B, of Q4_0, Q4_K_M, Q6_K and Q8_0."""
ON_DEVICE: tuple[StepCost, ...] = ((1, 1.0), (2, 1.2), (3, 1.32), (4, 1.45), (8, 2.0), (16, 2.4))
"""Of a GPU that reads 8B weights."""

_MAX_SPREAD = 1.5  # ratio of the upper to the lower quartile of equal steps; more means that the machine is busy
_ATTENTION_DEPTH = 1024  # tokens; fewer if their prefill takes longer than ...
_PREFILL_SECONDS = 2.0
_ATTENTION_ROUNDS = 9  # after one to warm up
ATTENTION_CELLS = _ATTENTION_DEPTH + 256
"""Context window of the two contexts that are compared."""


class StepCosts:
    """The costs of decode steps by their rows: a table, moved by what drafted steps take.

    All costs beyond that of a plain step are scaled by one factor. An engine's answers share it.
    """

    def __init__(self, table: Sequence[StepCost]) -> None:
        self.begin = tuple(table)  # before any step moved it
        self._plain: deque[float] = deque(maxlen=POLICY.cost_memory)  # seconds
        self._weight = self._total = 0.0  # of the factors that were seen
        self.factor = 1.0
        self.table = self.begin

    def record_plain(self, seconds: Sequence[float]) -> None:
        """Account for steps of one row: old costs count less with each, so that one that was too high does not stay."""
        memory = POLICY.cost_memory
        self._plain.extend(seconds[-memory:])
        self._move((1 - 1 / (16 * memory)) ** len(seconds))

    def record(self, expected: float, seconds: float) -> None:
        """Account for a step of one sequence with a draft.

        Args:
            expected: what it costs beyond a plain step, by the table that it began with.
        """
        plain = sorted(self._plain)[len(self._plain) // 2] if self._plain else 0.0
        if plain > 0:
            factor = min(max(0.0, (seconds / plain - 1) / expected), POLICY.most_cost)
            self._move(1 - 1 / POLICY.cost_memory, factor)

    def _move(self, kept: float, *factors: float) -> None:
        self._weight = kept * self._weight + len(factors)
        self._total = kept * self._total + sum(factors)
        prior = POLICY.cost_prior
        self.factor = (prior + self._total) / (prior + self._weight)
        self.table = tuple((width, 1 + self.factor * (cost - 1)) for width, cost in self.begin)


def cost_of(table: Sequence[StepCost], width: int) -> float:
    """Return the cost of a step by its number of rows, interpolated."""
    low = table[0]
    for high in table[1:]:
        if width < high[0]:
            return low[1] + (high[1] - low[1]) * (width - low[0]) / (high[0] - low[0])
        low = high
    return low[1]


def measure_attention(
    on: Context, off: Context, clock: Callable[[], float], is_interrupted: Callable[[], bool]
) -> tuple[AttentionTime, ...]:
    """Measure plain decode steps with both settings in turns, at two depths.

    Args:
        on, off: empty contexts with the same weights.
        clock: monotonic seconds.
        is_interrupted: checked before each decode call.

    Returns:
        The times; none if the measurement was interrupted, or disturbed by other load.
    """

    def seconds(context: Context, depth: int, n_tokens: int) -> float:
        n_vocab, end = context.vocabulary.n_tokens, depth + n_tokens
        batch = [Entry(position % n_vocab, position, 0, position == end - 1) for position in range(depth, end)]
        return _seconds(context, batch, clock, is_interrupted)

    def step_times(depth: int) -> AttentionTime:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(1 + _ATTENTION_ROUNDS):
            for context, of_context in zip((on, off), times, strict=True):
                of_context.append(seconds(context, depth, 1))
                context.forget(0, depth)
        for of_context in times:
            _raise_if_disturbed(of_context[1:])
        return AttentionTime(depth, *(_median(of_context[1:]) for of_context in times))

    try:
        shallow, depth, spent = step_times(0), 0, 0.0
        while depth < _ATTENTION_DEPTH and spent < _PREFILL_SECONDS:
            spent += max(seconds(context, depth, POLICY.wide_batch) for context in (on, off))
            depth += POLICY.wide_batch
        return shallow, step_times(depth)
    except (Aborted, CacheFull):
        return ()


def _seconds(
    context: Context, batch: list[Entry], clock: Callable[[], float], is_interrupted: Callable[[], bool]
) -> float:
    """Measure one decode call, whose last entry has logits; raise Aborted if the measurement is interrupted."""
    if is_interrupted():
        raise Aborted
    began = clock()
    context.decode(batch)
    context.logits(len(batch) - 1)  # waits for the computation
    return clock() - began


def _raise_if_disturbed(equal: list[float]) -> None:
    """Raise Aborted if equal steps differ too much: the machine is busy."""
    from statistics import quantiles

    fast, _, slow = quantiles(equal, n=4)
    if slow > _MAX_SPREAD * fast:
        raise Aborted


def _median(values: Sequence[float]) -> float:
    from statistics import median  # with what it brings, 2 ms, for which no first token should wait

    return median(values)
