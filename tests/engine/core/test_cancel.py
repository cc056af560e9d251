"""Cancelled requests and aborted batches leave other requests unchanged."""

from __future__ import annotations

import pytest
from support.conversation import Conversation
from support.fake_context import endless, hashed, scripted, tokens_of

from llmrun.engine.llama.base import Aborted
from llmrun.protocol.messages import PrefillProgress


def test_cancel_while_decoding() -> None:
    talk = Conversation(endless)
    talk.ask("Hi")
    talk.context.before_decode = lambda call: talk.engine.cancel(1) if call == 3 else None
    talk.run()
    assert (talk.text(), talk.finished().reason) == ("cdef", "cancelled")
    assert talk.finished().stats.completion_tokens == 4


def test_cancel_in_prefill() -> None:
    talk = Conversation(endless, n_batch=8)
    talk.ask("x" * 30)
    talk.context.before_decode = lambda call: talk.engine.cancel(1) if call == 1 else None
    talk.run()
    assert (talk.text(), talk.finished().reason) == ("", "cancelled")
    assert talk.context.cached() == tokens_of("x" * 16)
    talk.answer("x" * 20, most=1)
    assert talk.started().reused_tokens == 16


def test_cancel_while_queued() -> None:
    talk = Conversation(endless)
    talk.ask("Hi", most=3, request=1)
    talk.ask("Ho", request=2)
    talk.events += talk.engine.step()
    talk.engine.cancel(2)
    talk.run()
    assert talk.of(2) == [talk.finished(2)]
    assert talk.finished(2).reason == "cancelled"
    assert talk.text(1) == "cde"


def test_cancel_before_the_first_step() -> None:
    talk = Conversation(endless)
    talk.ask("Hi")
    talk.engine.cancel(1)
    talk.run()
    assert talk.of(1) == [talk.finished()]
    assert talk.computed() == 0


def test_cancel_shows_text_held_back() -> None:
    talk = Conversation(scripted({"Hi": "a<end"}))
    talk.ask("Hi", stop=("<end>",))
    talk.context.before_decode = lambda call: talk.engine.cancel(1) if call == 3 else None
    talk.run()
    assert talk.text() == "a<en"


def test_cancel_of_an_unknown_request() -> None:
    talk = Conversation(endless)
    talk.ask("Hi", most=2)
    talk.engine.cancel(99)
    talk.run()
    assert talk.text() == "cd"


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("call", range(5))
def test_an_aborted_batch_is_tried_again(call: int, cuts: bool) -> None:
    prompt = "x" * 20
    talk = Conversation(scripted({prompt: "abc"}), n_batch=8, cuts=cuts)
    talk.context.faults[call] = Aborted()
    assert talk.answer(prompt) == ("abc", "stop")
    assert talk.context.cached() == tokens_of(prompt + "abc")
    assert talk.finished().stats.completion_tokens == 4


@pytest.mark.parametrize("cuts", [True, False])
def test_prefill_progress_when_an_abort_costs_what_was_reused(cuts: bool) -> None:
    first, second = "x" * 12, "x" * 12 + "c" + "y" * 40
    talk = Conversation(scripted({first: "c", second: "ok"}), n_batch=8, cuts=cuts)
    talk.answer(first)
    talk.context.faults[len(talk.context.calls) + 1] = Aborted()
    assert talk.answer(second) == ("ok", "stop")
    progress = [event.tokens for event in talk.events if isinstance(event, PrefillProgress)]
    assert all(tokens > 0 for tokens in progress), progress
    assert progress[-1] == (40 if cuts else 53), "all of it"
    assert talk.finished().stats.reused_tokens == (13 if cuts else 0)


def test_aborted_by_a_cancel() -> None:
    talk = Conversation(endless, n_batch=8)

    def abort(call: int) -> None:
        if call == 2:
            talk.engine.cancel(1)

    talk.context.before_decode = abort
    talk.context.faults[2] = Aborted()
    talk.ask("x" * 30)
    talk.run()
    assert talk.finished().reason == "cancelled"
    assert talk.context.cached() == tokens_of("x" * 16), "what the aborted batch wrote is forgotten"
    assert talk.finished().stats.context_used == 16


def test_a_cancel_of_one_does_not_hurt_the_other() -> None:
    talk = Conversation(hashed, n_seq_max=2)
    alone = Conversation(hashed).answer("Ho", most=10)[0]
    talk.ask("Hi", most=10, request=1)
    talk.ask("Ho", most=10, request=2)
    talk.context.before_decode = lambda call: talk.engine.cancel(1) if call == 4 else None
    talk.context.faults[4] = Aborted()
    talk.run()
    assert talk.finished(1).reason == "cancelled"
    assert talk.text(2) == alone


@pytest.mark.parametrize("number", range(8))
def test_a_cancel_of_one_of_eight_leaves_the_others_alone(number: int) -> None:
    """Cancelling stops no other request's batch and touches no other request's KV cache."""
    talk = Conversation(hashed, n_seq_max=8, n_batch=64)
    for request in range(8):
        talk.ask(f"{request} Hi", most=20, request=request)
    for _ in range(6):
        talk.events += talk.engine.step()
    assert not any(talk.engine.runs_alone(request) for request in range(8))
    before = {slot: talk.context.cached(slot) for slot in range(8)}
    cut: list[int] = []
    forget = talk.context.forget
    talk.context.forget = lambda slot, start: cut.append(slot) or forget(slot, start)  # type: ignore[method-assign]
    talk.engine.cancel(number)
    talk.events += talk.engine.step()
    assert talk.finished(number).reason == "cancelled"
    assert {slot: talk.context.cached(slot) for slot in range(8)} == before
    talk.run()
    assert not cut
    for request in {*range(8)} - {number}:
        assert talk.text(request) == Conversation(hashed).answer(f"{request} Hi", most=20)[0]


def test_whose_batch_it_is() -> None:
    talk = Conversation(hashed, n_seq_max=2, n_batch=64)
    assert not talk.engine.runs_alone(1)
    talk.ask("Hi", most=9, request=1)
    seen: list[tuple[bool, bool]] = []
    talk.context.before_decode = lambda call: seen.append((talk.engine.runs_alone(1), talk.engine.runs_alone(2)))
    for _ in range(3):
        talk.engine.step()
    talk.ask("Ho", most=2, request=2)
    talk.run()
    assert seen == [(True, False)] * 2 + [(False, False)] * 2 + [(True, False)] * 5


def test_only_those_in_an_aborted_batch_are_cut_back() -> None:
    talk = Conversation(hashed, n_seq_max=2, n_batch=4)
    talk.ask("x" * 4, most=5, request=1)
    talk.ask("y" * 4, most=5, request=2)
    talk.context.faults[0] = Aborted()
    cut: list[int] = []
    talk.context.before_decode = lambda call: cut.clear()
    forget = talk.context.forget
    talk.context.forget = lambda slot, start: cut.append(slot) or forget(slot, start)  # type: ignore[method-assign]
    while not talk.context.calls:
        talk.events += talk.engine.step()
    assert cut == [0]
    talk.run()
    assert talk.text(2) == Conversation(hashed).answer("y" * 4, most=5)[0]
