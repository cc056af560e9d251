"""More sequences than the KV cache has cells for: some wait or are sent back, and every answer is what it is alone."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
from support.conversation import Conversation
from support.fake_context import END, hashed, tokens_of

from llmrun.engine.core.policy import Policy
from llmrun.engine.core.prefix import NO_SALT, Prefix
from llmrun.engine.core.states import KVStore
from llmrun.engine.llama.base import Aborted
from llmrun.errors import ContextOverflowError, UsageError
from llmrun.protocol.messages import Finished, PrefillProgress, Started
from llmrun.protocol.params import SamplingParams

SAMPLING = SamplingParams(seed=5, temperature=1.0, repeat_penalty=1.2)


def alone(prompt: str, most: int, **more: tuple[str, ...]) -> str:
    return Conversation(hashed, n_ctx=400).answer(prompt, SAMPLING, most=most, **more)[0]


def test_twelve_in_cells_for_six() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=12, n_cells=6 * 50, n_batch=64)
    prompts = [f"{request:02} " * 5 for request in range(12)]
    for request, prompt in enumerate(prompts):
        talk.ask(prompt, SAMPLING, most=35, request=request)
    talk.run()
    assert [talk.text(request) for request in range(12)] == [alone(prompt, 35) for prompt in prompts]
    together = max(len({entry.sequence_id for entry in batch}) for batch in talk.context.calls)
    assert together >= 6
    assert talk.computed() > sum(len(prompt) + 34 for prompt in prompts), "somebody was sent back"


@pytest.mark.parametrize("seed", range(30))
def test_random_crowds(seed: int) -> None:
    """Check that answers are unchanged by shared prefixes, bans, cancels, aborts and new requests in few cells."""
    rng = random.Random(seed)
    n_ctx = rng.randint(60, 100)
    talk = Conversation(
        hashed,
        n_ctx=n_ctx,
        n_seq_max=rng.randint(2, 12),
        n_cells=rng.randint(n_ctx, 3 * n_ctx),
        n_batch=rng.choice([7, 32, 128]),
        cuts=rng.random() < 0.7,
    )
    system = "".join(rng.choices("abc", k=30))
    asked: dict[int, tuple[str, int, tuple[str, ...]]] = {}
    cancelled: set[int] = set()

    def disturb(call: int) -> None:
        if rng.random() < 0.05:
            talk.context.faults[call] = Aborted()
        if asked and rng.random() < 0.02:
            cancelled.add(rng.choice(list(asked)))
            for request in cancelled:
                talk.engine.cancel(request)

    talk.context.before_decode = disturb
    for request in range(14):
        prompt = system[: rng.choice([0, 12, 30])] + "".join(rng.choices("xyz", k=rng.randint(1, 20)))
        bans = tuple("".join(rng.choices("defgh", k=2)) for _ in range(rng.choice([0, 0, 8])))
        asked[request] = (prompt, rng.randint(1, n_ctx - len(prompt)), bans)
        talk.ask(prompt, SAMPLING, most=asked[request][1], ban=bans, request=request)
        for _ in range(rng.choice([0, 0, 1, 10])):
            talk.events += talk.engine.step()
            assert_books_are_right(talk)
    talk.run()
    assert_books_are_right(talk)
    for request, (prompt, most, bans) in asked.items():
        whole = alone(prompt, most, ban=bans)
        finished, said = talk.finished(request), talk.text(request)
        assert [type(event) for event in talk.of(request)].count(Started) <= 1
        if request in cancelled and finished.reason == "cancelled":
            assert whole.startswith(said)
        else:
            assert (said, finished.reason) == (whole, "length")


# What the memory of a model may be like: cut anywhere, whole (recurrent) or but for drafts, within a window, apart.
MEMORIES: dict[str, dict[str, int]] = {
    "plain": {},
    "recurrent": {"cuts": False, "has_checkpoints": True},
    "window": {"window": 24, "has_checkpoints": True},
    "rollback": {"cuts": False, "has_checkpoints": True, "n_rollback": 3},
    "streams": {"streams": True},
    "device": {"streams": True, "on_device": True},
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("memory", MEMORIES)
def test_random_crowds_with_idle_jobs_saves_and_reloads(memory: str, seed: int, tmp_path: Path) -> None:
    """Check that each answer is the one alone, whatever the engine does between and beside the turns of others."""
    rng = random.Random(seed)
    policy = Policy(min_reused=4, min_saved=4, min_gap=4)  # so that everything is worthwhile
    store, n_ctx = KVStore(tmp_path, "model", 1 << 20), 300
    system = [*tokens_of("".join(rng.choices("abc", k=40))), END]
    conversations = [[*system], [*system], tokens_of("another one; ")]
    prefixes: list[Prefix] = []
    reused = number = 0
    for _ in range(4):  # processes, or contexts
        n_seq_max, n_cells = rng.randint(1, 4), rng.randint(n_ctx, 3 * n_ctx)
        talk = Conversation(
            hashed,
            store,
            prefixes=prefixes,
            policy=policy,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_parked=rng.choice([0, 2]) if memory in ("plain", "window") else 0,
            n_cells=n_ctx * n_seq_max if "streams" in MEMORIES[memory] else n_cells,
            n_batch=rng.choice([7, 32, 128]),
            **MEMORIES[memory],
        )
        asked: dict[int, tuple[list[int], int]] = {}
        cancelled: set[int] = set()
        for _ in range(rng.randint(3, 8)):
            number += 1
            conversation = rng.choice(conversations)
            if rng.random() < 0.3:  # an earlier turn is changed
                del conversation[rng.randint(len(conversation) // 2, len(conversation)) :]
            conversation += [*tokens_of("".join(rng.choices("xyz", k=rng.randint(1, 25)))), END]
            if len(conversation) > n_ctx - 50:
                conversation[:] = system
            if rng.random() < 0.4:
                talk.engine.read_ahead(list(conversation), NO_SALT)
            asked[number] = list(conversation), rng.randint(1, 40)
            talk.ask(list(conversation), SAMPLING, most=asked[number][1], request=number)
            for _ in range(rng.choice([0, 1, 10, 200])):
                talk.events += talk.engine.step() if talk.engine.busy else []
                assert_books_are_right(talk)
            if rng.random() < 0.1:
                cancelled.add(number)
                talk.engine.cancel(number)
            if rng.random() < 0.5:
                talk.run()
            _do_idle_job(rng, talk, number)
            assert_books_are_right(talk)
            if not talk.engine.busy and number not in cancelled and rng.random() < 0.5:
                conversation += tokens_of(talk.text(number))
        talk.run()
        assert_books_are_right(talk)
        for request, (prompt, most) in asked.items():
            whole, finished = (
                Conversation(hashed, n_ctx=n_ctx).answer(prompt, SAMPLING, most=most)[0],
                talk.finished(request),
            )
            reused += finished.stats.reused_tokens
            if request in cancelled and finished.reason == "cancelled":
                assert whole.startswith(talk.text(request))
            else:
                assert (talk.text(request), finished.reason) == (whole, "length")
        prefixes = talk.engine.prefixes() if rng.random() < 0.4 else []
        if rng.random() < 0.5:
            talk.engine.save_parked()
        assert talk.engine._slots.saver is not None
        talk.engine._slots.saver.wait()
    assert reused > 0


def _do_idle_job(rng: random.Random, talk: Conversation, request: int) -> None:
    """Do what the engine does when it is idle, also where it is not."""
    job = rng.choice(["save", "save prompt", "park", "", ""])
    if job.startswith("save"):
        with suppress(UsageError):  # not finished, or another answer took its slot
            talk.engine.save(request, prompt_only=job == "save prompt")
    elif job == "park" and not talk.engine.busy:
        talk.engine.save_parked()


def assert_books_are_right(talk: Conversation) -> None:
    """Check that the loop's records of cached tokens and used cells match the KV cache."""
    slots = talk.engine._slots
    for slot, tokens in slots.cached.items():
        assert talk.context.cached(slot) == tokens
    assert slots.budget.used == talk.context.n_used
    assert slots.budget.used <= talk.context.n_cells


def test_parked_prefixes_go_first_and_those_not_used_for_longest_before_others() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=4, n_cells=100)
    for name in "abc":
        talk.answer(name * 20, most=5)
    talk.answer("a" * 20 + "!", most=5)
    talk.answer("d" * 40, most=10)
    cached = [bytes(talk.context.cached(slot))[:1] for slot in range(4)]
    assert sorted(cached) == [b"", b"a", b"c", b"d"], "b was not used for longest"


def test_a_preempted_request_goes_on_where_it_was() -> None:
    talk = Conversation(hashed, n_ctx=60, n_seq_max=2, n_cells=60, n_batch=16)
    talk.ask("old ", SAMPLING, most=40, request=1)
    talk.ask("young ", SAMPLING, most=30, request=2)
    talk.run()
    assert talk.text(1) == alone("old ", 40)
    assert talk.text(2) == alone("young ", 30)
    assert talk.computed() > 4 + 39 + 6 + 29
    assert [type(event) for event in talk.of(2)].count(Started) == 1
    assert [event.tokens for event in talk.of(2) if isinstance(event, PrefillProgress)] == [6], "only before its text"
    assert talk.finished(2).stats.completion_tokens == 30
    reused = talk.finished(2).stats.reused_tokens
    assert 0 <= reused <= talk.started(2).reused_tokens


def test_the_oldest_is_never_sent_back() -> None:
    talk = Conversation(hashed, n_ctx=60, n_seq_max=3, n_cells=64, n_batch=64)
    for request in (1, 2, 3):
        talk.ask(f"{request}" * 6, SAMPLING, most=50, request=request)
    talk.run()
    positions = [entry.position for batch in talk.context.calls for entry in batch if entry.sequence_id == 0]
    oldest = positions[: 6 + 49]
    assert oldest == sorted(oldest)


def test_a_preempted_sequence_is_admitted_before_newcomers_and_as_soon_as_a_request_has_finished() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=4, n_cells=100, n_batch=64)
    talk.ask("old ", SAMPLING, most=20, request=1)
    talk.ask("older than some ", SAMPLING, most=70, request=2)
    talk.ask("young ", SAMPLING, most=40, request=3)
    talk.ask("the youngest of all, with a long prompt", SAMPLING, most=20, request=4)
    talk.run()
    ended = [event.request for event in talk.events if isinstance(event, Finished)]
    assert ended == [1, 3, 2, 4]
    for request, prompt, most in ((2, "older than some ", 70), (3, "young ", 40)):
        assert talk.text(request) == alone(prompt, most)


def test_whoever_was_sent_back_may_be_cancelled_and_shows_what_was_held_back() -> None:
    talk = Conversation(hashed, n_ctx=60, n_seq_max=2, n_cells=60, n_batch=64)
    whole = alone("young ", 30)
    talk.ask("old ", SAMPLING, most=50, request=1)
    talk.ask("young ", SAMPLING, most=30, request=2, stop=(whole[20:23] + "never",))
    while talk.context.cached(1) or len(talk.context.calls) < 10:
        talk.events += talk.engine.step()
    talk.engine.cancel(2)
    talk.run()
    assert talk.finished(2).reason == "cancelled"
    assert whole.startswith(talk.text(2))
    assert len(talk.text(2)) == talk.finished(2).stats.completion_tokens
    assert talk.text(1) == alone("old ", 50)


def test_a_prompt_that_never_fits_is_refused() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=2, n_cells=50)
    with pytest.raises(ContextOverflowError, match="50"):
        talk.ask("x" * 51)
    assert talk.answer("x" * 50, most=9)[1] == "length"
    assert talk.finished().stats.completion_tokens == 1


def test_an_answer_that_fills_all_cells_ends_with_length() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=2, n_cells=50)
    assert talk.answer("x" * 20, SAMPLING) == (alone("x" * 20, 31), "length")


def test_cells_that_are_not_there_although_they_should_be() -> None:
    """As where a sliding window's own cells run out: the answer ends, or the prompt is refused; the others go on."""
    talk = Conversation(hashed, n_ctx=100, n_seq_max=2, n_cells=100, n_batch=64)
    talk.context.hidden_cells = 60
    talk.ask("x" * 20, SAMPLING, most=90, request=1)
    talk.ask("y" * 10, SAMPLING, most=5, request=2)
    talk.ask("z" * 50, SAMPLING, most=5, request=3)
    talk.run()
    assert (talk.text(1), talk.finished(1).reason) == (alone("x" * 20, 21), "length")
    assert talk.text(2) == alone("y" * 10, 5)
    assert talk.failed(3).code == "context-overflow"
    assert talk.answer("Hi", SAMPLING, most=5)[0] == alone("Hi", 5)


def test_a_cache_that_cannot_grow_as_far_as_it_was_meant_to() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=4, n_cells=400, n_batch=64)

    def shrink(call: int) -> None:
        if talk.context.n_used > 100:
            talk.context.n_cells = 110

    talk.context.before_decode = shrink
    for request in range(4):
        talk.ask(f"{request}" * 20, SAMPLING, most=60, request=request)
    talk.run()
    assert_books_are_right(talk)
    assert [talk.text(request) for request in range(4)] == [alone(f"{request}" * 20, 60) for request in range(4)]
    with pytest.raises(ContextOverflowError, match="100"):
        talk.ask("x" * 101)


def test_no_request_overtakes_a_long_prompt_that_waits_for_cells() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=3, n_cells=100, n_batch=64)
    talk.ask("a" * 20, SAMPLING, most=50, request=1)
    talk.ask("b" * 60, SAMPLING, most=5, request=2)
    talk.ask("c", SAMPLING, most=5, request=3)
    talk.run()
    assert [event.request for event in talk.events if isinstance(event, Started)] == [1, 2, 3]


# ---- prefixes that several share -------------------------------------------------------------------------

SYSTEM = "you are a helpful assistant. "


def test_a_prefix_is_shared_with_a_sequence_that_runs() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=3, n_batch=64)
    talk.ask(SYSTEM + "one", SAMPLING, most=20, request=1)
    talk.events += talk.engine.step() + talk.engine.step()
    talk.ask(SYSTEM + "two", SAMPLING, most=20, request=2)
    talk.run()
    assert talk.started(2).reused_tokens == len(SYSTEM)
    for request, name in ((1, "one"), (2, "two")):
        assert talk.text(request) == alone(SYSTEM + name, 20)
    assert talk.computed() == len(SYSTEM) + 2 * (3 + 19)
    assert talk.context.n_used == len(SYSTEM) + 2 * (3 + 19)


def test_cells_that_are_shared_let_more_in() -> None:
    system = "s" * 60
    talk = Conversation(hashed, n_ctx=100, n_seq_max=4, n_cells=100, n_batch=64)
    for request in range(3):
        talk.ask(system + f"{request}", SAMPLING, most=10, request=request)
    talk.run()
    assert max(len({entry.sequence_id for entry in batch}) for batch in talk.context.calls) == 3
    assert talk.computed() == 60 + 3 * (1 + 9)


def test_the_same_long_prompt_at_once_is_computed_once() -> None:
    prompt = "x" * 90
    talk = Conversation(hashed, n_ctx=200, n_seq_max=4, n_batch=64)
    for request in range(4):
        talk.ask(prompt, SAMPLING, most=4, request=request)
    talk.run()
    assert {talk.text(request) for request in range(4)} == {alone(prompt, 4)}
    assert talk.computed() < 2 * len(prompt)


def test_the_same_short_prompt_at_once_is_computed_once_but_for_its_last_token() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=4, n_batch=64)
    for request in range(4):
        talk.ask("short", SAMPLING, most=4, request=request)
    talk.run()
    assert {talk.text(request) for request in range(4)} == {alone("short", 4)}
    assert [talk.started(request).reused_tokens for request in range(4)] == [0, 4, 4, 4]
    assert talk.computed() == len("short") + 3 + 4 * 3


def test_a_parked_conversation_is_not_cut_by_one_that_begins_alike() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=3)
    first, _ = talk.answer(SYSTEM + "one", most=5)
    talk.answer(SYSTEM + "two", most=5)
    assert talk.started().reused_tokens == len(SYSTEM)
    talk.answer(SYSTEM + "one" + first + "more", most=5)
    assert talk.started().reused_tokens == len(SYSTEM + "one") + 4
    assert talk.context.cached(0)[: len(SYSTEM)] == tokens_of(SYSTEM)


def test_the_same_question_again_takes_the_slot_that_knows_it() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=3)
    talk.answer("question", most=5)
    talk.answer("question", most=5)
    assert talk.started().reused_tokens == len("question") - 1
    assert [len(talk.context.cached(slot)) for slot in (1, 2)] == [0, 0]


def test_with_a_cache_per_stream_nothing_is_shared() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=2, unified=False, n_batch=64)
    talk.ask(SYSTEM + "one", SAMPLING, most=20, request=1)
    talk.events += talk.engine.step() + talk.engine.step()
    talk.ask(SYSTEM + "two", SAMPLING, most=20, request=2)
    talk.run()
    assert talk.started(2).reused_tokens == 0
    assert talk.text(2) == alone(SYSTEM + "two", 20)


def test_a_state_that_can_only_be_copied_whole_is_not_taken_in_part() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=2, cuts=False)
    talk.answer(SYSTEM, most=5)
    assert talk.answer(SYSTEM + "two", SAMPLING, most=5)[0] == alone(SYSTEM + "two", 5)
    assert talk.started().reused_tokens == 0
