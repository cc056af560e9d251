"""How long decode steps of several widths take here: what gate.py decides by.

Owns the measuring; must not know who asked for it. What the KV cache held, it holds afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from llmrun.engine.core.slots import Slots
from llmrun.engine.llama.base import Aborted, Context, Entry, NoRoom
from llmrun.protocol.speculation import StepTime

_WIDTHS = (4, 8, 16)  # beside 1
_ROUNDS = 5  # and one to warm up
_LEAST_DEPTH = 256  # tokens in the KV cache; fewer say nothing about more of them


def measure_steps(
    context: Context, slots: Slots, clock: Callable[[], float], interrupted: Callable[[], bool]
) -> tuple[StepTime, ...]:
    """Step times behind an empty KV cache, and behind the longest sequence that it holds.

    Args:
        context: with no sequence running.
        slots: of the context.
        clock: seconds, monotonic.
        interrupted: whether something else has to be done; asked before each step.

    Returns:
        The times; none where it was interrupted.
    """
    longest = max(slots.cached, key=lambda slot: len(slots.cached[slot]))
    shortest = min(slots.cached, key=lambda slot: len(slots.cached[slot]))
    depth = len(slots.cached[longest])
    fits = depth + max(_WIDTHS) <= context.n_ctx and slots.room.admits(max(_WIDTHS))
    found: list[StepTime] = []
    try:
        if depth >= _LEAST_DEPTH and fits:
            found += _measured(context, longest, depth, clock, interrupted)
        with slots.set_aside(shortest) as is_empty:
            if is_empty:
                found += _measured(context, shortest, 0, clock, interrupted)
    except (Aborted, NoRoom):
        return ()
    return tuple(found)


def _measured(
    context: Context, slot: int, depth: int, clock: Callable[[], float], interrupted: Callable[[], bool]
) -> list[StepTime]:
    """The step times at one depth.

    Steps of all widths take turns with those of one row, as they do in an answer. A graph is built anew where the width
    changes, there and back: both ways are counted for the wide step.
    """

    def seconds(width: int) -> float:
        if interrupted():
            raise Aborted
        began = clock()
        try:
            context.decode([Entry(token, depth + token, slot, True) for token in range(width)])
            context.logits(width - 1)  # waits for it
            return clock() - began
        finally:
            context.forget(slot, depth)

    widths = [width for width in _WIDTHS if width <= min(context.n_batch, context.n_outputs)]
    plain: list[float] = []
    wide: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(1 + _ROUNDS):
        for width in widths:
            before, verified, after = seconds(1), seconds(width), seconds(1)
            plain.append(before)
            wide[width].append(verified + max(0.0, after - before))
    first = StepTime(1, depth, median(plain[len(widths) :]))
    return [first, *(StepTime(width, depth, median(wide[width][1:])) for width in widths)]
