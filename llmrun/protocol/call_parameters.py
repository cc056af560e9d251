"""Tool call parameters written one by one, strings literally and everything else as JSON; the tool's schema tells
which. Pure."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from llmrun.protocol.codec import load_json

_DEPTH = 8  # of references to references
_CHOICES = ("anyOf", "oneOf")


def parameters_of(schema: Any) -> dict[str, Any]:
    """Return the schema of each parameter by name."""
    known = resolved(schema, schema)
    properties = known.get("properties") if isinstance(known, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: resolved(value, schema) for name, value in properties.items()}


TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


def types_of(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the types that a value may have by its schema; all without a type.

    Args:
        root: the schema whose definitions this one may refer to.
    """
    return _types(schema, root, set())


def _types(schema: Any, root: Any, seen: set[int]) -> frozenset[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return TYPES if schema is not False else frozenset()
    if id(schema) in seen:  # it refers to itself
        return frozenset()
    seen.add(id(schema))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(json_type, schema["enum"])) or TYPES
    if "const" in schema:
        return frozenset({json_type(schema["const"])})
    for several in _CHOICES:
        if isinstance(schema.get(several), list):
            return frozenset().union(*(_types(each, root, seen) for each in schema[several]))
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    types = frozenset(name for name in names if isinstance(name, str)) & TYPES
    return (types | {"integer"} if "number" in types else types) or TYPES


def alternatives(schema: Any, root: Any) -> list[Any]:
    """Return the schemas of which a value has to meet one."""
    schema = resolved(schema, root)
    if isinstance(schema, dict) and not {"properties", "items"} & schema.keys():
        for several in _CHOICES:
            if isinstance(schema.get(several), list):
                return [resolved(each, root) for each in schema[several]]
    return [schema]


def member_of(schema: Any, name: str | None, root: Any) -> Any:
    """Return the schema of an object's property, or of a list's items if it has no name; True if there is none."""
    for each in alternatives(schema, root):
        if isinstance(each, dict):
            properties = each.get("properties")
            found = each.get("items" if name is None else "additionalProperties")
            if name is not None and isinstance(properties, dict):
                found = properties.get(name, found)
            if isinstance(found, dict):
                return resolved(found, root)
    return True


def narrowed_to(schema: Any, types: frozenset[str]) -> Any:
    """Return the schema of those of its values that have one of these types."""
    if not isinstance(schema, dict):
        return {"type": sorted(types)}
    if isinstance(schema.get("enum"), list):
        return {**schema, "enum": [value for value in schema["enum"] if json_type(value) in types]}
    for several in _CHOICES:
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
        lambda match: names.get(match[0], match[0].replace("\n", "\\n")),
        text,
        flags=re.DOTALL,
    )
    try:
        return json.dumps(ast.literal_eval(outside), ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def resolved(schema: Any, root: Any) -> Any:
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
