"""Tool call parameters written one by one, strings literally and everything else as JSON; the tool's schema tells
which. Pure."""

from __future__ import annotations

import json
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


def may_be_text(schema: Any) -> bool:
    """Return whether a parameter may be a string, as it may without a type."""
    if not isinstance(schema, dict):
        return schema is not False
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    if "const" in schema:
        return isinstance(schema["const"], str)
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            return any(map(may_be_text, schema[several]))
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def as_json(written: str, schema: Any) -> str:
    """Return a parameter as JSON; if it may be a string or something else, a value that parses as the latter wins."""
    is_only_text = isinstance(schema, dict) and schema.get("type") == "string"
    try:
        if not is_only_text and not isinstance(load_json(written), str):
            return written
    except ValueError:
        pass
    return json.dumps(written, ensure_ascii=False)


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
