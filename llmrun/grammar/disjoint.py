"""The proof that the schemas of a oneOf exclude each other.

An answer can't be held to several schemas at once while it is written, so oneOf is enforced as anyOf, which is the same
if its schemas exclude each other. A oneOf without that proof is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from llmrun.grammar.reach import follow, in_place
from llmrun.grammar.schema_parts import Schema
from llmrun.grammar.values import TYPES, types_allowed, types_of_value

_MAX_STEPS = 50_000
_HINT = "write anyOf, or give each object a required property with a const of its own"


@dataclass(slots=True)
class _Facts:
    """Facts that certainly hold for all values of a schema."""

    types: set[str] = field(default_factory=lambda: set(TYPES))  # the possible ones
    values: set[str] | None = None  # the possible ones as JSON; None if they are not listed
    required: set[str] = field(default_factory=set)  # properties that an object has
    properties: dict[str, list[Any]] = field(default_factory=dict)  # name -> schemas that the property meets
    only: set[str] | None = None  # the possible properties; None if there may be others


def check_one_of(schema: Schema) -> None:
    """Raise BadGrammarError if two schemas of a oneOf may overlap."""
    prover = _Prover(schema)
    for part in schema.parts:
        options = part.get("oneOf", [])
        around = {key: value for key, value in part.items() if key != "oneOf"}
        facts = [prover.facts([option, around]) for option in options]
        if _all_listed_apart(facts):
            continue
        for index, one in enumerate(facts):
            for other in range(index):
                if not prover.exclude(one, facts[other]):
                    why = f"schemas {other + 1} and {index + 1} of oneOf may both be met, which can't be prevented"
                    schema.fail(options, index, why, _HINT)


def _all_listed_apart(facts: list[_Facts]) -> bool:
    listed = [value for fact in facts for value in fact.values or ()]
    return all(fact.values is not None for fact in facts) and len(set(listed)) == len(listed)


class _Prover:
    """The proofs for one schema, within a limit of steps."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._steps_left = _MAX_STEPS

    def facts(self, parts: list[Any]) -> _Facts:
        """Return the facts about values that meet all these schemas."""
        facts = _Facts()
        waiting = list(parts)
        seen: set[int] = set()
        while waiting and self._steps_left > 0:
            part = waiting.pop()
            if part is False:
                facts.types = set()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            self._steps_left -= 1 + len(part.get("properties", ()))
            _learn(facts, part)
            certain = [step for step in in_place(part) if step[1] == "$ref" or step[0] is part.get("allOf")]
            waiting += [follow(self._schema, *step) for step in certain]
        return facts

    def exclude(self, one: _Facts, other: _Facts) -> bool:
        """Return whether no value can have both facts; False if that is uncertain."""
        self._steps_left -= 1
        common = one.types & other.types
        if not common:
            return True
        if one.values is not None and other.values is not None:
            return not one.values & other.values
        if common != {"object"} or self._steps_left < 0:
            return False
        if _lacks(one, other) or _lacks(other, one):
            return True
        names = one.required & other.required & one.properties.keys() & other.properties.keys()
        return any(
            self.exclude(self.facts(one.properties[name]), self.facts(other.properties[name])) for name in sorted(names)
        )


def _learn(facts: _Facts, part: dict[str, Any]) -> None:
    """Add the facts of a schema without its inner ones."""
    facts.types &= types_allowed(part)
    for listed in [part[key] if key == "enum" else [part[key]] for key in ("enum", "const") if key in part]:
        values = {json.dumps(_plain(value), sort_keys=True) for value in listed}  # the same text for equal values
        facts.values = values if facts.values is None else facts.values & values
        facts.types &= set().union(*map(types_of_value, listed))
    facts.required.update(part.get("required", []))
    for name, property_schema in part.get("properties", {}).items():
        facts.properties.setdefault(name, []).append(property_schema)
    if part.get("additionalProperties") is False and not part.get("patternProperties"):
        names = set(part.get("properties", {}))
        facts.only = names if facts.only is None else facts.only & names


def _lacks(one: _Facts, other: _Facts) -> bool:
    """Return whether an object of one can't have a property that the other requires."""
    return one.only is not None and bool(other.required - one.only)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
