"""The measurement of decode steps: of several widths, for _native.Gate, and with and without flash attention.

Widths are measured while the engine rests; or within an answer, for machines on which nothing was measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from llmrun._native import StepShape
from llmrun.engine.core.draft_model import DraftModel
from llmrun.engine.core.mtp_model import HeadModel
from llmrun.engine.core.slots import Slots
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry
from llmrun.protocol.messages import DraftSource
from llmrun.protocol.speculation import AttentionTime, StepTables, StepTime, StepTimes

WIDTHS = (2, 3, 4, 8, 16)  # compared with 1
_ROUNDS = 5  # after one to warm up
_SETTLING = 3  # steps of one row after a wide one that may take longer
_MIN_DEPTH = 256  # tokens in the KV cache; too few don't show the cost of attention
_MAX_SPREAD = 1.5  # ratio of the upper to the lower quartile of equal steps; more means that the machine is busy

# Of a measurement within an answer.
_PROBED_WIDTHS = (2, 4, 8, 16)
_PROBED_ROUNDS = 2  # of all widths
_PROBE_WARM_UP = 4  # steps
_PROBE_INTERVAL = 3  # plain steps before the next wide one
_MOST_STEPS, _MOST_SHARE = 1.0, 0.01  # that wide steps may cost, as in gate.cpp: plain steps, and of the answer's time

ATTENTION_CELLS = 1280
"""Context window of the two contexts that are compared."""
_ATTENTION_DEPTH = 1024  # tokens; fewer if their prefill takes too long
_PREFILL_SECONDS = 2.0
_ATTENTION_PIECE = 64
_ATTENTION_ROUNDS = 9  # after one to warm up


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
        if draft_model is not None:
            draft_times += _measure_drafts(draft_model, clock, is_interrupted)
    except (Aborted, CacheFull, MemoryError):  # the last one before anything was emptied
        return StepTables()
    return StepTables(tuple(times), tuple(draft_times))


def _measure_drafts(
    draft_model: DraftModel | HeadModel, clock: Callable[[], float], is_interrupted: Callable[[], bool]
) -> list[StepTime]:
    """Measure step times of what drafts; none if its window is full."""
    slot, length = draft_model.measured_sequence()
    if length + max(WIDTHS) > draft_model.context.n_ctx:
        return []

    def restore() -> None:
        if not draft_model.restore(slot, length):
            raise Aborted

    return _measure(draft_model.context, slot, length, clock, is_interrupted, restore)


def _restoring(context: Context, slots: Slots, slot: int) -> Callable[[], object]:
    """Return what cuts a slot to the tokens that it has now; it raises Aborted if they are lost.

    Raises:
        Aborted: there is no memory for a copy.
    """
    depth = len(slots.cached[slot])
    # Of a memory that can't be cut: otherwise the first token of each step would stay.
    try:
        state = context.checkpoint(slot) if context.has_checkpoints else bytearray()
    except MemoryError:
        raise Aborted from None

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
        batch = [Entry(token, depth + token, slot, True) for token in range(width)]
        try:
            return _seconds(context, batch, clock, is_interrupted)
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
    _raise_if_disturbed(plain)
    first = StepTime(1, depth, _median(plain))
    return [first, *(StepTime(width, depth, _median(wide[width][1:])) for width in widths)]


def _seconds(
    context: _Measured, batch: list[Entry], clock: Callable[[], float], is_interrupted: Callable[[], bool]
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
            spent += max(seconds(context, depth, _ATTENTION_PIECE) for context in (on, off))
            depth += _ATTENTION_PIECE
        return shallow, step_times(depth)
    except (Aborted, CacheFull):
        return ()


class StepProbe:
    """The measurement of step times within an answer; the interface of drafts.Drafting.

    Some steps verify a draft of a fixed width. It is verified as ever, so the answer is the same, but when a width is
    tried depends on the clock: answers that have to be repeated exactly are not measured.

    A wider step is tried when the answer is long enough for its cost: each row more is expected to cost what it does in
    the widest step so far, and at most as much as a plain step. So a short answer may have times of some widths only.
    """

    model = None
    is_native = False
    source: DraftSource = "probe"
    probabilities: Sequence[float] = ()

    def __init__(self, most: int = max(_PROBED_WIDTHS) - 1, known: Sequence[StepTime] = ()) -> None:
        """Start.

        Args:
            most: drafted tokens of a step.
            known: times from earlier answers, whose widths are not measured again.
        """
        times = StepTimes(known)
        plain = next((time.seconds for time in known if time.width == 1), 0.0)
        self._known = {width: times.seconds(width, known[0].depth) / plain for width in times.widths} if plain else {}
        missing = [width for width in _PROBED_WIDTHS if width <= most + 1 and width not in self._known]
        self._queue = missing * _PROBED_ROUNDS
        self._plain: list[float] = []  # seconds
        self._wide: dict[int, list[float]] = {}  # width -> seconds
        self._lost = 0.0  # seconds
        self._n_steps = self._n_between = 0
        self._width = self._depth = 0  # of the planned step; width 0 without one
        self._draft: list[int] = []
        self._last: tuple[int, float] | None = None  # width and seconds of a wide step directly before

    def plan(self, tokens: Sequence[int], limit: int, step: StepShape) -> int:
        """Plan a step as Drafting.plan()."""
        is_wide = self._queue and limit >= self._queue[0] - 1 and self._can_afford(self._queue[0])
        self._width = (self._queue[0] if is_wide else 1) if step.rows == 1 else 0
        self._depth = max(self._depth, step.depth)
        self._draft = [tokens[-1]] * (self._width - 1)  # almost never right
        return len(self._draft)

    def _can_afford(self, width: int) -> bool:
        if self._n_between < _PROBE_INTERVAL:
            return False
        plain = _median(self._plain)
        times = {measured: ratio * plain for measured, ratio in self._known.items()}
        times |= {measured: _median(seconds) for measured, seconds in self._wide.items()}
        widest = max((measured for measured in times if 1 < measured <= width), default=0)
        a_row = (times[widest] - plain) / (widest - 1) if widest else plain
        return self._lost + (width - 1) * a_row <= (_MOST_STEPS + _MOST_SHARE * self._n_steps) * plain

    def take(self, count_allowed: Callable[[list[int]], int]) -> list[int]:
        """Return the draft, nothing if the grammar does not allow all of it."""
        if self._draft and count_allowed(self._draft) < len(self._draft):
            self._draft, self._width = [], 0
        return self._draft

    def shorten(self, length: int) -> list[int]:
        """Return the first tokens of the draft as Drafting.shorten(); a shorter step is not measured."""
        if length < len(self._draft):
            self._draft, self._width = self._draft[:length], 0
        return self._draft

    def record(self, seconds: float) -> None:
        """Account for a decode call."""
        width, self._width = self._width, 0
        if not width:
            self._last = None
            return
        self._n_steps += 1
        if width > 1:
            self._last, self._n_between = (width, seconds), 0
        elif self._last is not None:
            self._add(*self._last, seconds)
            self._last = None
        elif self._n_steps > _PROBE_WARM_UP:
            self._plain.append(seconds)
            self._n_between += 1

    def _add(self, width: int, seconds: float, after: float) -> None:
        """Add a wide step: llama.cpp rebuilds its graph twice, the second time in the step after it."""
        self._queue.remove(width)
        plain = self._plain[-1]
        self._wide.setdefault(width, []).append(seconds + max(0.0, after - plain))
        self._lost += max(0.0, self._wide[width][-1] - plain)

    def times(self) -> tuple[StepTime, ...]:
        """Return the step times, known ones included; none if the answer was too short, or the machine busy."""
        if not self._wide:
            return ()
        try:
            _raise_if_disturbed(self._plain)
        except Aborted:
            return ()
        plain = _median(self._plain)
        found = {width: ratio * plain for width, ratio in self._known.items()}
        found |= {1: plain, **{width: _median(seconds) for width, seconds in self._wide.items()}}
        return tuple(StepTime(width, self._depth, found[width]) for width in sorted(found))

    def rewind(self, length: int) -> None: ...

    def close(self) -> None: ...


def _median(values: Sequence[float]) -> float:
    from statistics import median  # with what it brings, 2 ms, for which no first token should wait

    return median(values)
