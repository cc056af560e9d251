"""How long decode steps of several widths take here: what gate.py decides by.

Owns the measuring; must not know who asked for it. What the KV cache held, it holds afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles

from llmrun.engine.core.draft_model import DraftModel
from llmrun.engine.core.slots import Slots
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry
from llmrun.protocol.speculation import StepTables, StepTime

_WIDTHS = (4, 8, 16)  # beside 1
_ROUNDS = 5  # and one to warm up
_LEAST_DEPTH = 256  # tokens in the KV cache; fewer say nothing about more of them
_MOST_SPREAD = 1.5  # times as long as the fastest quarter of equal steps the slowest one may take


def measure_steps(
    context: Context,
    slots: Slots,
    draft_model: DraftModel | None,
    clock: Callable[[], float],
    interrupted: Callable[[], bool],
) -> StepTables:
    """Step times behind an empty KV cache, and behind the longest sequence that it holds.

    Args:
        context: with no sequence running.
        slots: of the context.
        draft_model: whose steps are measured too, behind what it has read.
        clock: seconds, monotonic.
        interrupted: whether something else has to be done; asked before each step.

    Returns:
        The times; none where it was interrupted, or something else computed meanwhile.
    """
    longest = max(slots.cached, key=lambda slot: len(slots.cached[slot]))
    shortest = min(slots.cached, key=lambda slot: len(slots.cached[slot]))
    depth = len(slots.cached[longest])
    fits = depth + max(_WIDTHS) <= context.n_ctx and slots.room.admits(max(_WIDTHS))
    found: list[StepTime] = []
    of_drafts: list[StepTime] = []
    try:
        if depth >= _LEAST_DEPTH and fits:
            found += _measured(context, longest, depth, clock, interrupted)
        with slots.set_aside(shortest) as is_empty:
            if is_empty:
                found += _measured(context, shortest, 0, clock, interrupted)
        if draft_model is not None and draft_model.deepest[1] + max(_WIDTHS) <= draft_model.context.n_ctx:
            of_drafts += _measured(draft_model.context, *draft_model.deepest, clock, interrupted)
    except (Aborted, CacheFull):
        return StepTables()
    return StepTables(tuple(found), tuple(of_drafts))


def _measured(
    context: Context, slot: int, depth: int, clock: Callable[[], float], interrupted: Callable[[], bool]
) -> list[StepTime]:
    """The step times at one depth.

    Steps of all widths take turns with those of one row, as they do in an answer. A graph is built anew where the width
    changes, there and back: both ways are counted for the wide step.

    Raises:
        Aborted: something else has to be done, or is done beside this: what a step takes is not the same twice.
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
    plain = plain[len(widths) :]
    fast, _, slow = quantiles(plain, n=4)
    if slow > _MOST_SPREAD * fast:
        raise Aborted
    first = StepTime(1, depth, median(plain))
    return [first, *(StepTime(width, depth, median(wide[width][1:])) for width in widths)]
