"""Parked prefixes in host memory, outside of the KV cache.

In a unified KV cache on the processor, every row of a batch reads every used cell, if only to mask it: parked
conversations slow all answers down (16 of 300 tokens each slow 8 answers down by half). If each sequence has a stream
of its own, there are no more streams than sequences, and a new conversation takes the place of an old one.

Owns the prefixes and their order; must not know the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmrun.engine.core.checkpoints import Checkpoint
from llmrun.engine.core.prefix import common_prefix


class HostPrefix(NamedTuple):
    """A copy of a slot."""

    tokens: list[int]  # ids of the tokens with keys and values in the state
    state: bytearray  # from llama.cpp
    salt: str  # of the request that they were computed for
    n_prompt: int  # the number of them that were the last request's prompt
    is_multi_turn: bool  # the conversation had more than one turn
    checkpoints: list[Checkpoint]  # within the tokens


class HostPrefixCache:
    """A list of prefixes, oldest first."""

    def __init__(self, prefixes: Sequence[HostPrefix] = ()) -> None:
        self.prefixes = list(prefixes)
        self.n_tokens = sum(len(each.tokens) for each in prefixes)

    def put(self, prefix: HostPrefix) -> None:
        """Add an entry, and remove the entries that are its beginning."""
        for each in self.prefixes:
            if each.salt == prefix.salt and common_prefix(each.tokens, prefix.tokens) == len(each.tokens):
                self.remove(each)
        self.prefixes.append(prefix)
        self.n_tokens += len(prefix.tokens)

    def longest(self, tokens: list[int], salt: str) -> tuple[HostPrefix | None, int]:
        """Return the entry that shares the longest prefix with a prompt, and the shared length; None if none does."""
        shared = [(common_prefix(each.tokens, tokens) if each.salt == salt else 0, each) for each in self.prefixes]
        length, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        return (best, length) if length else (None, 0)

    def remove(self, prefix: HostPrefix) -> None:
        self.prefixes = [each for each in self.prefixes if each is not prefix]
        self.n_tokens -= len(prefix.tokens)

    def pop_oldest(self) -> HostPrefix:
        prefix = self.prefixes[0]
        self.remove(prefix)
        return prefix
