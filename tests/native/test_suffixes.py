"""The suffix automaton from Python, against a naive twin; native/test_suffixes.cpp does it a million times."""

from __future__ import annotations

import random

import pytest

from llmrun._native import SuffixAutomaton


def longest_match(tokens: list[int]) -> int:
    """How many last tokens occur earlier, too."""
    for length in range(len(tokens) - 1, 0, -1):
        end = tokens[-length:]
        if any(tokens[start : start + length] == end for start in range(len(tokens) - length)):
            return length
    return 0


def followers(tokens: list[int], length: int, draft: list[int]) -> list[list[int]]:
    """What followed each earlier occurrence of so many last tokens, and may go on in the draft."""
    end, whole = tokens[-length:], tokens + draft
    starts = [start for start in range(len(tokens) - length) if tokens[start : start + length] == end]
    return [whole[start + length : start + length + len(draft)] for start in starts]


@pytest.mark.parametrize("seed", range(20))
def test_any_operations(seed: int) -> None:
    draws = random.Random(seed)
    automaton = SuffixAutomaton()
    tokens: list[int] = []
    for _ in range(100):
        added = [draws.randrange(1 + seed % 5) for _ in range(draws.randrange(4))]
        automaton.extend(added)
        tokens += added
        if draws.random() < 0.2:
            del tokens[max(0, len(tokens) - draws.randrange(6)) :]
            automaton.rewind(len(tokens))
        assert len(automaton) == len(tokens)
        draft, length = automaton.draft(most := draws.randrange(10))
        assert length == longest_match(tokens)
        assert len(draft) == (most if length else 0)
        assert not draft or draft in followers(tokens, length, draft)


def test_to_rewind_to_a_longer_sequence_changes_nothing() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 1])
    automaton.rewind(5)
    assert automaton.draft(1) == ([2], 1)


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], [0.5], ["a"]])
def test_what_is_not_a_token(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    with pytest.raises(TypeError):
        automaton.extend(tokens)
    assert len(automaton) == 0
