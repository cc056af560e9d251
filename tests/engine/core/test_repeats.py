"""Loops are noticed soon and named, what merely looks alike is left alone."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.effort import loops
from support.fake_context import END, FakeContext, FakeVocabulary, favouring, hashed

from llmrun._native import CancelFlag
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.repeats import RepeatGuard
from llmrun.engine.llama.base import RunLimit
from llmrun.engine.service import Preparer
from llmrun.grammar import Grammar, read_grammar
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Message, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

INTRODUCTION = "Here is what I found out about the topic, in the order in which it came up. "
SENTENCE = "I am sorry, but I can't say more about this topic than that. "
PARAGRAPH = (
    "The first step is to gather all the ingredients and put them on the table. After that, heat the oven, and mix "
    "flour, sugar and butter in a large bowl until nothing of the butter can be seen. Bake it for forty minutes. "
    "Let it cool down before you serve it, since it breaks easily while it is warm and soft.\n\n"
)


def guarded(text: str, chance: random.Random | None = None) -> tuple[str | None, int]:
    """Return the detected block and the number of characters read; the text arrives in pieces like tokens."""
    guard = RepeatGuard()
    at = 0
    while at < len(text):
        length = chance.randint(1, 7) if chance else 4
        found = guard.push(text[at : at + length])
        at += length
        if found is not None:
            return found, at
    return None, at


@pytest.mark.parametrize(
    ("block", "named", "most"),
    [
        (SENTENCE, SENTENCE.strip(), 800),
        (PARAGRAPH, PARAGRAPH.strip(), 4 * len(PARAGRAPH) + 200),
        ("the ", "the", 1700),
        ("!", "!", 1700),
        ("\n", "\n", 1700),
        ("0, ", "0,", 1700),
        ("ha", "ha", 1700),
        ("1. Buy milk and bread at the shop\n", "1. Buy milk and bread at the shop", 900),
        ("这是一个重复的句子。", "这是一个重复的句子。", 800),
        ("Это предложение повторяется снова и снова. ", "Это предложение повторяется снова и снова.", 900),
        ("".join(f"Sentence number {n} of a long block. " for n in range(50)), "Sentence number 0", 4 * 2100),
    ],
)
def test_loops_are_found_and_named(block: str, named: str, most: int) -> None:
    found, after = guarded(INTRODUCTION + block * 5000)
    assert found is not None
    assert sorted(found.split()) == sorted(block.split())
    assert found.startswith(named[:10]) or found in named
    assert after - len(INTRODUCTION) <= most


def test_a_loop_is_found_however_the_text_is_split() -> None:
    text = INTRODUCTION + SENTENCE * 40
    whole = RepeatGuard().push(text)
    assert whole == SENTENCE.strip()
    for seed in range(50):
        assert guarded(text, random.Random(seed))[0] == whole


def test_once_found_it_stays_found() -> None:
    guard = RepeatGuard()
    assert guard.push(SENTENCE * 40) == SENTENCE.strip()
    assert guard.push("Something else.") == SENTENCE.strip()


def test_a_loop_late_in_a_long_answer() -> None:
    chance = random.Random(2)
    words = [f"{chance.choice('bcdfg')}{chance.choice('aeiou')}{chance.choice('lmnrt')}" for _ in range(40_000)]
    text = " ".join(words)
    assert guarded(text)[0] is None
    found, after = guarded(text + ". " + SENTENCE * 100)
    assert found == SENTENCE.strip()
    assert after - len(text) < 900


def test_a_loop_that_comes_back_after_other_text() -> None:
    """The first time it stops by itself, so the place where it stood last is not the block's length away."""
    short = "no no yes yes we do "
    found, _ = guarded(short * 5 + PARAGRAPH + short * 200)
    assert found is not None
    assert sorted(found.split()) == sorted(short.split())


def test_a_loop_with_a_tiny_loop_inside() -> None:
    block = "He said that " + "very " * 20 + "often it was cold outside. "
    found, _ = guarded(block * 100)
    assert found is not None
    assert sorted(found.split()) == sorted(block.split())


def table(rows: int) -> str:
    return "| Name | Value | Note |\n|------|-------|------|\n" + "".join(
        f"| item {n} | {n * n} | {'yes' if n % 2 else 'no'} |\n" for n in range(rows)
    )


INNOCENT = {
    "table": table(200),
    "empty table": "| A | B | C |\n|---|---|---|\n" + "|   |   |   |\n" * 60,
    "list": "".join(f"{n}. Buy item number {n} at the shop\n" for n in range(1, 200)),
    "checkboxes": "- [ ] \n" * 100,
    "rule": "=" * 120 + "\nTitle\n" + "-" * 120 + "\n",
    "long rule": "─" * 1000,
    "zeros": ("    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],\n" * 10) + "\n" + ("0 " * 16 + "\n") * 16,
    "booleans": "grid = [\n" + "    [False, False, False, False, False, False, False, False],\n" * 16 + "]\n",
    "indentation": "".join(" " * (4 * depth) + f"if x{depth}:\n" for depth in range(40)),
    "closing": "".join(" " * (2 * depth) + "}\n" for depth in range(60, 0, -1)),
    "html": "<table>\n" + "  <tr><td></td><td></td><td></td><td></td></tr>\n" * 20 + "</table>",
    "nops": "section .text\n" + "    nop\n" * 100,
    "base64": base64.b64encode(random.Random(1).randbytes(5000)).decode(),
    "base64 of zeros": base64.b64encode(bytes(900)).decode(),
    "hex dump": "".join(
        f"{n:08x}: 0000 0000 0000 0000 0000 0000 0000 0000  ................\n" for n in range(0, 960, 16)
    ),
    "form": "Name: ____________ Date: ____________ Signature: ____________\n" * 15,
    "art": "".join("*" * (2 * n + 1) + "\n" for n in range(60)) + ("/\\" * 30 + "\n" + "\\/" * 30 + "\n") * 10,
    "song": (
        "Row, row, row your boat,\nGently down the stream,\n"
        "Merrily, merrily, merrily, merrily,\nLife is but a dream.\n\n" * 4
    ),
    "coda": "Na na na nananana, nananana, hey Jude\n" * 18,
    "refrain": "".join(
        f"Verse {n}: {word} the river ran beyond the {word} hill.\nQuoth the raven: nevermore, nevermore.\n\n"
        for n, word in enumerate(("cold", "deep", "dark", "wide", "slow", "bright", "old", "grey", "long", "near"))
    ),
    "bottles": "".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer. Take one down and pass it around, "
        f"{n - 1} bottles of beer on the wall.\n"
        for n in range(99, 1, -1)
    ),
    "said again": PARAGRAPH * 3,
    "told thrice": "I will not talk in class. " * 10,
    "code": "".join(
        f"def test_{name}() -> None:\n    result = run({name!r})\n    assert result.returncode == 0\n"
        "    assert result.stdout == ''\n\n\n"
        for name in ("add", "remove", "list", "show", "pull", "push", "copy", "move", "link", "load", "save", "stop")
    ),
    "json": "".join(f'    {{"id": {n}, "name": "user{n}", "active": true, "tags": []}},\n' for n in range(100)),
    "cards": (
        '<div class="card">\n  <h2>Title</h2>\n  <p>Some text goes here.</p>\n  <a href="#">Read more</a>\n</div>\n' * 6
    ),
    "counting": " ".join(str(n) for n in range(1, 2000)),
    "laugh": "ha" * 100 + "! " + "lol " * 50,
}


@pytest.mark.parametrize("name", INNOCENT)
def test_what_only_looks_alike_is_left_alone(name: str) -> None:
    assert guarded(INTRODUCTION + "\n\n" + INNOCENT[name] + "\n\nThat is all.")[0] is None


def test_the_slow_twin_agrees() -> None:
    """Random texts over few letters with loops put in: what is found is a loop, and none is missed."""
    chance = random.Random(8)
    hits = 0
    for _ in range(60):
        noise = "".join(chance.choice("abcdefgh ") for _ in range(chance.randint(0, 600)))
        block = "".join(chance.choice("abcdefgh ") for _ in range(chance.randint(1, 120)))
        text = noise + block * chance.randint(1, 3000 // len(block))
        guard, end = RepeatGuard(), 0
        while end < len(text) and guard.push(text[end]) is None:
            end += 1
        looping = text[: end + 1]
        if end < len(text):
            hits += 1
            assert any(
                looping.endswith(looping[len(looping) - period :] * (600 // period + 1))
                or repeats(looping, period) >= 600
                for period in range(1, 400)
            )
        else:
            assert max(repeats(text, period) for period in range(1, 400)) < max(1500 + 16, 8 * len(block) + 16)
    assert 20 < hits < 60


def repeats(text: str, period: int) -> int:
    """Return the number of last characters that repeat with a period."""
    length = 0
    while length + period < len(text) and text[-1 - length] == text[-1 - length - period]:
        length += 1
    return length + period if length >= period else 0


@pytest.mark.parametrize("text", [" ".join(map(str, range(30_000))), "the " * 50_000, table(5000)], ids=len)
def test_it_costs_little(text: str) -> None:
    guard = RepeatGuard()
    tokens = [text[at : at + 4] for at in range(0, len(text), 4)]
    assert loops(lambda: [guard.push(token) for token in tokens]) < len(tokens) / 50, "a token takes milliseconds"


# ---- a reasoning that repeats itself is closed, and the answer follows; alone, in a run, beside others, with a grammar


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


def ask(engine: Engine, number: int, question: str, grammar: Grammar | None = None, **more: Any) -> None:
    request = AnswerRequest(
        (Message("user", question),),
        grammar=grammar,
        stops_repeats=True,
        **{"sampling": SamplingParams(temperature=0), "limits": Limits(3000), **more},
    )
    preparer = Preparer(FakeVocabulary(), TEMPLATE, 4000)
    engine.add(preparer.prepare(Generate(number, request), lambda event: None))


def answers(engine: Engine, *, runs: bool, steps: int = 64) -> dict[int, tuple[str, Finished]]:
    """Return the text of each answer and its end."""
    events: list[Event] = []
    while engine.busy:
        events += engine.step(RunLimit(steps, 1.0, CancelFlag())) if runs else engine.step()
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


@pytest.mark.parametrize("mirostat", [0, 2])
def test_the_answer_of_a_seed_does_not_depend_on_when_the_loop_was_seen(mirostat: int) -> None:
    """Native code has sampled more tokens by then."""

    def logits(tokens: Sequence[int]) -> Sequence[float]:
        return hashed(tokens) if CLOSED in text_of(tokens) else goes_round(tokens)

    found = set()
    for steps in (0, 7, 64):
        engine = Engine(FakeContext(logits, n_ctx=4000))
        sampling = SamplingParams(seed=3, temperature=1.0, xtc_probability=0.3, xtc_threshold=0.1, mirostat=mirostat)
        ask(engine, 1, "yes", limits=Limits(800), sampling=sampling)
        text, finished = answers(engine, runs=steps > 0, steps=steps)[1]
        assert finished.stats.loops_closed == 1
        found.add(text.partition(CLOSED)[2])
    assert len(found) == 1


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
