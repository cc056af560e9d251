"""A prefix that is cached somewhere, and the search for the one of which a prompt can reuse most. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple


class Salt(NamedTuple):
    """The part of a prefix's identity beside its tokens: only requests with an equal salt reuse it.

    Attributes:
        owner: see AnswerRequest.
        private: the client's own salt, and adapters other than the default ones. A prefix with any is not saved to
            disk, since no later request may have the same.
    """

    owner: str = ""
    private: str = ""


NO_SALT = Salt()


class Checkpoint(NamedTuple):
    """The memory of a sequence after `length` tokens, without keys and values that can be cut."""

    length: int
    state: bytearray | memoryview
    is_planned: bool = False  # a turn ends here, or another prompt differs from here on


@dataclass(slots=True, eq=False)
class Prefix:
    """The first tokens of a conversation, whose keys and values are kept in one place.

    That is a sequence of the KV cache, called a slot, which may still run; or a state in host memory or in a file.

    Attributes:
        tokens: ids of the tokens with keys and values; an array for a file.
        salt: of the last request.
        slot: number of the sequence; -1 for a state.
        state: from llama.cpp; empty for a slot, and for a file that was not read.
        n_prompt: the number of tokens that were the last request's prompt.
        checkpoints: within the tokens, in order of length; none for a memory that can be cut anywhere.
        planned: lengths at which a prompt's prefill is to make checkpoints.
        is_running: a sequence is being computed in the slot; else it is parked.
        is_multi_turn: the conversation had more than one turn.
        is_shared: another prompt had the beginning, too.
        n_saved: the number of first tokens that have been written to the disk.
        last_used: number of the slot's last release ...
        copied_at: ... and of that for which a copy in host memory was considered.
    """

    tokens: MutableSequence[int] = field(default_factory=list)
    salt: Salt = NO_SALT
    slot: int = -1
    state: bytearray | memoryview = field(default_factory=bytearray)
    n_prompt: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    planned: set[int] = field(default_factory=set)
    is_running: bool = False
    is_multi_turn: bool = False
    is_shared: bool = False
    n_saved: int = 0
    last_used: int = 0
    copied_at: int = 0

    def begins(self, other: Prefix) -> bool:
        """Return whether another prefix begins with this one."""
        return self.salt == other.salt and self.tokens == other.tokens[: len(self.tokens)]

    def reach(self, length: int, *, cuts: bool) -> int:
        """Return to how many of its first `length` tokens a state can be cut: to all, or to a checkpoint within them.

        Args:
            cuts: a state can be cut anywhere.
        """
        if cuts or length == len(self.tokens):
            return length
        found = self.deepest(length)
        return found.length if found is not None else 0

    def deepest(self, length: int) -> Checkpoint | None:
        """Return the last checkpoint within the first `length` tokens."""
        return next((checkpoint for checkpoint in reversed(self.checkpoints) if checkpoint.length <= length), None)

    def cut(self, length: int) -> None:
        """Remove the tokens, and the checkpoints, after the first `length`."""
        del self.tokens[length:]
        self.n_saved = min(self.n_saved, length)
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.length <= length]


def longest(
    prefixes: Iterable[Prefix], prompt: Sequence[int], salt: Salt, reach: Callable[[Prefix, int], int] | None = None
) -> tuple[Prefix, int]:
    """Return the prefix of which a prompt can reuse most, and how many tokens; of equal ones the shortest prefix.

    Args:
        reach: returns how many of a number of first tokens of a prefix can be reused; by default, all.

    Returns:
        An empty prefix if there are none.
    """
    best, most = None, 0
    as_array: array[int] | None = None
    for prefix in prefixes:
        wanted = prompt
        if isinstance(prefix.tokens, array):
            wanted = as_array = as_array or array("i", prompt)
        length = common_prefix(prefix.tokens, wanted, most) if prefix.salt == salt else 0
        if length and reach is not None:
            length = reach(prefix, length)
        if best is None or length > most or (length == most and len(prefix.tokens) < len(best.tokens)):
            best, most = prefix, length
    return best or Prefix(), most


def common_prefix(cached: Sequence[int], prompt: Sequence[int], least: int = 1) -> int:
    """Return the length of the common prefix of two lists, or arrays; 0 if it is shorter than `least`."""
    same, different = max(least, 1), min(len(cached), len(prompt))
    if different < same or cached[same - 1] != prompt[same - 1] or cached[:same] != prompt[:same]:
        return 0
    if cached[same:different] == prompt[same:different]:
        return different
    while different - same > 1:  # bisection, because comparing slices runs in C
        middle = (same + different) // 2
        if cached[same:middle] == prompt[same:middle]:
            same = middle
        else:
            different = middle
    return same


def reusable(cached: Sequence[int], prompt: list[int]) -> int:
    """Return the number of first prompt tokens that need no prefill.

    The prompt's last token is always decoded again: the first answer token is sampled from its logits.
    """
    return min(common_prefix(cached, prompt), len(prompt) - 1)


def gap_after(cached: Sequence[int], prompt: list[int], shared: int, minimum: int) -> int:
    """Return how many cached tokens to drop at index shared, so that the cache continues as the prompt does.

    Such a gap appears when a conversation's oldest turns are truncated.

    Args:
        minimum: number of equal tokens after the gap that makes it worthwhile.

    Returns:
        The length of the gap; 0 if there is none.
    """
    following = prompt[shared : shared + minimum]
    if len(following) < minimum:
        return 0
    start = shared
    with suppress(ValueError):
        while True:
            start = cached.index(following[0], start + 1)
            if cached[start : start + minimum] == following:
                return start - shared
    return 0
