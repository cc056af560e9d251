"""JSON values and their types, as JSON Schema sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas are about the same value as the schema that they are in."""


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "a string"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"


def types_of_value(value: Any) -> set[str]:
    """The types that a value has; a whole number has two."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"number", "integer"} if value == int(value) else {"number"}
    names = {"null": "null", "true": "boolean", "false": "boolean", "a string": "string", "a list": "array"}
    return {names.get(kind_of(value), "object")}


def types_allowed(part: Mapping[str, Any]) -> set[str]:
    """The types that a schema's own "type" allows; all of them if it says nothing."""
    types = part.get("type", TYPES)
    allowed = {types} if isinstance(types, str) else set(types)
    return allowed | {"integer"} if "number" in allowed else allowed
