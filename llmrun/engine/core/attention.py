"""The measurement of decode steps with and without flash attention, for planning/measurements.py."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from llmrun.engine.core.steps import raise_if_disturbed
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry
from llmrun.protocol.speculation import AttentionTime

ATTENTION_CELLS = 1280
"""Context window of the two contexts."""
_DEPTH = 1024  # tokens; fewer if their prefill takes too long
_PREFILL_SECONDS = 2.0
_PIECE = 64
_ROUNDS = 9  # after one to warm up


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
        if is_interrupted():
            raise Aborted
        n_vocab, end = context.vocabulary.n_tokens, depth + n_tokens
        batch = [Entry(position % n_vocab, position, 0, position == end - 1) for position in range(depth, end)]
        began = clock()
        context.decode(batch)
        context.logits(n_tokens - 1)  # waits for the computation
        return clock() - began

    def step_times(depth: int) -> AttentionTime:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(1 + _ROUNDS):
            for context, found in zip((on, off), times, strict=True):
                found.append(seconds(context, depth, 1))
                context.forget(0, depth)
        for found in times:
            raise_if_disturbed(found[1:])
        return AttentionTime(depth, *(median(found[1:]) for found in times))

    try:
        shallow, depth, spent = step_times(0), 0, 0.0
        while depth < _DEPTH and spent < _PREFILL_SECONDS:
            spent += max(seconds(context, depth, _PIECE) for context in (on, off))
            depth += _PIECE
        return shallow, step_times(depth)
    except (Aborted, CacheFull):
        return ()
