"""Answers under JSON schemas: jsonschema judges what may be written."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from support.fake_context import END
from support.random_schemas import WRITTEN, random_object
from support.schema_answers import EXACT, allowed, follows, of_rules, of_schema, walk

from llmrun.engine.constraint.calls import arguments_schema, left_out
from llmrun.engine.constraint.matcher import check_rules
from llmrun.errors import BadGrammarError
from llmrun.grammar.loosen import enforceable
from llmrun.grammar.regex import parse
from llmrun.protocol.messages import Tool

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 5, -3, 2.5, "", "a", "ab", "abc", "foo", "bar", [], [1], [1, 2], ["a"], [1, "a"],
    [1, 1],
    [2, 1, 5], {}, {"a": 1}, {"a": "x"}, {"a": 1, "b": 2}, {"b": 2}, {"a": "x", "b": "y"}, {"foo": 1},
    {"a": 1, "foo": 2},
    {"a": {"b": 1}}, {"kind": "cat"}, {"kind": "cat", "lives": 9}, {"kind": "dog", "lives": 9}, {"kind": "dog"},
]  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_a_schema_allows_what_jsonschema_does(name: str) -> None:
    constraint, judge = of_schema(EXACT[name]), jsonschema.Draft202012Validator(EXACT[name])
    if "dependencies" in EXACT[name]:
        judge = jsonschema.Draft7Validator(EXACT[name])
    decisions = {json.dumps(value): follows(constraint, value) for value in VALUES}
    assert decisions == {json.dumps(value): judge.is_valid(value) for value in VALUES}
    assert {*decisions.values()} == {True, False}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": -2.5, "exclusiveMaximum": 10.25},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "maximum": 0},
        {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 3},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        {"type": "number"},
        {"type": "integer"},
        {"type": "integer", "multipleOf": 100, "minimum": -1000},
        {"type": "integer", "minimum": -15, "maximum": 123_456_789_012},
        {"type": "integer", "multipleOf": 7},
    ],
)  # fmt: skip
def test_numbers_end_and_are_in_their_range(schema: dict[str, Any]) -> None:
    constraint, judge = of_schema(schema), jsonschema.Draft202012Validator(schema)
    for seed in range(30):
        choose, answer, twin = random.Random(seed), "", constraint.copy()
        while digits := [token for token in allowed(twin) if token != END]:
            token = choose.choice(digits)
            twin.accept(token)
            answer += chr(token)
            assert len(answer) < 70, "digits without an end"
        value = json.loads(answer)
        assert abs(value) < float("inf")
        if schema.get("multipleOf", 1) >= 1:  # a float has an error there
            judge.validate(value)
    numbers = [0, -1, 1, 2.5, 0.01, 3, 10.24, 10.25, -2.5, -2.51, 700, 1e-5, 12345.678, -1000, -1100, 14, 1e300, 1e-300]
    for value in numbers:
        text = json.dumps(value)
        if "e" in text and "minimum" in schema:
            continue  # not every number of a range can be written with an exponent
        if not (schema["type"] == "integer" and isinstance(value, float)) and schema.get("multipleOf") != 0.01:
            assert follows(constraint, value) == judge.is_valid(value) or "e" in text, value


PATTERNS = [
    r"\bRM-\d+\b", r"^(?!x)\w+$", r"^[^]*$", r"^[a-z]+\0?$", r"\A[a-z]+\Z", r"^(?=.*\d)(?=.*[a-z]).{2,5}$", "a|^b$",
    "^(a|b$)", r"^\S(.*\S)?$", r"[^\d\s]-", r"^(?:\w+\.)*\w+$", r"\d{2,3}", "^$", "", r"^\u0061+$", r"^\x61?b", r"^\cJ",
    r"^(([^,]+(,|$)){3,})$", r"^(a($|-))*$", r"(b|a$){2}", r"^(a|$)+$",
    "^a{,3}$", "^[a-c-]+$", r"^[\w.-]+@[\w-]+$", r"^\p{Lu}", "^(x|(y|z))*$", "^.$", r"\/\-\.", "^é{2}$",
]  # fmt: skip
TEXTS = [
    "", "a", "b", "ab", "xa", "x", "RM-12", "aRM-1", "RM-1 y", "q RM-1", "a1", "1", "12", "x-", " a", "a ", "a b", "A",
    "É", "éé", "a.b", "a..b", "a@b", "\n", "\"", "\\", "a{,3}", "a-c", "xyz", "/-.", "\0", "a\0", "\t-", "😀",
    "Zz", "_", "a,b,c", "a,b", "a,,b", "a-", "a-a", "a-a-", "bb", "ba", "aa", "xbba",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_it_does_in_python(pattern: str) -> None:
    """Python's own regular expressions are ECMA-262's with some words changed."""
    python = re.sub(r"\\p\{Lu\}", "[A-ZÉ]", pattern.replace("[^]", r"[\s\S]").replace(r"\cJ", r"\n"))
    python = re.sub(r"(?<!\\)\$", r"\\Z", python.replace("a{,3}", r"a\{,3\}"))
    constraint = of_schema({"type": "string", "pattern": pattern})
    for text in TEXTS:
        expected = re.search(python, text, re.ASCII) is not None
        assert parse(pattern).matches(text) == expected, text
        assert follows(constraint, text) == expected, text


def test_random_answers_are_valid() -> None:
    for name, schema in EXACT.items():
        judge = (jsonschema.Draft7Validator if "dependencies" in schema else jsonschema.Draft202012Validator)(schema)
        constraint = of_schema(schema)
        for seed in range(10):
            answer = walk(constraint.copy(), seed)
            assert judge.is_valid(json.loads(answer)), (name, answer)


def tool(schema: Any) -> Tool:
    return Tool("open", "", json.dumps(schema))


FILE: dict[str, Any] = {"path": {"type": "string", "maxLength": 12}, "mode": {"enum": ["r", "w"]}}
NOTES: dict[str, tuple[Any, list[str]]] = {
    "long text": ({"type": "string", "maxLength": 65536}, []),
    "many items": ({"type": "array", "items": {"type": "string"}, "maxItems": 20000}, []),
    "a 32-bit float": ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, []),
    "a 64-bit float": ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, []),
    "an unknown format": ({"type": "integer", "format": "uint32"}, []),
    "names are strings": ({"type": "object", "propertyNames": {"type": "string"}}, []),
    "enum null": ({"type": "string", "enum": None}, ["enum"]),
    "an unknown type": ({"type": "any", "description": "x"}, ["type"]),
    "a broken pattern": ({"type": "string", "pattern": "([a-z", "minLength": 1}, ["pattern"]),
    "a look-behind": ({"type": "string", "pattern": "(?<=a)b"}, ["pattern"]),
    "a costly pattern": ({"type": "string", "pattern": "^(?=.*a.{900}$)(?=.*b.{800}$)(?=.*c.{700}$).*$"}, ["pattern"]),
    "a set": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["uniqueItems"]),
    "at least two of any": ({"type": "object", "minProperties": 2}, ["minProperties"]),
    "a reference to the world": ({"$ref": "https://example.com/x.json"}, ["$ref"]),
    "a part in a list": ({"anyOf": [{"pattern": "(?<=a)b"}, {"type": "null"}]}, ["anyOf[0].pattern"]),
    "an item": ({"items": {"pattern": "(?<=a)b"}}, ["items.pattern"]),
    "one of what overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf[1]"]),
    "a broken condition": ({"if": {"pattern": "(?<=a)b"}, "then": {"maxLength": 1}}, ["if"]),
    "a name's pattern": ({"patternProperties": {"(": {}}, "additionalProperties": False}, ["patternProperties"]),
    "no schema": (5, [""]),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_cannot_be_enforced_loses_nothing_else(name: str) -> None:
    note, named = NOTES[name]
    schema = {"type": "object", "properties": {**FILE, "note": note}, "required": ["path", "mode"]}
    found = left_out([tool(schema)])
    assert found == tuple(f"tools.open.parameters.properties.note{'.' if each else ''}{each}" for each in named)
    rules = arguments_schema(json.dumps(schema)).rules
    constraint = of_rules(rules)
    assert follows(constraint, {"path": "x", "mode": "r"})
    assert not follows(constraint, {"path": "x" * 13, "mode": "r"})
    assert not follows(constraint, {"path": "x", "mode": "a"})
    assert not follows(constraint, {"path": "x"})
    if isinstance(note, dict) and named and "note" in name:
        assert follows(constraint, {"path": "x", "mode": "r", "note": "text"})


def test_what_nobody_can_read_is_any_object() -> None:
    for parameters in ("5", '{"properties": 5}', '{"type": "string"}', '{"items": ' * 450 + "{}" + "}" * 450):
        rules = arguments_schema(parameters).rules
        constraint = of_rules(rules)
        assert follows(constraint, {"a": [1]})
        assert not follows(constraint, 5)
        assert left_out([Tool("open", "", parameters)])


def test_different_items_are_in_any_order() -> None:
    constraint = of_schema({"items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2, "type": "array"})
    for size in range(4):
        for values in itertools.product("abc", repeat=size):
            assert follows(constraint, list(values)) == (len(set(values)) == size >= 2)


N_RANDOM = 500


def test_no_tool_is_refused_and_no_keyword_lost_that_holds() -> None:
    """Values by random walks through the masks of many tools' schemas meet all but what is named as left out."""
    n_whole = n_lost = 0
    for seed in range(N_RANDOM):
        schema = random_object(random.Random(seed))
        rules, left = arguments_schema(json.dumps(schema))
        n_whole += not left
        constraint = of_rules(rules)
        answer = walk(constraint, seed)
        if () not in left:
            judge = without(schema, left)
            assert not [*jsonschema.Draft202012Validator(judge).iter_errors(json.loads(answer))], (schema, left, answer)
        named = {path[-1] for path in left if path}
        assert named <= {"pattern", "type", "enum", "uniqueItems", "minProperties", "$ref", "minimum", 1}
        n_lost += () in left
    assert n_whole > N_RANDOM / 2
    assert n_lost == 0


def without(schema: Any, left: Sequence[tuple[Any, ...]]) -> Any:
    """Return a schema without the keywords at some paths."""
    found = json.loads(json.dumps(schema))
    for path in left:
        part = found
        for step in path[:-1] if isinstance(path[-1], str) else path[:-2]:
            part = part[step]
        part.pop(path[-1] if isinstance(path[-1], str) else path[-2], None)
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_what_libraries_write_is_enforced(name: str) -> None:
    """All of it but sets of any values, zod's patterns of durations and emoji, and typebox's types of JavaScript."""
    schema = WRITTEN[name]
    rules, left = enforceable(json.dumps(schema), check_rules)
    assert {path[-1] for path in left} <= {"uniqueItems", "pattern", *(["type"] if "typebox" in name else [])}
    assert len(left) <= 3
    if "pydantic M3" in name or "typebox tuple" in name or "zod strings" in name or left:
        return  # for the judge \uFEFF is no space, and items is no list; a walk seldom finds the end of ".*x"
    constraint = of_rules(rules)
    judge = jsonschema.Draft7Validator if "draft-7" in name else jsonschema.Draft202012Validator
    for seed in range(5):
        answer = walk(constraint.copy(), seed)
        assert judge(schema).is_valid(json.loads(answer)), answer


RIVER: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "km": {"type": "integer"}, "sea": {"enum": ["north", "black"]}},
    "required": ["km", "name"],
}


@pytest.mark.parametrize("schema", [RIVER, {"allOf": [RIVER, {"required": ["name"]}]}])
def test_objects_are_open_and_in_any_order_unless_the_schema_is_strict(schema: dict[str, Any]) -> None:
    constraint, strict = of_schema(schema), of_schema(schema, is_strict=True)
    pairs = {"name": "Elbe", "km": 1094, "sea": "north"}
    for size in range(4):
        for names in itertools.permutations(pairs, size):
            value = {name: pairs[name] for name in names}
            assert follows(constraint, value) == jsonschema.Draft202012Validator(schema).is_valid(value)
            assert follows(strict, value) == (names in (("name", "km", "sea"), ("name", "km")))
    further = {"km": 1094, "name": "Elbe", "clean": True, "": [1]}
    assert follows(constraint, further)
    assert not follows(strict, {"name": "Elbe", "km": 1094, "clean": True})
    assert not follows(constraint, {"clean": True, **pairs}), "a model would write them without end"
    for name in ("km", "k\\u006d"):
        text = f'{{"km": 1094, "name": "Elbe", "{name}": "long"}}'
        assert constraint.allowed([*text.encode()]) < len(text), "a name was written twice"


def test_a_list_of_values_may_stand_beside_other_values() -> None:
    """The lexer must not take the beginning of a listed object or list for that of another one, or the reverse."""
    schema = {"anyOf": [{"enum": [{"kind": "none"}, [1, "a"], "x"]}, {"properties": {"kind": {"const": "some"}}}]}
    constraint, judge = of_schema(schema), jsonschema.Draft202012Validator(schema)
    for value in ({"kind": "none"}, {"kind": "some"}, {"kind": "so"}, [1, "a"], [1, "b"], [2], {}, "x", "y", []):
        assert follows(constraint, value) == judge.is_valid(value), value


NOTED: dict[str, tuple[Any, list[str], list[Any]]] = {
    "integers are numbers": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"], [1, 1.5]),
    "a format": (
        {"properties": {"at": {"oneOf": [{"format": "date"}, {"type": "string"}]}}},
        ["properties.at.oneOf"],
        [{"at": "2026-01-01"}, {"at": "x"}, {}],
    ),
    "an enum of another type": (
        {"properties": {"a": {"type": "object", "enum": ["x"]}}, "type": "object"},
        ["properties.a"],
        [{}, {"b": 1}],
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_a_schema_that_is_not_strict_is_not_held_to_is_named(name: str) -> None:
    schema, named, values = NOTED[name]
    constraint = of_schema(schema)
    assert constraint.left_out == tuple(f"json_schema.{path}" for path in named)
    for value in values:
        assert follows(constraint, value), value
    for value in ("text", {"at": 5}, {"a": "x"}, {"a": {}}):
        if not jsonschema.Draft202012Validator(schema).is_valid(value):
            assert not follows(constraint, value), value
    with pytest.raises(BadGrammarError, match=r"oneOf|enum"):
        of_schema(schema, is_strict=True)


def test_a_one_of_that_can_be_enforced_stays_exact_and_unnamed() -> None:
    schema = {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 1}]}
    constraint, judge = of_schema(schema), jsonschema.Draft202012Validator(schema)
    assert not constraint.left_out
    for text in ("a", "ab", "b", "ac", "cb", "c", "cc", "", "aab"):
        assert follows(constraint, text) == judge.is_valid(text), text
