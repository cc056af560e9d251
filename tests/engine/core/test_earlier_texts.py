"""Drafts from earlier requests: fewer steps, the same texts, and nothing of another user."""

from __future__ import annotations

import random

import pytest
from support.conversation import Conversation
from support.fake_context import N_VOCAB, scripted, tokens_of

from llmrun._native import SuffixAutomaton
from llmrun.engine.core.drafts import MOST_TOKENS, MOST_USERS, Drafting, EarlierTexts
from llmrun.protocol.messages import Finished
from llmrun.protocol.speculation import Speculation, StepTime

TIMES = tuple(StepTime(width, 0, 1 + width / 40) for width in (1, 4, 8, 16))
ANSWER = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=150))


def ask(talk: Conversation, prompt: str, *, salt: str = "", repeats: bool = False) -> Finished:
    tokens = tokens_of(prompt)
    drafting = Drafting(Speculation(15, TIMES), SuffixAutomaton(), tokens, repeats=repeats)
    talk.events.clear()
    talk.ask(prompt, most=150, drafting=drafting, salt=salt)
    talk.run()
    assert talk.text() == ANSWER
    return talk.finished()


def new() -> Conversation:
    talk = Conversation(scripted({"One?": ANSWER, "Two?": ANSWER}), n_ctx=400, n_seq_max=2)
    assert ask(talk, "One?").stats.drafted_tokens < 10
    return talk


@pytest.mark.parametrize("prompt", ["One?", "Two?"])
def test_what_was_answered_before_is_drafted(prompt: str) -> None:
    stats = ask(new(), prompt).stats
    assert stats.decode_steps < 50
    assert stats.accepted_tokens > 100


def test_an_answer_that_has_to_be_repeatable_takes_the_same_steps() -> None:
    assert ask(new(), "One?", repeats=True).stats.decode_steps > 140


def test_other_users_have_their_own_texts() -> None:
    talk = new()
    assert ask(talk, "Two?", salt="somebody").stats.decode_steps > 140
    assert ask(talk, "Two?", salt="somebody").stats.decode_steps < 50


def test_the_texts_are_bounded() -> None:
    texts, draws = EarlierTexts(), random.Random(1)
    for number in range(12):
        texts.add("", [draws.randrange(N_VOCAB) for _ in range(9000)], 0)
        assert len(texts.of("")) <= MOST_TOKENS
        texts.add(f"{number}", [1, 2, 3], 0)
    assert len(texts._texts) == MOST_USERS
    assert len(texts.of("")) >= MOST_TOKENS // 2, "one that is used is not dropped"


def test_what_is_known_is_not_added_again() -> None:
    texts = EarlierTexts()
    texts.add("", [1, 2, 3], 2)
    assert len(texts.of("")) == 4, "nothing was known"
    texts.add("", [1, 2, 3, 4, 5], 3)
    assert len(texts.of("")) == 7


def test_a_draft_does_not_go_on_in_the_next_text() -> None:
    texts = EarlierTexts()
    texts.add("", [1, 2, 3], 0)
    texts.add("", [7, 8, 9], 0)
    sequence = SuffixAutomaton()
    sequence.extend([5, 1])
    sequence.follow(texts.of(""))
    assert sequence.draft_from_other(5) == ([2, 3], 1)
    sequence.extend([2, 3])
    assert sequence.draft_from_other(5) == ([], 0)
