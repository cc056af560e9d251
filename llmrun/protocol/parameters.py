"""Tool call parameters written one by one, strings literally and everything else as JSON; the tool's schema tells
which. Pure."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from llmrun.protocol.codec import load_json

_DEPTH = 8  # of references to references


def parameters_of(schema: Any) -> dict[str, Any]:
    """Return the schema of each parameter by name."""
    known = _resolved(schema, schema)
    properties = known.get("properties") if isinstance(known, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: _resolved(value, schema) for name, value in properties.items()}


_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


def types_of(schema: Any) -> frozenset[str]:
    """Return the types that a value may have by its schema; all without a type."""
    if not isinstance(schema, dict):
        return _TYPES if schema is not False else frozenset()
    if isinstance(schema.get("enum"), list):
        return frozenset(map(json_type, schema["enum"])) or _TYPES
    if "const" in schema:
        return frozenset({json_type(schema["const"])})
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            return frozenset().union(*map(types_of, schema[several]))
    named = schema.get("type")
    types = frozenset([named] if isinstance(named, str) else named if isinstance(named, list) else ()) & _TYPES
    return (types | {"integer"} if "number" in types else types) or _TYPES


def narrowed_to(schema: Any, types: frozenset[str]) -> Any:
    """Return the schema of those of its values that have one of these types."""
    if not isinstance(schema, dict):
        return {"type": sorted(types)}
    if isinstance(schema.get("enum"), list):
        return {**schema, "enum": [value for value in schema["enum"] if json_type(value) in types]}
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            left = [narrowed_to(each, types) for each in schema[several] if types_of(each) & types]
            return {**schema, several: left}
    return schema if "const" in schema else {**schema, "type": sorted(types & types_of(schema))}


def json_type(value: Any) -> str:
    """Return JSON Schema's name of a value's type."""
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return types.get(type(value), "null")


def as_json(written: str, schema: Any) -> str:
    """Return a parameter as JSON; if it may be a string or something else, a value that parses as the latter wins."""
    is_only_text = isinstance(schema, dict) and schema.get("type") == "string"
    try:
        if not is_only_text and not isinstance(load_json(written), str):
            return written
    except ValueError:
        if "string" not in types_of(schema):
            return json_of_python(written.strip())
    return json.dumps(written, ensure_ascii=False)


def json_of_python(text: str) -> str:
    """Return a literal of Python, or one with JSON's names, as JSON; a text that is neither is a string."""
    try:
        return json.dumps(load_json(text), ensure_ascii=False)
    except ValueError:
        pass
    names = {"true": "True", "false": "False", "null": "None"}
    outside = re.sub(
        r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\b(true|false|null)\b",
        lambda match: names.get(match[0], match[0]),
        text,
        flags=re.DOTALL,
    )
    try:
        return json.dumps(ast.literal_eval(outside), ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Return the schema that a schema refers to among the root's definitions, else the schema itself."""
    for _ in range(_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        if target is None:
            return schema
        schema = target
    return schema
