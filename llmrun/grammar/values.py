"""JSON values and their types in JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas are about the same value as the schema around them."""


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value in words, e.g. "a string"."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "a string"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"


def types_of_value(value: Any) -> set[str]:
    """Return the types of a value; a whole number has two."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"number", "integer"} if value == int(value) else {"number"}
    names = {"null": "null", "true": "boolean", "false": "boolean", "a string": "string", "a list": "array"}
    return {names.get(kind_of(value), "object")}


def types_allowed(part: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema's own "type" allows; all without one."""
    types = part.get("type", TYPES)
    allowed = {types} if isinstance(types, str) else set(types)
    return allowed | {"integer"} if "number" in allowed else allowed
