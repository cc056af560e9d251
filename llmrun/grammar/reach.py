"""Two checks of schemas that refer to themselves: for circular definitions, and for values without end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmrun.grammar.schema_parts import Schema
from llmrun.grammar.values import IN_PLACE, types_allowed


def in_place(part: dict[str, Any]) -> list[tuple[Any, str | int]]:
    """Return the schemas about the same value as a part, each as a container and the key in it."""
    found: list[tuple[Any, str | int]] = [(part, "$ref")] if "$ref" in part else []
    return found + [(part[key], index) for key in IN_PLACE if key in part for index in range(len(part[key]))]


def follow(schema: Schema, container: Any, key: str | int) -> Any:
    """Return the schema at a place from in_place()."""
    return schema.target(container) if key == "$ref" else container[key]


def check_circles(schema: Schema) -> None:
    """Raise BadGrammarError if a $ref refers to itself without any other constraint."""
    done: set[int] = set()
    for start in schema.parts:
        path: dict[int, Iterator[tuple[Any, str | int]]] = {}
        following: Any = start
        while following is not None or path:
            if following is not None and id(following) not in done:
                path[id(following)] = iter([*in_place(following), *_conditions(following)])
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


def _conditions(part: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield further schemas about the same value, which it need not meet."""
    yield from ((part, key) for key in ("not", "if", "then", "else") if key in part)
    for key in ("dependentSchemas", "dependencies"):
        yield from ((part[key], name) for name, value in part.get(key, {}).items() if not isinstance(value, list))


def check_ends(schema: Schema) -> None:
    """Raise BadGrammarError if each value of a schema has to contain another value of the same schema, without end."""
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
            why = "a value of this schema never ends: it has to contain another one, which contains another one"
            schema.fail_part(part, why, "make the inner one optional, or allow null there")


def _needed(schema: Schema, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas inside that may decide whether a value of this one ends."""
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
    """Return the schemas of the required properties."""
    properties = part.get("properties", {})
    others = part.get("additionalProperties", True)
    return [properties.get(name, others) for name in part.get("required", [])]


def _items(part: dict[str, Any]) -> list[Any]:
    """Return the schemas of the required items."""
    minimum, items = part.get("minItems", 0), part.get("items", True)
    first = items if isinstance(items, list) else part.get("prefixItems", [])
    others = part.get("additionalItems", True) if isinstance(items, list) else items
    return [*first[:minimum], *([others] if minimum > len(first) else [])]
