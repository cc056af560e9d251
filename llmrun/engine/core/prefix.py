"""The part of a KV cache that a prompt can reuse, from its beginning or after a gap. Pure."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import NamedTuple, TypeVar

_Tokens = TypeVar("_Tokens", list[int], "array[int]")


class Salt(NamedTuple):
    """The part of a prefix's identity beside its tokens: only requests with an equal salt reuse it.

    Attributes:
        owner: see AnswerRequest.
        private: the client's own salt, and adapters other than the default ones. A prefix with any is not saved to
            disk, since no later request may have the same.
    """

    owner: str = ""
    private: str = ""


NO_SALT = Salt()


def common_prefix(cached: _Tokens, prompt: _Tokens) -> int:
    """Return the length of the common prefix."""
    if not cached or not prompt or cached[0] != prompt[0]:
        return 0
    same, different = 1, min(len(cached), len(prompt))
    if cached[:different] == prompt[:different]:
        return different
    while different - same > 1:  # bisection, because comparing slices runs in C
        middle = (same + different) // 2
        if cached[same:middle] == prompt[same:middle]:
            same = middle
        else:
            different = middle
    return same


def reusable(cached: list[int], prompt: list[int]) -> int:
    """Return the number of first prompt tokens that need no prefill.

    The prompt's last token is always decoded again: the first answer token is sampled from its logits.
    """
    return min(common_prefix(cached, prompt), len(prompt) - 1)


def gap_after(cached: list[int], prompt: list[int], shared: int, minimum: int) -> int:
    """Return how many cached tokens to drop at index shared, so that the cache continues as the prompt does.

    Such a gap appears when a conversation's oldest turns are truncated.

    Args:
        minimum: number of equal tokens after the gap that makes it worthwhile.

    Returns:
        The length of the gap; 0 if there is none.
    """
    following = prompt[shared : shared + minimum]
    if len(following) < minimum:
        return 0
    start = shared
    with suppress(ValueError):
        while True:
            start = cached.index(following[0], start + 1)
            if cached[start : start + minimum] == following:
                return start - shared
    return 0
