"""The choice of the next sequence to admit. Must not know batches."""

from __future__ import annotations

from collections.abc import Sequence as List
from operator import itemgetter

from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.core.slots import Slots
from llmrun.engine.llama.base import Context

CANDIDATES = 8
"""Among the first N waiting sequences, the one with the longest cached prefix is admitted ..."""
MAX_PASSED = 8
"""... unless the oldest has been passed over this often."""
_MIN_PENDING_PREFIX = 64  # tokens; a shorter shared prefix is prefilled twice rather than waited for


def next_admission(
    waiting: List[Sequence], active: List[Sequence], slots: Slots, context: Context, n_candidates: int
) -> tuple[Sequence | None, bool]:
    """Return the next sequence to admit, and whether admission pauses until a sequence finishes."""
    ready: list[tuple[int, Sequence]] = []
    free_slots = context.n_seq_max - len(active)
    for sequence in waiting:
        if not free_slots or len(ready) == n_candidates:
            break
        cached = slots.cached_prefix(sequence.tokens, sequence.salt)
        sequence.awaits_prefix = context.shares and _is_prefix_pending(sequence, active, slots, cached)
        if sequence.awaits_prefix:
            free_slots -= 1  # reserved for it
        else:
            ready.append((cached, sequence))
    if not ready:
        return None, False
    chosen = ready[0][1]
    if chosen.passed < MAX_PASSED:
        chosen = max(ready, key=itemgetter(0))[1]
    pending = [each.n_waiting for each in active]
    if active and not slots.admits(chosen.tokens, chosen.salt, sum(pending)):
        # While others still prefill, their prompts may turn out to share its prefix.
        return None, sum(pending) == len(pending)
    for _, sequence in ready:
        sequence.passed += sequence.number < chosen.number
    return chosen, False


def _is_prefix_pending(sequence: Sequence, active: List[Sequence], slots: Slots, cached: int) -> bool:
    """Return whether a running prefill will soon make much more of the prompt reusable than is cached now."""
    remaining = len(sequence.tokens) - cached - 1
    minimum = cached + (1 if sequence.awaits_prefix else max(1, min(_MIN_PENDING_PREFIX, remaining)))
    for each in active:
        if each.n_waiting > 1 and each.salt == sequence.salt:
            shared = common_prefix(each.tokens, sequence.tokens)
            if shared >= minimum and shared > each.n_cached:
                slots.checkpoints.plan_another(each.slot, shared)
                return True
    return False
