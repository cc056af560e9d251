"""Parked prefixes outside of the KV cache, in plain memory.

Every row of a batch looks at every used cell of a unified cache, if only to pass it over: parked conversations make
the answers of all others slower (16 of 300 tokens each by half, with 8 that run). Copying them out and back takes as
long as a few such steps. Where each sequence has a stream of its own, there are no more streams than sequences.

Owns what is stowed, and in which order it goes; must not know the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmrun.engine.core.prefix import common_prefix


class HostPrefix(NamedTuple):
    """What a slot held.

    Attributes:
        tokens: whose keys and values are in the state.
        salt: for which they were computed.
        n_prompt: how many of them were the last request's prompt.
        went_on: it was a conversation of more than one turn.
    """

    tokens: list[int]
    state: bytearray
    salt: str
    n_prompt: int
    went_on: bool


class HostPrefixCache:
    """Prefixes, the one stowed first at the beginning.

    Attributes:
        prefixes: all of them.
        n_tokens: of all together.
    """

    def __init__(self, prefixes: Sequence[HostPrefix] = ()) -> None:
        self.prefixes = list(prefixes)
        self.n_tokens = sum(len(each.tokens) for each in prefixes)

    def put(self, prefix: HostPrefix) -> None:
        """One more."""
        self.prefixes.append(prefix)
        self.n_tokens += len(prefix.tokens)

    def longest(self, tokens: list[int], salt: str) -> tuple[HostPrefix | None, int]:
        """The one that knows most of a prompt, and how much; None where none knows anything."""
        known = [(common_prefix(each.tokens, tokens) if each.salt == salt else 0, each) for each in self.prefixes]
        length, best = max(known, key=lambda pair: pair[0], default=(0, None))
        return (best, length) if length else (None, 0)

    def take(self, prefix: HostPrefix) -> None:
        """That one goes back into the cache."""
        self.prefixes = [each for each in self.prefixes if each is not prefix]
        self.n_tokens -= len(prefix.tokens)

    def take_oldest(self) -> HostPrefix:
        """The one that was stowed first."""
        prefix = self.prefixes[0]
        self.take(prefix)
        return prefix
