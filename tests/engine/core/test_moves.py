"""After truncation of the oldest turns, the KV cache of later turns is moved, not computed again."""

from __future__ import annotations

import json
import random

import pytest
from support.conversation import Conversation
from support.fake_context import hashed, tokens_of
from support.seeds import for_seeds

from llmrun.engine.core.prefix import common_prefix, gap_after

SYSTEM = "be kind. "
FIRST = "a first turn that is dropped. "
SECOND = "a second turn that stays where it is, more or less. "


def test_what_stands_after_dropped_turns_is_not_computed_again() -> None:
    talk = Conversation(hashed, n_ctx=400, n_batch=400)
    talk.answer(SYSTEM + FIRST + SECOND, most=5)
    answer = talk.text()
    talk.context.calls.clear()
    talk.answer(SYSTEM + SECOND + answer + "?", moves=True, most=2)
    assert talk.started().reused_tokens == len(SYSTEM + SECOND) + 4
    assert talk.computed() == 2 + 1
    assert talk.context.cached() == tokens_of(SYSTEM + SECOND + answer + "?" + talk.text())[:-1]


def test_checkpoints_after_dropped_turns_are_of_other_tokens() -> None:
    """As with a sliding window, whose cells may be moved as long as none has passed."""
    talk = Conversation(hashed, n_ctx=400, n_batch=16, has_checkpoints=True)
    talk.answer(SYSTEM + FIRST + SECOND, most=5)
    talk.answer(SYSTEM + SECOND + talk.text() + "?", moves=True, most=2)
    kept = talk.engine._slots.slots[0].checkpoints
    assert all(json.loads(each.state) == talk.context.cached()[: each.length] for each in kept)


@pytest.mark.parametrize(("moves", "cuts"), [(False, True), (True, False)])
def test_else_it_is(moves: bool, cuts: bool) -> None:
    talk = Conversation(hashed, n_ctx=400, n_batch=400, cuts=cuts)
    talk.answer(SYSTEM + FIRST + SECOND, most=5)
    prompt = SYSTEM + SECOND + "?"
    talk.answer(prompt, moves=moves, most=2)
    assert talk.started().reused_tokens == (len(SYSTEM + "a ") if cuts else 0)
    assert talk.context.cached() == tokens_of(prompt + talk.text())[:-1]


def test_reasoning_that_are_gone_leave_no_gap_to_close() -> None:
    """The answer after them attended to them, so its cells are not reused without them."""
    talk = Conversation(hashed, n_ctx=400, n_batch=400)
    answer, _ = talk.answer(SYSTEM + FIRST, most=80)
    thoughts, said = answer[:30], answer[30:]
    talk.answer(SYSTEM + FIRST + said + "?", moves=True, most=2)
    assert talk.started().reused_tokens == len(SYSTEM + FIRST)
    assert len(thoughts) == 30
    assert talk.context.cached() == tokens_of(SYSTEM + FIRST + said + "?" + talk.text())[:-1]


def test_turns_are_moved_once_and_then_once_more() -> None:
    third = "a third turn, which goes on for about as long as the others. "
    talk = Conversation(hashed, n_ctx=400, n_batch=400)
    talk.answer(SYSTEM + FIRST + SECOND + third, most=5)
    talk.answer(SYSTEM + SECOND + third + talk.text() + "?", moves=True, most=5)
    kept = third + talk.text()
    talk.answer(SYSTEM + kept + "?", moves=True, most=2)
    assert talk.started().reused_tokens == len(SYSTEM + third)


def test_the_conversation_that_lost_turns_is_found_among_others_that_begin_alike() -> None:
    talk = Conversation(hashed, n_ctx=400, n_batch=400, n_seq_max=3)
    answer, _ = talk.answer(SYSTEM + FIRST + SECOND, most=5)
    talk.answer(SYSTEM + "another conversation", most=5)
    talk.answer(SYSTEM + SECOND + answer + "?", moves=True, most=2)
    assert talk.started().reused_tokens == len(SYSTEM + SECOND) + 4


def test_cells_that_a_request_shares_stay_where_they_are() -> None:
    talk = Conversation(hashed, n_ctx=400, n_batch=400, n_seq_max=3)
    talk.ask(SYSTEM + FIRST + SECOND, most=5, request=1)
    talk.run()
    talk.ask(SYSTEM + FIRST + SECOND + talk.text(1)[:2] + "something else", most=60, request=2)
    talk.events += talk.engine.step() + talk.engine.step()
    talk.ask(SYSTEM + SECOND + "?", moves=True, most=2, request=3)
    talk.run()
    assert talk.started(3).reused_tokens == len(SYSTEM + "a ")
    assert (
        talk.text(2)
        == Conversation(hashed, n_ctx=400).answer(
            SYSTEM + FIRST + SECOND + talk.text(1)[:2] + "something else", most=60
        )[0]
    )


@for_seeds(200)
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
