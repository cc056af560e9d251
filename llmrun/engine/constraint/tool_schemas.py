"""The rules of tools' schemas. What can't be enforced in one of them is left out and named; the rest is enforced."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from llmrun.engine.constraint.matcher import check_rules
from llmrun.grammar.json_lark import Rules
from llmrun.grammar.loosen import EnforceableSchema, enforceable
from llmrun.grammar.place import dotted
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Tool

_ANY_OBJECT = {"type": "object"}
_MAX_NAMED = 50  # parts that were left out


def arguments_schema(parameters: str) -> EnforceableSchema:
    """Return the enforceable part of a tool's schema; arguments are always an object."""
    try:
        schema = load_json(parameters)
    except ValueError:  # nested too deep, since the template has read it
        return EnforceableSchema(value_rules(_ANY_OBJECT), ((),))
    if not isinstance(schema, dict):
        return EnforceableSchema(value_rules(_ANY_OBJECT), ((),) if schema is not True else ())
    if schema.get("type", "object") == "object":
        return enforceable(json.dumps({**schema, "type": "object"}), check_rules)
    rules, left_out = enforceable(json.dumps({**schema, "type": "object"}), check_rules)
    return EnforceableSchema(rules, (("type",), *left_out))


def value_rules(schema: dict[str, Any]) -> Rules:
    """Return the rules of the enforceable part of a schema."""
    return enforceable(json.dumps(schema), check_rules).rules


def left_out(tools: Iterable[Tool]) -> tuple[str, ...]:
    """Return what of tools' schemas is not enforced, e.g. "tools.get_weather.parameters.properties.city.pattern"."""
    parts = [
        ".".join(filter(None, ("tools", tool.name, "parameters", dotted(path))))
        for tool in tools
        for path in arguments_schema(tool.parameters).left_out
    ]
    return tuple(parts[:_MAX_NAMED])
