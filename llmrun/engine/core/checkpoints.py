"""Checkpoints: copies of the part of a sequence's memory that can't be cut, kept in host memory.

Keys and values can be cut to any prefix. A recurrent state can't, nor a sliding window that has passed: without a
checkpoint inside the common prefix, such a model computes a changed prompt from its beginning. Pure bookkeeping; must
not know llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

MAX_BYTES = 512 << 20
_TAIL = 64  # tokens in which a chat template ends the last turn and begins the answer


class Checkpoint(NamedTuple):
    """The memory of a sequence after `length` tokens, without keys and values that can be cut."""

    length: int
    state: bytearray


class Checkpoints:
    """The checkpoints of all slots, each slot's in order of length."""

    def __init__(self, slots: Iterable[int], limit: int = MAX_BYTES) -> None:
        """Start without any; limit is the maximum of their bytes together."""
        self._slots: dict[int, list[Checkpoint]] = {slot: [] for slot in slots}
        self._limit = limit

    @property
    def n_bytes(self) -> int:
        """Bytes of all states; one that several slots have counts once."""
        return sum({id(each.state): len(each.state) for kept in self._slots.values() for each in kept}.values())

    def of(self, slot: int) -> list[Checkpoint]:
        return list(self._slots[slot])

    def put(self, slot: int, checkpoints: Iterable[Checkpoint]) -> None:
        self._slots[slot] = list(checkpoints)

    def add(self, slot: int, checkpoint: Checkpoint) -> None:
        """Add a checkpoint after the slot's other ones, and remove the least useful ones beyond the limit."""
        self._slots[slot].append(checkpoint)
        while self.n_bytes > self._limit and self._remove_least_useful():
            pass

    def deepest(self, slot: int, length: int) -> Checkpoint | None:
        """Return the last checkpoint within the first `length` tokens."""
        return next((each for each in reversed(self._slots[slot]) if each.length <= length), None)

    def cut(self, slot: int, length: int) -> None:
        """Remove those after the first `length` tokens."""
        self._slots[slot] = [each for each in self._slots[slot] if each.length <= length]

    def copy(self, source: int, target: int, length: int) -> None:
        self._slots[target] = [each for each in self._slots[source] if each.length <= length]

    def _remove_least_useful(self) -> bool:
        """Remove the checkpoint whose absence costs the fewest tokens to compute; a slot's last one goes last."""
        candidates = [
            (index == len(kept) - 1, each.length - (kept[index - 1].length if index else 0), slot, index)
            for slot, kept in self._slots.items()
            for index, each in enumerate(kept)
        ]
        if not candidates:
            return False
        _, _, slot, index = min(candidates)
        del self._slots[slot][index]
        return True


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
