"""Prefixes that prompts have in common: computed once, parked, kept apart by salts; and who gets in before whom."""

from __future__ import annotations

import random

import pytest
from support.conversation import Conversation
from support.fake_context import hashed

from llmrun.engine.core.prefix import Prefix, Salt, common_prefix, longest
from llmrun.protocol.messages import Finished, Started
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.questions import EngineStatus

SAMPLING = SamplingParams(seed=5, temperature=1.0, repeat_penalty=1.2)
SYSTEM = "You answer briefly and well. " * 10


def alone(prompt: str, most: int) -> str:
    return Conversation(hashed, n_ctx=1000).answer(prompt, SAMPLING, most=most)[0]


def started(talk: Conversation) -> list[int]:
    return [event.request for event in talk.events if isinstance(event, Started)]


@pytest.mark.parametrize("n_batch", [16, 64, 512])
def test_eight_clients_with_one_system_prompt_compute_it_once(n_batch: int) -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=8, n_batch=n_batch)
    for request in range(8):
        talk.ask(SYSTEM + f"{request}?", SAMPLING, most=5, request=request)
    talk.run()
    assert [talk.text(request) for request in range(8)] == [alone(SYSTEM + f"{request}?", 5) for request in range(8)]
    assert talk.computed() == len(SYSTEM) + 8 * (2 + 4)
    assert [talk.started(request).reused_tokens for request in range(1, 8)] == [len(SYSTEM)] * 7


def test_who_comes_while_the_prefix_is_computed_waits_for_it_and_others_do_not() -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=3, n_batch=64)
    talk.ask(SYSTEM + "one", SAMPLING, most=3, request=1)
    talk.events += talk.engine.step() + talk.engine.step()
    talk.ask(SYSTEM + "two", SAMPLING, most=3, request=2)
    talk.ask("another prompt", SAMPLING, most=3, request=3)
    talk.run()
    assert started(talk) == [1, 3, 2]
    assert talk.started(2).reused_tokens == len(SYSTEM)


def test_a_seat_is_kept_for_who_waits_for_a_prefix() -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=2, n_batch=64)
    talk.ask(SYSTEM + "one", SAMPLING, most=3, request=1)
    talk.ask(SYSTEM + "two", SAMPLING, most=3, request=2)
    talk.ask("another prompt", SAMPLING, most=3, request=3)
    talk.run()
    assert started(talk) == [1, 2, 3]


def test_little_in_common_is_not_waited_for() -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=2, n_batch=512)
    talk.ask("x" * 63 + "1" * 200, SAMPLING, most=3, request=1)
    talk.ask("x" * 63 + "2" * 200, SAMPLING, most=3, request=2)
    talk.run()
    assert [talk.started(request).reused_tokens for request in (1, 2)] == [0, 0]
    assert len(talk.context.calls[0]) > 263


def test_no_request_waits_for_one_that_was_cancelled() -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=2, n_batch=64)
    talk.ask(SYSTEM + "one", SAMPLING, most=3, request=1)
    talk.ask(SYSTEM + "two", SAMPLING, most=3, request=2)
    talk.events += talk.engine.step() + talk.engine.step()
    talk.engine.cancel(1)
    talk.run()
    assert talk.started(2).reused_tokens == 64
    assert talk.text(2) == alone(SYSTEM + "two", 3)


# ---- parked ------------------------------------------------------------------------------------------------------


def test_more_prefixes_are_kept_than_sequences_run() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=2, n_parked=4, n_batch=64)
    prompts = [letter * 20 for letter in "abcdef"]
    for request, prompt in enumerate(prompts):
        talk.ask(prompt, SAMPLING, most=4, request=request)
    talk.run()
    assert max(len({entry.sequence_id for entry in batch}) for batch in talk.context.calls) == 2
    for prompt in prompts:
        assert talk.answer(prompt + "!", SAMPLING, most=4)[0] == alone(prompt + "!", 4)
        assert talk.started().reused_tokens == 20


def test_of_parked_prefixes_the_one_not_used_for_longest_goes() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=2, n_parked=2, n_batch=64)
    for letter in "abcd":
        talk.answer(letter * 20, most=4)
    talk.answer("a" * 20 + "!", most=4)
    talk.answer("e" * 20, most=4)
    found = {}
    for letter in "acdb":
        talk.answer(letter * 20 + "?", most=1)
        found[letter] = talk.started().reused_tokens
    assert found["b"] == 0
    assert found["a"] == 20


def test_a_prefix_stays_parked_beside_those_that_go_on_from_it() -> None:
    talk = Conversation(hashed, n_ctx=200, n_seq_max=2, n_parked=8, n_cells=150, n_batch=64)
    system = "s" * 100
    for letter in "abcdef":
        talk.answer(system + letter * 2, SAMPLING, most=4)
    assert talk.started().reused_tokens == 100
    assert talk.context.n_used == 100 + 6 * (2 + 3)


# ---- salts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unified", [True, False])
def test_prefixes_are_shared_only_among_equal_salts(unified: bool) -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=2, n_parked=2 if unified else 0, unified=unified)
    reused = []
    for salt in ("", "mine", "", "mine", "yours"):
        text, _ = talk.answer(SYSTEM, SAMPLING, most=4, salt=salt)
        assert text == alone(SYSTEM, 4)
        reused.append(talk.started().reused_tokens)
    assert reused == [0, 0, len(SYSTEM) - 1, len(SYSTEM) - 1, 0]


def test_no_request_waits_for_a_prefix_of_another_salt() -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=3, n_batch=64)
    talk.ask(SYSTEM + "one", SAMPLING, most=3, request=1, salt="mine")
    talk.ask(SYSTEM + "two", SAMPLING, most=3, request=2, salt="yours")
    talk.ask(SYSTEM + "three", SAMPLING, most=3, request=3, salt="mine")
    talk.run()
    assert [talk.started(request).reused_tokens for request in (1, 2, 3)] == [0, 0, len(SYSTEM)]


def test_the_prefix_that_knows_most_of_a_prompt_against_the_obvious_search() -> None:
    numbers = random.Random(7)
    salts = Salt(), Salt("mine")

    def some(most: int) -> list[int]:
        return [numbers.randrange(2) for _ in range(numbers.randrange(most))]

    for _ in range(2000):
        prompt = [1, *some(8)]
        prefixes = [Prefix(some(9), numbers.choice(salts), slot=slot) for slot in range(6)]
        known = [common_prefix(each.tokens, prompt) if each.salt == salts[1] else 0 for each in prefixes]
        best = max(prefixes, key=lambda each: (known[each.slot], -len(each.tokens), -each.slot))
        assert longest(prefixes, prompt, salts[1]) == (best, known[best.slot])
        halves = [length // 2 for length in known]
        best = max(prefixes, key=lambda each: (halves[each.slot], -len(each.tokens), -each.slot))
        assert longest(prefixes, prompt, salts[1], lambda _, length: length // 2) == (best, halves[best.slot])
    assert longest([], [1], salts[0])[1] == 0


# ---- who gets in -------------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_is_admitted_first_but_no_request_is_passed_over_for_ever() -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=1, n_batch=64, unified=True)
    talk.ask(SYSTEM + "first", SAMPLING, most=3, request=0)
    talk.events += talk.engine.step() + talk.engine.step()
    talk.ask("a stranger", SAMPLING, most=3, request=100)
    for request in range(1, 30):
        talk.ask(SYSTEM + f"{request}", SAMPLING, most=3, request=request)
    talk.run()
    order = [event.request for event in talk.events if isinstance(event, Finished)]
    assert order[:9] == list(range(9))
    assert order[9] == 100, "eight have passed it"


# ---- how busy it is ----------------------------------------------------------------------------------------------


def test_the_condition_is_that_of_this_moment() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=2, n_cells=300, n_batch=64)
    assert talk.engine.status(waiting=3) == EngineStatus(waiting=3, cells=300)
    for request in range(3):
        talk.ask("s" * 70 + f"{request}?", SAMPLING, most=4, request=request)
    conditions: list[EngineStatus] = []
    talk.context.before_decode = lambda call: conditions.append(talk.engine.status())
    talk.run()
    assert conditions[0] == EngineStatus(running=1, waiting=2, cells=300, prefix_queries=72)
    assert conditions[1] == conditions[0]._replace(cells_used=64, prefilled=64)
    assert conditions[2].cells_shared == 70
    assert (conditions[2].running, conditions[2].waiting) == (2, 1)
    last = talk.engine.status()
    assert (last.running, last.waiting, last.cells_used) == (0, 0, talk.context.n_used)
    assert (last.prefix_queries, last.prefix_hits) == (3 * 72, 2 * 70)
    assert (last.prefilled, last.decoded) == (70 + 3 * 2, 3 * 4)


def test_a_request_names_the_first_difference_from_a_cached_prompt() -> None:
    talk = Conversation(hashed, n_ctx=600, n_seq_max=3, unified=True)
    system = "s" * 100
    differences = []
    for prompt in (f"{system} Monday. Hi", f"{system} Tuesday. Hi", f"{system} Tuesday. Hi, you"):
        talk.answer(prompt, SAMPLING, most=1)
        differences.append(talk.started().difference)
    assert differences[0] is differences[2] is None
    assert differences[1] is not None
    position, cached, now = differences[1]
    assert position == len(f"{system} ")
    assert (cached[:6], now[:7]) == ("Monday", "Tuesday")
