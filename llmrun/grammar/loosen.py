"""The enforceable part of a JSON schema: what can't be enforced is left out, as little as possible, and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from llmrun.errors import BadGrammarError
from llmrun.grammar.json_lark import Rules, rules_of
from llmrun.grammar.jsontext import read_json
from llmrun.grammar.schema import LISTS, NAMED, SINGLE, places_inside

_MAX_LOOSENED = 100  # parts of one schema
# Keywords that are worth leaving out one by one if a grammar can't be compiled, though nothing is wrong with them.
_COSTLY = (
    "pattern", "patternProperties", "multipleOf", "format", "maxLength", "minLength", "maxItems", "minItems", "enum",
)  # fmt: skip

_COMPANIONS = {
    "if": ("then", "else"),
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "prefixItems": ("items", "unevaluatedItems"),
    "items": ("additionalItems", "unevaluatedItems"),
    "minContains": ("contains",),
}

Path = tuple[str | int, ...]


class EnforceableSchema(NamedTuple):
    """The rules of a schema's enforceable part, and the paths of what was left out; () is the whole schema."""

    rules: Rules
    left_out: tuple[Path, ...]


@lru_cache(maxsize=256)
def enforceable(text: str, check: Callable[[Rules], None]) -> EnforceableSchema:
    """Return the enforceable part of a JSON object that should be a schema.

    Cached, because agents send the same tools with every request.

    Args:
        check: raises BadGrammarError for rules that can't be compiled.
    """
    left_out: list[Path] = []
    try:
        schema, _ = read_json(text)
    except BadGrammarError:  # nested too deep
        schema = {}
        left_out.append(())
    while len(left_out) < _MAX_LOOSENED:
        try:
            rules = rules_of(json.dumps(schema))
        except BadGrammarError as error:
            if not error.path:
                break
            left_out.append(_loosen(schema, error.path))
            continue
        try:
            check(rules)
        except BadGrammarError:
            costly = _costly(schema)
            if costly is None:
                break
            left_out.append(_loosen(schema, costly))
            continue
        return EnforceableSchema(rules, tuple(dict.fromkeys([*left_out, *rules.repeating])))
    type_alone = {"type": schema["type"]} if schema.get("type") in ("object", "array", "string") else {}
    return EnforceableSchema(rules_of(json.dumps(type_alone)), ((),))


def _loosen(part: dict[str, Any], path: Path) -> Path:
    """Leave out the keyword that a path leads to, or the schema, so that no value is excluded that was allowed.

    Returns:
        The path of what is left out.
    """
    key, value = path[0], part.get(str(path[0]))
    if key in (*NAMED, *LISTS) or isinstance(value, list):
        if len(path) == 1 or key not in (*NAMED, *LISTS, "items") or not isinstance(value, dict | list):
            return _leave_out(part, key)
        if key == "oneOf":  # exact for the other schemas only if none of them grows
            del part["oneOf"]
            part["allOf"] = [*part.get("allOf", []), {"anyOf": value}]
        inner = value[path[1]]  # type: ignore[index]  # the path is of this value
        if len(path) > 2 and isinstance(inner, dict):
            return (*path[:2], *_loosen(inner, path[2:]))
        if key == "patternProperties":
            return _leave_out(part, key)
        if key != "oneOf" or len(path) > 2:
            value[path[1]] = True  # type: ignore[index]
        return path[:2]
    if len(path) > 1 and isinstance(value, dict) and key in SINGLE and key not in ("not", "if"):
        return (key, *_loosen(value, path[1:]))
    return _leave_out(part, key)


def _leave_out(part: dict[str, Any], key: str | int) -> Path:
    """Remove a keyword, and those that mean something else without it."""
    for keyword in (str(key), *_COMPANIONS.get(str(key), ())):
        part.pop(keyword, None)
    return (key,)


def _costly(schema: dict[str, Any]) -> Path | None:
    """Return the path of the first keyword that may be what can't be compiled."""
    paths: dict[str, Path] = {}
    waiting: list[tuple[dict[str, Any], Path]] = [(schema, ())]
    while waiting:
        part, path = waiting.pop()
        for key in part:
            paths.setdefault(key, (*path, key))
        for container, step in places_inside(part):
            if container is not None and isinstance(container[step], dict):
                keyword = next(key for key, value in part.items() if value is container or value is container[step])
                waiting.append((container[step], (*path, *dict.fromkeys((keyword, step)))))
    return next((paths[key] for key in _COSTLY if key in paths), None)
