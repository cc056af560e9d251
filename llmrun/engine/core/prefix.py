"""Which cached tokens a prompt can reuse, from the beginning on or after a gap. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """How many first tokens are the same in both."""
    limit = min(len(cached), len(prompt))
    if cached[:limit] == prompt[:limit]:
        return limit
    return next((i for i in range(limit) if cached[i] != prompt[i]), limit)


def reusable(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """How many first tokens of the prompt need no prefill.

    The prompt's last token is always computed again: its logits are what the first answer token is drawn from.
    """
    return min(common_prefix(cached, prompt), len(prompt) - 1)


def gap_after(cached: Sequence[int], prompt: Sequence[int], shared: int, least: int) -> int:
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
    for start in range(shared + 1, len(cached) - least + 1):
        if cached[start] == wanted[0] and cached[start : start + least] == wanted:
            return start - shared
    return 0
