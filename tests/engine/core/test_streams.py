"""Sequences with cells of their own: prefixes are copied, and gaps closed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import hashed

from llmrun.engine.core.policy import POLICY, Policy
from llmrun.protocol.params import SamplingParams

SAMPLING = SamplingParams(seed=5, temperature=1.0, repeat_penalty=1.2)
SYSTEM = "You answer briefly and well. " * 10


def talk(policy: Policy = POLICY, **settings: int) -> Conversation:
    return Conversation(
        hashed, policy=policy, **{"n_ctx": 1000, "n_seq_max": 4, "streams": True, "n_batch": 64, **settings}
    )


def alone(prompt: str, most: int) -> str:
    return Conversation(hashed, n_ctx=1000).answer(prompt, SAMPLING, most=most)[0]


def check_cells(crowd: Conversation) -> None:
    assert crowd.engine.status(0).cells_used == crowd.context.n_used


def test_one_system_prompt_is_computed_once_and_copied() -> None:
    crowd = talk()
    for request in range(6):
        crowd.ask(SYSTEM + f"{request}?", SAMPLING, most=5, request=request)
    crowd.run()
    assert not crowd.context.shares_cells
    assert crowd.computed() == len(SYSTEM) + 6 * (2 + 4)
    assert [crowd.text(request) for request in range(6)] == [alone(SYSTEM + f"{request}?", 5) for request in range(6)]
    assert crowd.engine.status(0).cells_shared == 0
    check_cells(crowd)


def test_more_conversations_are_kept_than_there_are_streams() -> None:
    crowd = talk()
    prompts = [letter * 80 for letter in "abcdef"]
    for prompt in prompts:
        crowd.answer(prompt, SAMPLING, most=4)
    for prompt in prompts:
        assert crowd.answer(prompt + "!", SAMPLING, most=4)[0] == alone(prompt + "!", 4)
        assert crowd.started().reused_tokens == 80
    check_cells(crowd)


def test_a_stream_whose_prefix_others_have_too_is_not_kept_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = talk()
    for request in range(4):
        crowd.answer(SYSTEM + f"{request}?", SAMPLING, most=4)
    monkeypatch.setattr(crowd.engine._slots, "_copy", lambda prefix: pytest.fail("it is kept twice"))
    crowd.answer("something else", SAMPLING, most=4)


def test_a_stream_that_holds_as_much_of_a_prompt_as_any_is_cut_to_that_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = talk()
    for request in range(4):
        crowd.answer(SYSTEM + f"{request}?", SAMPLING, most=4)
    monkeypatch.setattr(crowd.context, "copy", lambda *_: pytest.fail("it is there already"))
    assert crowd.answer(SYSTEM + "next?", SAMPLING, most=4)[0] == alone(SYSTEM + "next?", 4)
    assert crowd.started().reused_tokens == len(SYSTEM)
    check_cells(crowd)


@pytest.mark.parametrize(("seconds", "is_kept"), [(0.0005, False), (0.01, True)])
def test_a_prefix_is_kept_besides_if_its_prefill_would_be_noticed(seconds: float, is_kept: bool) -> None:
    crowd = talk()
    crowd.clock.per_token = seconds
    for letter in "abcde":
        crowd.answer(letter * 100, SAMPLING, most=4)
    assert crowd.answer("a" * 100 + "!", SAMPLING, most=4)[0] == alone("a" * 100 + "!", 4)
    assert crowd.started().reused_tokens == (100 if is_kept else 0)


def busy_slots(crowd: Conversation) -> list[int]:
    return sorted({entry.sequence_id for entry in crowd.context.calls[-1]})


def test_sequences_that_run_are_neighbours_again_after_some_steps() -> None:
    crowd = talk()
    for request, most in enumerate((100, 10, 10, 100)):
        crowd.ask(f"{request} prompt", SAMPLING, most=most, request=request)
    for _ in range(14):
        crowd.events += crowd.engine.step()
    assert busy_slots(crowd) == [0, 3], "somebody else may still come"
    for _ in range(6):
        crowd.events += crowd.engine.step()
    first, second = busy_slots(crowd)
    assert second - first == 1
    check_cells(crowd)
    crowd.run()
    for request, most in ((0, 100), (3, 100)):
        assert crowd.text(request) == alone(f"{request} prompt", most)
    assert crowd.computed() == 4 * len("0 prompt") + 2 * 99 + 2 * 9, "nothing was computed again"


def test_the_shorter_sequences_move_and_none_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long conversation in slot 0, short ones in slots 2 and 3."""
    for length, most_cells, moved in ((400, 4096, [2, 3]), (400, 4, []), (3, 4096, [0])):
        crowd = talk(policy=Policy(most_moved=most_cells))
        copy, sources = crowd.context.copy, list[int]()

        def counting(source: int, *rest: int, copy: Any = copy, sources: list[int] = sources) -> bool:
            sources.append(source)
            return bool(copy(source, *rest))

        monkeypatch.setattr(crowd.context, "copy", counting)
        prompts = ["a" * length, "ended", "short", "brief"]
        for request, prompt in enumerate(prompts):
            crowd.ask(prompt, SAMPLING, most=2 if request == 1 else 60, request=request)
        crowd.run()
        assert sources == moved
        assert [crowd.text(request) for request in (0, 2, 3)] == [alone(prompts[request], 60) for request in (0, 2, 3)]
        check_cells(crowd)


def test_no_long_conversation_goes_so_that_running_sequences_are_neighbours() -> None:
    """Neither for a new sequence, nor for one that moves; a short one may."""
    crowd = talk(policy=Policy(most_moved=100))
    for prompt in ("a" * 300, "short", "b" * 300):
        crowd.answer(prompt, SAMPLING, most=4)
    crowd.ask("short, and more", SAMPLING, most=60, request=7)
    crowd.events += crowd.engine.step()
    crowd.ask("new", SAMPLING, most=60, request=8)
    crowd.run()
    assert {"a" * 300, "b" * 300} <= {bytes(tokens[:300]).decode() for tokens in crowd.engine._slots.cached.values()}
    assert [crowd.text(7), crowd.text(8)] == [alone("short, and more", 60), alone("new", 60)]


def test_full_streams_of_others_stay() -> None:
    """The next turn of one takes cells of its own stream."""
    crowd = Conversation(hashed, n_ctx=100, n_seq_max=3, streams=True)
    for letter in "abc":
        crowd.answer(letter * 97, SAMPLING, most=2)
    crowd.answer("a" * 98, SAMPLING, most=2)
    assert [len(tokens) for tokens in crowd.engine._slots.cached.values()] == [99, 98, 98]


@pytest.mark.parametrize(("copies_whole", "n_copied"), [(True, 0), (False, 40)])
def test_a_prefix_is_computed_again_where_copying_all_of_its_source_takes_longer(
    copies_whole: bool, n_copied: int
) -> None:
    crowd = talk()
    crowd.context.copies_whole = copies_whole
    long, other = SYSTEM[:40] + "x" * 700, SYSTEM[:40] + "y" * 20
    crowd.answer(long, SAMPLING, most=4)
    before = crowd.computed()
    assert crowd.answer(other, SAMPLING, most=4)[0] == alone(other, 4)
    assert crowd.started().reused_tokens == n_copied
    assert crowd.computed() - before == len(other) - n_copied + 3
    crowd.answer(long + "!", SAMPLING, most=4)
    assert crowd.started().reused_tokens == len(long), "the conversation stays"


def test_a_new_sequence_closes_the_gap() -> None:
    crowd = talk()
    for request, most in enumerate((100, 5, 100)):
        crowd.ask(f"prompt {request}", SAMPLING, most=most, request=request)
    while len(crowd.context.calls) < 7:
        crowd.events += crowd.engine.step()
    crowd.ask("next", SAMPLING, most=5, request=9)
    crowd.events += crowd.engine.step() + crowd.engine.step()
    assert busy_slots(crowd) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(8))
def test_any_crowd_answers_as_if_everybody_were_alone(seed: int) -> None:
    draws = random.Random(seed)
    crowd = talk(n_ctx=600, on_device=draws.random() < 0.5, n_batch=draws.choice((16, 64)))
    asked: dict[int, tuple[str, int]] = {}
    cancelled = set()
    for request in range(25):
        prompt = SYSTEM[: draws.choice((0, 80, 100, 290))] + draws.choice("abc") * draws.choice((3, 70, 200))
        asked[request] = prompt, draws.randint(1, 40)
        crowd.ask(prompt, SAMPLING, most=asked[request][1], request=request)
        for _ in range(draws.choice((0, 1, 5, 30))):
            crowd.events += crowd.engine.step()
        if draws.random() < 0.2:
            crowd.engine.cancel(request)
            cancelled.add(request)
    crowd.run()
    for request in set(asked) - cancelled:
        assert crowd.text(request) == alone(*asked[request])
    check_cells(crowd)
