"""Which sequences decode or prefill in the next batch, and how many tokens each. Pure.

Sequences that decode go first. While some do, prefill beside them gets what is left of a small batch: that bounds
their inter-token latency, and the batch has the same width step after step, so that llama.cpp reuses its graph.
Of several that prefill, the oldest gets half of what there is, so that it comes to an end; the others come in the order
of what they still need, so that a short prompt is not held up behind a long one. Where half is too little, they take
turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.engine.core.metrics import PrefillRate

PIECE = 65
"""Tokens of a piece of a prompt beside others' tokens. llama.cpp computes the first of them together with the others,
and for 64 or more, ggml's flash attention has a kernel that is several times as fast as for fewer."""

_MIXED_SECONDS = 0.1  # a batch may take, where some decode and some prefill: their inter-token latency
_PAUSE_SECONDS = 0.25  # where that buys a whole piece, or happens a few times only ...
_SOON_SECONDS = 1.0  # ... because all that waits to be prefilled takes no longer than this
_DECODES = 8  # tokens waiting: one drawn, and maybe some behind it that a grammar forced


def mixed_tokens(rate: PrefillRate, n_waiting: int, worthwhile: int = 0) -> int:
    """Most tokens of a batch in which some decode and some prefill.

    What is prefilled soon is prefilled in few long steps, which costs less; a long prompt in many short ones.

    Args:
        n_waiting: tokens that are not in the KV cache yet, of all sequences.
        worthwhile: tokens that a batch should have, if that takes no longer than a pause may.
    """
    short, long, soon = map(rate.tokens_within, (_MIXED_SECONDS, _PAUSE_SECONDS, _SOON_SECONDS))
    if n_waiting <= soon:
        return long
    return max(short, worthwhile) if worthwhile <= long else short


def budget(waiting: Sequence[int], n_batch: int, n_mixed: int) -> int:
    """Most tokens of the next batch.

    Args:
        waiting: for every sequence, the oldest first, how many of its tokens are not in the KV cache yet.
        n_batch: most tokens of any batch.
        n_mixed: most tokens of a batch in which some decode and some prefill: what takes a short time on this machine.
    """
    decoding = sum(want for want in waiting if want <= _DECODES)
    return min(n_batch, max(n_mixed, decoding + PrefillRate.LEAST)) if decoding else n_batch


def schedule(waiting: Sequence[int], n_batch: int, n_mixed: int, turn: int = 0) -> list[int]:
    """Share a batch out; arguments as in budget().

    Args:
        turn: a number that grows from batch to batch.

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
    halves = len(prefilling) == len(waiting) or free >= 2 * PIECE
    if halves or turn % 2 == 0:
        for index in prefilling[:1]:
            give(index, (free + 1) // 2 if halves else free)
    for index in sorted(prefilling, key=waiting.__getitem__):
        give(index, free)
    return shares
