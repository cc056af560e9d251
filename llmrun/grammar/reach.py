"""Schemas that refer to themselves: whether a value can ever be whole.

Owns the two questions only: whether a schema is defined by nothing but itself, and whether its values come to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmrun.grammar.schema_tree import Schema
from llmrun.grammar.values import IN_PLACE, types_allowed


def in_place(part: dict[str, Any]) -> list[tuple[Any, str | int]]:
    """Schemas about the same value as a part, each as a container and the key in it."""
    found: list[tuple[Any, str | int]] = [(part, "$ref")] if "$ref" in part else []
    return found + [(part[key], index) for key in IN_PLACE if key in part for index in range(len(part[key]))]


def follow(schema: Schema, container: Any, key: str | int) -> Any:
    """The schema that is meant at a place that in_place() gave."""
    return schema.target(container) if key == "$ref" else container[key]


def check_circles(schema: Schema) -> None:
    """Refuse a schema that is said to be what it is itself.

    Raises:
        BadGrammarError: there is one.
    """
    done: set[int] = set()
    for start in schema.parts:
        path: dict[int, Iterator[tuple[Any, str | int]]] = {}
        following: Any = start
        while following is not None or path:
            if following is not None and id(following) not in done:
                path[id(following)] = iter(in_place(following))
            following = None
            if not path:
                break
            current = next(reversed(path))
            step = next(path[current], None)
            if step is None:
                done.add(current)
                del path[current]
                continue
            child = follow(schema, *step)
            if id(child) in path:
                why = "this schema is only defined by itself, over and over"
                schema.fail(*step, why, "let it be inside a property or an item")
            following = child if isinstance(child, dict) else None


def check_ends(schema: Schema) -> None:
    """Refuse a schema whose values would have to hold another value of the same schema, without end.

    Raises:
        BadGrammarError: there is one.
    """
    users: dict[int, list[dict[str, Any]]] = {}
    for part in schema.parts:
        for child in _needed(schema, part):
            users.setdefault(id(child), []).append(part)
    ending: set[int] = set()
    waiting = list(schema.parts)
    while waiting:
        part = waiting.pop()
        if id(part) not in ending and _ends(schema, part, ending):
            ending.add(id(part))
            waiting += users.get(id(part), [])
    for part in schema.parts:
        if id(part) not in ending:
            why = "a value of this schema never ends, because it has to hold another one, and that another one"
            schema.fail_part(part, why, "make the inner one optional, or allow null there")


def _needed(schema: Schema, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Schemas that it may depend on whether a value of this one ends."""
    inner = [follow(schema, *step) for step in in_place(part)] + _required(part) + _items(part)
    yield from (child for child in inner if isinstance(child, dict))


def _ends(schema: Schema, part: dict[str, Any], ending: set[int]) -> bool:
    def end(children: list[Any]) -> list[bool]:
        return [not isinstance(child, dict) or id(child) in ending for child in children]

    if "const" in part or "enum" in part:
        return True
    for key in ("anyOf", "oneOf"):
        if key in part and not any(end(part[key])):
            return False
    if not all(end([*part.get("allOf", []), schema.target(part)])):
        return False
    types = types_allowed(part)
    if types - {"object", "array"}:
        return True
    return ("object" in types and all(end(_required(part)))) or ("array" in types and all(end(_items(part))))


def _required(part: dict[str, Any]) -> list[Any]:
    """Schemas of the properties that an object has to have."""
    properties = part.get("properties", {})
    others = part.get("additionalProperties", True)
    return [properties.get(name, others) for name in part.get("required", [])]


def _items(part: dict[str, Any]) -> list[Any]:
    """Schemas of the items that a list has to have."""
    least, items = part.get("minItems", 0), part.get("items", True)
    first = items if isinstance(items, list) else part.get("prefixItems", [])
    others = part.get("additionalItems", True) if isinstance(items, list) else items
    return [*first[:least], *([others] if least > len(first) else [])]
