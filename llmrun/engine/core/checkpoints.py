"""Checkpoints: copies of the part of a sequence's memory that can't be cut, kept in host memory.

Keys and values can be cut to any prefix. A recurrent state can't, nor a sliding window that has passed: without a
checkpoint inside the common prefix, such a model computes a changed prompt from its beginning. Owns where checkpoints
are made and which ones stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from llmrun.engine.core.policy import POLICY, Policy
from llmrun.engine.core.prefix import Checkpoint, Prefix
from llmrun.engine.llama.base import Context
from llmrun.errors import LlmrunError

_TAIL = 64  # tokens in which a chat template ends the last turn and begins the answer


class Checkpoints:
    """Makes the checkpoints of slots, and keeps the most useful ones.

    Args:
        context: with the memory.
        prefixes: those with the checkpoints; copies in host memory have theirs beside.
    """

    def __init__(self, context: Context, prefixes: Sequence[Prefix], policy: Policy = POLICY) -> None:
        self._context, self._prefixes, self._policy = context, prefixes, policy
        self._last_bytes = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all states; one that several prefixes have counts once."""
        return bytes_of(prefix.checkpoints for prefix in self._prefixes)

    def put(self, prefix: Prefix, checkpoints: Iterable[Checkpoint]) -> None:
        """Replace a prefix's checkpoints, and remove the least useful ones of all beyond the limit."""
        prefix.checkpoints = list(checkpoints)
        thin_out([each.checkpoints for each in self._prefixes], self._policy.checkpoint_bytes)

    def plan(self, prefix: Prefix, lengths: Iterable[int], start: int) -> None:
        """Plan checkpoints of a prompt instead of those of the slot's last one.

        Args:
            lengths: where another prompt differed, or the next turn may differ.
            start: tokens that the slot holds.
        """
        if self._context.has_checkpoints:
            prefix.planned = {length for length in lengths if length >= start + self._policy.min_gap}

    def record(self, prefix: Prefix) -> None:
        """Make a checkpoint if one is planned at this length, or enough of the prompt came after the last."""
        if not self._context.has_checkpoints:
            return
        length = len(prefix.tokens)
        is_planned = length in prefix.planned
        if not is_planned:
            last = prefix.deepest(length) if length < prefix.n_prompt else None
            start = last.length if last is not None else 0
            interval = self._context.n_batch * (1 + self._last_bytes // self._policy.checkpoint_batch_bytes)
            if length >= prefix.n_prompt or length - start < interval:
                return
        prefix.planned.discard(length)
        with suppress(LlmrunError, MemoryError):
            state = self._context.checkpoint(prefix.slot)
            self._last_bytes = len(state)
            if state:
                self.put(prefix, [*prefix.checkpoints, Checkpoint(length, state, is_planned)])

    def go_back(self, prefix: Prefix, length: int) -> int:
        """Cut a slot's memory to its deepest checkpoint within some tokens, else to none; return the number left."""
        found = prefix.deepest(length)
        if found is not None and self._context.go_back(prefix.slot, found.state, found.length):
            return found.length
        self._context.forget(prefix.slot, 0)
        return 0


def bytes_of(lists: Iterable[list[Checkpoint]]) -> int:
    """Return the bytes of all states; one that several lists have counts once."""
    return sum({id(checkpoint.state): len(checkpoint.state) for kept in lists for checkpoint in kept}.values())


def thin_out(lists: list[list[Checkpoint]], limit: int) -> None:
    """Remove checkpoints until their states take at most `limit` bytes.

    The one whose absence costs the fewest tokens to compute goes first, but planned ones after all others, and the last
    one of a list after those. One that several lists have is removed from all of them, and as useful as where it is
    most useful.
    """
    while bytes_of(lists) > limit:
        costs: dict[int, tuple[bool, bool, int]] = {}
        for kept in lists:
            for index, checkpoint in enumerate(kept):
                n_saved = checkpoint.length - (kept[index - 1].length if index else 0)
                cost = index == len(kept) - 1, checkpoint.is_planned, n_saved
                costs[id(checkpoint.state)] = max(cost, costs.get(id(checkpoint.state), cost))
        least = min(costs, key=costs.__getitem__)
        for kept in lists:
            kept[:] = [checkpoint for checkpoint in kept if id(checkpoint.state) != least]


def most_useful(checkpoints: list[Checkpoint], most: int) -> list[Checkpoint]:
    """Return a few checkpoints of a sequence, for the disk."""
    kept = list(checkpoints)
    thin_out([kept], most * max((len(checkpoint.state) for checkpoint in kept), default=0))
    return kept


def first_end(prompt: list[int], is_end: Callable[[int], bool]) -> int:
    """Return the length of a prompt's first turn, as a rule the system prompt with the tools; 0 without its end."""
    return next((length for length, token in enumerate(prompt, 1) if token >= 0 and is_end(token)), 0)


def turn_end(prompt: Sequence[int], is_end: Callable[[int], bool]) -> int:
    """Return the length of a prompt without what begins the answer.

    The next prompt may have the answer in another form, for example without its reasoning, and differs from there on.
    A chat template without an end-of-turn token has the answer begin at the prompt's end.
    """
    for length in range(len(prompt) - 1, max(0, len(prompt) - _TAIL), -1):
        token = prompt[length - 1]
        if token >= 0 and is_end(token):
            return length
    return len(prompt) - 1
