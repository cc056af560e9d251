"""The generation loop over a scripted model: what it says, what it computes, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from support.conversation import Conversation
from support.fake_backend import BEGIN, END, HEART, N_VOCAB, TURN, endless, favouring, hashed, scripted, tokens_of

from llmrun.engine.llama.base import Aborted, DecodeError
from llmrun.errors import ContextOverflowError, OutOfMemoryError, UsageError
from llmrun.protocol.messages import Failed, Finished, PrefillProgress, Started, TextDelta
from llmrun.protocol.params import SamplingParams

FREE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


# ---- how an answer ends -----------------------------------------------------------------------------


def test_an_answer() -> None:
    talk = Conversation(scripted({"Hi": "Hello!"}))
    assert talk.answer("Hi") == ("Hello!", "stop")
    assert talk.backend.cached() == tokens_of("HiHello!")
    kinds = [type(event) for event in talk.events]
    assert kinds == [Started, *[TextDelta] * 6, Finished]


def test_an_empty_answer() -> None:
    talk = Conversation(scripted({}))
    assert talk.answer("Hi") == ("", "stop")
    assert talk.finished().stats.completion_tokens == 1


def test_a_prompt_of_one_token() -> None:
    assert Conversation(scripted({"?": "!"})).answer("?") == ("!", "stop")


@pytest.mark.parametrize("most", [1, 2, 7])
def test_max_tokens(most: int) -> None:
    talk = Conversation(endless)
    text, reason = talk.answer("Hi", most=most)
    assert (text, reason) == ("cdefghijk"[:most], "length")
    assert talk.finished().stats.completion_tokens == most
    assert talk.computed() == 2 + most - 1, "the last token is not computed: nothing follows it"


@pytest.mark.parametrize("most", range(1, 6))
def test_max_tokens_within_a_character(most: int) -> None:
    """Tokens of half a character count like others, and what is left of it is shown as such."""
    heart = [HEART, 0xA4]
    talk = Conversation(scripted({"Hi": [*heart, *heart, *heart]}))
    text, reason = talk.answer("Hi", most=most)
    assert talk.finished().stats.completion_tokens == most
    assert (text, reason) == ("❤" * (most // 2) + "\ufffd" * (most % 2), "length")


def test_an_answer_as_long_as_max_tokens_stops_by_itself() -> None:
    talk = Conversation(scripted({"Hi": "yes"}))
    assert talk.answer("Hi", most=4) == ("yes", "stop")
    assert talk.answer("Hi", most=3) == ("yes", "length")


def test_control_tokens_have_no_text() -> None:
    talk = Conversation(scripted({"Hi": [ord("a"), TURN, ord("b"), BEGIN]}))
    assert talk.answer("Hi") == ("ab", "stop")
    assert talk.finished().stats.completion_tokens == 5


def test_a_stop_string_ends_the_answer() -> None:
    talk = Conversation(scripted({"Hi": "one\nUser: two"}))
    assert talk.answer("Hi", stop=("\nUser:",)) == ("one", "stop")
    assert talk.computed() == len("Hi" + "one\nUser:") - 1


def test_the_beginning_of_a_stop_string_is_shown_at_the_end() -> None:
    assert Conversation(scripted({"Hi": "one\nUs"})).answer("Hi", stop=("\nUser:",)) == ("one\nUs", "stop")
    assert Conversation(endless).answer("Hi", stop=("fgx",), most=5) == ("cdefg", "length")


def test_a_stop_string_at_max_tokens_is_a_stop() -> None:
    assert Conversation(endless).answer("Hi", stop=("e",), most=3) == ("cd", "stop")


# ---- the context window -----------------------------------------------------------------------------


@pytest.mark.parametrize("room", range(5))
def test_the_end_of_the_context_window(room: int) -> None:
    """The last token may be drawn from a full window: it needs no place in it."""
    talk = Conversation(endless, n_ctx=20)
    text, reason = talk.answer("x" * (20 - room))
    assert (len(text), reason) == (room + 1, "length")
    stats = talk.finished().stats
    assert (stats.context_used, stats.n_ctx, stats.completion_tokens) == (20, 20, room + 1)


def test_a_prompt_longer_than_the_context_window() -> None:
    talk = Conversation(endless, n_ctx=20)
    with pytest.raises(ContextOverflowError) as caught:
        talk.ask("x" * 21)
    assert "21 tokens" in caught.value.what
    assert "20" in caught.value.what
    assert not talk.engine.busy


def test_an_answer_that_just_fits() -> None:
    talk = Conversation(scripted({"x" * 17: "abc"}), n_ctx=20)
    assert talk.answer("x" * 17) == ("abc", "stop")
    assert talk.finished().stats.context_used == 20


def test_the_slot_is_usable_after_a_full_window() -> None:
    talk = Conversation(endless, n_ctx=20)
    talk.answer("x" * 20)
    assert talk.answer("Hi", most=3) == ("cde", "length")


# ---- prefill and reuse ------------------------------------------------------------------------------


def test_prefill_progress_counts_what_was_computed() -> None:
    talk = Conversation(scripted({"x" * 20: "a"}), n_batch=8)
    talk.answer("x" * 20)
    progress = [event for event in talk.events if isinstance(event, PrefillProgress)]
    assert progress == [PrefillProgress(1, 8, 1), PrefillProgress(1, 16, 2)]
    assert [len(batch) for batch in talk.backend.calls] == [8, 8, 4, 1]


def test_only_the_last_prompt_token_wants_logits() -> None:
    talk = Conversation(scripted({"x" * 20: "a"}), n_batch=8)
    talk.answer("x" * 20)
    wanted = [entry.position for batch in talk.backend.calls for entry in batch if entry.wants_logits]
    assert wanted == [19, 20]


def test_turns_reuse_what_the_cache_knows() -> None:
    turns = {"Q1": "A1", "Q1A1Q2": "A2", "Q1A1Q2A2Q3": "A3"}
    talk = Conversation(scripted(turns))
    for (prompt, answer), reused in zip(turns.items(), (0, 4, 8), strict=True):
        assert talk.answer(prompt) == (answer, "stop")
        assert talk.started() == Started(1, len(prompt), reused, talk.started().seed)
        assert talk.backend.cached() == tokens_of(prompt + answer)
    assert talk.finished().stats.reused_tokens == 8
    assert talk.computed() == len("Q1A1Q2A2Q3A3"), "every token was computed once"


def test_the_same_prompt_again_computes_one_token_of_it() -> None:
    talk = Conversation(scripted({"Hello": "you"}))
    talk.answer("Hello")
    assert talk.answer("Hello") == ("you", "stop")
    assert talk.started().reused_tokens == 4
    assert talk.backend.cached() == tokens_of("Helloyou")


@pytest.mark.parametrize(("prompt", "reused"), [("abX", 2), ("a", 0), ("ab", 1), ("zzz", 0), ("abcdefX", 6)])
def test_another_prompt_cuts_the_cache(prompt: str, reused: int) -> None:
    talk = Conversation(scripted({"abcd": "efgh", prompt: "ok"}))
    talk.answer("abcd")
    assert talk.answer(prompt) == ("ok", "stop")
    assert talk.started().reused_tokens == reused
    assert talk.backend.cached() == tokens_of(prompt + "ok")


def test_memory_that_cannot_be_cut_starts_anew() -> None:
    talk = Conversation(scripted({"abcd": "ef", "abX": "ok", "abXokY": "so"}), cuts=False)
    talk.answer("abcd")
    assert talk.answer("abX") == ("ok", "stop")
    assert talk.started().reused_tokens == 0
    assert talk.backend.cached() == tokens_of("abXok")
    assert talk.answer("abXokY") == ("so", "stop")
    assert talk.started().reused_tokens == 5, "going on needs no cut"


# ---- cancelling and failing -------------------------------------------------------------------------


def test_cancel_while_decoding() -> None:
    talk = Conversation(endless)
    talk.ask("Hi")
    talk.backend.before_decode = lambda call: talk.engine.cancel(1) if call == 3 else None
    talk.run()
    assert (talk.text(), talk.finished().reason) == ("cdef", "cancelled")
    assert talk.finished().stats.completion_tokens == 4


def test_cancel_in_prefill() -> None:
    talk = Conversation(endless, n_batch=8)
    talk.ask("x" * 30)
    talk.backend.before_decode = lambda call: talk.engine.cancel(1) if call == 1 else None
    talk.run()
    assert (talk.text(), talk.finished().reason) == ("", "cancelled")
    assert talk.backend.cached() == tokens_of("x" * 16)
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
    talk.backend.before_decode = lambda call: talk.engine.cancel(1) if call == 3 else None
    talk.run()
    assert talk.text() == "a<en"


def test_cancel_of_nobody() -> None:
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
    talk.backend.faults[call] = Aborted()
    assert talk.answer(prompt) == ("abc", "stop")
    assert talk.backend.cached() == tokens_of(prompt + "abc")
    assert talk.finished().stats.completion_tokens == 4


@pytest.mark.parametrize("cuts", [True, False])
def test_prefill_progress_when_an_abort_costs_what_was_reused(cuts: bool) -> None:
    first, second = "x" * 12, "x" * 12 + "c" + "y" * 40
    talk = Conversation(scripted({first: "c", second: "ok"}), n_batch=8, cuts=cuts)
    talk.answer(first)
    talk.backend.faults[len(talk.backend.calls) + 1] = Aborted()
    assert talk.answer(second) == ("ok", "stop")
    progress = [event.tokens for event in talk.events if isinstance(event, PrefillProgress)]
    assert all(tokens > 0 for tokens in progress), progress
    assert progress[-1] == (32 if cuts else 48), "what is left fits into the last batch"
    assert talk.finished().stats.reused_tokens == (13 if cuts else 0)


def test_aborted_by_a_cancel() -> None:
    talk = Conversation(endless, n_batch=8)

    def abort(call: int) -> None:
        if call == 2:
            talk.engine.cancel(1)

    talk.backend.before_decode = abort
    talk.backend.faults[2] = Aborted()
    talk.ask("x" * 30)
    talk.run()
    assert talk.finished().reason == "cancelled"
    assert talk.backend.cached() == tokens_of("x" * 16), "what the aborted batch wrote is forgotten"
    assert talk.finished().stats.context_used == 16


def test_a_cancel_of_one_does_not_hurt_the_other() -> None:
    talk = Conversation(hashed, n_seq_max=2)
    alone = Conversation(hashed).answer("Ho", most=10)[0]
    talk.ask("Hi", most=10, request=1)
    talk.ask("Ho", most=10, request=2)
    talk.backend.before_decode = lambda call: talk.engine.cancel(1) if call == 4 else None
    talk.backend.faults[4] = Aborted()
    talk.run()
    assert talk.finished(1).reason == "cancelled"
    assert talk.text(2) == alone


@pytest.mark.parametrize(
    ("error", "code"),
    [(DecodeError("no", why="status 1"), "internal"), (OutOfMemoryError("no"), "not-enough-memory")],
)
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_batch_that_fails(error: DecodeError, code: str, call: int) -> None:
    talk = Conversation(scripted({"x" * 10: "abc"}), n_batch=8)
    talk.backend.faults[call] = error
    talk.ask("x" * 10)
    talk.run()
    assert talk.failed() == Failed(1, code, "no", error.why)
    assert talk.backend.cached() == []
    assert talk.answer("x" * 10) == ("abc", "stop"), "the engine lives on"
    assert talk.started().reused_tokens == 0


@pytest.mark.parametrize("logit", [math.nan, math.inf])
def test_logits_that_are_not_numbers(logit: float) -> None:
    def model(tokens: Sequence[int]) -> Sequence[float]:
        return [*favouring(ord("a"))[:-1], logit] if len(tokens) == 4 else favouring(ord("a"))

    talk = Conversation(model)
    talk.ask("Hi")
    talk.run()
    assert talk.text() == "aa"
    assert talk.failed().code == "bad-logits"
    assert talk.failed().hint
    assert talk.answer("H", most=2) == ("aa", "length")


def test_nothing_left_to_sample() -> None:
    talk = Conversation(endless)
    talk.ask("Hi", SamplingParams(logit_bias=tuple((token, -math.inf) for token in range(N_VOCAB))))
    talk.run()
    assert talk.failed().code == "bad-logits"
    assert "logit_bias" in talk.failed().hint


def test_bad_logits_of_one_do_not_hurt_the_other() -> None:
    def model(tokens: Sequence[int]) -> Sequence[float]:
        return [math.nan] * N_VOCAB if tokens[0] == ord("!") else endless(tokens)

    talk = Conversation(model, n_seq_max=2)
    talk.ask("!!", request=1)
    talk.ask("Hi", request=2, most=4)
    talk.run()
    assert talk.failed(1).code == "bad-logits"
    assert talk.text(2) == "cdef"


def test_a_biased_token_outside_the_vocabulary() -> None:
    talk = Conversation(endless)
    with pytest.raises(UsageError, match="logit_bias"):
        talk.ask("Hi", SamplingParams(logit_bias=((N_VOCAB, 1.0),)))
    assert not talk.engine.busy


# ---- several at once --------------------------------------------------------------------------------

PROMPTS = ["a", "bb", "x" * 30, "dddd", "ab" * 12]


@pytest.mark.parametrize("n_seq_max", [1, 2, 3, 5])
@pytest.mark.parametrize("n_batch", [5, 8, 64])
def test_several_at_once_say_what_each_says_alone(n_seq_max: int, n_batch: int) -> None:
    sampling = SamplingParams(seed=5, temperature=1.0, repeat_penalty=1.2)
    alone = [Conversation(hashed).answer(prompt, sampling, most=12)[0] for prompt in PROMPTS]
    talk = Conversation(hashed, n_seq_max=n_seq_max, n_batch=n_batch)
    for request, prompt in enumerate(PROMPTS):
        talk.ask(prompt, sampling, most=12, request=request)
    talk.run()
    assert [talk.text(request) for request in range(len(PROMPTS))] == alone
    assert all(talk.finished(request).reason == "length" for request in range(len(PROMPTS)))


def test_more_requests_than_slots_wait_in_order() -> None:
    talk = Conversation(hashed, n_seq_max=2)
    for request in range(5):
        talk.ask(f"prompt {request}", most=3, request=request)
    talk.run()
    assert [event.request for event in talk.events if isinstance(event, Started)] == list(range(5))
    assert max(len({entry.sequence_id for entry in batch}) for batch in talk.backend.calls) == 2


def test_a_long_prefill_does_not_hold_up_decoding() -> None:
    talk = Conversation(hashed, n_seq_max=2, n_batch=8)
    talk.ask("Hi", most=10, request=1)
    for _ in range(3):
        talk.events += talk.engine.step()
    talk.ask("x" * 40, most=2, request=2)
    seen = len(talk.backend.calls)
    talk.run()
    for batch in talk.backend.calls[seen : seen + 5]:
        assert [entry.sequence_id for entry in batch] == [0] + [1] * 7


def test_a_request_gets_the_slot_that_knows_its_prompt() -> None:
    talk = Conversation(scripted({"abc": "d", "xyz": "w", "xyzw!": "?", "abcd!": "?"}), n_seq_max=2)
    talk.ask("abc", request=1)
    talk.ask("xyz", request=2)
    talk.run()
    talk.answer("xyzw!")
    assert talk.started().reused_tokens == 4
    talk.answer("abcd!")
    assert talk.started().reused_tokens == 4


def test_a_new_conversation_does_not_overwrite_an_old_one_while_a_slot_is_empty() -> None:
    talk = Conversation(scripted({"abc": "d", "xyz": "w", "abcd!": "?"}), n_seq_max=2)
    talk.answer("abc")
    talk.answer("xyz")
    talk.answer("abcd!")
    assert talk.started().reused_tokens == 4


# ---- sampling ---------------------------------------------------------------------------------------


def test_a_seed_makes_an_answer_repeatable() -> None:
    def say(seed: int | None) -> tuple[str, int]:
        talk = Conversation(hashed)
        text, _ = talk.answer("Hi", SamplingParams(seed=seed, temperature=1.0), most=30)
        assert talk.finished().stats.seed == talk.started().seed
        return text, talk.started().seed

    assert say(1) == say(1)
    assert say(0)[1] == 0
    assert say(1)[0] != say(2)[0]


def test_without_a_seed_the_drawn_one_is_named() -> None:
    talk = Conversation(hashed)
    text, _ = talk.answer("Hi", FREE, most=30)
    seed = talk.started().seed
    again = Conversation(hashed)
    assert again.answer("Hi", SamplingParams(**{**_values(FREE), "seed": seed}), most=30)[0] == text
    seeds = set()
    for _ in range(4):
        talk.answer("Hi", FREE, most=1)
        seeds.add(talk.started().seed)
    assert len(seeds) == 4


def _values(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__slots__}


def test_penalties_see_the_prompt() -> None:
    def model(tokens: Sequence[int]) -> Sequence[float]:
        logits = [0.0] * N_VOCAB
        logits[ord("a")], logits[ord("b")] = 3.0, 2.5
        return logits

    penalty = SamplingParams(temperature=0, presence_penalty=1.0)
    assert Conversation(model).answer("xy", penalty, most=1)[0] == "a"
    assert Conversation(model).answer("xa", penalty, most=1)[0] == "b"


def test_penalties_see_the_whole_prompt_even_if_it_is_cached() -> None:
    def model(tokens: Sequence[int]) -> Sequence[float]:
        logits = [0.0] * N_VOCAB
        logits[ord("a")], logits[ord("b")] = 3.0, 2.5
        return logits

    penalty = SamplingParams(temperature=0, presence_penalty=1.0)
    talk = Conversation(model)
    talk.answer("axxx", most=1)
    assert talk.answer("axxx", penalty, most=1)[0] == "b"
    assert talk.started().reused_tokens == 3


def test_suppressed_tokens_are_never_drawn() -> None:
    talk = Conversation(endless)
    talk.backend.suppressed = (ord("c"), END + 10_000)
    assert talk.answer("Hi", most=1)[0] != "c"


# ---- stats ------------------------------------------------------------------------------------------


def test_stats_of_an_answer() -> None:
    """The clock ticks once each time it is read: when a request comes, around a batch, and after a draw."""
    talk = Conversation(scripted({"x" * 20: "abc", "x" * 20 + "abc!": "ok"}), n_batch=8)
    talk.answer("x" * 20, SamplingParams(temperature=0, seed=7))
    stats = talk.finished().stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.completion_tokens) == (20, 0, 4)
    assert (stats.context_used, stats.n_ctx, stats.seed) == (23, 64, 7)
    assert stats.prefill_seconds == 3.0, "three batches of one tick"
    assert stats.ttft_seconds == 7.0, "two ticks a batch, one for the draw"
    assert stats.decode_seconds == 9.0, "three ticks a token"
    assert stats.itl_p50_seconds == stats.itl_p95_seconds == 3.0
    assert stats.overhead_seconds == 2.0
    talk.answer("x" * 20 + "abc!", SamplingParams(temperature=0, seed=8))
    stats = talk.finished().stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.completion_tokens, stats.seed) == (24, 23, 3, 8)
    assert stats.prefill_seconds == 1.0


def test_stats_of_a_cancelled_request() -> None:
    talk = Conversation(endless)
    talk.ask("Hi", SamplingParams(seed=3))
    talk.engine.cancel(1)
    talk.run()
    stats = talk.finished().stats
    assert (stats.prompt_tokens, stats.completion_tokens, stats.seed, stats.ttft_seconds) == (2, 0, 3, 0.0)


def test_not_busy_without_requests() -> None:
    engine = Conversation(endless).engine
    assert not engine.busy
    assert engine.step() == []
