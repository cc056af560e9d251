"""Calls of tools are told from an answer's text, however it is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest
from support.call_syntaxes import SYNTAXES

from llmrun.protocol.messages import Tool, ToolCall
from llmrun.protocol.toolcalls import HARMONY, HERMES, CallField, CallSplitter, CallSyntax

LLAMA, MISTRAL, MISTRAL_ARGS = SYNTAXES["llama"], SYNTAXES["mistral"], SYNTAXES["mistral-args"]
QWEN_XML, GLM, GEMMA, LFM2 = (SYNTAXES[name] for name in ("qwen-xml", "glm", "gemma", "lfm2"))

ARGUMENTS = (
    '{"city": "Rome"}',
    "{}",
    '{"a": {"b": [1, "}\\"]{"]}, "c": "\\\\"}',
    '{"tag": "</tool_call>\\n<tool_call>"}',
)
TEXTS = ("Let me see.", "I use <tool and [TOOL", "a\n\nb")


def written(syntax: CallSyntax, calls: list[tuple[str, str]]) -> str:
    """Calls as a model of this family writes them."""
    return syntax.write([ToolCall("abcdefgh9", *call) for call in calls]).removeprefix(syntax.prefill)


def split(
    syntax: CallSyntax | None, pieces: list[str], *, is_cut_off: bool = False
) -> tuple[str, list[tuple[str, str]], int]:
    """The text besides the calls, the calls, and how many of them are complete."""
    splitter = CallSplitter(syntax)
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    parts += splitter.flush(is_cut_off=is_cut_off)
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
def test_calls_cut_anywhere(syntax: CallSyntax) -> None:
    numbers = random.Random(7)
    for _ in range(400):
        n_calls = numbers.randint(1, 3 if syntax.between is not None else 1)
        calls = [(numbers.choice(("weather", "a.b-c")), numbers.choice(ARGUMENTS)) for _ in range(n_calls)]
        before = "" if syntax.at_start else numbers.choice(("", *TEXTS))
        blank = "" if syntax.prefill else numbers.choice(("", "\n"))
        answer = f"{before}{blank}{written(syntax, calls)}"
        text, found, n_found = split(syntax, cut(answer, numbers))
        assert (text, n_found) == (before, n_calls)
        assert [(name, json.loads(arguments)) for name, arguments in found] == [
            (name, json.loads(arguments)) for name, arguments in calls
        ]


@pytest.mark.parametrize("syntax", [*SYNTAXES.values(), None])
def test_text_without_calls_stays_whole(syntax: CallSyntax | None) -> None:
    numbers = random.Random(8)
    others = [text for each in SYNTAXES.values() if each != syntax for text in (each.trigger,)]
    for _ in range(400):
        answer = "".join(numbers.choice((*TEXTS, "\n", " ", *others)) for _ in range(4))
        begins = syntax is not None and syntax.trigger in answer
        if answer and not begins:
            assert split(syntax, cut(answer, numbers)) == (answer, [], 0)


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_noise_is_never_lost_but_for_blanks_and_a_cut_off_frame(syntax: CallSyntax) -> None:
    """Whatever a model writes, pieces do not change what is told."""
    numbers = random.Random(9)
    words = (
        *syntax.texts,
        syntax.trigger,
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
    text, calls, n_calls = split(HERMES, [answer], is_cut_off=HERMES.trigger in answer)
    assert all(name == "weather" and ARGUMENTS[0].startswith(arguments) for name, arguments in calls)
    assert text == ("Well." if HERMES.trigger in answer else answer)
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
def test_what_only_begins_like_a_call_is_text(syntax: CallSyntax, answer: str) -> None:
    assert split(syntax, [answer]) == (answer, [], 0)
    assert split(syntax, list(answer)) == (answer, [], 0)


LATE = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"


def test_the_first_tag_may_be_missing_before_a_tool_that_there_is() -> None:
    schema = '{"type": "object", "properties": {"x": {"type": "integer"}}}'
    for pieces in ([f"Hm.\n\n{LATE}"], [*f"Hm.\n\n{LATE}"]):
        splitter = CallSplitter(QWEN_XML, (Tool("f", "", schema),))
        parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
        assert "".join(part.text for part in parts if part.kind == "text") == "Hm."
        assert [part.text for part in parts if part.kind == "call"] == ["f"]
        assert "".join(part.text for part in parts if part.kind == "arguments") == '{"x": 1}'
        others = CallSplitter(QWEN_XML, (Tool("g", "", schema),))
        said = [part for piece in pieces for part in others.feed(piece)] + others.flush()
        assert "".join(part.text for part in said) == f"Hm.\n\n{LATE}"


@pytest.mark.parametrize("answer", ["Noon.", "", "<|channel|>final<|message|>", "\n"])
def test_what_leads_in_a_text_is_none_of_it(answer: str) -> None:
    written = HARMONY.lead + answer
    assert split(HARMONY, [written]) == split(HARMONY, [*written]) == (answer, [], 0)


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ("all\nLet me see.>>>now\n{}", "Let me see.", ["now"]),
        ("all\n>>> is a prompt of Python", ">>> is a prompt of Python", []),
        ("all\n>>>then\n{}", ">>>then\n{}", []),  # no such tool
        ("Hello", "Hello", []),
        ("now\n{}>>>now\n{}", "", ["now", "now"]),
    ],
)
def test_a_header_that_the_prompt_begins(answer: str, text: str, calls: list[str]) -> None:
    for pieces in ([answer], list(answer)):
        splitter = CallSplitter(SYNTAXES["functionary"], (Tool("now"),))
        parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
        assert "".join(part.text for part in parts if part.kind == "text") == text
        assert [part.text for part in parts if part.kind == "call"] == calls


KIMI = CallSyntax(
    ("<call>functions.", CallField.NAME, ":", CallField.INDEX, "<args>", CallField.ARGUMENTS, "</call>"),
    "<call>",
    between="",
)
FIRST = "functions.f:0"


@pytest.mark.parametrize(
    ("syntax", "answer", "taken", "ids"),
    [
        (KIMI, "<call>functions.f:0<args>{}</call><call>functions.f:1<args>{}</call>", (), [FIRST, "functions.f:1"]),
        (KIMI, "<call>functions.f:0<args>{}</call><call>functions.f:0<args>{}</call>", (), [FIRST, ""]),
        (KIMI, "<call>functions.f:0<args>{}</call>", (FIRST,), [""]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', (), [""]),
    ],
)
def test_the_models_own_ids_if_no_other_call_has_them(
    syntax: CallSyntax, answer: str, taken: tuple[str, ...], ids: list[str]
) -> None:
    splitter = CallSplitter(syntax, taken=taken)
    parts = [part for piece in answer for part in splitter.feed(piece)]
    assert [part.call_id for part in parts if part.kind == "call"] == ids


def test_a_value_may_contain_its_end_in_cdata() -> None:
    answer = '<function name="f"><param name="x"><![CDATA[<a></param>]]></param></function>'
    _, calls, _ = split(SYNTAXES["minicpm"], list(answer))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"x": "<a></param>"})]


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


@pytest.mark.parametrize("syntax", [QWEN_XML, GLM], ids=["qwen-xml", "glm"])
@pytest.mark.parametrize("either", ["null", "nothing"])
def test_what_is_a_text_is_said_by_the_schema(syntax: CallSyntax, either: str) -> None:
    form = syntax.parameters
    assert form is not None
    (written,) = form.forms
    values = {"text": "5\n", "number": "5", "either": either, "unit": "5"}
    parameters = "".join(f"{form.begin}{name}{written.middle}{value}{written.end}" for name, value in values.items())
    answer = syntax.write([ToolCall("", "pair", "{}")])
    head = answer.index("pair") + len("pair")
    head += (
        len(next(text for text in syntax.head[::-1] if isinstance(text, str)))
        if syntax.head[-1] != CallField.NAME
        else 0
    )
    answer = answer[:head] + parameters + answer[head:]
    for place in range(len(answer)):
        splitter = CallSplitter(syntax, (PAIR,))
        parts = [*splitter.feed(answer[:place]), *splitter.feed(answer[place:]), *splitter.flush()]
        arguments = "".join(part.text for part in parts if part.kind == "arguments")
        meant = {"text": "5\n", "number": 5, "either": None if either == "null" else either, "unit": "5"}
        assert json.loads(arguments) == meant


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_a_cut_call_has_no_whole_arguments(syntax: CallSyntax) -> None:
    """Clients take empty arguments for those of a call without any."""
    answer = written(syntax, [("f", '{"a": "b", "c": "d"}')])
    for size in range(len(answer)):
        _, calls, n_calls = split(syntax, [answer[:size]])
        for _, arguments in calls[n_calls:]:
            assert arguments
            with pytest.raises(ValueError, match=r"."):
                json.loads(arguments)
