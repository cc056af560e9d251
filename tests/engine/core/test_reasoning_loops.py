"""A reasoning that repeats itself is closed, and the answer follows; alone, in a run, beside others, with a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.fake_context import END, FakeContext, FakeVocabulary, favouring

from llmrun._native import CancelFlag
from llmrun.engine.core.loop import Engine
from llmrun.engine.llama.base import RunLimit
from llmrun.engine.service import Preparer
from llmrun.grammar import Grammar, read_grammar
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Message, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

LOOP = "Wait, let me think about the rain once more. "
CLOSED = "\n</think>\n\n"
TEMPLATE = "{{ messages[-1].content }}<think>{# </think> #}"
GRAMMAR = read_grammar('root ::= "{" [a-z]* "}"')


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def goes_round(tokens: Sequence[int]) -> Sequence[float]:
    """A model that repeats one sentence in its reasoning, and answers what is asked when that is closed."""
    question, _, said = text_of(tokens).partition("<think>")
    thoughts, closing, answer = said.partition(CLOSED)
    script = f"{{{question}}}" if closing else LOOP * 100
    done = len(answer if closing else thoughts)
    return favouring(ord(script[done]) if done < len(script) else END)


def goes_round_for_ever(tokens: Sequence[int]) -> Sequence[float]:
    """A model whose answer repeats itself, too."""
    _, _, said = text_of(tokens).partition("<think>")
    return favouring(ord((LOOP * 100)[len(said.rpartition(CLOSED)[2])]))


def ask(engine: Engine, number: int, question: str, grammar: Grammar | None = None) -> None:
    request = AnswerRequest(
        (Message("user", question),),
        sampling=SamplingParams(temperature=0),
        limits=Limits(3000),
        grammar=grammar,
        stops_repeats=True,
    )
    preparer = Preparer(FakeVocabulary(), TEMPLATE, 4000)
    engine.add(preparer.prepare(Generate(number, request), lambda event: None))


def answers(engine: Engine, *, runs: bool) -> dict[int, tuple[str, Finished]]:
    """Return the text of each answer and its end."""
    events: list[Event] = []
    while engine.busy:
        events += engine.step(RunLimit(64, 1.0, CancelFlag())) if runs else engine.step()
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, TextDelta):
            texts[event.request] = texts.get(event.request, "") + event.text
    return {event.request: (texts[event.request], event) for event in events if isinstance(event, Finished)}


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("grammar", [None, GRAMMAR])
def test_the_answer_follows(*, runs: bool, grammar: Grammar | None) -> None:
    engine = Engine(FakeContext(goes_round, n_ctx=4000))
    ask(engine, 1, "yes", grammar)
    text, finished = answers(engine, runs=runs)[1]
    thoughts, _, answer = text.partition(CLOSED)
    assert 600 <= len(thoughts) <= 700
    assert (LOOP * 20).startswith(thoughts)
    assert (answer, finished.reason, finished.stats.loops_closed) == ("{yes}", "stop", 1)
    assert finished.stats.completion_tokens == len(text) + 1


@pytest.mark.parametrize("runs", [False, True])
def test_beside_others_each_answers_as_alone(*, runs: bool) -> None:
    engine = Engine(FakeContext(goes_round, n_ctx=4000, n_seq_max=3))
    for number, question in enumerate(("one", "two", "three")):
        ask(engine, number, question)
    found = answers(engine, runs=runs)
    for number, question in enumerate(("one", "two", "three")):
        alone = Engine(FakeContext(goes_round, n_ctx=4000))
        ask(alone, number, question)
        assert found[number][0] == answers(alone, runs=False)[number][0]
        assert found[number][0].endswith(f"{{{question}}}")


@pytest.mark.parametrize("runs", [False, True])
def test_closing_it_does_not_end_the_answer_where_an_empty_line_is_an_end(
    *, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RWKV's end token is an empty line."""
    tokenize = FakeVocabulary.tokenize

    def with_end(self: FakeVocabulary, text: str, *, special: bool, begins: bool = True) -> list[int]:
        is_end = special and text.endswith("\n\n")
        return [*tokenize(self, text[:-2], special=True), END] if is_end else tokenize(self, text, special=special)

    monkeypatch.setattr(FakeVocabulary, "tokenize", with_end)

    def logits(tokens: Sequence[int]) -> Sequence[float]:
        said = text_of(tokens)
        closing = CLOSED.rstrip()
        return favouring(END if said.endswith("!") else ord("!")) if closing in said else goes_round(tokens)

    engine = Engine(FakeContext(logits, n_ctx=4000))
    ask(engine, 1, "yes")
    text, finished = answers(engine, runs=runs)[1]
    assert (text[-1], finished.reason, finished.stats.loops_closed) == ("!", "stop", 1)


@pytest.mark.parametrize("runs", [False, True])
def test_an_answer_that_repeats_itself_ends(*, runs: bool) -> None:
    engine = Engine(FakeContext(goes_round_for_ever, n_ctx=4000))
    ask(engine, 1, "yes")
    text, finished = answers(engine, runs=runs)[1]
    assert (finished.reason, finished.stats.loops_closed) == ("repeats", 1)
    assert text.count(CLOSED) == 1
    assert finished.detail.strip() == LOOP.strip()


def test_at_the_limit_it_is_cut() -> None:
    engine = Engine(FakeContext(goes_round, n_ctx=4000))
    request = AnswerRequest((Message("user", "yes"),), sampling=SamplingParams(temperature=0), stops_repeats=True)
    length = len(answers_of_loop())
    preparer = Preparer(FakeVocabulary(), TEMPLATE, 4000)
    engine.add(preparer.prepare(Generate(1, replace(request, limits=Limits(length))), lambda event: None))
    _, finished = answers(engine, runs=False)[1]
    assert (finished.reason, finished.stats.loops_closed) == ("repeats", 0)


def answers_of_loop() -> str:
    """Return the reasoning up to its closing."""
    engine = Engine(FakeContext(goes_round, n_ctx=4000))
    ask(engine, 1, "yes")
    return answers(engine, runs=False)[1][0].partition(CLOSED)[0]
