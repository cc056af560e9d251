"""Saved KV states in the loop: what was computed once is not prefilled again, and what is wrong is as if not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.conversation import Conversation
from support.fake_context import hashed, tokens_of

from llmrun.engine.core.prefix import NO_SALT, Salt
from llmrun.engine.core.states import KVStore
from llmrun.engine.llama.base import DecodeError
from llmrun.errors import BadModelError, LlmrunError, OutOfMemoryError, UsageError

LONG = "a system prompt and a file that are the same each time; " * 4


def talk(folder: Path, **context: int) -> Conversation:
    """An engine that has just been started."""
    return Conversation(hashed, KVStore(folder, "model", 1 << 20), n_ctx=600, n_batch=512, **context)


def test_a_conversation_goes_on_without_prefill(tmp_path: Path) -> None:
    first = talk(tmp_path)
    answer, _ = first.answer(LONG, most=20)
    tokens, n_bytes = first.engine.save(1, prompt_only=False)
    assert tokens == len(LONG) + 19
    assert n_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
    later = talk(tmp_path)
    later.ask(LONG + answer + "And then?", most=5)
    later.run()
    assert later.started().reused_tokens == len(LONG) + 19
    assert later.computed() == 1 + len("And then?") + 4
    assert later.context.cached()[: len(LONG)] == tokens_of(LONG)


def test_the_answer_is_the_same_with_and_without_a_saved_state(tmp_path: Path) -> None:
    first = talk(tmp_path)
    answer, _ = first.answer(LONG, most=20)
    first.engine.save(1, prompt_only=False)
    question = LONG + answer + "And then?"
    assert talk(tmp_path).answer(question, most=30) == talk(tmp_path / "empty").answer(question, most=30)


def test_another_question_after_the_same_long_prompt(tmp_path: Path) -> None:
    first = talk(tmp_path)
    first.answer(LONG + "What is it?", most=20)
    tokens, n_bytes = first.engine.save(1, prompt_only=True)
    assert tokens == len(LONG + "What is it?")
    assert n_bytes > 0
    later = talk(tmp_path)
    later.answer(LONG + "How long?", most=5)
    assert later.started().reused_tokens == len(LONG)
    assert later.context.cached() == tokens_of(LONG + "How long?" + later.text())[:-1]


def test_where_a_model_cannot_be_cut_only_a_whole_state_is_used(tmp_path: Path) -> None:
    first = talk(tmp_path, cuts=False)
    answer, _ = first.answer(LONG, most=5)
    first.engine.save(1, prompt_only=False)
    later = talk(tmp_path, cuts=False)
    later.answer(LONG + answer + "more", most=2)
    assert later.started().reused_tokens == len(LONG) + 4
    other = talk(tmp_path, cuts=False)
    other.answer(LONG + "other", most=2)
    assert other.started().reused_tokens == 0
    assert other.context.cached()[: len(LONG)] == tokens_of(LONG)


def test_what_the_slot_knows_already_is_not_read_again(tmp_path: Path) -> None:
    first = talk(tmp_path)
    answer, _ = first.answer(LONG, most=5)
    first.engine.save(1, prompt_only=False)
    first.answer(LONG + answer + "x", most=2)
    assert first.started().reused_tokens == len(LONG) + 4


def test_a_state_that_llama_cpp_refuses_costs_only_the_prefill(tmp_path: Path) -> None:
    KVStore(tmp_path, "model", 1 << 20).save(tokens_of(LONG), b"bad")
    later = talk(tmp_path)
    later.answer(LONG + "x", most=2)
    assert later.started().reused_tokens == 0
    assert later.context.cached() == tokens_of(LONG + "x" + later.text())[:-1]


@pytest.mark.parametrize("error", [OutOfMemoryError("no"), DecodeError("no")], ids=["memory", "llama.cpp"])
def test_a_state_that_cannot_be_read_in_costs_only_the_prefill(tmp_path: Path, error: LlmrunError) -> None:
    KVStore(tmp_path, "model", 1 << 20).save(tokens_of(LONG), b"[]")
    later = talk(tmp_path)
    later.context.set_state_error = error
    assert later.answer(LONG + "x", most=2)[1] == "length"
    assert later.started().reused_tokens == 0
    assert later.context.cached() == tokens_of(LONG + "x" + later.text())[:-1]


@pytest.mark.parametrize("error", [OSError("no"), BadModelError("no")])
def test_a_store_that_fails_knows_nothing(tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*args: object, **options: object) -> None:
        raise error

    later = talk(tmp_path)
    later.answer(LONG, most=5)
    monkeypatch.setattr(KVStore, "find", find)
    later.answer(LONG + "x" * 80, most=2)
    assert later.started().reused_tokens == len(LONG)


def test_a_state_for_which_there_are_no_cells_is_not_used(tmp_path: Path) -> None:
    KVStore(tmp_path, "model", 1 << 20).save(tokens_of(LONG), json.dumps(tokens_of(LONG)).encode())
    later = talk(tmp_path, n_seq_max=2, n_cells=500)
    later.ask("y" * 250, most=200, request=1)
    for _ in range(100):
        later.events += later.engine.step()
    later.ask(LONG[:100] + "x", most=5, request=2)
    later.run()
    assert later.started(2).reused_tokens == 0
    assert later.text(1) == Conversation(hashed, n_ctx=600).answer("y" * 250, most=200)[0]


def test_each_answer_can_be_saved_until_its_slot_is_given_away(tmp_path: Path) -> None:
    first = talk(tmp_path, n_seq_max=2)
    first.ask(LONG + "one", most=5, request=1)
    first.ask(LONG + "two", most=5, request=2)
    first.run()
    assert first.engine.save(1, prompt_only=False)[0] == len(LONG + "one") + 4
    assert first.engine.save(2, prompt_only=True)[0] == len(LONG + "two")
    first.ask(LONG + "one", most=5, request=3)
    first.run()
    with pytest.raises(UsageError):
        first.engine.save(1, prompt_only=False)
    assert first.engine.save(2, prompt_only=True)[0] == len(LONG + "two")


def test_a_state_longer_than_the_context_window_is_not_used(tmp_path: Path) -> None:
    KVStore(tmp_path, "model", 1 << 20).save(tokens_of(LONG * 4), b"[]")
    later = talk(tmp_path)
    assert later.answer(LONG + "x", most=2)[1] == "length"
    assert later.started().reused_tokens == 0


def test_only_the_last_answer_can_be_saved_and_only_with_a_store(tmp_path: Path) -> None:
    first = talk(tmp_path)
    first.answer("Hi", most=2)
    with pytest.raises(UsageError):
        first.engine.save(7, prompt_only=False)
    without = Conversation(hashed)
    without.answer("Hi", most=2)
    assert without.engine.save(1, prompt_only=False) == (0, 0)


# ---- what others will want ---------------------------------------------------------------------------------------

SYSTEM = "a long system prompt that all of the clients have in common; " * 5


def saved(conversation: Conversation) -> None:
    """Rest for a while, and wait until all is on disk."""
    conversation.engine.save_parked()
    saver = conversation.engine._slots.saver
    assert saver is not None
    saver.wait()


def test_a_prefix_that_two_prompts_share_is_there_after_a_restart(tmp_path: Path) -> None:
    first = talk(tmp_path, n_seq_max=4)
    first.answer(SYSTEM + "one?", most=5)
    saved(first)
    assert not list(tmp_path.rglob("*.kv")), "nobody shares it yet"
    for question in ("two?", "three?", "four?"):
        first.answer(SYSTEM + question, most=5)
    saved(first)
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    later = talk(tmp_path, n_seq_max=4)
    for request in range(4):
        later.ask(SYSTEM + f"{request}!", most=5, request=request)
    later.run()
    assert [later.started(request).reused_tokens for request in range(4)] == [len(SYSTEM)] * 4
    saved(later)
    assert len(list(tmp_path.rglob("*.kv"))) == 1, "it is not written again"


def test_a_long_conversation_goes_to_disk_before_it_is_evicted_and_comes_back(tmp_path: Path) -> None:
    crowd = talk(tmp_path, n_seq_max=2, n_parked=4, n_cells=700)
    answer, _ = crowd.answer(SYSTEM, most=5)
    second, _ = crowd.answer(SYSTEM + answer + "And then?", most=5)
    saved(crowd)
    for letter in "xyz":
        crowd.answer(letter * 300, most=5)
    saved(crowd)
    assert len(list(tmp_path.rglob("*.kv"))) == 1, "nobody went on with the others"
    assert crowd.answer(SYSTEM + answer + "And then?" + second + "Go on", most=5)[1] == "length"
    assert crowd.started().reused_tokens == len(SYSTEM + answer + "And then?") + 4


def test_what_has_a_salt_is_not_written(tmp_path: Path) -> None:
    crowd = talk(tmp_path, n_seq_max=2, n_parked=4, n_cells=700)
    for question in ("one?", "two?"):
        crowd.answer(SYSTEM + question, most=5, salt="mine")
    answer, _ = crowd.answer("x" * 400, most=5, salt="mine")
    crowd.answer("x" * 400 + answer + "!", most=5, salt="mine")
    crowd.answer("y" * 590, most=5)
    saved(crowd)
    assert not list(tmp_path.rglob("*.kv"))


def test_what_is_saved_is_not_read_for_a_salt(tmp_path: Path) -> None:
    first = talk(tmp_path)
    first.answer(LONG, most=5)
    first.engine.save(1, prompt_only=False)
    later = talk(tmp_path)
    later.answer(LONG, most=5, salt="mine")
    assert later.started().reused_tokens == 0
    assert later.engine.save(1, prompt_only=False) == (0, 0)


def test_a_full_disk_stops_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "no space left")

    monkeypatch.setattr(KVStore, "save", full)
    crowd = talk(tmp_path, n_seq_max=4)
    for question in ("one?", "two?", "three?"):
        assert crowd.answer(SYSTEM + question, most=5)[1] == "length"
    saved(crowd)


def test_a_state_is_read_before_the_loop_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = talk(tmp_path)
    answer, _ = first.answer(LONG, most=20)
    first.engine.save(1, prompt_only=False)
    question, store = LONG + answer + "And then?", KVStore(tmp_path, "model", 1 << 20)
    later = Conversation(hashed, store, n_ctx=600, n_batch=512)
    later.engine.read_ahead(tokens_of(question), NO_SALT)
    monkeypatch.setattr(store, "_read", None)
    later.answer(question, most=5)
    assert later.started().reused_tokens == len(LONG) + 19
    later.engine.read_ahead(tokens_of(question), NO_SALT)  # nothing is read: a slot holds it


def test_nothing_is_read_ahead_for_a_request_with_a_salt(tmp_path: Path) -> None:
    first = talk(tmp_path)
    first.answer(LONG, most=20)
    first.engine.save(1, prompt_only=False)
    store = KVStore(tmp_path, "model", 1 << 20)
    later = Conversation(hashed, store, n_ctx=600, n_batch=512)
    later.engine.read_ahead(tokens_of(LONG), Salt(private="mine"))
    assert not store._ahead
    later.engine.read_ahead(tokens_of(LONG), NO_SALT)
    assert store._ahead
    later.engine.save_parked()
    assert not store._ahead, "an idle engine keeps nothing that was not asked for"
