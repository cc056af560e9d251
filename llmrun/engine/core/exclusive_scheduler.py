"""Who may be in the next batch where not all may be in one: a context computes with one choice of adapters at a time.

Owns whose turn it is; must not know how a batch is shared out among those who are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from llmrun.engine.core.metrics import PrefillRate
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.llama.base import Context

_BATCHES = 4  # of a turn: changing adapters takes a quarter of a decode step of SmolLM2


class ExclusiveScheduler:
    """Groups of sequences take turns of a few batches: whoever waited longest is next.

    Args:
        context: is told of the adapters.
        exact: each sequence is alone; else those with the same adapters are together.
    """

    def __init__(self, context: Context, *, exact: bool) -> None:
        self._context, self._exact = context, exact
        self._batch = 0
        self._last_batches: dict[Hashable, int] = {}
        self._group: Hashable = None  # whose turn it is ...
        self._left = 0  # ... for so many batches more

    def next(
        self, running: list[Sequence], active: list[Sequence], n_mixed: Callable[[int], int]
    ) -> tuple[list[Sequence], int]:
        """Who is in the next batch, and most tokens of it; the context has their adapters then.

        Args:
            running: who may be in the batch.
            active: all that are being answered.
            n_mixed: how many tokens a batch may have for which somebody waits who decodes, if so many are waiting.
        """
        groups: dict[Hashable, list[Sequence]] = {}
        for sequence in running:
            group = sequence.number if self._exact else sequence.extras.adapters
            groups.setdefault(group, []).append(sequence)
        self._last_batches = {group: self._last_batches.get(group, self._batch) for group in groups}
        if self._group not in groups or not self._left:
            self._group = min(groups, key=self._last_batches.__getitem__)
            self._left = 1 if self._exact else _BATCHES
        self._batch, self._left = self._batch + 1, self._left - 1
        self._last_batches[self._group] = self._batch
        members = groups[self._group]
        self._context.adapt(members[0].extras.adapters)
        return members, self._most(members, active, n_mixed)

    def _most(self, members: list[Sequence], active: list[Sequence], n_mixed: Callable[[int], int]) -> int:
        """A whole batch, but where others who decode wait for it; exact answers need batches of one size."""
        n_batch = self._context.n_batch
        if self._exact or not any(each.n_completion for each in active if each not in members):
            return n_batch
        waiting = sum(each.n_waiting for each in members)
        return min(n_batch, max(n_mixed(waiting), len(members), PrefillRate.LEAST))
