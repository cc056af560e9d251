"""Which sequences decode or prefill in the next batch, and how many tokens each. Pure.

Sequences that decode (one token waiting) go first, so that a long prefill beside them fills only what is left
of the batch and never holds up their inter-token latency by more than one batch.
"""

from __future__ import annotations

from collections.abc import Sequence


def schedule(waiting: Sequence[int], n_batch: int) -> list[int]:
    """Share a batch out.

    Args:
        waiting: for every sequence, how many of its tokens are not in the KV cache yet.
        n_batch: most tokens of one batch.

    Returns:
        For every sequence, how many of its waiting tokens go into the next batch, in its order.
    """
    if len(waiting) == 1:  # one user, whose every token comes through here
        return [min(waiting[0], n_batch)]
    shares = [0] * len(waiting)
    free = n_batch
    for index in sorted(range(len(waiting)), key=lambda i: waiting[i] > 1):
        shares[index] = min(waiting[index], free)
        free -= shares[index]
    return shares
