"""Speculation: whatever is drafted, an answer is the one that the plain loop gives, and so is what is left of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.chi_square import assert_drawn_from
from support.constraints import AfterA
from support.conversation import Conversation
from support.drafters import Foreseeing
from support.fake_context import END, N_VOCAB, endless, hashed, scripted, tokens_of
from support.seeds import for_seeds

from llmrun.engine.constraint.matcher import compile_grammar
from llmrun.engine.core.draft_source import Source
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence as Request
from llmrun.engine.core.steps import StepCosts
from llmrun.engine.llama.base import Aborted, CacheFull, DecodeError
from llmrun.grammar import Grammar
from llmrun.protocol.messages import AnswerRequest, DraftedToken, Finished, Stats, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation

CHEAP = tuple((width, 1 + width / 16) for width in (1, 4, 8, 16))


def foreseeing(answer: Sequence[int], wrong: float, draws: random.Random) -> Foreseeing:
    """Return a source that knows an answer, and is wrong about every token of it as often as asked."""
    return Foreseeing(answer, lambda token: draws.randrange(N_VOCAB) if draws.random() < wrong else token)


def drafting(prompt: str, most: int = 15, text: Source | None = None, *, pays: bool = False) -> Drafting:
    """Return drafts that are always made, or if cheap steps make them pay."""
    return Drafting(Speculation(most, only_if_it_pays=pays), tokens_of(prompt), None, StepCosts(CHEAP), text=text)


def counts(stats: Stats) -> tuple[int, ...]:
    """Return the statistics that don't depend on the number of steps."""
    return (
        stats.prompt_tokens,
        stats.reused_tokens,
        stats.completion_tokens,
        stats.context_used,
        stats.retracted_tokens,
        stats.seed,
    )


def assert_consistent(talk: Conversation) -> None:
    """Check the record of cached tokens against the decoded ones, and the count of cells."""
    slots = talk.engine._slots
    assert {slot: talk.context.cached(slot) for slot in slots.cached} == slots.cached
    assert slots.budget.used == talk.context.n_used


def ending(tokens: Sequence[int]) -> Sequence[float]:
    """As hashed(), of few letters, and it may end."""
    logits = [value if ord("a") <= token < ord("g") else -9.0 for token, value in enumerate(hashed(tokens))]
    logits[END] = 0.1
    return logits


# ---- against the plain loop -------------------------------------------------------------------------


def any_options(draws: random.Random) -> dict[str, Any]:
    """Return random options of a request."""
    letters = "abcdef"

    def phrases(longest: int) -> tuple[str, ...]:
        return tuple(
            "".join(draws.choices(letters, k=draws.randint(1, longest))) for _ in range(draws.choice((0, 0, 1, 2)))
        )

    sampling = SamplingParams(
        temperature=draws.choice((0.0, 0.7, 1.5)),
        repeat_penalty=draws.choice((1.0, 1.3)),
        dry_multiplier=draws.choice((0.0, 0.8)),
        xtc_probability=draws.choice((0.0, 0.5)),
        mirostat=draws.choice((0, 0, 0, 2)),
        seed=draws.randrange(2**32),
    )
    watermark = draws.choice(("", "", "green", "green,selfhash=3"))
    if watermark and not sampling.mirostat:
        sampling = replace(sampling, watermark=watermark, watermark_key="a long secret")
    return {
        "sampling": sampling,
        "most": draws.choice((None, 1, 2, 5, 9, 30)),
        "stop": tuple(phrase + draws.choice(letters) for phrase in phrases(3)),
        "ban": phrases(3),
        "logprobs": draws.choice((None, None, 2)),
    }


def answered(
    talk: Conversation, prompt: str, options: dict[str, Any], constrained: bool, drafts: Drafting | None = None
) -> Finished:
    asked = {key: value for key, value in options.items() if key != "logprobs"}
    talk.ask(prompt, constraint=AfterA() if constrained else None, drafting=drafts, **asked)
    talk.run()
    return talk.finished()


HYBRID = {"cuts": False, "has_checkpoints": True}
"""A memory that can't be cut, except by the last tokens of the last batch."""


@pytest.mark.parametrize("memory", [{}, *({**HYBRID, "n_rollback": n} for n in (1, 3, 7))], ids=repr)
@for_seeds(200)
def test_any_request_is_answered_as_without(seed: int, memory: dict[str, Any]) -> None:
    draws = random.Random(seed)
    options, constrained = any_options(draws), draws.random() < 0.4
    prompt = "".join(draws.choices("abcdef", k=draws.randint(1, 30)))
    plain = Conversation(ending, n_ctx=80)
    expected = answered(plain, prompt, options, constrained)
    source = draws.choice((None, foreseeing(plain.context.cached(), draws.choice((0, 0.1, 1)), draws)))
    sizes = {"n_batch": draws.choice((16, 16, 5)), "n_outputs": draws.choice((16, 7, 1))}
    talk = Conversation(ending, n_ctx=80, **sizes, **memory)
    talk.context.before_decode = breaking(talk, draws) if draws.random() < 0.5 else lambda call: None
    drafts = drafting(prompt, draws.choice((1, 3, 6, 15)), source, pays=draws.random() < 0.5)
    finished = answered(talk, prompt, options, constrained, drafts)
    assert (talk.text(), finished.reason, finished.detail) == (plain.text(), expected.reason, expected.detail)
    assert counts(finished.stats) == counts(expected.stats) or memory  # what a failure has lost is computed again
    cached = talk.context.cached()
    assert cached == plain.context.cached()[: len(cached)]
    assert len(cached) == len(plain.context.cached()) or memory
    assert_consistent(talk)
    stats = finished.stats
    assert stats.accepted_tokens <= stats.drafted_tokens
    drafted = sum(event.drafted for event in talk.events if isinstance(event, TextDelta))
    assert drafted <= stats.accepted_tokens


def breaking(talk: Conversation, draws: random.Random) -> Callable[[int], None]:
    """Batches with a draft fail now and then."""

    def before_decode(call: int) -> None:
        if sum(entry.wants_logits for entry in talk.context.calls[call]) > 1 and draws.random() < 0.3:
            talk.context.faults[call] = draws.choice((Aborted(), CacheFull(), DecodeError("it failed")))

    return before_decode


@pytest.mark.parametrize("aborts", [False, True])
@for_seeds(60)
def test_a_cancelled_answer_is_the_beginning_of_the_plain_one(seed: int, *, aborts: bool) -> None:
    draws = random.Random(seed)
    options = {**any_options(draws), "most": None}
    prompt = "".join(draws.choices("abcdef", k=10))
    whole = Conversation(ending, n_ctx=80)
    answered(whole, prompt, options, True)
    talk = Conversation(ending, n_ctx=80)
    when = draws.randrange(len(whole.context.calls) // 2 + 1)

    def before_decode(call: int) -> None:
        if call == when:
            talk.engine.cancel(1)
            if aborts:
                talk.context.faults[call] = Aborted()

    talk.context.before_decode = before_decode
    source = foreseeing(whole.context.cached(), 0.1, draws)
    finished = answered(talk, prompt, options, True, drafting(prompt, text=source))
    plain = Conversation(ending, n_ctx=80)
    plain.ask(prompt, constraint=AfterA(), **{key: value for key, value in options.items() if key != "logprobs"})
    (sequence,) = plain.engine._waiting
    told = finished.stats.completion_tokens
    while plain.engine.busy and not (
        sequence.n_completion == told and sequence.n_retracted >= finished.stats.retracted_tokens
    ):
        plain.events += plain.engine.step()
    plain.engine.cancel(1)
    plain.run()
    assert talk.text() == plain.text()
    # Verified and forced tokens may be in the KV cache already.
    cached = talk.context.cached()
    assert finished.stats.context_used == len(cached)
    assert cached == sequence.tokens[: len(cached)]
    assert cached[: len(plain.context.cached())] == plain.context.cached()
    assert_consistent(talk)


@pytest.mark.parametrize("memory", [{"n_parked": 2}, {**HYBRID, "n_rollback": 3}], ids=repr)
@for_seeds(60)
def test_several_at_once_are_answered_as_each_alone(seed: int, memory: dict[str, Any]) -> None:
    draws = random.Random(seed)
    prompts = ["".join(draws.choices("abcdef", k=draws.randint(1, 30))) for _ in range(5)]
    options = [{**any_options(draws), "most": draws.randint(1, 25)} for _ in prompts]
    plain = [Conversation(ending, n_ctx=80) for _ in prompts]
    for talk, prompt, asked in zip(plain, prompts, options, strict=True):
        answered(talk, prompt, asked, False)
    crowd = Conversation(ending, n_ctx=80, n_seq_max=3, n_cells=draws.choice((90, 240)), **memory)
    for number, (prompt, asked) in enumerate(zip(prompts, options, strict=True)):
        source = foreseeing(plain[number].context.cached(), 0.2, draws)
        asked = {key: value for key, value in asked.items() if key != "logprobs"}
        drafts = drafting(prompt, text=source, pays=draws.random() < 0.5)
        crowd.ask(prompt, request=number, drafting=drafts if number != 1 else None, **asked)
    crowd.context.before_decode = breaking(crowd, draws)
    crowd.run()
    for number, talk in enumerate(plain):
        assert crowd.text(number) == talk.text()
        assert crowd.finished(number).reason == talk.finished().reason
        assert crowd.finished(number).stats.completion_tokens == talk.finished().stats.completion_tokens
    assert_consistent(crowd)


# ---- steps ------------------------------------------------------------------------------------------


def test_a_draft_that_comes_true_takes_one_step() -> None:
    answer = "the same, the same, the same again"
    talk = Conversation(scripted({"Hi": answer}))
    source = foreseeing([*tokens_of("Hi" + answer), END], 0, random.Random(0))
    talk.ask("Hi", drafting=drafting("Hi", text=source))
    talk.run()
    assert talk.text() == answer
    stats = talk.finished().stats
    assert (stats.completion_tokens, stats.drafted_tokens, stats.accepted_tokens) == (35, 32, 32)
    assert stats.decode_steps == len(talk.context.calls) == 4
    widths = [len(call) for call in talk.context.calls]
    assert widths == [2, 16, 16, 3]
    drafted = [event.drafted for event in talk.events if isinstance(event, TextDelta)]
    assert drafted == [False, *[True] * 15, False, *[True] * 15, False, True]


def test_the_automaton_drafts_what_was_said_before() -> None:
    talk = Conversation(endless)
    talk.ask("abcdefghijklmnopqrstuvwxyzab", drafting=drafting("abcdefghijklmnopqrstuvwxyzab"), most=20)
    talk.run()
    assert talk.text() == "cdefghijklmnopqrstuv"
    assert talk.finished().stats.decode_steps == 3


def test_a_token_tells_what_was_drafted_in_its_place() -> None:
    talk = Conversation(scripted({"ab;ab": "c;abd"}))
    sampler = SequenceSampler(
        SamplingParams(temperature=0.0), talk.context.vocabulary, tokens_of("ab;ab"), None, remember=9, logprobs=0
    )
    talk.engine.add(Request(1, tokens_of("ab;ab"), sampler, AnswerRequest(logprobs=0), drafting=drafting("ab;ab", 3)))
    talk.run()
    tokens = [token for event in talk.events if isinstance(event, TextDelta) for token in event.logprobs]
    drafts = [(token.text, token.draft) for token in tokens]
    assert drafts == [
        ("c", None),
        (";", None),
        ("a", DraftedToken("prompt", 1, "a", accepted=True)),
        ("b", DraftedToken("prompt", 2, "b", accepted=True)),
        ("d", DraftedToken("prompt", 3, "c", accepted=False)),
    ]
    answer = talk.engine.finished(1)
    assert [answer.drafted.get(index) for index in range(5, 10)] == [draft for _, draft in drafts]


def test_a_draft_from_the_answer_is_told_from_one_from_the_prompt() -> None:
    talk = Conversation(scripted({"x": "abcd;abcd;"}))
    talk.engine.add(Request(
        1, tokens_of("x"),
        SequenceSampler(SamplingParams(temperature=0.0), talk.context.vocabulary, tokens_of("x"), None, remember=20),
        AnswerRequest(), drafting=drafting("x", 3),
    ))  # fmt: skip
    talk.run()
    found = talk.engine.finished(1).drafted.values()
    assert {each.source for each in found} == {"answer"}
    assert "".join(each.text for each in found if each.accepted) == "bcd"


def test_a_retracted_token_takes_its_draft_along() -> None:
    talk = Conversation(scripted({"abc;": "ab"}))
    tokens = tokens_of("abc;")
    sampler = SequenceSampler(SamplingParams(temperature=0.0), talk.context.vocabulary, tokens, None, remember=9)
    source = foreseeing(tokens_of("abc;ab"), 0, random.Random(0))
    asked = AnswerRequest(limits=Limits(ban=("ab",)))
    talk.engine.add(Request(1, tokens, sampler, asked, drafting=drafting("abc;", 3, source)))
    talk.run()
    answer = talk.engine.finished(1)
    assert talk.finished().stats.retracted_tokens
    assert all(index < len(answer.tokens) for index in answer.drafted)
    assert not any(each.accepted and each.text == "b" for each in answer.drafted.values())


def test_nothing_is_noted_that_nobody_asks_for() -> None:
    talk = Conversation(endless)
    talk.ask("abcdefghijklmnopqrstuvwxyzab", drafting=drafting("abcdefghijklmnopqrstuvwxyzab"), most=20)
    talk.run()
    assert talk.finished().stats.accepted_tokens
    assert not talk.engine.finished(1).drafted


def test_nothing_is_drafted_that_max_tokens_or_the_window_would_cut() -> None:
    talk = Conversation(endless, n_ctx=30)
    talk.ask("abcdefghijklmnopqrstuvwxyza", drafting=drafting("abcdefghijklmnopqrstuvwxyza"))
    talk.run()
    assert (talk.text(), talk.finished().reason) == ("bcde", "length")
    talk.ask("abcdefghijklmnopqrstuvwxy", drafting=drafting("abcdefghijklmnopqrstuvwxy"), most=2)
    talk.run()
    assert talk.finished().stats.drafted_tokens == 0


def test_nothing_is_drafted_where_it_cannot_be_taken_back() -> None:
    talk = Conversation(endless, cuts=False)
    talk.ask("abcdefghijklmnopqrstuvwxyzab", drafting=drafting("abcdefghijklmnopqrstuvwxyzab"), most=20)
    talk.run()
    assert {len(call) for call in talk.context.calls[2:]} == {1}
    assert talk.finished().stats.drafted_tokens == 0


def test_a_step_with_prefill_has_no_draft() -> None:
    talk = Conversation(endless, n_seq_max=2, n_batch=16, n_ctx=100)
    source = foreseeing([ord("a") + place % 26 for place in range(100)], 0, random.Random(0))
    talk.ask("ab", drafting=drafting("ab", text=source), most=60, request=1)
    for _ in range(4):
        talk.events += talk.engine.step()
    talk.ask("x" * 40, most=3, request=2)
    talk.run()
    for call in talk.context.calls:
        prefilled = [entry for entry in call if entry.token == ord("x") and not entry.wants_logits]
        assert not prefilled or sum(entry.wants_logits for entry in call) <= 2


# ---- distribution -----------------------------------------------------------------------------------

LETTERS = "abcdef"
LOGITS = (2.0, 1.5, 1.0, 0.5, 0.2, 0.1)


def ab_and_any(tokens: Sequence[int]) -> Sequence[float]:
    """ "a" and "b", then any letter, then the end."""
    said = len(tokens) - 1
    logits = [-math.inf] * N_VOCAB
    if said < 2:
        logits[ord(LETTERS[said])] = 1.0
    elif said == 2:
        logits[ord("a") : ord("f") + 1] = LOGITS
    else:
        logits[END] = 1.0
    return logits


def third_letters(sampling: SamplingParams, grammar: Grammar | None, count: int = 1000) -> list[int]:
    """Return tokens sampled after "ab", after an accepted draft that continues with "c"."""
    talk = Conversation(ab_and_any)
    constraint = compile_grammar(grammar, talk.context.vocabulary) if grammar is not None else None
    letters: list[int] = []
    for seed in range(count):
        drafts = drafting("x", 3, foreseeing(tokens_of("xabc"), 0, random.Random(0)))
        talk.ask("x", replace(sampling, seed=seed), constraint=constraint, drafting=drafts, most=4)
        talk.run()
        assert len(talk.context.calls[-1]) > 1 or len(talk.context.calls[-2]) > 1
        letters.append(talk.context.cached()[3])
        if constraint is not None:
            constraint.rewind(talk.finished().stats.completion_tokens)
        talk.events.clear()
    return letters


@pytest.mark.parametrize("grammar", [None, Grammar("gbnf", "root ::= [a-f] [a-f] [b-e]")], ids=["free", "grammar"])
@pytest.mark.parametrize("penalty", [1.0, 2.0])
def test_a_token_after_a_draft_has_the_models_distribution(grammar: Grammar | None, penalty: float) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=penalty)
    weights = {
        ord(letter): math.exp(logit / (penalty if letter in "ab" else 1.0))
        for letter, logit in zip(LETTERS, LOGITS, strict=True)
        if grammar is None or letter in "bcde"
    }
    total = sum(weights.values())
    assert_drawn_from({token: each / total for token, each in weights.items()}, third_letters(sampling, grammar))


# ---- recordings -------------------------------------------------------------------------------------


def repeating(tokens: Sequence[int]) -> Sequence[float]:
    """Say a passage again, with another word now and then."""
    return [30.0 * (token == tokens[-12]) + value for token, value in enumerate(hashed(tokens))]


@pytest.mark.parametrize("seed", range(10))
def test_recorded_drafts_make_each_step_as_wide_again_whatever_steps_take(seed: int) -> None:
    """On another clock other drafts would pay."""

    def widths(drafts: Drafting, seconds: Callable[[int], float]) -> tuple[list[int], str, Finished]:
        talk = Conversation(repeating, n_ctx=400)
        talk.engine._clock = lambda: float(sum(seconds(len(call)) for call in talk.context.calls))
        talk.context.step_seconds = seconds
        talk.ask(
            prompt,
            most=300,
            sampling=SamplingParams(temperature=5.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed),
            drafting=drafts,
        )
        talk.run()
        return [len(call) for call in talk.context.calls], talk.text(), talk.finished()

    prompt = "".join(random.Random(seed).choices("abcdef", k=40))
    first = widths(drafting(prompt, pays=True), lambda rows: 1.0 + rows / 16)
    other = widths(drafting(prompt, pays=True), float)
    recorded = Speculation(15, recorded=first[2].drafts)
    again = widths(Drafting(recorded, tokens_of(prompt)), float)
    assert first[2].drafts
    assert first[0] != other[0]
    assert again[:2] == first[:2]
    assert again[2].drafts == first[2].drafts
