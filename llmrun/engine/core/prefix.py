"""Which cached tokens a prompt can reuse, from the beginning on or after a gap. Pure."""

from __future__ import annotations

from contextlib import suppress


def common_prefix(cached: list[int], prompt: list[int]) -> int:
    """How many first tokens are the same in both."""
    if not cached or not prompt or cached[0] != prompt[0]:
        return 0
    same, different = 1, min(len(cached), len(prompt))
    if cached[:different] == prompt[:different]:
        return different
    while different - same > 1:  # slices are compared by C, as far as they are the same
        middle = (same + different) // 2
        if cached[same:middle] == prompt[same:middle]:
            same = middle
        else:
            different = middle
    return same


def reusable(cached: list[int], prompt: list[int]) -> int:
    """How many first tokens of the prompt need no prefill.

    The prompt's last token is always computed again: its logits are what the first answer token is drawn from.
    """
    return min(common_prefix(cached, prompt), len(prompt) - 1)


def gap_after(cached: list[int], prompt: list[int], shared: int, least: int) -> int:
    """How many cached tokens, from index shared on, have to go so that the prompt goes on as the cache does.

    That is what a conversation looks like after its oldest turns were dropped.

    Args:
        cached: token ids in the KV cache.
        prompt: token ids of the prompt.
        shared: how many first tokens are the same in both.
        least: fewer equal tokens after the gap are not worth it.

    Returns:
        The length of the gap; 0 if there is none.
    """
    wanted = prompt[shared : shared + least]
    if len(wanted) < least:
        return 0
    start = shared
    with suppress(ValueError):
        while True:
            start = cached.index(wanted[0], start + 1)
            if cached[start : start + least] == wanted:
                return start - shared
    return 0
