"""Banned phrases in the loop: the answer never contains them, and continues with the model's other tokens."""

from __future__ import annotations

from collections.abc import Sequence

from support.constraints import AfterA
from support.conversation import Conversation
from support.fake_context import END, N_VOCAB, favouring, hashed, scripted, tokens_of
from support.seeds import for_seeds

from llmrun.engine.core.repeats import RepeatGuard
from llmrun.engine.prompt.thinking import ThinkingBudget
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.reasoning import ReasoningSyntax

HOT = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)


def second_choice(answer: str, instead: dict[str, str]) -> object:
    """A model that says an answer, and has for some beginnings of it another next letter as its second choice."""

    def logits(tokens: Sequence[int]) -> Sequence[float]:
        said = bytes(tokens[2:]).decode()
        row = favouring(ord(answer[len(said)]) if answer.startswith(said) and said != answer else END)
        if said in instead:
            row[ord(instead[said])] = 10.0
        return row

    return logits


def test_a_banned_phrase_is_replaced_from_its_first_token_on() -> None:
    talk = Conversation(second_choice("say no!", {"say ": "x"}))
    assert talk.answer("Hi", ban=("No",)) == ("say x", "stop")
    assert talk.context.cached() == tokens_of("Hisay x"), "the KV cache holds nothing of the phrase"
    stats = talk.finished().stats
    assert (stats.completion_tokens, stats.retracted_tokens) == (len("say x") + 1, len("no"))


def test_only_the_token_before_the_phrase_is_computed_again() -> None:
    talk = Conversation(second_choice("say no!", {"say ": "x"}))
    talk.answer("Hi", ban=("no",))
    assert [[entry.token for entry in batch] for batch in talk.context.calls] == [
        tokens_of("Hi"),
        *([byte] for byte in b"say n"),
        [ord(" ")],
        [ord("x")],
    ]


def test_where_a_model_cannot_be_cut_the_whole_prompt_is_computed_again() -> None:
    talk = Conversation(second_choice("say no!", {"say ": "x"}), cuts=False)
    assert talk.answer("Hi", ban=("no",)) == ("say x", "stop")
    assert talk.context.cached() == tokens_of("Hisay x")
    assert talk.finished().stats.reused_tokens == 0


def test_a_banned_phrase_among_forced_tokens() -> None:
    """Forced tokens that stay are not in the KV cache yet."""
    talk = Conversation(hashed)
    text, reason = talk.answer("aaa", constraint=AfterA(), ban=("c",), most=20)
    assert (len(text), reason) == (20, "length")
    assert "c" not in text
    assert "ab" in text
    assert talk.finished().stats.retracted_tokens > 0


def test_a_phrase_at_the_very_beginning() -> None:
    talk = Conversation(second_choice("no", {"": "y"}))
    assert talk.answer("Hi", ban=("no",)) == ("y", "stop")


def test_another_answer_may_be_banned_in_turn() -> None:
    talk = Conversation(second_choice("say no!", {"say ": "x"}))
    text, reason = talk.answer("Hi", ban=("no", "y x"))
    assert (text[:4], len(text), reason) == ("say ", 5, "stop")
    assert text[4] not in "nx"


def test_the_end_of_the_answer_within_a_phrase_is_kept() -> None:
    assert Conversation(scripted({"Hi": "as an"})).answer("Hi", ban=("as an AI",)) == ("as an", "stop")


def test_what_is_refused_at_one_place_may_come_at_another() -> None:
    def logits(tokens: Sequence[int]) -> Sequence[float]:
        likely = {b"": "ny", b"n": "o", b"y": "n"}.get(bytes(tokens[2:]), "")
        row = favouring(END)
        for rank, letter in enumerate(likely):
            row[ord(letter)] = 40.0 - rank
        return row

    assert Conversation(logits).answer("Hi", ban=("no",)) == ("yn", "stop")


def test_when_no_token_is_left_it_fails_and_says_why() -> None:
    def only_a(tokens: Sequence[int]) -> Sequence[float]:
        return [0.0 if token == ord("a") else -float("inf") for token in range(N_VOCAB)]

    talk = Conversation(only_a)
    talk.ask("Hi", ban=("aa",))
    talk.run()
    assert talk.failed().code == "bad-logits"
    assert "ban" in talk.failed().hint


def test_reasoning_that_are_taken_back_do_not_count() -> None:
    budget = ThinkingBudget(ReasoningSyntax("<think>", "</think>"), True, 4)
    talk = Conversation(second_choice("abno!", {"ab": "x"}))
    assert talk.answer("Hi", ban=("no",), thinking=budget) == ("abx", "stop")


def test_text_that_is_taken_back_is_no_repetition() -> None:
    """The guard reads what is shown."""
    guard = RepeatGuard()
    talk = Conversation(second_choice("say no!", {"say ": "x"}))
    talk.answer("Hi", ban=("no",), guard=guard)
    assert guard._text == "say x"


def test_metrics_count_what_stayed() -> None:
    talk = Conversation(second_choice("say no!", {"say ": "x"}))
    talk.answer("Hi", ban=("no",))
    stats = talk.finished().stats
    assert stats.context_used == len("Hisay x")
    assert stats.ttft_seconds > 0


@for_seeds(40)
def test_random_answers_never_hold_a_banned_phrase(seed: int) -> None:
    """Every phrase of two letters that a first answer held is banned from the second, several requests at once."""
    free = Conversation(hashed, n_ctx=200)
    before, _ = free.answer("Hi", HOT, most=30)
    bans = tuple({before[at : at + 2] for at in range(seed % 7, 28)})[: 1 + seed % 20]
    talk = Conversation(hashed, n_ctx=200, n_seq_max=2)
    talk.ask("Hi", HOT, most=30, ban=bans, request=1)
    talk.ask(f"Hello {seed}", HOT, most=30, ban=bans, request=2)
    talk.run()
    for request in (1, 2):
        text = talk.text(request)
        assert len(text) == 30
        assert not any(ban in text for ban in bans)
        assert talk.finished(request).stats.completion_tokens == 30


def test_bans_that_never_come_change_nothing() -> None:
    free, banned = Conversation(hashed, n_ctx=200), Conversation(hashed, n_ctx=200)
    assert free.answer("Hi", HOT, most=50) == banned.answer("Hi", HOT, most=50, ban=("never said", "qqqq"))
