"""Which sequences decode or prefill in the next batch, and how many tokens each. Pure.

Sequences that decode go first. While some do, prefill beside them gets what is left of a small batch: that bounds
their inter-token latency, and the batch has the same width step after step, so that llama.cpp reuses its graph.
Of several that prefill, the oldest gets half of what there is, so that it comes to an end; the others come in the order
of what they still need, so that a short prompt is not held up behind a long one.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.engine.core.metrics import PrefillRate

_DECODES = 8  # tokens waiting: one drawn, and maybe some behind it that a grammar forced


def budget(waiting: Sequence[int], n_batch: int, n_mixed: int) -> int:
    """Most tokens of the next batch.

    Args:
        waiting: for every sequence, the oldest first, how many of its tokens are not in the KV cache yet.
        n_batch: most tokens of any batch.
        n_mixed: most tokens of a batch in which some decode and some prefill: what takes a short time on this machine.
    """
    decoding = sum(want for want in waiting if want <= _DECODES)
    return min(n_batch, max(n_mixed, decoding + PrefillRate.LEAST)) if decoding else n_batch


def schedule(waiting: Sequence[int], n_batch: int, n_mixed: int) -> list[int]:
    """Share a batch out; arguments as in budget().

    Returns:
        For every sequence, how many of its waiting tokens go into the next batch, in its order.
    """
    if len(waiting) == 1:  # one user, whose every token comes through here
        return [min(waiting[0], n_batch)]
    shares = [0] * len(waiting)
    free = budget(waiting, n_batch, n_mixed)

    def give(index: int, most: int) -> None:
        nonlocal free
        more = min(waiting[index] - shares[index], most, free)
        shares[index] += more
        free -= more

    prefilling = [index for index, want in enumerate(waiting) if want > _DECODES]
    for index, want in enumerate(waiting):
        if want <= _DECODES:
            give(index, free)
    for index in prefilling[:1]:
        give(index, (free + 1) // 2)
    for index in sorted(prefilling, key=waiting.__getitem__):
        give(index, free)
    return shares
