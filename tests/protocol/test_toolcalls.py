"""Calls of tools are told from an answer's text, however it is cut into pieces."""

from __future__ import annotations

import random

import pytest

from llmrun.protocol.toolcalls import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, SYNTAXES, CallKind, CallSplitter, Syntax

ARGUMENTS = (
    '{"city": "Rome"}',
    "{}",
    '{"a": {"b": [1, "}\\"]{"]}, "c": "\\\\"}',
    '{"tag": "</tool_call>\\n<tool_call>"}',
)
TEXTS = ("Let me see.", "I use <tool and [TOOL", "a\n\nb")


def written(syntax: Syntax, calls: list[tuple[str, str]]) -> str:
    """Calls as a model of this family writes them."""
    texts = [f"{name}{syntax.middle}{arguments}{syntax.close}" for name, arguments in calls]
    return f"{syntax.begin}{syntax.first}{syntax.then.join(texts)}{syntax.end}" if calls else ""


def split(syntax: Syntax | None, pieces: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """The text besides the calls, the calls, and how many of them are complete."""
    splitter = CallSplitter(syntax)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
    text, calls = "", []
    for part in parts:
        assert part.text
        if part.kind is CallKind.TEXT:
            text += part.text
        elif part.kind is CallKind.NAME:
            calls.append((part.text, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return text, calls, splitter.n_calls


def cut(text: str, numbers: random.Random) -> list[str]:
    places = sorted(numbers.sample(range(1, len(text)), min(len(text) - 1, numbers.randint(0, 8))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_calls_cut_anywhere(syntax: Syntax) -> None:
    numbers = random.Random(7)
    for _ in range(400):
        n_calls = numbers.randint(1, 3 if syntax.then else 1)
        calls = [(numbers.choice(("weather", "a.b-c")), numbers.choice(ARGUMENTS)) for _ in range(n_calls)]
        before = "" if syntax.at_start else numbers.choice(("", *TEXTS))
        answer = f"{before}{numbers.choice(('', chr(10)))}{written(syntax, calls)}"
        assert split(syntax, cut(answer, numbers)) == (before, calls, n_calls)


@pytest.mark.parametrize("syntax", [*SYNTAXES.values(), None])
def test_text_without_calls_stays_whole(syntax: Syntax | None) -> None:
    numbers = random.Random(8)
    others = [text for each in SYNTAXES.values() if each != syntax for text in (each.begin, each.first)]
    for _ in range(400):
        answer = "".join(numbers.choice((*TEXTS, "\n", " ", *others)) for _ in range(4))
        begins = syntax is not None and syntax.begin in answer
        if answer and not begins:
            assert split(syntax, cut(answer, numbers)) == (answer, [], 0)


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_noise_is_never_lost_but_for_blanks_and_a_cut_off_frame(syntax: Syntax) -> None:
    """Whatever a model writes, pieces do not change what is told."""
    numbers = random.Random(9)
    words = (
        syntax.begin,
        syntax.first,
        syntax.middle,
        syntax.close,
        syntax.then,
        syntax.end,
        "f",
        "{}",
        "{",
        '"',
        "\n",
    )
    for _ in range(400):
        answer = "".join(numbers.choice(words) for _ in range(numbers.randint(1, 9)))
        if answer:
            assert split(syntax, cut(answer, numbers)) == split(syntax, [answer])


@pytest.mark.parametrize("size", range(1, len(written(HERMES, [("weather", ARGUMENTS[0])]))))
def test_an_answer_that_is_cut_off(size: int) -> None:
    answer = "Well.\n" + written(HERMES, [("weather", ARGUMENTS[0])])[:size]
    text, calls, n_calls = split(HERMES, [answer])
    assert all(name == "weather" and ARGUMENTS[0].startswith(arguments) for name, arguments in calls)
    assert text == ("Well." if HERMES.begin in answer else answer)
    assert n_calls == sum(arguments == ARGUMENTS[0] for _, arguments in calls)


@pytest.mark.parametrize(
    ("syntax", "answer"),
    [
        (HERMES, "<tool_call> is how I call"),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": 5}'),
        (HERMES, '<tool_call>\n{"name": "' + "f" * 300),
        (LLAMA, '{"name": "f", "parameters": []}'),
        (LLAMA, '{"name": 5}'),
        (LLAMA, 'So: {"name": "f", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS]f"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]x"),
    ],
)
def test_what_only_begins_like_a_call_is_text(syntax: Syntax, answer: str) -> None:
    assert split(syntax, [answer]) == (answer, [], 0)
    assert split(syntax, list(answer)) == (answer, [], 0)


def test_arguments_come_as_they_are_written() -> None:
    splitter = CallSplitter(HERMES)
    splitter.feed('<tool_call>\n{"name": "weather", "arguments": {')
    assert [part.text for part in splitter.feed('"city": ')] == ['"city": ']
    assert [part.text for part in splitter.feed('"Ro')] == ['"Ro']
