"""The scheduler of sequences that can't share a batch: a context computes with one choice of adapters at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from llmrun.engine.core.metrics import PrefillRate
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.llama.base import Context

_BATCHES = 4  # of a turn: changing adapters takes a quarter of a decode step of SmolLM2


class ExclusiveScheduler:
    """A round robin of the sequences with the same adapters: the group that waited longest gets the next few batches.

    Args:
        context: its adapters are set to those of the group.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batch = 0
        self._last_batches: dict[Hashable, int] = {}
        self._group: Hashable = None  # the one whose turn it is ...
        self._remaining = 0  # ... and the batches left of that turn

    def next(
        self, running: list[Sequence], active: list[Sequence], n_mixed: Callable[[list[int]], int]
    ) -> tuple[list[Sequence], int]:
        """Return the sequences of the next batch and its maximum size, and set the context's adapters.

        Args:
            n_mixed: returns the maximum size of a batch that delays decoding sequences, given the waiting tokens.
        """
        groups: dict[Hashable, list[Sequence]] = {}
        for sequence in running:
            groups.setdefault(sequence.adapters, []).append(sequence)
        self._last_batches = {group: self._last_batches.get(group, self._batch) for group in groups}
        if self._group not in groups or not self._remaining:
            self._group = min(groups, key=self._last_batches.__getitem__)
            self._remaining = _BATCHES
        self._batch, self._remaining = self._batch + 1, self._remaining - 1
        self._last_batches[self._group] = self._batch
        members = groups[self._group]
        self._context.adapt(members[0].adapters)
        return members, self._max_size(members, active, n_mixed)

    def _max_size(self, members: list[Sequence], active: list[Sequence], n_mixed: Callable[[list[int]], int]) -> int:
        """Return n_batch, or less if other sequences are decoding."""
        n_batch = self._context.n_batch
        decoding = [each for each in active if each.n_completion and each not in members]
        if not decoding:
            return n_batch
        waiting = [each.n_waiting for each in (*members, *decoding)]
        return min(n_batch, max(n_mixed(waiting), len(members), PrefillRate.MIN_TOKENS))
