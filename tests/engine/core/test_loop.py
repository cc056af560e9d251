"""The generation loop over a scripted model: what it says, what it computes, and how it ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.conversation import Conversation
from support.fake_context import BEGIN, END, HEART, N_VOCAB, TURN, endless, hashed, scripted, tokens_of

from llmrun.errors import ContextOverflowError
from llmrun.protocol.messages import Finished, PrefillProgress, Started, TextDelta
from llmrun.protocol.params import SamplingParams

FREE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


# ---- how an answer ends -----------------------------------------------------------------------------


def test_an_answer() -> None:
    talk = Conversation(scripted({"Hi": "Hello!"}))
    assert talk.answer("Hi") == ("Hello!", "stop")
    assert talk.context.cached() == tokens_of("HiHello!")
    kinds = [type(event) for event in talk.events]
    assert kinds == [Started, PrefillProgress, *[TextDelta] * 6, Finished]


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


def test_control_tokens_have_a_text_where_a_request_shows_them() -> None:
    talk = Conversation(scripted({"Hi": [ord("a"), TURN, ord("b"), BEGIN]}), n_seq_max=2)
    talk.ask("Hi", shown_controls=frozenset({TURN}), request=1)
    talk.ask("Hi", request=2)
    talk.run()
    assert (talk.text(1), talk.text(2)) == ("a<turn>b", "ab")


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
    assert progress == [PrefillProgress(1, 8, 1), PrefillProgress(1, 16, 2), PrefillProgress(1, 20, 3)]
    assert [len(batch) for batch in talk.context.calls] == [8, 8, 4, 1]


def test_only_the_last_prompt_token_wants_logits() -> None:
    talk = Conversation(scripted({"x" * 20: "a"}), n_batch=8)
    talk.answer("x" * 20)
    wanted = [entry.position for batch in talk.context.calls for entry in batch if entry.wants_logits]
    assert wanted == [19, 20]


def test_turns_reuse_what_the_cache_knows() -> None:
    turns = {"Q1": "A1", "Q1A1Q2": "A2", "Q1A1Q2A2Q3": "A3"}
    talk = Conversation(scripted(turns))
    for (prompt, answer), reused in zip(turns.items(), (0, 4, 8), strict=True):
        assert talk.answer(prompt) == (answer, "stop")
        assert talk.started() == Started(1, len(prompt), reused, talk.started().seed)
        assert talk.context.cached() == tokens_of(prompt + answer)
    assert talk.finished().stats.reused_tokens == 8
    assert talk.computed() == len("Q1A1Q2A2Q3A3"), "every token was computed once"


def test_the_same_prompt_again_computes_one_token_of_it() -> None:
    talk = Conversation(scripted({"Hello": "you"}))
    talk.answer("Hello")
    assert talk.answer("Hello") == ("you", "stop")
    assert talk.started().reused_tokens == 4
    assert talk.context.cached() == tokens_of("Helloyou")


@pytest.mark.parametrize(("prompt", "reused"), [("abX", 2), ("a", 0), ("ab", 1), ("zzz", 0), ("abcdefX", 6)])
def test_another_prompt_cuts_the_cache(prompt: str, reused: int) -> None:
    talk = Conversation(scripted({"abcd": "efgh", prompt: "ok"}))
    talk.answer("abcd")
    assert talk.answer(prompt) == ("ok", "stop")
    assert talk.started().reused_tokens == reused
    assert talk.context.cached() == tokens_of(prompt + "ok")


def test_memory_that_cannot_be_cut_starts_anew() -> None:
    talk = Conversation(scripted({"abcd": "ef", "abX": "ok", "abXokY": "so"}), cuts=False)
    talk.answer("abcd")
    assert talk.answer("abX") == ("ok", "stop")
    assert talk.started().reused_tokens == 0
    assert talk.context.cached() == tokens_of("abXok")
    assert talk.answer("abXokY") == ("so", "stop")
    assert talk.started().reused_tokens == 5, "going on needs no cut"


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
    assert max(len({entry.sequence_id for entry in batch}) for batch in talk.context.calls) == 2


def test_what_is_prefilled_soon_is_prefilled_in_one_step() -> None:
    """A second for a batch of 500: 119 more take less than a quarter of one, so they are computed at once."""
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=2, n_batch=512)
    talk.ask("a" * 500, most=9, request=1)
    for _ in range(3):
        talk.events += talk.engine.step()
    talk.ask("x" * 119, most=2, request=2)
    seen = len(talk.context.calls)
    talk.run()
    assert [entry.sequence_id for entry in talk.context.calls[seen]] == [0] + [1] * 119


def test_a_long_prefill_does_not_hold_up_decoding() -> None:
    """Batches are small while another request decodes, and as large as possible afterwards."""
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=2, n_batch=512)
    talk.ask("Hi", most=6, request=1)
    for _ in range(3):
        talk.events += talk.engine.step()
    talk.ask("x" * 900, most=2, request=2)
    seen = len(talk.context.calls)
    talk.run()
    beside = [[entry.sequence_id for entry in batch] for batch in talk.context.calls[seen : seen + 4]]
    sizes = [64, 24, 16, 9]
    assert beside == [[0] + [1] * (size - 1) for size in sizes], "a batch took a whole second"
    assert len(talk.context.calls[seen + 4]) == 512


def test_prefill_beside_decode_is_as_much_as_goes_through_in_a_tenth_of_a_second() -> None:
    talk = Conversation(hashed, n_ctx=5000, n_seq_max=2, n_batch=512)
    talk.ask("Hi", most=40, request=1)
    talk.engine.step()
    talk.clock.per_token = 1 / 1300
    talk.ask("x" * 4000, most=2, request=2)
    talk.run()
    assert {len(batch) for batch in talk.context.calls[5:20]} == {128}
    talk.clock.per_token = 1 / 100_000
    talk.ask("y" * 4000, most=2, request=3)
    talk.ask("z", most=20, request=4)
    talk.run()
    assert max(map(len, talk.context.calls[-15:])) == 512, "a batch is never larger"


def test_prompts_are_computed_in_turn_whatever_their_slots() -> None:
    talk = Conversation(hashed, n_ctx=400, n_seq_max=3, n_batch=64)
    for request, prompt in enumerate(("a" * 10, "b" * 10, "c" * 10)):
        talk.ask(prompt, most=2, request=request)
    talk.run()
    talk.ask("c" * 10 + "x" * 100, most=2, request=3)
    talk.ask("a" * 10 + "x" * 100, most=2, request=4)
    talk.run()
    ended = [event.request for event in talk.events if isinstance(event, Finished)]
    assert ended == [0, 1, 2, 3, 4]


def test_a_short_prompt_is_not_delayed_by_a_long_one() -> None:
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=2, n_batch=64)
    talk.ask("x" * 900, most=2, request=1)
    talk.events += talk.engine.step() + talk.engine.step()
    talk.ask("y" * 40, most=1, request=2)
    seen = len(talk.context.calls)
    talk.run()
    assert [event.request for event in talk.events if isinstance(event, Finished)] == [2, 1]
    first, second = talk.context.calls[seen : seen + 2]
    assert [entry.sequence_id for entry in first] == [0] * 32 + [1] * 32, "the older one goes on"
    assert [entry.sequence_id for entry in second][-8:] == [1] * 8


def test_results_are_rows_by_slot() -> None:
    """Batches are in the order of the slots, also where requests come and go at random."""
    rng = random.Random(1)
    talk = Conversation(hashed, n_ctx=100, n_seq_max=5, n_batch=64)
    for request in range(30):
        talk.ask(f"{request} Hi", most=rng.randint(1, 30), request=request)
        for _ in range(rng.randrange(4)):
            talk.events += talk.engine.step()
    talk.run()  # the fake context asserts it
    for request in range(30):
        text = talk.text(request)
        assert text == Conversation(hashed).answer(f"{request} Hi", most=len(text))[0]


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


def a_or_b(tokens: Sequence[int]) -> Sequence[float]:
    logits = [0.0] * N_VOCAB
    logits[ord("a")], logits[ord("b")] = 3.0, 2.5
    return logits


def test_penalties_see_the_prompt() -> None:
    penalty = SamplingParams(temperature=0, presence_penalty=1.0)
    assert Conversation(a_or_b).answer("xy", penalty, most=1)[0] == "a"
    assert Conversation(a_or_b).answer("xa", penalty, most=1)[0] == "b"


def test_penalties_see_the_whole_prompt_even_if_it_is_cached() -> None:
    penalty = SamplingParams(temperature=0, presence_penalty=1.0)
    talk = Conversation(a_or_b)
    talk.answer("axxx", most=1)
    assert talk.answer("axxx", penalty, most=1)[0] == "b"
    assert talk.started().reused_tokens == 3


def test_suppressed_tokens_are_never_drawn() -> None:
    talk = Conversation(endless)
    talk.context.vocabulary.suppressed = (ord("c"), END + 10_000)
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
    assert stats.ttft_seconds == 8.0, "two ticks a batch, one for the admission and one for the draw"
    assert stats.queue_seconds == 1.0
    assert stats.decode_seconds == 9.0, "three ticks a token"
    assert stats.itl_p50_seconds == stats.itl_p95_seconds == 3.0
    assert stats.overhead_seconds == 2.0
    talk.answer("x" * 20 + "abc!", SamplingParams(temperature=0, seed=8))
    stats = talk.finished().stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.completion_tokens, stats.seed) == (24, 23, 3, 8)
    assert stats.prefill_seconds == 1.0


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_device_that_computes_after_decode_has_returned_gets_the_same_times(is_asynchronous: bool) -> None:
    talk = Conversation(endless, n_ctx=5000, n_batch=512, n_seq_max=2)
    talk.context.is_asynchronous = is_asynchronous
    talk.clock.per_token = 1 / 1024
    talk.ask("x" * 1024, most=9, request=1)
    talk.run()
    stats = talk.finished().stats
    assert stats.prefill_seconds == stats.ttft_seconds == 1.0
    assert [event.seconds for event in talk.events if isinstance(event, PrefillProgress)] == [0.5, 1.0]
    assert (stats.decode_seconds, stats.overhead_seconds) == (8 / 1024, 0.0)
    assert talk.engine._rate.tokens_within(1.0) == 1024, "what sizes the pieces of prompts"


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
