"""Random JSON schemas, as tools have them: most of JSON Schema's keywords, some of them broken or not enforceable."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WRITTEN: dict[str, Any] = json.loads((Path(__file__).parent / "written_schemas.json").read_text())
"""What pydantic 2.14, zod 4.6 and typebox 0.34 write for types of all their kinds, and what schemars 1.0 does."""

_NAMES = ("a", "b", "path", "mode", "x-y", "größe")
_BROKEN: list[dict[str, Any]] = [
    {"type": "string", "pattern": "(?<=a)b"},
    {"type": "string", "pattern": "([a-z"},
    {"type": "any"},
    {"type": "string", "enum": None},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "object", "minProperties": 3},
    {"$ref": "#/nowhere"},
    {"type": "integer", "minimum": "5"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
]


def random_schema(choose: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of any kind of value."""
    kind = choose.choice(
        ("integer", "number", "string", "enum", "boolean", "null", *("array", "object", "some") * depth)
    )
    if choose.random() < 0.06:
        return choose.choice(_BROKEN)
    if kind == "enum":
        return {"enum": choose.sample([1, "a", "b", None, True, 2.5, [1], {"a": 1}], choose.randint(1, 4))}
    if kind == "some":
        word, inner = choose.choice(("anyOf", "oneOf", "allOf", "not", "if")), random_schema(choose, depth - 1)
        if word == "if":
            return {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": inner}
        if word == "not":
            return {"type": ["string", "integer"], "not": {"enum": ["a", 1]}}
        if word == "oneOf":
            return {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]}
        return {word: [inner, random_schema(choose, depth - 1)] if word == "anyOf" else [inner, {"title": "x"}]}
    found: dict[str, Any] = {"type": kind if choose.random() < 0.9 else [kind, "null"]}
    if kind in ("integer", "number"):
        low = choose.choice((-100, 0, 1, 17))
        found |= choose.choice(({}, {"minimum": low}, {"exclusiveMinimum": low, "maximum": low + 50}, {"maximum": 3}))
        found |= choose.choice(({}, {}, {"multipleOf": choose.choice((2, 10) if kind == "integer" else (0.5, 5))}))
        found |= choose.choice(({}, {"format": choose.choice(("int32", "uint8", "double"))}))
    elif kind == "string":
        found |= choose.choice((
            {"minLength": 1, "maxLength": 5}, {"pattern": r"^[a-z]{2,4}\d?$"}, {"format": "date"},
            {"format": "made-up"}, {"pattern": r"^(?!b)\w{1,5}$"}, {"maxLength": 3}, {"format": "uuid"},
        ))  # fmt: skip
    elif kind == "array":
        found |= choose.choice((
            {"items": random_schema(choose, depth - 1), "maxItems": 3},
            {"prefixItems": [random_schema(choose, depth - 1)], "items": False},
            {"items": {"enum": ["a", "b", 3]}, "uniqueItems": True, "minItems": 1},
            {"contains": {"type": "integer"}, "items": {"type": ["integer", "boolean"]}},
        ))  # fmt: skip
    elif kind == "object":
        return random_object(choose, depth - 1)
    return found


def random_object(choose: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of objects."""
    names = choose.sample(_NAMES, choose.randint(1, 4))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(choose, depth) for name in names},
        "required": choose.sample(names, choose.randint(0, len(names))),
    }
    found |= choose.choice((
        {}, {"additionalProperties": False}, {"additionalProperties": {"type": "boolean"}, "maxProperties": 5},
        {"dependentRequired": {names[0]: [names[-1]]}}, {"propertyNames": {"maxLength": 8}}, {"minProperties": 1},
        {"patternProperties": {"^z": {"type": "null"}}, "additionalProperties": False},
        {"unevaluatedProperties": False},
    ))  # fmt: skip
    return found
