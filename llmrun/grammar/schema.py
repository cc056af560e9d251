"""The checks of a JSON schema: errors with line and column.

Must not know how a schema is enforced. Keywords that can't be enforced while an answer is written are refused by name,
never ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from llmrun.errors import did_you_mean
from llmrun.grammar import regex
from llmrun.grammar.jsontext import read_json
from llmrun.grammar.place import SCHEMA, broken, check_text
from llmrun.grammar.reach import check_circles, check_ends
from llmrun.grammar.schema_parts import Schema
from llmrun.grammar.values import IN_PLACE, TYPES, kind_of, types_allowed, types_of_value

MAX_COUNT = 1_000_000
_MAX_LEAST = 10_000  # characters, items or properties
_MAX_INTEGER = 2**63
_MAX_BOUND = 10**40  # more than a 32-bit float
_MAX_STEPS = 10_000

# Keywords that can't be enforced, and what to do instead.
_REFUSED = {
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "maxContains": "describe each item with prefixItems",
}

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def parse(text: str) -> Schema:
    """Parse a schema, and check that an answer can meet it.

    Raises:
        BadGrammarError: the schema is broken, can't be met, or can't be enforced.
    """
    check_text(SCHEMA, text)
    root, places = read_json(text)
    if root is True:
        root = {}
    if not isinstance(root, dict):
        start = len(text) - len(text.lstrip())
        why = "false allows nothing at all" if root is False else f"a schema is an object, not {kind_of(root)}"
        raise broken(SCHEMA, text, start, why, 'write: {"type": "object", ...}')
    schema = Schema(text, root, places)
    for part in schema.parts:
        _check(schema, part)
    check_circles(schema)
    check_ends(schema)
    return schema


def _check(schema: Schema, part: dict[str, Any]) -> None:
    for key, hint in _REFUSED.items():
        if key in part:
            schema.fail_key(part, key, f"{key!r} can't be enforced while an answer is written", hint)
    for key, check in _CHECKS.items():
        if key in part:
            check(schema, part, key)
    for low, high in (("minItems", "maxItems"), ("minLength", "maxLength"), ("minProperties", "maxProperties")):
        if part.get(low, 0) > part.get(high, MAX_COUNT):
            schema.fail(part, low, f"{low} {part[low]} is more than {high} {part[high]}, so nothing fits")
    _check_range(schema, part)
    _check_properties(schema, part)


def _check_type(schema: Schema, part: dict[str, Any], key: str) -> None:
    types = part[key] if isinstance(part[key], list) else [part[key]]
    container = part[key] if isinstance(part[key], list) else part
    for index, name in enumerate(types):
        if name not in TYPES:
            hint = did_you_mean(name, TYPES) if isinstance(name, str) else ""
            shown = repr(name) if isinstance(name, str) else kind_of(name)
            place = index if container is not part else key
            schema.fail(container, place, f"there is no type {shown}", hint or f"the types are {', '.join(TYPES)}")
    if not types:
        schema.fail(part, key, "an empty list of types allows nothing")


def _check_filled(schema: Schema, part: dict[str, Any], key: str) -> None:
    if not isinstance(part[key], list):
        schema.fail(part, key, f"{key} is a list, not {kind_of(part[key])}")
    if not part[key]:
        schema.fail(part, key, f"an empty {key} allows nothing")


def _check_enum(schema: Schema, part: dict[str, Any], key: str) -> None:
    _check_filled(schema, part, key)
    types = types_allowed(part)
    if not any(types_of_value(value) & types for value in part[key]):
        schema.fail(part, key, f"no value of enum is of type {part['type']!r}")
    for index, value in enumerate(part[key]):
        _check_numbers(schema, part[key], index, value)


def _check_const(schema: Schema, part: dict[str, Any], key: str) -> None:
    types = types_allowed(part)
    if not types_of_value(part[key]) & types:
        schema.fail(part, key, f"const is {kind_of(part[key])}, and the type {part['type']!r}")
    _check_numbers(schema, part, key, part[key])


def _check_numbers(schema: Schema, container: Any, key: str | int, value: Any) -> None:
    """Refuse integers with more digits than survive parsing, in values that answers must repeat."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _MAX_INTEGER:
        schema.fail(container, key, "this integer is too large", "write it as a string")
    if isinstance(value, dict | list):
        for inner in value if isinstance(value, dict) else range(len(value)):
            _check_numbers(schema, value, inner, value[inner])


def _check_count(schema: Schema, part: dict[str, Any], key: str) -> None:
    value = part[key]
    if isinstance(value, float) and value == int(value):
        part[key] = value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        shown = value if isinstance(value, int | float) else kind_of(value)
        schema.fail(part, key, f"{key} is a whole number from 0 on, not {shown}")
    if key.startswith("min") and value > _MAX_LEAST:
        schema.fail(part, key, f"{key} {value:,} is more than a model will write", f"the maximum is {_MAX_LEAST:,}")
    if value > MAX_COUNT:
        schema.fail(part, key, f"{key} {value:,} is more than {MAX_COUNT:,}", f"leave {key} out for no limit")


def _check_bound(schema: Schema, part: dict[str, Any], key: str) -> None:
    value = part[key]
    if isinstance(value, bool) and key.startswith("exclusive"):
        return  # a flag up to draft 4
    if not isinstance(value, int | float) or isinstance(value, bool):
        schema.fail(part, key, f"{key} is a number, not {kind_of(value)}")
    if key != "multipleOf":
        if abs(value) >= sys.float_info.max and (value > 0) == (key in ("maximum", "exclusiveMaximum")):
            del part[key]  # numbers beyond it are never written
        elif abs(value) > _MAX_BOUND:
            schema.fail(part, key, f"{key} is beyond {_MAX_BOUND:.0e}", f"leave {key} out for no limit")
        elif 0 < abs(value) < 1 / _MAX_BOUND:
            schema.fail(part, key, f"{key} has too many digits after its point", "write 0")
    elif value <= 0 or _steps(value) > _MAX_STEPS:
        schema.fail(part, key, f"multipleOf is over 0, and has at most {len(str(_MAX_STEPS)) - 1} digits")


def _steps(value: float) -> int:
    """Return the value without its decimal point: the number of remainders that a parser must tell apart."""
    from decimal import Decimal

    digits = Decimal(str(value)).normalize().as_tuple()
    exponent = digits.exponent if isinstance(digits.exponent, int) else 0
    number = int("".join(map(str, digits.digits)))
    return int(number * 10**exponent if exponent > 0 else max(number, 10**-exponent))


def _check_range(schema: Schema, part: dict[str, Any]) -> None:
    lows = [key for key in ("minimum", "exclusiveMinimum") if not isinstance(part.get(key, True), bool)]
    highs = [key for key in ("maximum", "exclusiveMaximum") if not isinstance(part.get(key, True), bool)]
    if types_allowed(part) - {"integer", "number"}:
        return  # other values fit
    for low in lows:
        for high in highs:
            open_end = part.get("exclusiveMinimum") is True or part.get("exclusiveMaximum") is True
            open_end = open_end or low == "exclusiveMinimum" or high == "exclusiveMaximum"
            if part[low] > part[high] or (open_end and part[low] == part[high]):
                schema.fail(part, low, f"{low} {part[low]} and {high} {part[high]} leave no number")


def _check_string(schema: Schema, part: dict[str, Any], key: str) -> None:
    if not isinstance(part[key], str):
        schema.fail(part, key, f"{key} is a string, not {kind_of(part[key])}")


def _check_pattern(schema: Schema, part: dict[str, Any], key: str) -> None:
    _check_string(schema, part, key)
    _check_regex(schema, part, key, part[key])


def _check_regex(schema: Schema, part: dict[str, Any], key: str, pattern: str) -> None:
    try:
        regex.parse(pattern)
    except regex.PatternError as error:
        schema.fail(part, key, str(error))


def _check_pattern_properties(schema: Schema, part: dict[str, Any], key: str) -> None:
    for pattern in part[key]:
        _check_regex(schema, part[key], pattern, pattern)


def _check_required(schema: Schema, part: dict[str, Any], key: str) -> None:
    if not isinstance(part[key], list):
        schema.fail(part, key, f"required is a list of names, not {kind_of(part[key])}")
    properties = part.get("properties", {})
    for index, name in enumerate(part[key]):
        if not isinstance(name, str):
            schema.fail(part[key], index, f"required is a list of names, not of {kind_of(name)}")
        if isinstance(properties, dict) and properties.get(name, True) is False:
            schema.fail(part[key], index, f"{name!r} is required, but its schema is false")


def _check_properties(schema: Schema, part: dict[str, Any]) -> None:
    required, properties = part.get("required", []), part.get("properties", {})
    if part.get("additionalProperties") is False and "patternProperties" not in part:
        for index, name in enumerate(required):
            if name not in properties:
                why = f"{name!r} is required, but it is not among the properties"
                schema.fail(required, index, why, did_you_mean(name, properties))
    if len(required) > part.get("maxProperties", MAX_COUNT):
        schema.fail(part, "maxProperties", f"{len(required)} properties are required")


def _check_dependencies(schema: Schema, part: dict[str, Any], key: str) -> None:
    if not isinstance(part[key], dict):
        schema.fail(part, key, f"{key} is an object of lists of names, not {kind_of(part[key])}")
    for name, value in part[key].items():
        if key == "dependentRequired" and not isinstance(value, list):
            schema.fail(part[key], name, f"{key} has lists of names, not {kind_of(value)}")
        if isinstance(value, list) and not all(isinstance(each, str) for each in value):
            schema.fail(part[key], name, f"{key} has lists of names, and one of them is none")


def _check_boolean(schema: Schema, part: dict[str, Any], key: str) -> None:
    if not isinstance(part[key], bool):
        schema.fail(part, key, f"{key} is true or false, not {kind_of(part[key])}")


_CHECKS: Mapping[str, Callable[[Schema, dict[str, Any], str], None]] = {
    "type": _check_type,
    "enum": _check_enum,
    "const": _check_const,
    "format": _check_string,
    "pattern": _check_pattern,
    "patternProperties": _check_pattern_properties,
    "dependentRequired": _check_dependencies,
    "dependencies": _check_dependencies,
    "uniqueItems": _check_boolean,
    "required": _check_required,
    **dict.fromkeys(IN_PLACE, _check_filled),
    **dict.fromkeys(_COUNTS, _check_count),
    **dict.fromkeys(_BOUNDS, _check_bound),
}
