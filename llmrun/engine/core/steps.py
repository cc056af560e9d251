"""The measurement of decode steps of several widths, for _native.Gate. The KV cache is the same afterwards."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from typing import Protocol

from llmrun.engine.core.draft_model import DraftModel
from llmrun.engine.core.mtp_model import HeadModel
from llmrun.engine.core.slots import Slots
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry
from llmrun.protocol.speculation import StepTables, StepTime

WIDTHS = (2, 3, 4, 8, 16)  # compared with 1
_ROUNDS = 5  # after one to warm up
_SETTLING = 3  # steps of one row after a wide one that may take longer
_MIN_DEPTH = 256  # tokens in the KV cache; too few don't show the cost of attention
_MAX_SPREAD = 1.5  # ratio of the upper to the lower quartile of equal steps; more means that the machine is busy


def measure_steps(
    context: Context,
    slots: Slots,
    draft_model: DraftModel | HeadModel | None,
    clock: Callable[[], float],
    is_interrupted: Callable[[], bool],
) -> StepTables:
    """Measure step times with an empty KV cache, and after the longest sequence that it holds.

    Returns:
        The times; none if the measurement was interrupted, or disturbed by other load.
    """
    longest = max(slots.cached, key=lambda slot: len(slots.cached[slot]))
    shortest = min(slots.cached, key=lambda slot: len(slots.cached[slot]))
    depth = len(slots.cached[longest])
    fits = depth + max(WIDTHS) <= context.n_ctx and slots.budget.admits(max(WIDTHS))
    times: list[StepTime] = []
    draft_times: list[StepTime] = []
    try:
        if depth >= _MIN_DEPTH and fits:
            times += _measure(context, longest, depth, clock, is_interrupted, _restoring(context, slots, longest))
        with slots.emptied(shortest) as is_empty:
            if is_empty:
                times += _measure(context, shortest, 0, clock, is_interrupted, lambda: context.forget(shortest, 0))
        if draft_model is not None and draft_model.longest_sequence[1] + max(WIDTHS) <= draft_model.context.n_ctx:
            drafts, (slot, length) = draft_model.context, draft_model.longest_sequence
            draft_times += _measure(drafts, slot, length, clock, is_interrupted, lambda: drafts.forget(slot, length))
    except (Aborted, CacheFull):
        return StepTables()
    return StepTables(tuple(times), tuple(draft_times))


def raise_if_disturbed(equal: list[float]) -> None:
    """Raise Aborted if equal steps differ too much: the machine is busy."""
    fast, _, slow = quantiles(equal, n=4)
    if slow > _MAX_SPREAD * fast:
        raise Aborted


def _restoring(context: Context, slots: Slots, slot: int) -> Callable[[], object]:
    """Return what cuts a slot to the tokens that it has now; it raises Aborted if they are lost."""
    depth = len(slots.cached[slot])
    # Of a memory that can't be cut: otherwise the first token of each step would stay.
    state = context.checkpoint(slot) if context.has_checkpoints else bytearray()

    def restore() -> None:
        if not (context.forget(slot, depth) or (state and context.go_back(slot, state, depth))):
            slots.truncate(slot, 0)
            raise Aborted

    return restore


class _Measured(Protocol):
    """The part of a base.Context that is measured."""

    n_batch: int
    n_outputs: int

    @property
    def max_draft(self) -> int: ...

    def decode(self, batch: list[Entry], /) -> None: ...

    def logits(self, index: int, /) -> int: ...


def _measure(
    context: _Measured,
    slot: int,
    depth: int,
    clock: Callable[[], float],
    is_interrupted: Callable[[], bool],
    restore: Callable[[], object],
) -> list[StepTime]:
    """Measure step times at one depth.

    Steps of all widths alternate with those of one row, as in an answer. When the width changes, llama.cpp rebuilds its
    graph, and a GPU records it anew, maybe some steps later: what the next steps take longer counts as part of the wide
    step.

    Raises:
        Aborted: the measurement was interrupted, or equal steps differ too much.
    """

    def seconds(width: int) -> float:
        if is_interrupted():
            raise Aborted
        began = clock()
        try:
            context.decode([Entry(token, depth + token, slot, True) for token in range(width)])
            context.logits(width - 1)  # waits for the computation
            return clock() - began
        finally:
            restore()

    widths = [width for width in WIDTHS if width <= min(context.n_batch, context.n_outputs, context.max_draft + 1)]
    plain: list[float] = []
    wide: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(1 + _ROUNDS):
        for width in widths:
            verified, after, settled = seconds(width), [seconds(1) for _ in range(_SETTLING)], seconds(1)
            plain.append(settled)
            wide[width].append(verified + max(0.0, sum(after) - _SETTLING * settled))
    plain = plain[len(widths) :]
    raise_if_disturbed(plain)
    first = StepTime(1, depth, median(plain))
    return [first, *(StepTime(width, depth, median(wide[width][1:])) for width in widths)]
