"""When the oldest turns leave a prompt, what the KV cache holds behind them is moved, not computed again."""

from __future__ import annotations

import random

import pytest
from support.conversation import Conversation
from support.fake_backend import hashed, tokens_of

from llmrun.engine.core.prefix import common_prefix, gap_after
from llmrun.engine.core.sequence import Extras

SYSTEM = "be kind. "
FIRST = "a first turn that is dropped. "
SECOND = "a second turn that stays where it is, more or less. "


def test_what_stands_behind_dropped_turns_is_not_computed_again() -> None:
    talk = Conversation(hashed, n_ctx=400, n_batch=400)
    talk.answer(SYSTEM + FIRST + SECOND, most=5)
    answer = talk.text()
    talk.backend.calls.clear()
    talk.answer(SYSTEM + SECOND + answer + "?", extras=Extras(moves=True), most=2)
    assert talk.started().reused_tokens == len(SYSTEM + SECOND) + 4
    assert talk.computed() == 2 + 1
    assert talk.backend.cached() == tokens_of(SYSTEM + SECOND + answer + "?" + talk.text())[:-1]


@pytest.mark.parametrize(("moves", "cuts"), [(False, True), (True, False)])
def test_else_it_is(moves: bool, cuts: bool) -> None:
    talk = Conversation(hashed, n_ctx=400, n_batch=400, cuts=cuts)
    talk.answer(SYSTEM + FIRST + SECOND, most=5)
    prompt = SYSTEM + SECOND + "?"
    talk.answer(prompt, extras=Extras(moves=moves), most=2)
    assert talk.started().reused_tokens == (len(SYSTEM + "a ") if cuts else 0)
    assert talk.backend.cached() == tokens_of(prompt + talk.text())[:-1]


@pytest.mark.parametrize("seed", range(200))
def test_a_gap_is_what_has_to_go(seed: int) -> None:
    rng = random.Random(seed)
    cached = [rng.randrange(4) for _ in range(60)]
    start, length = rng.randrange(40), rng.randrange(1, 10)
    prompt = cached[:start] + cached[start + length :] + [9]
    shared = common_prefix(cached, prompt)
    gap = gap_after(cached, prompt, shared, 6)
    after = cached[:shared] + cached[shared + gap :]
    assert common_prefix(after, prompt) >= shared
    if gap:
        assert common_prefix(after, prompt) >= shared + 6
    elif len(prompt) - shared > 6 and shared == start:
        assert cached[start + length :][:6] != prompt[start : start + 6] or len(cached) - start - length < 6


def test_no_gap() -> None:
    assert gap_after([1, 2, 3], [1, 2, 3, 4], 3, 2) == 0
    assert gap_after([1, 2, 3, 4, 5], [1, 9, 9], 1, 2) == 0
    assert gap_after([], [1], 0, 1) == 0
    assert gap_after([1, 2, 3, 4, 5], [1, 4, 5, 6], 1, 2) == 2
