"""The narrowed form of a schema that answers are held to: it allows no more than the schema, and less.

A model fills without end what a schema leaves open. So an object gets only the listed properties, and a list no items
after its prefix, wherever that can't contradict another part of the schema.
"""

from __future__ import annotations

import json
from typing import Any

from llmrun.grammar.reach import follow, in_place
from llmrun.grammar.schema import FORMATS
from llmrun.grammar.schema_parts import Schema
from llmrun.grammar.values import IN_PLACE

# Keywords about the structure of a value; two schemas about one value that both have some could contradict each other.
_STRUCTURE = frozenset({
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    "items", "prefixItems", "additionalItems", "minItems", "maxItems", "const", "enum",
})  # fmt: skip
_DROPPED = frozenset({"$schema", "$id", "uniqueItems", "$recursiveAnchor"})


def narrowed(schema: Schema) -> str:
    """Return the text of the narrowed schema."""
    return json.dumps(_Narrowing(schema).value(schema.root), ensure_ascii=False)


class _Narrowing:
    def __init__(self, schema: Schema) -> None:
        self._schemas = {id(part) for part in schema.parts}
        self._shared = _shared(schema)

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if not isinstance(value, dict):
            return value
        if id(value) not in self._schemas:
            return {key: self.value(item) for key, item in value.items()}
        part = {key: self.value(item) for key, item in value.items() if key not in _DROPPED}
        if part.get("format", FORMATS[0]) not in FORMATS:
            del part["format"]
        if "oneOf" in part:
            part["allOf"] = [*part.get("allOf", []), {"anyOf": part.pop("oneOf")}]
            if len(part["allOf"]) == 1 and "anyOf" not in part:
                part["anyOf"] = part.pop("allOf")[0]["anyOf"]
        if id(value) not in self._shared:
            _close(part)
        return part


def _close(part: dict[str, Any]) -> None:
    """Allow only the properties and items that are listed."""
    properties = part.get("properties")
    open_object = properties and not {"additionalProperties", "patternProperties"} & part.keys()
    if open_object and set(part.get("required", [])) <= set(properties or ()):
        part["additionalProperties"] = False
    if "prefixItems" in part and "items" not in part and part.get("minItems", 0) <= len(part["prefixItems"]):
        part["items"] = False
    items = part.get("items")
    if isinstance(items, list) and "additionalItems" not in part and part.get("minItems", 0) <= len(items):
        part["additionalItems"] = False


def _shared(schema: Schema) -> set[int]:
    """Return the ids of the parts that share their value with another part."""
    shared: set[int] = set()
    waiting: list[Any] = []
    for part in schema.parts:
        steps = in_place(part)
        groups = [key for key in ("$ref", *IN_PLACE) if key in part]
        alone = len(groups) == 1 and not _STRUCTURE & part.keys() and len(part.get("allOf", [0])) == 1
        if steps and not alone:
            waiting += [part, *(follow(schema, *step) for step in steps)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) not in shared:
            shared.add(id(part))
            waiting += [follow(schema, *step) for step in in_place(part)]
    return shared
