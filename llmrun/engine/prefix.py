"""Which cached tokens a prompt can reuse. Pure."""

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
