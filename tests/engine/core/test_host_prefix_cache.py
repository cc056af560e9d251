"""Parked prefixes that are copied to host memory while the engine rests, and come back without being computed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import hashed

from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.prefix import Salt
from llmrun.engine.core.states import KVStore
from llmrun.protocol.params import SamplingParams

SAMPLING = SamplingParams(seed=5, temperature=1.0, repeat_penalty=1.2)
LONG = {letter: letter * 300 for letter in "abc"}
STATE_BYTES = 1600  # of such a prompt and a short answer in the fake context, at most


def alone(prompt: str, most: int = 4) -> str:
    return Conversation(hashed, n_ctx=2000).answer(prompt, SAMPLING, most=most)[0]


def crowd() -> Conversation:
    """Three conversations are parked, and a fourth runs."""
    talk = Conversation(hashed, n_ctx=2000, n_seq_max=2, n_parked=4)
    for prompt in LONG.values():
        talk.answer(prompt, SAMPLING, most=4)
    talk.ask("runs", SAMPLING, most=400, request=9)
    talk.events += talk.engine.step() + talk.engine.step()
    return talk


def test_of_what_is_parked_in_a_pool_the_last_prefix_stays() -> None:
    talk = crowd()
    assert talk.context.n_used == 303 + len("runs")
    on_device = Conversation(hashed, n_ctx=2000, n_seq_max=2, n_parked=4, on_device=True)
    for prompt in LONG.values():
        on_device.answer(prompt, SAMPLING, most=4)
    assert on_device.context.n_used == 3 * 303


def test_it_comes_back_without_being_computed_again() -> None:
    talk = crowd()
    for request, prompt in enumerate(LONG.values(), 20):
        talk.ask(prompt + "!", SAMPLING, most=4, request=request)
    talk.run()
    for request, prompt in enumerate(LONG.values(), 20):
        assert talk.started(request).reused_tokens == 300
        assert talk.text(request) == alone(prompt + "!")
    assert talk.text(9) == alone("runs", 400)


@pytest.mark.parametrize("salt", ["mine", "yours"])
def test_it_comes_back_only_for_its_salt(salt: str) -> None:
    talk = Conversation(hashed, n_ctx=2000, n_seq_max=2, n_parked=4)
    talk.answer(LONG["a"], SAMPLING, most=4, salt="mine")
    talk.answer(LONG["b"], SAMPLING, most=4)
    talk.ask("runs", SAMPLING, most=50, request=9)
    talk.events += talk.engine.step()
    talk.ask(LONG["a"] + "!", SAMPLING, most=4, request=20, salt=salt)
    talk.run()
    assert talk.started(20).reused_tokens == (300 if salt == "mine" else 0)


def test_prefixes_move_to_another_context() -> None:
    talk = crowd()
    talk.run()
    wide = Conversation(hashed, prefixes=talk.engine.prefixes(), n_ctx=2000, n_seq_max=3)
    for request, prompt in enumerate(LONG.values(), 20):
        wide.ask(prompt + "!", SAMPLING, most=4, request=request)
    wide.run()
    for request, prompt in enumerate(LONG.values(), 20):
        assert wide.started(request).reused_tokens == 300
        assert wide.text(request) == alone(prompt + "!")


def test_nothing_leaves_while_no_other_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(hashed, n_ctx=2000, n_seq_max=2, n_parked=4)
    monkeypatch.setattr(talk.context, "state", lambda sequence_id: pytest.fail("it was read out"))
    talk.answer(LONG["a"], SAMPLING, most=4)
    talk.answer(LONG["a"] + "!", SAMPLING, most=4)
    assert talk.started().reused_tokens == 300
    assert talk.context.n_used == 304


def test_what_shares_most_of_its_cells_stays() -> None:
    talk = Conversation(hashed, n_ctx=2000, n_seq_max=2, n_parked=4)
    system = "s" * 400
    for letter in "abc":
        talk.answer(system + letter * 10, SAMPLING, most=4)
    talk.ask("runs", SAMPLING, most=50, request=9)
    talk.events += talk.engine.step()
    talk.ask(system + "dd", SAMPLING, most=4, request=20)
    talk.run()
    assert talk.started(20).reused_tokens == 400
    assert talk.context.n_used == 400 + 3 * (10 + 3) + (2 + 3) + (4 + 49)


def test_the_oldest_goes_where_there_is_no_room_for_all() -> None:
    talk = Conversation(hashed, n_ctx=2000, n_seq_max=2, n_parked=4, copy_bytes=2 * STATE_BYTES)
    for prompt in LONG.values():
        talk.answer(prompt, SAMPLING, most=4)
    talk.answer("d" * 300, SAMPLING, most=4)
    talk.ask("runs", SAMPLING, most=400, request=9)
    talk.events += talk.engine.step()
    for request, prompt in enumerate(LONG.values(), 20):
        talk.ask(prompt + "!", SAMPLING, most=4, request=request)
    talk.run()
    assert [talk.started(request).reused_tokens for request in (20, 21, 22)] == [0, 300, 300]


@pytest.mark.parametrize("streams", [False, True])
def test_copies_take_what_the_plan_has_for_them_and_for_unused_cells(streams: bool) -> None:
    """The more cells have been used, the fewer bytes are left for copies; with all of them used, only their own."""
    limits = {"copy_bytes": 3000, "cell_bytes": 4}
    talk = Conversation(hashed, n_ctx=2000, n_batch=16, n_seq_max=2, streams=streams, **limits)
    slots, held = talk.engine._slots, []
    scattered = 0 if streams else 32  # cells of a pool that llama.cpp may skip

    def check() -> None:
        untouched = max(talk.context.n_cells - slots.budget.touched - scattered, 0)
        held.append(slots.copied_bytes)
        assert held[-1] <= 3000 + 4 * untouched

    talk.context.before_decode = lambda call: check()
    for letter in "abcdefgh":
        prompt = letter * 300
        assert talk.answer(prompt, SAMPLING, most=4)[0] == alone(prompt)
        check()
    assert max(held) > 3000, "cells that were never used lend their memory"
    for letter in "xyz":  # they fill all cells
        talk.ask(letter * 1900, SAMPLING, most=50)
    talk.run()
    check()
    assert held[-1] <= 3000 + 4 * 250


def test_nothing_is_read_out_that_will_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for host memory nor for the disk."""
    store = KVStore(tmp_path, "model", 1000)
    talk = Conversation(hashed, store, n_ctx=600, n_seq_max=2, n_parked=4, copy_bytes=1000)
    for name in ("state", "write_state"):
        monkeypatch.setattr(talk.context, name, lambda *_: pytest.fail("it was read out"))
    answer, _ = talk.answer(LONG["a"], SAMPLING, most=4)
    talk.answer(LONG["a"] + answer + "!", SAMPLING, most=4)
    talk.answer(LONG["b"], SAMPLING, most=4)
    talk.engine.save_parked()
    assert talk.engine.save(1, prompt_only=False) == (0, 0)
    assert talk.engine.prefixes() == []


def test_a_prefix_without_memory_for_a_copy_moves_to_another_context_over_the_disk(tmp_path: Path) -> None:
    store = KVStore(tmp_path, "model", 1 << 20)
    talk = Conversation(hashed, store, n_ctx=2000, copy_bytes=1000)
    talk.answer(LONG["a"], SAMPLING, most=4)
    assert talk.engine.prefixes() == []
    assert talk.engine._slots.saver is not None
    talk.engine._slots.saver.wait()
    wide = Conversation(hashed, KVStore(tmp_path, "model", 1 << 20), n_ctx=2000, n_seq_max=3, copy_bytes=1000)
    wide.answer(LONG["a"] + "!", SAMPLING, most=4)
    assert wide.started().reused_tokens == 300


def test_a_conversation_that_goes_is_on_disk(tmp_path: Path) -> None:
    store = KVStore(tmp_path, "model", 1 << 20)
    talk = Conversation(hashed, store, n_ctx=600, n_seq_max=2, n_parked=4, copy_bytes=STATE_BYTES)
    answer, _ = talk.answer(LONG["a"], SAMPLING, most=4)
    talk.answer(LONG["a"] + answer + "!", SAMPLING, most=4)
    for letter in "bcd":
        talk.answer(LONG.get(letter, letter * 300), SAMPLING, most=4)
    saver = talk.engine._slots.saver
    assert saver is not None
    saver.wait()
    assert len(list(tmp_path.rglob("*.kv"))) == 1, "nobody went on with the others"
    talk.answer(LONG["a"] + answer + "!?", SAMPLING, most=4)
    assert talk.started().reused_tokens >= 300


def test_a_state_that_is_read_for_its_beginning_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in its file."""
    store = KVStore(tmp_path, "model", 1 << 20)
    talk = Conversation(hashed, store, n_ctx=2000)
    talk.answer(LONG["a"] + LONG["b"], SAMPLING, most=4)
    talk.engine.save(1, prompt_only=False)
    later = Conversation(hashed, store, n_ctx=2000)
    monkeypatch.setattr(later.context, "state_in_pieces", lambda *_: pytest.fail("it was read out"))
    for prompt, n_reused in ((LONG["a"] + LONG["c"], 300), (LONG["a"] + LONG["b"] + "!", 600)):
        later.answer(prompt, SAMPLING, most=4)
        assert later.started().reused_tokens == n_reused
        monkeypatch.undo()


def test_what_is_restored_over_a_prefix_of_another_salt_keeps_its_own(tmp_path: Path) -> None:
    store = KVStore(tmp_path, "model", 1 << 20)
    talk = Conversation(hashed, store, n_ctx=2000)
    talk.answer(LONG["a"] + LONG["b"], SAMPLING, most=4, salt=Salt("one"))
    talk.engine.save(1, prompt_only=False)
    later = Conversation(hashed, store, n_ctx=2000)
    later.answer(LONG["c"], SAMPLING, most=4, salt="yours")
    later.answer(LONG["a"] + LONG["c"], SAMPLING, most=4, salt=Salt("one"))
    assert later.started().reused_tokens == 300
    later.answer(LONG["a"] + LONG["b"] + "!", SAMPLING, most=4, salt="yours")
    assert later.started().reused_tokens == 0


def test_equal_prompts_of_two_salts_do_not_replace_each_other() -> None:
    talk = Conversation(hashed, n_ctx=2000)
    for _ in range(2):
        talk.answer(LONG["a"], SAMPLING, most=4, salt="mine")
        mine = talk.started().reused_tokens
        talk.answer(LONG["a"], SAMPLING, most=4, salt="yours")
    assert (mine, talk.started().reused_tokens) == (299, 299)


def test_a_state_that_is_refused_is_computed_again() -> None:
    talk = crowd()
    talk.context.set_state = lambda *arguments: False  # type: ignore[method-assign]
    talk.ask(LONG["a"] + "!", SAMPLING, most=4, request=20)
    talk.run()
    assert talk.started(20).reused_tokens == 0
    assert talk.text(20) == alone(LONG["a"] + "!")


@pytest.mark.parametrize("streams", [False, True])
def test_without_memory_for_copies_there_are_none(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    talk = Conversation(hashed, n_ctx=2000, n_seq_max=2, streams=streams)
    for name in ("state", "copy"):
        monkeypatch.setattr(talk.context, name, fail)
    for prompt in (*LONG.values(), LONG["a"] + "!"):
        assert talk.answer(prompt, SAMPLING, most=4)[0] == alone(prompt)
    talk.ask(LONG["b"], SAMPLING, most=400, request=9)
    talk.events += talk.engine.step() + talk.engine.step()
    talk.ask(LONG["b"] + "!", SAMPLING, most=4, request=10)
    talk.run()
    assert talk.text(10) == alone(LONG["b"] + "!")


def test_a_copy_replaces_those_of_its_beginnings() -> None:
    talk = Conversation(hashed, n_ctx=2000, n_seq_max=2, streams=True)
    for prompt in (LONG["a"], LONG["b"], LONG["a"] + "c" * 100):
        talk.answer(prompt, SAMPLING, most=1)
    assert [bytes(copy.tokens).decode() for copy in talk.engine._slots._copies] == [LONG["b"], LONG["a"] + "c" * 100]


# ---- copied while others run -------------------------------------------------------------------------------------


def beside(n_pieces: list[int], **settings: Any) -> Conversation:
    """A conversation is parked, another one runs, and a third has just come that needs the slot or the cells.

    Args:
        n_pieces: gets the number of pieces copied before each decode call from now on.
    """
    policy = POLICY._replace(**{"piece_bytes": 200, **settings.pop("policy", {})})
    talk = Conversation(hashed, policy=policy, **{"n_ctx": 600, "n_seq_max": 2, "n_batch": 64, **settings})
    talk.answer(LONG["a"], SAMPLING, most=4)
    talk.ask(LONG["b"][:100], SAMPLING, most=200, request=9)
    for _ in range(8):
        talk.events += talk.engine.step()
    talk.context.before_decode = lambda call: n_pieces.append(talk.context.n_pieces)
    talk.ask(LONG["c"], SAMPLING, most=4, request=20)
    return talk


@pytest.mark.parametrize("settings", [{"streams": True}, {"n_parked": 4, "n_cells": 600}, {"unified": False}])
def test_what_a_prompt_evicts_is_copied_in_pieces_between_the_steps_of_others(settings: dict[str, Any]) -> None:
    n_pieces: list[int] = []
    talk = beside(n_pieces, **settings)
    while not talk.of(20):
        talk.events += talk.engine.step()
    copied = [after - before for before, after in pairwise(n_pieces)]
    assert sum(copied) > 3
    assert max(copied) <= 1
    talk.run()
    assert (talk.text(9), talk.text(20)) == (alone(LONG["b"][:100], 200), alone(LONG["c"]))
    talk.ask(LONG["a"] + "!", SAMPLING, most=4, request=21)
    talk.run()
    assert talk.started(21).reused_tokens == 300
    assert talk.text(21) == alone(LONG["a"] + "!")


def test_cells_that_running_sequences_will_need_are_copied_before() -> None:
    n_pieces: list[int] = []
    talk = beside(n_pieces, n_parked=4, n_cells=600)
    talk.engine.cancel(20)
    talk.ask("d" * 100, SAMPLING, most=150, request=22)
    talk.run()
    assert max(after - before for before, after in pairwise(n_pieces)) <= 1
    assert max(n_pieces) > 3
    assert talk.text(22) == alone("d" * 100, 150)
    assert talk.answer(LONG["a"] + "!", SAMPLING, most=4)[0] == alone(LONG["a"] + "!")
    assert talk.started().reused_tokens == 300


@pytest.mark.parametrize("prompt", [LONG["a"] + "!", LONG["a"][:200] + "other"])
@pytest.mark.parametrize("cancelled", [(20,), (20, 9)])
def test_a_slot_that_is_being_copied_may_go_on_or_be_cut(prompt: str, cancelled: tuple[int, ...]) -> None:
    """After its copy, or at once where nothing runs any more."""
    talk = beside([], streams=True)
    talk.events += talk.engine.step()
    assert talk.engine._slots.is_copying
    for request in cancelled:
        talk.engine.cancel(request)
    talk.ask(prompt, SAMPLING, most=40, request=21)
    talk.run()
    assert not talk.engine._slots.is_copying
    assert talk.text(21) == alone(prompt, 40)


@pytest.mark.parametrize("settings", [{"policy": {"piece_bytes": 0}}, {"on_device": True}])
def test_elsewhere_no_prompt_waits_for_a_copy(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all prompts are known, and where a copy takes about as long as the prefill."""
    talk = beside([], streams=True, **settings)
    monkeypatch.setattr(talk.context, "state_in_pieces", lambda *_: pytest.fail("it was read out"))
    talk.events += talk.engine.step()
    assert talk.of(20)


def test_no_conversation_is_lost_where_sequences_become_neighbours() -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=4, n_batch=64, streams=True)
    for request, prompt in enumerate(("0 prompt", LONG["a"], LONG["b"], "3 prompt")):
        talk.ask(prompt, SAMPLING, most=4 if request in (1, 2) else 100, request=request)
    talk.run()
    for letter in "ab":
        talk.answer(LONG[letter] + "!", SAMPLING, most=4)
        assert talk.started().reused_tokens == 300
