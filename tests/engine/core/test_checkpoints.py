"""Checkpoints: which are kept, and what a model that can't cut its memory reuses with them."""

from __future__ import annotations

import random

import pytest
from support.conversation import Conversation
from support.fake_context import END, FakeContext, hashed

from llmrun.engine.core.checkpoints import Checkpoints, turn_end
from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.prefix import Checkpoint, Prefix
from llmrun.protocol.params import SamplingParams

CONTEXT = FakeContext(hashed, has_checkpoints=True)
SAMPLING = SamplingParams(seed=5, temperature=1.0)


def made(*prefixes: Prefix, limit: int = POLICY.checkpoint_bytes) -> Checkpoints:
    return Checkpoints(CONTEXT, prefixes, POLICY._replace(checkpoint_bytes=limit))


def add(checkpoints: Checkpoints, prefix: Prefix, *lengths: int, n_bytes: int = 10) -> None:
    for length in lengths:
        checkpoints.put(prefix, [*prefix.checkpoints, Checkpoint(length, bytearray(n_bytes))])


def lengths(prefix: Prefix) -> list[int]:
    return [each.length for each in prefix.checkpoints]


def test_the_deepest_within_a_prefix() -> None:
    prefix = Prefix()
    add(made(prefix), prefix, 10, 20, 30)
    found = [prefix.deepest(length) for length in (9, 10, 29, 99)]
    assert [each and each.length for each in found] == [None, 10, 20, 30]


def test_beyond_the_limit_those_go_that_cost_least() -> None:
    first, second = Prefix(), Prefix()
    checkpoints = made(first, second, limit=40)
    add(checkpoints, first, 100, 110, 300)
    add(checkpoints, second, 50, 90)
    assert lengths(first) == [100, 300]  # 110 is 10 tokens after 100
    assert lengths(second) == [50, 90]
    assert checkpoints.n_bytes == 40


def test_the_last_one_of_a_slot_goes_last() -> None:
    first, second = Prefix(), Prefix()
    checkpoints = made(first, second, limit=20)
    add(checkpoints, first, 500, 501)
    add(checkpoints, second, 7)
    assert (lengths(first), lengths(second)) == ([501], [7])


def test_one_larger_than_the_limit_is_not_kept() -> None:
    prefix = Prefix()
    add(made(prefix, limit=5), prefix, 10)
    assert lengths(prefix) == []


def test_a_copied_one_counts_once() -> None:
    first, second = Prefix(), Prefix()
    checkpoints = made(first, second)
    add(checkpoints, first, 10, 20)
    second.checkpoints = [*first.checkpoints]
    second.cut(15)
    assert lengths(second) == [10]
    assert checkpoints.n_bytes == 20
    first.cut(10)
    assert lengths(first) == [10]


@pytest.mark.parametrize(
    ("prompt", "length"),
    [([5, 6, END, 7, 8], 3), ([5, 6, 7], 2), ([END, *[5] * 100], 100), ([5, END], 1), ([-1, END, -1], 2)],
)
def test_where_a_turn_ends(prompt: list[int], length: int) -> None:
    assert turn_end(prompt, lambda token: token == END) == length


def test_one_in_several_places_is_removed_from_all_of_them() -> None:
    first, second, copy = Prefix(), Prefix(), Prefix()
    checkpoints = made(first, second, copy, limit=30)
    add(checkpoints, first, 10, 100)
    second.checkpoints, copy.checkpoints = [*first.checkpoints], [*first.checkpoints]
    add(checkpoints, second, 200)
    assert checkpoints.n_bytes == 30
    add(checkpoints, first, 300)
    assert [lengths(prefix) for prefix in (first, second, copy)] == [[100, 300], [100, 200], [100]]


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_a_conversation_whose_answers_come_back_changed_keeps_its_slot(has_checkpoints: bool) -> None:
    talk = Conversation(hashed, n_ctx=400, n_seq_max=4, cuts=not has_checkpoints, has_checkpoints=has_checkpoints)
    prompt = "a" * 40
    for turn in range(5):
        talk.answer(f"{prompt}?", SAMPLING, most=4)
        prompt += f"{turn}" * 40
    assert len([tokens for tokens in talk.engine._slots.cached.values() if tokens]) == 1


def test_another_end_costs_the_tokens_from_the_last_checkpoint() -> None:
    talk = Conversation(hashed, n_ctx=400, cuts=False, has_checkpoints=True)
    talk.answer("a" * 200, SAMPLING, most=4)
    talk.answer("a" * 100 + "b" * 20, SAMPLING, most=4)
    assert talk.started().reused_tokens >= 100 - talk.context.n_batch


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_random_conversations_are_answered_as_alone(seed: int, slots: int) -> None:
    """The fake context asserts that each checkpoint is of the tokens that it is used for."""
    draw = random.Random(seed)
    prompts = ["".join(draw.choices("ab", k=draw.choice((20, 60, 150))))]
    for _ in range(8):
        old = draw.choice(prompts)
        prompts.append(old[: draw.randrange(len(old))] + "".join(draw.choices("ab", k=draw.randrange(1, 60))))
    settings = {"n_ctx": 300, "cuts": False, "has_checkpoints": True}
    talk = Conversation(hashed, n_seq_max=slots, unified=slots > 1, **settings)
    for request, prompt in enumerate(prompts, 1):
        talk.ask(prompt, SAMPLING, most=draw.randrange(1, 9), request=request)
        if draw.random() < 0.5:
            talk.run()
    talk.run()
    for request, prompt in enumerate(prompts, 1):
        alone = Conversation(hashed, n_ctx=300)
        text = alone.answer(prompt, SAMPLING, most=9)[0]
        assert text.startswith(talk.text(request))


@pytest.mark.parametrize(("n_bytes", "expected"), [(1 << 10, [8, 16, 24, 32]), (33 << 20, [8, 32])])
def test_large_ones_are_rarer(n_bytes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    context = FakeContext(hashed, has_checkpoints=True)
    monkeypatch.setattr(context, "n_batch", 8)
    monkeypatch.setattr(context, "checkpoint", lambda slot: bytearray(n_bytes))
    prefix = Prefix(n_prompt=100)
    checkpoints = Checkpoints(context, [prefix])
    for _ in range(4):
        prefix.tokens += [1] * 8
        checkpoints.record(prefix)
    assert lengths(prefix) == expected
