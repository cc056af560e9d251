"""Arguments of calls follow their tool's schema, from where a call begins."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from support.byte_vocabulary import ByteVocabulary, allowed_tokens
from support.call_syntaxes import SYNTAXES
from support.random_schemas import random_object
from support.text_grammars import APPLY_PATCH, PATCH

from llmrun.engine.constraint.calls import ToolCallConstraint, arguments_schema, compile_calls
from llmrun.engine.constraint.closing import TimelyEnd
from llmrun.engine.constraint.matcher import Constraint, compile_lark
from llmrun.engine.prompt.thinking import ReasoningTracker
from llmrun.errors import BadGrammarError, UsageError
from llmrun.grammar import read_grammar, read_json_schema
from llmrun.protocol.messages import AnswerRequest, Tool, ToolCall
from llmrun.protocol.toolcalls import HERMES, CallSplitter, CallSyntax

LLAMA, MISTRAL_ARGS = SYNTAXES["llama"], SYNTAXES["mistral-args"]

THINK, UNTHINK, CALLS, ARGS, END = 256, 257, 258, 259, 260
CONTROL = {THINK: b"<think>", UNTHINK: b"</think>", CALLS: b"[TOOL_CALLS]", ARGS: b"[ARGS]", END: b"</s>"}
WORDS = [b"<tool_call>", b"call>", b'call>\n{"', b'{"name": "', b'": "', b'name": "we', b"</tool_call>", b"}\n"]
TAGS = ("<think>", "</think>")
SHOWN = (CALLS, ARGS)

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
LOOK_AROUND = {"type": "string", "pattern": r"(?<=a)[a-z]+$"}  # llguidance has none
TOOLS = (Tool("weather", "Tells it.", json.dumps(PLACE)), Tool("now"))
ASKED = AnswerRequest(tools=TOOLS)


VOCABULARY = ByteVocabulary(CONTROL, WORDS)


def allowed(constraint: Constraint) -> list[int]:
    return allowed_tokens(constraint, VOCABULARY.n_tokens)


def text_of(tokens: list[int]) -> str:
    shown = (CONTROL[token] if token in SHOWN else VOCABULARY.piece(token) for token in tokens)
    return b"".join(shown).decode("utf-8", "replace")


def say(constraint: Constraint, text: bytes) -> None:
    """Say this, in control tokens where those are allowed."""
    while text:
        choices = allowed(constraint)
        control = next((token for token in SHOWN if token in choices and text.startswith(CONTROL[token])), None)
        token = text[0] if control is None else control
        assert token in choices
        constraint.accept(token)
        text = text.removeprefix(text[:1] if control is None else CONTROL[control])


def finish(constraint: Constraint, numbers: random.Random, preferred: bytes = b"") -> str:
    """Go on at random to the end, most often by one of the preferred characters."""
    tokens: list[int] = []
    while True:
        choices = allowed(constraint)
        some = [token for token in choices if token in [*preferred]] if preferred and numbers.random() < 0.9 else []
        token = END if END in choices else numbers.choice(some or choices)
        if token == END:
            return text_of(tokens)
        constraint.accept(token)
        tokens.append(token)


def calls_in(syntax: CallSyntax, answer: str, tools: Sequence[Tool] = TOOLS) -> list[tuple[str, Any]]:
    splitter = CallSplitter(syntax, tools)
    found: list[tuple[str, str]] = []
    for part in [*splitter.feed(answer), *splitter.flush()]:
        if part.kind == "call":
            found.append((part.text, ""))
        elif part.kind == "arguments":
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    assert splitter.n_calls == len(found)
    return [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
@pytest.mark.parametrize("choice", ["required", "=weather", "=now"])
def test_a_required_call_is_one_whose_arguments_follow_the_schema(syntax: CallSyntax, choice: str) -> None:
    for seed in range(12):
        constraint = compile_calls(replace(ASKED, tool_choice=choice), syntax, VOCABULARY, SHOWN)
        calls = calls_in(syntax, finish(constraint, random.Random(seed)))
        assert calls
        for name, arguments in calls:
            assert choice in ("required", f"={name}")
            jsonschema.validate(arguments, PLACE if name == "weather" else {"type": "object"})


@pytest.mark.parametrize("syntax", [each for each in SYNTAXES.values() if each.between is not None])
@pytest.mark.parametrize("parallel", [True, False])
def test_several_calls_only_where_they_may_be_parallel(syntax: CallSyntax, parallel: bool) -> None:
    constraint = compile_calls(
        replace(ASKED, tool_choice="required", parallel_calls=parallel), syntax, VOCABULARY, SHOWN
    )
    call, calls = ToolCall("abcdefgh9", "now", "{}"), syntax.write([ToolCall("abcdefgh9", "now", "{}")] * 2)
    one = syntax.write([call]).removesuffix(syntax.end)
    say(constraint, one.removeprefix(syntax.prefill).encode())
    more = VOCABULARY.tokenize(calls[len(one) :], special=False)
    assert (constraint.allowed(more) == len(more)) is parallel
    assert (END in allowed(constraint)) is (not syntax.end)


def begin(syntax: CallSyntax, *, thinking: bool = False, inside: bool = False) -> ToolCallConstraint:
    thoughts = ReasoningTracker.begin(TAGS, inside=inside) if thinking else None
    return ToolCallConstraint(compile_calls(ASKED, syntax, VOCABULARY, SHOWN), VOCABULARY, syntax, thoughts)


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_anything_may_be_said_until_a_call_begins(syntax: CallSyntax) -> None:
    constraint = begin(syntax)
    if not syntax.at_start:
        say(constraint, b"Well, <tool or [TOOL\n")
    assert END in allowed(constraint)
    say(constraint, syntax.trigger.encode())
    assert END not in allowed(constraint)
    answer = syntax.trigger + finish(constraint, random.Random(1))
    assert {name for name, _ in calls_in(syntax, answer)} <= {"weather", "now"}


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_a_draft_is_cut_in_a_call_only(syntax: CallSyntax) -> None:
    constraint = begin(syntax)
    assert constraint.allowed([*b"\0 anything"]) == len(b"\0 anything")
    say(constraint, syntax.trigger.encode())
    assert constraint.allowed([0]) == 0


def test_a_call_that_would_begin_with_more_in_the_same_token_is_kept_out() -> None:
    constraint = begin(HERMES)
    say(constraint, b"<tool_")
    assert VOCABULARY.word(b"call>") in allowed(constraint)
    assert VOCABULARY.word(b'call>\n{"') not in allowed(constraint)
    constraint.rewind(1)
    assert VOCABULARY.word(b'call>\n{"') in allowed(constraint)


def test_llamas_calls_stand_at_the_beginning_or_not_at_all() -> None:
    constraint = begin(LLAMA)
    say(constraint, b'So: {"name": "anything')
    assert END in allowed(constraint)


def test_a_control_token_begins_a_call() -> None:
    constraint = begin(MISTRAL_ARGS)
    constraint.accept(CALLS)
    say(constraint, b"now")
    assert ARGS in allowed(constraint)


@pytest.mark.parametrize("inside", [True, False])
def test_no_call_begins_in_reasoning(inside: bool) -> None:
    constraint = begin(HERMES, thinking=True, inside=inside)
    if not inside:
        constraint.accept(THINK)
    say(constraint, b"I could write <tool_call> and")
    assert END in allowed(constraint)
    constraint.accept(UNTHINK)
    say(constraint, b"\n\n<tool_call>")
    assert allowed(constraint) == [ord("\n")]


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_what_is_taken_back_was_never_said(syntax: CallSyntax) -> None:
    answer = list(syntax.write([ToolCall("abcdefgh9", "now", "{}")]).partition("now")[0].encode() + b"now")
    for n_tokens in range(1, len(answer)):
        constraint = begin(syntax)
        for token in answer[: n_tokens - 1]:
            constraint.accept(token)
        before = allowed(constraint)
        for token in answer[n_tokens - 1 :]:
            constraint.accept(token)
        constraint.rewind(len(answer) - n_tokens + 1)
        assert allowed(constraint) == before


def test_an_answer_by_schema_or_a_call() -> None:
    asked = replace(ASKED, grammar=read_json_schema('{"type": "object", "properties": {"answer": {"const": 1}}}'))
    constraint = compile_calls(asked, HERMES, VOCABULARY, SHOWN)
    assert {ord("{"), ord("<")} <= set(allowed(constraint))
    assert ord("a") not in allowed(constraint)


def test_another_grammar_and_tools_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="used together"):
        compile_calls(replace(ASKED, grammar=read_grammar('root ::= "a"')), HERMES, VOCABULARY, SHOWN)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (PLACE, {"city": "Rome"}, {"city": "Bonn"}),
        ({}, {"a": 1}, None),
        ({"type": "string"}, {"a": 1}, None),
        ({**PLACE, "not": {"required": ["days"]}}, {"city": "Rome"}, {"city": "Bonn"}),
        (
            {"type": "object", "properties": {"not": {"type": "integer"}, "if": {"propertyNames": {}}}},
            {"not": 1},
            {"not": "x"},
        ),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "made-up"}}}, {"a": "b"}, {"a": 1}),
        ({"properties": {**PLACE["properties"], "a": LOOK_AROUND}}, {"city": "Rome", "a": "../"}, {"city": "Bonn"}),
        ({"type": "object", "properties": 5}, {"a": 1}, None),
        ({"properties": {"a": json.loads('{"items": ' * 450 + "{}" + "}" * 450)}}, {"a": [1]}, None),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, {"a": 1}, None),
    ],
)
def test_as_much_of_a_schema_as_can_be_enforced_is(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    rules = arguments_schema(json.dumps(schema)).rules
    lark = "\n".join([f"start: {rules.start}", *rules.lines])
    say(compile_lark(lark, VOCABULARY, ()), json.dumps(right).encode())
    if wrong is not None:
        with pytest.raises((AssertionError, BadGrammarError)):
            say(compile_lark(lark, VOCABULARY, ()), json.dumps(wrong).encode())


MIXED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "flag": {"type": "boolean"},
        "text": {"type": "string", "maxLength": 3},
        "unit": {"$ref": "#/$defs/Unit"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/Unit"}, "maxItems": 2},
        "count": {"enum": [1, 25]},
        "tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
    },
    "required": ["text", "places"],
    "$defs": {
        "Unit": {"type": "string", "enum": ["c", "fa"]},
        "Tree": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 2},
                "leaves": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2},
                "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 1, "maxItems": 2},
            },
            "required": ["sizes"],
        },
    },
}


@pytest.mark.parametrize("syntax", [each for each in SYNTAXES.values() if each.parameters])
def test_parameters_one_by_one_follow_the_schema(syntax: CallSyntax) -> None:
    tool = Tool("mixed", "", json.dumps(MIXED))
    seen = set()
    for seed in range(40):
        asked = AnswerRequest(tools=(tool,), tool_choice="required", parallel_calls=False)
        answer = finish(compile_calls(asked, syntax, VOCABULARY, SHOWN), random.Random(seed))
        ((_, arguments),) = calls_in(syntax, answer, (tool,))
        jsonschema.validate(arguments, MIXED)
        seen |= {*arguments}
    assert seen == {*MIXED["properties"]}


@pytest.mark.parametrize("name", [name for name, each in SYNTAXES.items() if each.parameters])
def test_a_call_is_complete_at_the_limit_of_its_answer(name: str) -> None:
    """Strings have no end here that the model wants to write."""
    syntax = SYNTAXES[name]
    texts = {key: {"type": "string"} for key in ("a", "b", "c")}
    tree = {"type": "object", "properties": {"d": {"type": "array", "items": {"type": "string"}}}, "required": ["d"]}
    schema = {"type": "object", "properties": {**texts, "tree": tree}, "required": ["a", "tree"]}
    tool = Tool("f", "", json.dumps(schema))
    asked = AnswerRequest(tools=(tool,), tool_choice="required", parallel_calls=False)
    for seed in range(3):
        matcher, numbers, answer = compile_calls(asked, syntax, VOCABULARY, SHOWN), random.Random(seed), list[int]()
        end = TimelyEnd(matcher, matcher.tokens, 280, matcher.endings)
        for _ in range(280):
            choices = allowed(matcher)
            token = numbers.choice([each for each in choices if each in (*b"abc xyz",)] or choices)
            matcher.accept(token)
            token = end.accept(token)
            if token == END:
                break
            answer.append(token)
        ((_, arguments),) = calls_in(syntax, syntax.prefill + text_of(answer), (tool,))
        jsonschema.validate(arguments, schema)


def test_what_a_string_without_quotes_does_not_follow_is_named() -> None:
    texts = {
        "a": {"type": "string", "pattern": "^[0-9]", "format": "date", "minLength": 2, "maxLength": 5000},
        "b": {"type": "string", "maxLength": 3, "format": "made-up"},
        "c": {"type": "integer", "minimum": 3},
    }
    tool = Tool("f", "", json.dumps({"type": "object", "properties": texts}))
    asked = AnswerRequest(tools=(tool,), tool_choice="required", parallel_calls=False)
    unquoted = [syntax for syntax in SYNTAXES.values() if syntax.parameters and not syntax.parameters.is_python]
    assert unquoted
    for syntax in SYNTAXES.values():
        keys = ("pattern", "minLength", "format", "maxLength") if syntax in unquoted else ()
        left_out = compile_calls(asked, syntax, VOCABULARY, SHOWN).left_out
        assert left_out == tuple(f"tools.f.parameters.properties.a.{key}" for key in keys)


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_a_constant_is_written_in_every_syntax(syntax: CallSyntax) -> None:
    tool = Tool("f", "", json.dumps({"type": "object", "properties": {"b": {"const": "only"}}, "required": ["b"]}))
    asked = AnswerRequest(tools=(tool,), tool_choice="required", parallel_calls=False)
    answer = finish(compile_calls(asked, syntax, VOCABULARY, SHOWN), random.Random(1))
    assert [json.loads(arguments) if isinstance(arguments, str) else arguments for _, arguments in
            calls_in(syntax, answer, (tool,))] == [{"b": "only"}]  # fmt: skip


def test_a_hundred_tools_are_one_grammar() -> None:
    """Equal schemas are written once; the rules of different ones do not meet."""
    tools = tuple(Tool(f"t{n}", "", json.dumps(random_object(random.Random(n // 2)))) for n in range(100))
    matcher = compile_calls(AnswerRequest(tools=tools, tool_choice="required"), HERMES, VOCABULARY, SHOWN)
    assert all(each.split(".")[1] in {tool.name for tool in tools} for each in matcher.left_out)
    assert allowed(matcher)


TEXT_TOOL = Tool(
    "patch",
    "",
    json.dumps({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}),
    APPLY_PATCH,
)


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_a_text_follows_the_grammar_of_its_tool(syntax: CallSyntax) -> None:
    asked = AnswerRequest(tools=(TEXT_TOOL, *TOOLS), tool_choice="=patch")
    for seed in range(3):
        matcher = compile_calls(asked, syntax, VOCABULARY, SHOWN)
        answer = finish(matcher, random.Random(seed), b"\n\\n*")
        ((_, arguments),) = calls_in(syntax, answer, (TEXT_TOOL, *TOOLS))
        assert not matcher.left_out
        assert PATCH.fullmatch(arguments["input"])


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_a_recursive_grammar_of_a_text(syntax: CallSyntax) -> None:
    tool = TEXT_TOOL._replace(grammar='start: "(" start* ")" | "\\"" /[a-z]/')
    asked = AnswerRequest(tools=(tool,), tool_choice="required", parallel_calls=False)
    for seed in range(4):
        answer = finish(compile_calls(asked, syntax, VOCABULARY, SHOWN), random.Random(seed))
        ((_, arguments),) = calls_in(syntax, answer, (tool,))
        text = re.sub('"[a-z]', "", arguments["input"])
        while "()" in text:
            text = text.replace("()", "")
        assert text == ""


def test_a_grammar_that_cant_be_enforced_is_named() -> None:
    tool = TEXT_TOOL._replace(grammar='start: "a"\n%ignore " "')
    asked = AnswerRequest(tools=(tool,), tool_choice="required")
    for syntax in SYNTAXES.values():
        matcher = compile_calls(asked, syntax, VOCABULARY, SHOWN)
        assert matcher.left_out == ("tools.patch.format",)
        assert allowed(matcher)
