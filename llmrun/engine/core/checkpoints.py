"""Checkpoints: copies of the part of a sequence's memory that can't be cut, kept in host memory.

Keys and values can be cut to any prefix. A recurrent state can't, nor a sliding window that has passed: without a
checkpoint inside the common prefix, such a model computes a changed prompt from its beginning. Owns where checkpoints
are made and which ones stay; must not know the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from llmrun.engine.llama.base import Context
from llmrun.errors import LlmrunError

MAX_BYTES = 512 << 20
_MIN_NEW = 32  # tokens after the last checkpoint that make a planned one worthwhile
_BATCH_BYTES = 16 << 20  # each that a checkpoint has makes them rarer by a batch: copies must not slow prefill down
_MOST_ON_DISK = 4  # of one sequence
_TAIL = 64  # tokens in which a chat template ends the last turn and begins the answer


class Checkpoint(NamedTuple):
    """The memory of a sequence after `length` tokens, without keys and values that can be cut."""

    length: int
    state: bytearray | memoryview
    is_planned: bool = False  # a turn ends here, or another prompt differs from here on


class Checkpoints:
    """The checkpoints of all slots, each slot's in order of length; none for a memory that can be cut anywhere."""

    def __init__(
        self,
        context: Context,
        slots: Iterable[int],
        *,
        offloaded: Callable[[], Iterable[list[Checkpoint]]] = tuple,
        limit: int = MAX_BYTES,
    ) -> None:
        """Start without any.

        Args:
            context: with the memory.
            slots: of the context.
            offloaded: returns the checkpoints of each prefix in host memory; they count, and can be removed.
            limit: maximum of their bytes together.
        """
        self._context, self._limit = context, limit
        self._offloaded, self._last_bytes = offloaded, 0
        self._slots: dict[int, list[Checkpoint]] = {slot: [] for slot in slots}
        self._planned: dict[int, set[int]] = {slot: set() for slot in self._slots}  # lengths

    @property
    def n_bytes(self) -> int:
        """Bytes of all states; one that several slots have counts once."""
        return _bytes_of(self._all())

    def _all(self) -> list[list[Checkpoint]]:
        return [*self._slots.values(), *self._offloaded()]

    def of(self, slot: int) -> list[Checkpoint]:
        return list(self._slots[slot])

    def put(self, slot: int, checkpoints: Iterable[Checkpoint]) -> None:
        """Replace a slot's checkpoints, within the limit of all."""
        self._slots[slot] = list(checkpoints)
        thin_out(self._all(), self._limit)

    def add(self, slot: int, checkpoint: Checkpoint) -> None:
        """Add a checkpoint after the slot's other ones, and remove the least useful ones beyond the limit."""
        self._slots[slot].append(checkpoint)
        thin_out(self._all(), self._limit)

    def deepest(self, slot: int, length: int) -> Checkpoint | None:
        """Return the last checkpoint within the first `length` tokens."""
        return next((checkpoint for checkpoint in reversed(self._slots[slot]) if checkpoint.length <= length), None)

    def cut(self, slot: int, length: int) -> None:
        """Remove those after the first `length` tokens."""
        self._slots[slot] = [checkpoint for checkpoint in self._slots[slot] if checkpoint.length <= length]

    def copy(self, source: int, target: int, length: int) -> None:
        self._slots[target] = [checkpoint for checkpoint in self._slots[source] if checkpoint.length <= length]

    # ---- where they are made ----

    def plan(self, slot: int, lengths: Iterable[int], start: int) -> None:
        """Plan checkpoints of a prompt instead of those of the slot's last one.

        Args:
            lengths: where another prompt differed, or the next turn may differ.
            start: tokens that the slot holds.
        """
        if self._context.has_checkpoints:
            self._planned[slot] = {length for length in lengths if length >= start + _MIN_NEW}

    def plan_another(self, slot: int, length: int) -> None:
        """Plan a checkpoint in a prompt that is being prefilled, where a waiting prompt differs from it."""
        if self._context.has_checkpoints:
            self._planned[slot].add(length)

    def until_planned(self, slot: int, n_cached: int, n_tokens: int) -> int:
        """Return how many of n_tokens to decode next, so that a batch ends where a checkpoint is planned."""
        planned = self._planned[slot]
        if not planned:
            return n_tokens
        return min([n_tokens, *(length - n_cached for length in planned if length > n_cached)])

    def record(self, slot: int, length: int, n_prompt: int) -> None:
        """Make a checkpoint if one is planned at this length, or enough of the prompt came after the last."""
        if not self._context.has_checkpoints:
            return
        is_planned = length in self._planned[slot]
        if not is_planned:
            last = self.deepest(slot, length) if length < n_prompt else None
            start = last.length if last is not None else 0
            interval = self._context.n_batch * (1 + self._last_bytes // _BATCH_BYTES)
            if length >= n_prompt or length - start < interval:
                return
        self._planned[slot].discard(length)
        with suppress(LlmrunError, MemoryError):
            state = self._context.checkpoint(slot)
            self._last_bytes = len(state)
            if state:
                self.add(slot, Checkpoint(length, state, is_planned))

    def go_back(self, slot: int, length: int) -> int:
        """Cut a slot to the deepest checkpoint within its first tokens, else empty it; return the number left."""
        found = self.deepest(slot, length)
        if found is not None and self._context.go_back(slot, found.state, found.length):
            return found.length
        self._context.forget(slot, 0)
        return 0


def _bytes_of(lists: Iterable[list[Checkpoint]]) -> int:
    return sum({id(checkpoint.state): len(checkpoint.state) for kept in lists for checkpoint in kept}.values())


def thin_out(lists: list[list[Checkpoint]], limit: int) -> None:
    """Remove checkpoints until their states take at most `limit` bytes.

    The one whose absence costs the fewest tokens to compute goes first, but planned ones after all others, and the last
    one of a list after those. One that several lists have is removed from all of them, and as useful as where it is
    most useful.
    """
    while _bytes_of(lists) > limit:
        costs: dict[int, tuple[bool, bool, int]] = {}
        for kept in lists:
            for index, checkpoint in enumerate(kept):
                n_saved = checkpoint.length - (kept[index - 1].length if index else 0)
                cost = index == len(kept) - 1, checkpoint.is_planned, n_saved
                costs[id(checkpoint.state)] = max(cost, costs.get(id(checkpoint.state), cost))
        least = min(costs, key=costs.__getitem__)
        for kept in lists:
            kept[:] = [checkpoint for checkpoint in kept if id(checkpoint.state) != least]


def most_useful(checkpoints: list[Checkpoint]) -> list[tuple[int, bytearray | memoryview]]:
    """Return lengths and states of a few checkpoints of a sequence, for the disk."""
    kept = list(checkpoints)
    thin_out([kept], _MOST_ON_DISK * max((len(checkpoint.state) for checkpoint in kept), default=0))
    return [(checkpoint.length, checkpoint.state) for checkpoint in kept]


def first_end(prompt: list[int], is_end: Callable[[int], bool]) -> int:
    """Return the length of a prompt's first turn, as a rule the system prompt with the tools; 0 without its end."""
    return next((length for length, token in enumerate(prompt, 1) if token >= 0 and is_end(token)), 0)


def turn_end(prompt: list[int], is_end: Callable[[int], bool]) -> int:
    """Return the length of a prompt without what begins the answer.

    The next prompt may have the answer in another form, for example without its reasoning, and differs from there on.
    A chat template without an end-of-turn token has the answer begin at the prompt's end.
    """
    for length in range(len(prompt) - 1, max(0, len(prompt) - _TAIL), -1):
        token = prompt[length - 1]
        if token >= 0 and is_end(token):
            return length
    return len(prompt) - 1
