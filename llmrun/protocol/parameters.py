"""Parameters of calls that are written one by one, texts as they are and everything else as JSON.

Owns which are which by a tool's schema; must not know in what they are enclosed. Pure.
"""

from __future__ import annotations

import json
from typing import Any

from llmrun.protocol.codec import load_json

_DEPTH = 8  # of references to references


def parameters_of(schema: Any) -> dict[str, Any]:
    """Name -> schema of each parameter that a tool's schema names."""
    known = _resolved(schema, schema)
    properties = known.get("properties") if isinstance(known, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: _resolved(value, schema) for name, value in properties.items()}


def may_be_text(schema: Any) -> bool:
    """Whether a parameter may be a text, as one is that nothing is said of."""
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
    """A parameter as JSON. What may be a text or something else is the latter where it reads like it."""
    is_only_text = isinstance(schema, dict) and schema.get("type") == "string"
    try:
        if not is_only_text and not isinstance(load_json(written), str):
            return written
    except ValueError:
        pass
    return json.dumps(written, ensure_ascii=False)


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """A schema itself where it refers to one of the root's definitions."""
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
