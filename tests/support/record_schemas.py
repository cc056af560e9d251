"""JSON schemas of records as programs ask for them, any number of them, always the same ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_FIELDS = (
    "id", "name", "status", "amount", "currency", "created_at", "email", "tags", "address", "items", "score",
    "quantity", "country", "priority", "due_date", "sku", "phone", "notes", "category", "rating", "parent", "is_active",
)  # fmt: skip
_WORDS = ("open", "paid", "shipped", "late", "low", "high", "EUR", "USD", "north", "south", "draft", "final")


def record_schema(number: int) -> dict[str, Any]:
    """The schema of a number: an object of a few fields, some of them objects or lists themselves."""
    chance = random.Random(number)
    schema = _object(chance, 2)
    if chance.random() < 0.3:  # a part that is named, and used by its name
        schema["$defs"] = {"part": _object(chance, 0)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"].append("part")
    return schema


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_FIELDS, chance.randint(1, 2 + depth))
    required = [name for name in names if chance.random() < 0.8] or names[:1]
    properties = {name: _any(chance, depth) for name in names}
    if chance.random() < 0.5:
        properties[names[0]]["description"] = f"What {names[0]} says"
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    makers: list[Callable[[random.Random], dict[str, Any]]] = [
        _number, _whole, _text, _choice, _formed, _flag, _constant, _nullable
    ]  # fmt: skip
    if depth and chance.random() < 0.35:
        return _object(chance, depth - 1) if chance.random() < 0.6 else _list(chance, depth - 1)
    return chance.choice(makers)(chance)


def _list(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 1)
    return {"type": "array", "items": _any(chance, depth), "minItems": least, "maxItems": least + chance.randint(1, 2)}


def _number(chance: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, "maximum": chance.choice((1, 10, 99.5)), "multipleOf": 0.5}


def _whole(chance: random.Random) -> dict[str, Any]:
    low = chance.randint(-10, 10)
    return {"type": "integer", "minimum": low, "maximum": low + chance.choice((1, 9, 1000))}


def _text(chance: random.Random) -> dict[str, Any]:
    return {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(3, 16)}


def _choice(chance: random.Random) -> dict[str, Any]:
    return {"enum": chance.sample(_WORDS, chance.randint(2, 5))}


def _formed(chance: random.Random) -> dict[str, Any]:
    formats = [
        {"format": "date"},
        {"format": "ipv4"},
        {"pattern": "^[A-Z]{2}-[0-9]{4}$"},
        {"pattern": "^#[0-9a-f]{6}$"},
    ]
    return {"type": "string", **chance.choice(formats)}


def _flag(chance: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _constant(chance: random.Random) -> dict[str, Any]:
    return {"const": chance.choice((*_WORDS, 1, True))}


def _nullable(chance: random.Random) -> dict[str, Any]:
    return chance.choice(({"type": ["string", "null"], "maxLength": 8}, {"anyOf": [_whole(chance), {"type": "null"}]}))
