"""A JSON schema as parts, and its checks: errors with line and column.

The parts are the schema itself, those inside it, and the targets of its $refs. Keywords that can't be enforced while an
answer is written are refused by name, never ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from llmrun.errors import did_you_mean
from llmrun.grammar import regex
from llmrun.grammar.jsontext import Places, read_json
from llmrun.grammar.place import SCHEMA, broken, check_text

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas are about the same value as the schema around them."""
# Keywords whose value is one schema, a list of them, or an object of them.
SINGLE = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

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


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value in words, e.g. "a string"."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "a string"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"


def types_of_value(value: Any) -> set[str]:
    """Return the types of a value; a whole number has two."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"number", "integer"} if value == int(value) else {"number"}
    names = {"null": "null", "true": "boolean", "false": "boolean", "a string": "string", "a list": "array"}
    return {names.get(kind_of(value), "object")}


def types_allowed(part: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema's own "type" allows; all without one."""
    types = part.get("type", TYPES)
    allowed = {types} if isinstance(types, str) else set(types)
    return allowed | {"integer"} if "number" in allowed else allowed


class Schema:
    """A schema and the schemas inside it.

    Args:
        is_strict: what no value can meet is refused wherever it is, and so is oneOf whose schemas may both be met.

    Attributes:
        ignored: the paths of what answers will not have, or will not be held to, in a schema that is not strict.
    """

    def __init__(self, text: str, root: dict[str, Any], places: Places, *, is_strict: bool) -> None:
        """Find all parts.

        Raises:
            BadGrammarError: a part is not a schema, or a $ref leads nowhere.
        """
        self.text = text
        self.root = root
        self.is_strict = is_strict
        self.ignored: list[tuple[str | int, ...]] = []
        # The root, and every schema inside it or at the end of a $ref, without true and false.
        self.parts: list[dict[str, Any]] = []
        self._places = places
        self._where: dict[int, tuple[Any, str | int]] = {}
        self._bases: dict[int, str] = {}
        self._named: dict[str, tuple[Any, str | int]] = {}  # URI of an $id or $anchor -> the schema
        self._find_names()
        waiting = [root]
        seen = {id(root)}
        while waiting:
            part = waiting.pop()
            self.parts.append(part)
            for container, key in [*self._inside(part), *self._pointed_to(part)]:
                child = container[key]
                if isinstance(child, dict) and id(child) not in seen:
                    seen.add(id(child))
                    self._where[id(child)] = container, key
                    waiting.append(child)

    def target(self, part: dict[str, Any]) -> Any:
        """Return the target of a part's $ref; None if it has none."""
        return next((container[key] for container, key in self._pointed_to(part)), None)

    def path(self, container: Any, key: str | int | None = None) -> tuple[str | int, ...]:
        """Return the keys and indices from the root to a container, or to the value under a key of it."""
        return self._places.path(container, key)

    def fail(self, container: Any, key: str | int, why: str, hint: str = "") -> NoReturn:
        """Raise the error for the value under a key."""
        path = self._places.path(container, key)
        raise broken(SCHEMA, self.text, self._places.of_value(container, key), why, hint, path)

    def fail_key(self, container: Any, key: str, why: str, hint: str = "") -> NoReturn:
        """Raise the error for a key."""
        path = self._places.path(container, key)
        raise broken(SCHEMA, self.text, self._places.of_key(container, key), why, hint, path)

    def fail_part(self, part: dict[str, Any], why: str, hint: str = "") -> NoReturn:
        """Raise the error for a whole part."""
        if id(part) in self._where:
            self.fail(*self._where[id(part)], why, hint)
        raise broken(SCHEMA, self.text, len(self.text) - len(self.text.lstrip()), why, hint)

    def _inside(self, part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        for container, key in places_inside(part):
            if container is None:
                container_name = "an object" if key in NAMED else "a list"
                self.fail(part, key, f"{key} is {container_name} of schemas, not {kind_of(part[key])}")
            if not isinstance(container[key], dict | bool):
                self.fail(container, key, f"a schema is an object, true or false, not {kind_of(container[key])}")
            yield container, key

    def _pointed_to(self, part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the target of a part's $ref, if it has one, as a container and the key in it."""
        if "$ref" not in part:
            return
        reference = part["$ref"]
        if not isinstance(reference, str):
            self.fail(part, "$ref", f"$ref is a string, not {kind_of(reference)}")
        document, fragment = urldefrag(_joined(self._bases.get(id(part), ""), reference))
        if document not in self._named:
            hint = "copy it into $defs, and point there with #/$defs/name"
            self.fail(part, "$ref", f"{reference!r} is outside of this schema, and nothing is fetched", hint)
        container, key = self._named[document]
        if fragment and not fragment.startswith("/"):
            if f"{document}#{fragment}" not in self._named:
                self._points_to_nothing(part)
            container, key = self._named[f"{document}#{fragment}"]
            fragment = ""
        for step in unquote(fragment).split("/")[1:]:
            container, key = container[key], step.replace("~1", "/").replace("~0", "~")
            if isinstance(container, list) and key.isdecimal() and int(key) < len(container):
                key = int(key)
            elif not isinstance(container, dict) or key not in container:
                self._points_to_nothing(part)
        if not isinstance(container[key], dict | bool):
            self.fail(part, "$ref", f"{reference!r} points to {kind_of(container[key])}, not to a schema")
        yield container, key

    def _find_names(self) -> None:
        """Find the URI of each schema, and those that have a name of their own ($id, $anchor)."""
        waiting: list[tuple[Any, Any, str]] = [({"": self.root}, "", "")]
        self._named[""] = waiting[0][:2]
        while waiting:
            container, key, base = waiting.pop()
            part = container[key]
            if not isinstance(part, dict):
                continue
            if isinstance(part.get("$id"), str):
                uri = _joined(base, part["$id"])
                self._named.setdefault(uri.removesuffix("#"), (container, key))
                base = urldefrag(uri).url
            if isinstance(part.get("$anchor"), str):
                self._named.setdefault(f"{base}#{part['$anchor']}", (container, key))
            self._bases[id(part)] = base
            waiting += [(*place, base) for place in places_inside(part) if place[0] is not None]

    def _points_to_nothing(self, part: dict[str, Any]) -> NoReturn:
        groups = [(group, self.root.get(group)) for group in ("$defs", "definitions")]
        names = [f"#/{group}/{name}" for group, names in groups if isinstance(names, dict) for name in names]
        self.fail(part, "$ref", f"{part['$ref']!r} points to nothing", did_you_mean(part["$ref"], names))


def _joined(base: str, reference: str) -> str:
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def places_inside(part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the schemas inside a schema as a container and the key in it; (None, key) for a keyword without any."""
    for key, value in part.items():
        if key in SINGLE and not (key == "items" and isinstance(value, list)):
            yield part, key
        elif key in LISTS or key == "items":
            yield from ((value, index) for index in range(len(value))) if isinstance(value, list) else [(None, key)]
        elif key == "dependencies" and isinstance(value, dict):  # up to draft 7: names or a schema
            yield from ((value, name) for name in value if not isinstance(value[name], list))
        elif key in NAMED:
            yield from ((value, name) for name in value) if isinstance(value, dict) else [(None, key)]


def parse(text: str, *, is_strict: bool = True) -> Schema:
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
    schema = Schema(text, root, places, is_strict=is_strict)
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
        if part is schema.root or schema.is_strict:
            schema.fail(part, key, f"no value of enum is of type {part['type']!r}")
        schema.ignored.append(schema.path(part))
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
        if isinstance(value, list) and not all(isinstance(required, str) for required in value):
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


def in_place(part: dict[str, Any]) -> list[tuple[Any, str | int]]:
    """Return the schemas about the same value as a part, each as a container and the key in it."""
    places: list[tuple[Any, str | int]] = [(part, "$ref")] if "$ref" in part else []
    return places + [(part[key], index) for key in IN_PLACE if key in part for index in range(len(part[key]))]


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
