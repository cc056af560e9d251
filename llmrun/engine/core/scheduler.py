"""The scheduling policies: which waiting sequence is admitted, whose turn it is, and how many tokens each one gets.

In a batch, decoding sequences come first. Beside them, prefill gets the rest of a small batch: that bounds their
inter-token latency, and batches of one width let llama.cpp reuse its graph. Few decoding sequences wait longer for
short prompts, which saves steps. The oldest prefill gets half of that rest, so that it finishes; the others follow,
shortest first, so that a short prompt does not wait for a long one. When half is too little, they take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import itemgetter

from llmrun.engine.core.metrics import PrefillRate
from llmrun.engine.core.policy import POLICY, Policy
from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.core.slots import Slots
from llmrun.engine.llama.base import Context


def next_admission(
    waiting: list[Sequence], active: list[Sequence], slots: Slots, context: Context, policy: Policy
) -> tuple[Sequence | None, bool]:
    """Return the next sequence to admit, and whether admission pauses until a sequence finishes.

    Among the first waiting ones, it is the one with the longest cached prefix, unless the oldest was passed too often.
    """
    ready: list[tuple[int, Sequence]] = []
    free_slots = context.n_seq_max - len(active)
    for sequence in waiting:
        if not free_slots or len(ready) == policy.candidates:
            break
        cached = slots.cached_prefix(sequence.tokens, sequence.salt)
        sequence.awaits_prefix = context.can_copy and _is_prefix_pending(sequence, active, slots, cached, policy)
        if sequence.awaits_prefix:
            free_slots -= 1  # reserved for it
        else:
            ready.append((cached, sequence))
    if not ready:
        return None, False
    chosen = ready[0][1]
    if chosen.passed < policy.candidates:
        chosen = max(ready, key=itemgetter(0))[1]
    pending = [running.n_waiting for running in active]
    if active and not slots.admits(chosen.tokens, chosen.salt, sum(pending)):
        # While others still prefill, their prompts may turn out to share its prefix.
        return None, sum(pending) == len(pending)
    if active and not slots.prepare(chosen.tokens, chosen.salt):
        return None, False
    for _, sequence in ready:
        sequence.passed += sequence.number < chosen.number
    return chosen, False


def _is_prefix_pending(sequence: Sequence, active: list[Sequence], slots: Slots, cached: int, policy: Policy) -> bool:
    """Return whether a running prefill will soon make much more of the prompt reusable than is cached now."""
    remaining = len(sequence.tokens) - cached - 1
    minimum = cached + (1 if sequence.awaits_prefix else max(1, min(policy.min_reused, remaining)))
    for running in active:
        if running.n_waiting > 1 and running.salt == sequence.salt:
            shared = common_prefix(running.tokens, sequence.tokens)
            if shared >= minimum and shared > running.n_cached:
                slots.plan_checkpoint(running.slot, shared)
                return True
    return False


class ExclusiveScheduler:
    """A round robin of the sequences with the same adapters: the group that waited longest gets the next few batches.

    Args:
        context: its adapters are set to those of the group.
    """

    def __init__(self, context: Context, policy: Policy = POLICY) -> None:
        self._context, self._policy = context, policy
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
            self._remaining = self._policy.change_steps
        self._batch, self._remaining = self._batch + 1, self._remaining - 1
        self._last_batches[self._group] = self._batch
        members = groups[self._group]
        self._context.adapt(members[0].adapters)
        return members, self._max_size(members, active, n_mixed)

    def _max_size(self, members: list[Sequence], active: list[Sequence], n_mixed: Callable[[list[int]], int]) -> int:
        """Return n_batch, or less if other sequences are decoding."""
        n_batch = self._context.n_batch
        decoding = [sequence for sequence in active if sequence.n_completion and sequence not in members]
        if not decoding:
            return n_batch
        waiting = [sequence.n_waiting for sequence in (*members, *decoding)]
        return min(n_batch, max(n_mixed(waiting), len(members), self._policy.few_tokens))


# ---- a batch -----------------------------------------------------------------------------------------------


def mixed_tokens(
    rate: PrefillRate, waiting: list[int], worthwhile: int = 0, *, on_device: bool = False, policy: Policy = POLICY
) -> int:
    """Return the maximum size of a batch in which some sequences decode and some prefill.

    Little prefill is done in one long step, which costs less; a long prompt in many short ones. Short prompts are done
    in long steps as well while few sequences decode: few wait, and most of a step is the reading of the weights.

    Args:
        waiting: as in budget().
        worthwhile: preferred size, if a batch of that size takes no longer than a pause may.
        on_device: steps are as short as a device's, and pauses are measured by them.
    """
    share = 1.0
    if on_device and rate.step_seconds:
        share = min(1.0, policy.mixed_steps * rate.step_seconds / policy.mixed_seconds)
    short, long = (rate.tokens_within(share * seconds) for seconds in (policy.mixed_seconds, policy.pause_seconds))
    n_decoding = sum(n_waiting <= policy.few_tokens for n_waiting in waiting)
    are_short = max(waiting, default=0) <= rate.tokens_within(policy.short_seconds)
    if sum(waiting) <= long or (are_short and n_decoding <= policy.few_decoding):
        return long
    return max(short, worthwhile) if worthwhile <= long else short


def budget(waiting: list[int], n_batch: int, n_mixed: int, policy: Policy = POLICY) -> int:
    """Return the maximum size of the next batch.

    Args:
        waiting: for every sequence, oldest first, the number of its tokens that are not in the KV cache yet.
    """
    decoding = sum(n_waiting for n_waiting in waiting if n_waiting <= policy.few_tokens)
    return min(n_batch, max(n_mixed, decoding + policy.few_tokens)) if decoding else n_batch


def schedule(waiting: list[int], n_batch: int, n_mixed: int, turn: int = 0, policy: Policy = POLICY) -> list[int]:
    """Share a batch out; arguments as in budget().

    Returns:
        For every sequence, the number of its waiting tokens in the next batch.
    """
    if len(waiting) == 1:  # a shortcut for a single user
        return [min(waiting[0], n_batch)]
    shares = [0] * len(waiting)
    free = budget(waiting, n_batch, n_mixed, policy)

    def assign(index: int, limit: int) -> None:
        nonlocal free
        more = min(waiting[index] - shares[index], limit, free)
        shares[index] += more
        free -= more

    prefilling = [index for index, n_waiting in enumerate(waiting) if n_waiting > policy.few_tokens]
    for index, n_waiting in enumerate(waiting):
        if n_waiting <= policy.few_tokens:
            assign(index, free)
    can_halve = len(prefilling) == len(waiting) or free >= 2 * policy.piece
    if can_halve or turn % 2 == 0:
        for index in prefilling[:1]:
            assign(index, (free + 1) // 2 if can_halve else free)
    for index in sorted(prefilling, key=waiting.__getitem__):
        assign(index, free)
    return shares


def level(shares: list[int], waiting: list[int], policy: Policy = POLICY) -> list[int]:
    """Reduce the passes over the weights of a batch, where each sequence has KV cells of its own.

    llama.cpp computes equally many tokens of each sequence at once, then the rest of the longer ones: for prompts of
    38, 39 and 41 tokens it runs through the model three times before any of them has its first token. So shares are
    cut down to slightly smaller ones. Beside the last piece of a prompt, the next prompt does not begin with a short
    piece.
    """
    longest, floor = max(shares, default=0), 1
    begins_short = [share < min(policy.piece, n, longest) for share, n in zip(shares, waiting, strict=True)]
    levelled = [0 if is_short else share for share, is_short in zip(shares, begins_short, strict=True)]
    for index in sorted(range(len(levelled)), key=levelled.__getitem__):
        if floor > 1 and levelled[index] <= floor + max(policy.level_tokens, floor // policy.level_part):
            levelled[index] = floor
        else:
            floor = levelled[index]
    return levelled
