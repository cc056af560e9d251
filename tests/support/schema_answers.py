"""Answers under JSON schemas, byte by byte, and schemas that are enforced exactly."""

from __future__ import annotations

import json
import random
from typing import Any

from llmrun.engine.constraint.matcher import Matcher, compile_grammar, compile_lark
from llmrun.grammar import read_json_schema
from llmrun.grammar.json_lark import Rules
from support.byte_vocabulary import allowed_tokens
from support.fake_context import END, N_VOCAB, FakeVocabulary, tokens_of

VOCABULARY = FakeVocabulary()


def allowed(constraint: Matcher) -> list[int]:
    return allowed_tokens(constraint, N_VOCAB)


def follows(constraint: Matcher, value: Any) -> bool:
    """Return whether a value is a complete answer, and rewind the constraint."""
    tokens = tokens_of(json.dumps(value, ensure_ascii=False))
    if constraint.allowed(tokens) < len(tokens):
        return False
    for token in tokens:
        constraint.accept(token)
    ends = END in allowed(constraint)
    constraint.rewind(len(tokens))
    return ends


def of_schema(schema: Any, *, is_strict: bool = False) -> Matcher:
    return compile_grammar(read_json_schema(json.dumps(schema), is_strict=is_strict), VOCABULARY)


def of_rules(rules: Rules) -> Matcher:
    return compile_lark("\n".join([f"start: {rules.start}", *rules.lines]), VOCABULARY, ())


def walk(constraint: Matcher, seed: int, longest: int = 4000) -> str:
    """Return a random answer that soon closes what it opened."""
    choose, answer = random.Random(seed), bytearray()
    while len(answer) < longest:
        tokens = allowed(constraint)
        if END in tokens and (len(tokens) == 1 or choose.random() < 0.5):
            return answer.decode()
        closing = [token for token in tokens if token in map(ord, '"}],')]
        token = choose.choice(closing if closing and choose.random() < 0.4 else [each for each in tokens if each < 256])
        constraint.accept(token)
        answer.append(token)
    raise AssertionError(f"the answer does not end: {answer[:200]!r}")


OPEN: dict[str, Any] = {"additionalProperties": True}
EXACT: dict[str, Any] = {
    "not a type": {"not": {"type": "string"}},
    "not an enum": {"not": {"enum": ["a", 1, None]}},
    "not a pattern": {"type": "string", "not": {"pattern": "^a"}},
    "not required": {**OPEN, "not": {"required": ["a"]}},
    "not a property's value": {**OPEN, "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    "not a number in a range": {"type": "number", "not": {"minimum": 1, "maximum": 2}},
    "if, then, else": {
        "if": {"properties": {"kind": {"const": "cat"}}},
        "then": {"required": ["lives"]},
        "else": {"properties": {"lives": False}},
        **OPEN,
    },
    "one of two that overlap": {"oneOf": [{"minimum": 1}, {"maximum": 2}]},
    "one of two required": {**OPEN, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of two patterns": {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b"}]},
    "needed by another": {**OPEN, "dependentRequired": {"a": ["b"]}},
    "a schema because of a property": {**OPEN, "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {**OPEN, "dependencies": {"a": ["b"], "foo": {"required": ["a"]}}},
    "names": {"propertyNames": {"maxLength": 1}},
    "names that are listed": {"propertyNames": {"enum": ["a", "foo"]}},
    "at least two properties": {"properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
    "at most one property": {"properties": {"a": {}, "b": {}, "foo": {}}, "maxProperties": 1, **OPEN},
    "contains": {"contains": {"type": "string"}},
    "contains twice": {"contains": {"type": "integer"}, "minContains": 2},
    "different items": {"items": {"enum": [1, 2, 5, "a"]}, "uniqueItems": True},
    "unevaluated properties": {
        "properties": {"a": {}},
        "anyOf": [{"properties": {"b": {}}}, {}],
        "unevaluatedProperties": False,
    },
    "unevaluated items": {"prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "string"}},
    "an anchor": {"items": {"$ref": "#one"}, "$defs": {"x": {"$anchor": "one", "type": "integer"}}},
    "a schema with a name": {
        "items": {"$ref": "item"},
        "$id": "https://example.com/",
        "$defs": {"x": {"$id": "item", "type": "integer"}},
    },
    "draft 7's names": {
        "properties": {"a": {"$ref": "#/definitions/b"}},
        "definitions": {"b": {"type": "string"}},
        **OPEN,
    },
    "const and type": {"allOf": [{"enum": [1, "a", {"a": 1}]}, {"not": {"type": "string"}}]},
    "patterns of names": {
        "patternProperties": {"^f": {"type": "string"}, "o$": {}},
        "additionalProperties": {"type": "integer"},
    },
}
