"""Calls of tools are told from an answer's text, however it is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest
from support.answers import split as whole

from llmrun.protocol.messages import Started, Tool
from llmrun.protocol.toolcalls import (
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_XML,
    SYNTAXES,
    CallSplitter,
    Syntax,
)

ARGUMENTS = (
    '{"city": "Rome"}',
    "{}",
    '{"a": {"b": [1, "}\\"]{"]}, "c": "\\\\"}',
    '{"tag": "</tool_call>\\n<tool_call>"}',
)
TEXTS = ("Let me see.", "I use <tool and [TOOL", "a\n\nb")


def written(syntax: Syntax, calls: list[tuple[str, str]]) -> str:
    """Calls as a model of this family writes them."""
    texts = [f"{name}{syntax.middle}{given(syntax, arguments)}{syntax.close}" for name, arguments in calls]
    return f"{syntax.begin}{syntax.first}{syntax.then.join(texts)}{syntax.end}" if calls else ""


def given(syntax: Syntax, arguments: str) -> str:
    """Arguments as a model of this family writes them."""
    if syntax.parameter is None:
        return arguments
    begin, middle, end, between, quote = syntax.parameter
    return between.join(
        f"{begin}{name}{middle}{quote + value + quote if isinstance(value, str) else json.dumps(value)}{end}"
        for name, value in json.loads(arguments).items()
    )


def split(syntax: Syntax | None, pieces: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """The text besides the calls, the calls, and how many of them are complete."""
    splitter = CallSplitter(syntax)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
    text, calls = "", []
    for part in parts:
        assert part.text or part.kind == "call_end"
        if part.kind == "text":
            text += part.text
        elif part.kind == "call":
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
        *(filter(None, syntax.parameter or ())),
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
        (QWEN_XML, '<tool_call>\n{"name": "f"}'),
        (QWEN_XML, "<tool_call>\n<function=f>\nx"),
        (GLM, "<tool_call>f\nx"),
        (GEMMA, "<|tool_call>f{}"),
        (HARMONY, "<|channel|>commentary to=browser.f <|constrain|>json<|message|>{}"),
        (HARMONY, "<|channel|>fin"),
    ],
)
def test_what_only_begins_like_a_call_is_text(syntax: Syntax, answer: str) -> None:
    assert split(syntax, [answer]) == (answer, [], 0)
    assert split(syntax, list(answer)) == (answer, [], 0)


@pytest.mark.parametrize("answer", ["Noon.", "", "<|channel|>final<|message|>", "\n"])
def test_what_leads_in_a_text_is_none_of_it(answer: str) -> None:
    written = HARMONY.lead + answer
    assert split(HARMONY, [written]) == split(HARMONY, [*written]) == (answer, [], 0)


def test_arguments_come_as_they_are_written() -> None:
    splitter = CallSplitter(HERMES)
    splitter.feed('<tool_call>\n{"name": "weather", "arguments": {')
    assert [part.text for part in splitter.feed('"city": ')] == ['"city": ']
    assert [part.text for part in splitter.feed('"Ro')] == ['"Ro']


PAIR = Tool(
    "pair",
    "",
    json.dumps(
        {
            "properties": {
                "text": {"type": "string"},
                "number": {"type": "integer"},
                "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "$defs": {"Unit": {"enum": ["c", "5"], "type": "string"}},
        }
    ),
)


@pytest.mark.parametrize("syntax", [QWEN_XML, GLM], ids=lambda syntax: syntax.name)
@pytest.mark.parametrize("either", ["null", "nothing"])
def test_what_is_a_text_is_said_by_the_schema(syntax: Syntax, either: str) -> None:
    form = syntax.parameter
    assert form is not None
    values = {"text": "5\n", "number": "5", "either": either, "unit": "5"}
    parameters = "".join(f"{form.begin}{name}{form.middle}{value}{form.end}" for name, value in values.items())
    answer = f"{syntax.begin}{syntax.first}pair{syntax.middle}{parameters}{syntax.close}"
    for place in range(len(answer)):
        splitter = CallSplitter(syntax, (PAIR,))
        parts = [*splitter.feed(answer[:place]), *splitter.feed(answer[place:]), *splitter.flush()]
        arguments = "".join(part.text for part in parts if part.kind == "arguments")
        meant = {"text": "5\n", "number": 5, "either": None if either == "null" else either, "unit": "5"}
        assert json.loads(arguments) == meant
    (call,) = whole(Started(1, 9, 0, 5, tool_syntax=syntax.name), answer, (PAIR,)).calls
    assert (call.name, call.arguments) == ("pair", arguments)


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=lambda syntax: syntax.name)
def test_a_cut_call_has_no_whole_arguments(syntax: Syntax) -> None:
    """Clients take empty arguments for those of a call without any."""
    answer = written(syntax, [("f", '{"a": "b", "c": "d"}')])
    for size in range(len(answer)):
        _, calls, n_calls = split(syntax, [answer[:size]])
        for _, arguments in calls[n_calls:]:
            assert arguments
            with pytest.raises(ValueError, match=r"."):
                json.loads(arguments)
