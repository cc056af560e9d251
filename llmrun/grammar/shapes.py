"""The normal form of JSON schemas: alternatives, each with one constraint per type.

Keywords that combine schemas (allOf, anyOf, oneOf, not, if, dependentRequired, unevaluatedProperties ...) become
intersections, unions and complements of these. Schemas of properties and items stay as they are until they are asked
for, so recursive schemas have a finite form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import ceil, floor, lcm
from typing import Any, NamedTuple

from llmrun.grammar.regex import FORMATS, parse
from llmrun.grammar.schema import Schema, types_allowed, types_of_value

_MAX_ALTERNATIVES = 256
_COMBINING = frozenset((
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "unevaluatedItems",
))  # fmt: skip
_ONE_OF_HINT = "write anyOf, or give each object a required property with a const of its own"


class Term(NamedTuple):
    """A schema that a value has to meet, or must not meet."""

    schema: Any
    holds: bool = True


Terms = tuple[Term, ...]
"""A value has to meet all of them; none means that any value is allowed."""
NOTHING: Terms = (Term(False),)


@dataclass(frozen=True, slots=True)
class Number:
    """A range of numbers; a bound of None is no limit."""

    low: Fraction | None = None
    high: Fraction | None = None
    is_low_open: bool = False
    is_high_open: bool = False
    is_integer: bool = False
    multiple: Fraction | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A string."""

    minimum: int = 0
    maximum: int | None = None
    patterns: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()  # patterns
    formats: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Array:
    """A list."""

    prefix: tuple[Terms, ...] = ()
    items: Terms | None = None  # after the prefix; None if no schema is about them
    minimum: int = 0
    maximum: int | None = None
    contains: tuple[tuple[Terms, int], ...] = ()  # and how many of them at least
    is_unique: bool = False
    is_negated: bool = False  # some of this comes from the complement of a schema
    sources: tuple[dict[str, Any], ...] = field(default=(), compare=False)

    def terms_at(self, index: int) -> Terms:
        """Return what an item has to meet."""
        return self.prefix[index] if index < len(self.prefix) else self.items or ()


class Group(NamedTuple):
    """The schemas of one part for properties without a name of their own."""

    patterns: tuple[tuple[str, Terms], ...]
    others: Terms | None  # where no pattern matches; None if no schema is about them


@dataclass(frozen=True, slots=True)
class Object:
    """An object."""

    properties: Mapping[str, Terms] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    required: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int | None = None
    names: Terms = ()
    negated: frozenset[str] = frozenset()  # properties that are only known from the complement of a schema
    sources: tuple[dict[str, Any], ...] = field(default=(), compare=False)

    def terms_of(self, name: str) -> Terms:
        """Return what the value of a property has to meet."""
        if name in self.properties:
            return self.properties[name]
        joined: Terms = ()
        for group in self.groups:
            matching = [terms for pattern, terms in group.patterns if parse(pattern).matches(name)]
            for terms in matching or [group.others or ()]:
                joined = join(joined, terms)
        return joined


@dataclass(frozen=True)
class Listed:
    """One of these values, all of one type."""

    values: tuple[Any, ...]

    @cached_property
    def texts(self) -> frozenset[str]:
        return frozenset(map(canonical, self.values))


Shape = Number | Text | Array | Object | Listed
Box = Mapping[str, Shape]
"""The constraint of each type that is allowed. Integers are numbers."""

_FULL: Box = {
    "null": Listed((None,)),
    "boolean": Listed((True, False)),
    "number": Number(),
    "string": Text(),
    "array": Array(),
    "object": Object(),
}


class _NoComplementError(Exception):
    """The complement of a schema has no normal form; says because of what."""


class _TooManyError(Exception):
    """There are too many alternatives."""


class Shapes:
    """The normal forms of a schema and of the schemas in it.

    A oneOf whose schemas may both be met is anyOf where that can't be prevented, or refused if the schema is strict.

    Raises:
        BadGrammarError: a method met a schema without a normal form.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._boxes: dict[int, list[Box]] = {}
        self._owns: dict[int, Box] = {}
        self._of_terms: dict[object, list[Box]] = {}
        self._possible: dict[object, bool] = {}

    def alternatives(self, terms: Terms) -> list[Box]:
        """Return the normal form of values that meet some schemas."""
        key = key_of(terms)
        if key not in self._of_terms:
            try:
                self._of_terms[key] = self._all_of(terms)
            except _TooManyError:
                self._schema.fail_part(
                    self._schema.root, "its anyOf, oneOf and if have too many combinations", "write fewer of them"
                )
        return self._of_terms[key]

    def _all_of(self, terms: Terms) -> list[Box]:
        boxes: list[Box] = [_FULL]
        if len(terms) > 1:  # listed values can be filtered by any schema, even by one whose opposite has no normal form
            terms = tuple(sorted(terms, key=lambda term: not (term.holds and _is_listed(term.schema))))
        for term in terms:
            if _are_listed(boxes):
                boxes = self._filtered(boxes, term)
            else:
                boxes = self._meet(boxes, self._of(term.schema) if term.holds else self._others(term.schema))
        return boxes

    def is_possible(self, terms: Terms) -> bool:
        """Return whether there may be a value; a False is certain."""
        key = key_of(terms)
        if key not in self._possible:
            self._possible[key] = True  # a value inside itself
            self._possible[key] = any(
                self.has_value(shape) for box in self.alternatives(terms) for shape in box.values()
            )
        return self._possible[key]

    def admits(self, terms: Terms, value: Any) -> bool:
        """Return whether a value meets some schemas."""
        return all(self._holds(term.schema, value) == term.holds for term in terms)

    def _holds(self, part: Any, value: Any) -> bool:
        """Return whether a value meets a schema."""
        if isinstance(part, bool):
            return part
        if "unevaluatedProperties" in part or "unevaluatedItems" in part:
            return any(self._fits(box, value) for box in self._of(part))
        one_of = [self._holds(option, value) for option in part.get("oneOf", ())]
        return (
            self._fits(self._own(part), value)
            and ("$ref" not in part or self._holds(self._schema.target(part), value))
            and all(self._holds(option, value) for option in part.get("allOf", ()))
            and ("anyOf" not in part or any(self._holds(option, value) for option in part["anyOf"]))
            and (not one_of or sum(one_of) == 1)
            and not ("not" in part and self._holds(part["not"], value))
            and self._holds(_consequence(part, self._holds(part.get("if", True), value)), value)
            and all(self._holds(each, value) for each in _dependencies(part, value))
        )

    def _filtered(self, boxes: list[Box], term: Term) -> list[Box]:
        """Return those of listed values that meet one more schema."""
        found: list[Box] = []
        for box in boxes:
            values = {
                name: tuple(value for value in shape.values if self.admits((term,), value))
                for name, shape in box.items()
                if isinstance(shape, Listed)
            }
            found.append({name: Listed(some) for name, some in values.items() if some})
        return [box for box in found if box]

    def has_value(self, shape: Shape) -> bool:
        """Return whether there may be a value of a shape; a False is certain."""
        if isinstance(shape, Object):
            return all(self.is_possible(shape.terms_of(name)) for name in shape.required)
        if isinstance(shape, Array):
            items = list(shape.prefix[: shape.minimum])
            items += [shape.items or ()] if shape.minimum > len(shape.prefix) else []
            others = () if shape.prefix else shape.items or ()  # an item of the prefix may be what it has to contain
            contained = [join(others, terms) for terms, _ in shape.contains]
            return all(map(self.is_possible, [*items, *contained]))
        return True

    def _of(self, part: Any) -> list[Box]:
        if isinstance(part, bool):
            return [_FULL] if part else []
        if id(part) not in self._boxes:
            self._boxes[id(part)] = self._normal(part)
        return self._boxes[id(part)]

    def _normal(self, part: dict[str, Any]) -> list[Box]:
        own = self._own(part)
        boxes = [own] if own else []
        if _are_listed(boxes) and not _COMBINING.isdisjoint(part):
            return self._filtered(boxes, Term(part))
        if "$ref" in part:
            boxes = self._meet(boxes, self._of(self._schema.target(part)))
        if "allOf" in part:
            boxes = self._meet(boxes, self._all_of(tuple(map(Term, part["allOf"]))))
        if "anyOf" in part:
            boxes = self._meet(boxes, [box for option in part["anyOf"] for box in self._of(option)])
        if "oneOf" in part:
            boxes = self._one_of(part, boxes)
        if "not" in part:
            boxes = self._meet(boxes, self._complement_at(part, "not"))
        if "if" in part and ("then" in part or "else" in part):
            then = self._meet(self._of(part["if"]), self._of(part.get("then", True)))
            otherwise = self._meet(self._complement_at(part, "if"), self._of(part.get("else", True)))
            boxes = self._meet(boxes, [*then, *otherwise])
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, dependency in part.get(key, {}).items():
                without: Box = {**_FULL, "object": Object({name: NOTHING}, negated=frozenset({name}))}
                names = (name, *dependency) if isinstance(dependency, list) else (name,)
                needed: list[Box] = [{"object": Object(required=tuple(dict.fromkeys(names)))}]
                if not isinstance(dependency, list):
                    needed = self._meet(needed, self._of(dependency))
                boxes = self._meet(boxes, [without, *needed])
        if "unevaluatedProperties" in part:
            boxes = [self._evaluated(box, _terms(part["unevaluatedProperties"])) for box in boxes]
        if "unevaluatedItems" in part:
            boxes = [self._evaluated_items(part, box, _terms(part["unevaluatedItems"])) for box in boxes]
        return boxes

    def _own(self, part: dict[str, Any]) -> Box:
        """Return a schema's own constraints, without its combinations with other schemas."""
        if id(part) not in self._owns:
            self._owns[id(part)] = self._intersection(self._asserted(part), _listed(part))
        return self._owns[id(part)]

    def _asserted(self, part: dict[str, Any]) -> Box:
        """Return the constraints of the keywords that are about one type."""
        types = types_allowed(part)
        shapes: dict[str, Shape] = {
            "number": _number(part, is_integer="number" not in types),
            "string": _text(part),
            "array": _array(part),
            "object": _object(part),
        }
        allowed = types - {"integer"} | ({"number"} if "integer" in types else set())
        return {name: shapes.get(name, shape) for name, shape in _FULL.items() if name in allowed}

    def _one_of(self, part: dict[str, Any], boxes: list[Box]) -> list[Box]:
        options = [self._meet(boxes, self._of(option)) for option in part["oneOf"]]
        chosen: list[Box] = []
        for index, option in enumerate(options):
            for other, other_option in enumerate(options):
                if other == index or not self._overlap(option, other_option):
                    continue
                try:
                    option = self._meet(option, self._whole_complement(part["oneOf"][other]))
                except (_NoComplementError, _TooManyError):
                    if not self._schema.is_strict:
                        self._schema.ignored.append(self._schema.path(part, "oneOf"))
                        return [box for each in options for box in each]
                    first, second = sorted((index, other))
                    why = f"schemas {first + 1} and {second + 1} of oneOf may both be met, which can't be prevented"
                    self._schema.fail(part["oneOf"], second, why, _ONE_OF_HINT)
            chosen += option
        return chosen

    def _whole_complement(self, part: Any) -> list[Box]:
        """Return the complement of a schema, and raise _NoComplementError if one of a schema in it will be needed later
        and does not exist."""
        complement = self._complement(self._of(part))
        waiting, seen = list(complement), set[int]()
        while waiting:
            for term in _negated(waiting.pop()):
                if id(term.schema) not in seen:
                    seen.add(id(term.schema))
                    waiting += self._complement(self._of(term.schema))
        return complement

    def _overlap(self, some: list[Box], others: list[Box]) -> bool:
        return any(self.has_value(shape) for box in self._meet(some, others) for shape in box.values())

    def _complement_at(self, part: dict[str, Any], key: str) -> list[Box]:
        try:
            return self._complement(self._of(part[key]))
        except _NoComplementError as error:
            self._schema.fail_key(
                part, key, f"{key!r} can't be enforced while an answer is written, because of {error}",
                "say what the value may be, with enum, type or anyOf",
            )  # fmt: skip

    def _others(self, part: Any) -> list[Box]:
        try:
            return self._complement(self._of(part))
        except _NoComplementError as error:
            assert isinstance(part, dict), "true and false have complements"
            self._schema.fail_part(part, f"its opposite can't be enforced while an answer is written ({error})")

    def _complement(self, boxes: list[Box]) -> list[Box]:
        complement: list[Box] = [_FULL]
        for box in boxes:
            absent = {name: shape for name, shape in _FULL.items() if name not in box}
            options: list[Box] = [absent] if absent else []
            for name, shape in box.items():
                options += [{name: other} for other in _complement_of(name, shape)]
            complement = self._meet(complement, options)
        return complement

    def _evaluated(self, box: Box, terms: Terms) -> Box:
        """Return a box whose properties without a schema meet these terms (unevaluatedProperties)."""
        shape = box.get("object")
        if not isinstance(shape, Object):
            return box
        properties = {
            name: join(own_terms, terms) if name in shape.negated else own_terms
            for name, own_terms in shape.properties.items()
        }
        if any(group.others is not None for group in shape.groups):
            groups = shape.groups
        else:  # one group: a name has to match a pattern of any of them
            patterns = tuple(pattern for group in shape.groups for pattern in group.patterns)
            groups = (Group(patterns, terms),)
        return {**box, "object": replace(shape, properties=properties, groups=groups)}

    def _evaluated_items(self, part: dict[str, Any], box: Box, terms: Terms) -> Box:
        shape = box.get("array")
        if not isinstance(shape, Array) or shape.items is not None:
            return box
        if shape.is_negated or shape.contains:
            self._schema.fail_key(part, "unevaluatedItems", "it can't be enforced beside contains or not", "use items")
        return {**box, "array": replace(shape, items=terms)}

    def _meet(self, some: list[Box], others: list[Box]) -> list[Box]:
        boxes = [box for one in some for other in others if (box := self._intersection(one, other))]
        if len(boxes) > _MAX_ALTERNATIVES:
            raise _TooManyError
        return boxes

    def _intersection(self, one: Box, other: Box) -> Box:
        if one is _FULL:
            return other
        if other is _FULL:
            return one
        shapes = {name: self.common(shape, other[name]) for name, shape in one.items() if name in other}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def common(self, one: Shape, other: Shape) -> Shape | None:
        """Return the shape of the values of two shapes of one type; None if there certainly are none."""
        if isinstance(one, Listed) or isinstance(other, Listed):
            listed, shape = (one, other) if isinstance(one, Listed) else (other, one)
            assert isinstance(listed, Listed), "one of them is"
            values = tuple(value for value in listed.values if self._suits(shape, value))
            return Listed(values) if values else None
        found: Shape
        if isinstance(one, Number) and isinstance(other, Number):
            found = _common_number(one, other)
        elif isinstance(one, Text) and isinstance(other, Text):
            found = Text(
                max(one.minimum, other.minimum),
                _least(one.maximum, other.maximum),
                _union(one.patterns, other.patterns),
                _union(one.forbidden, other.forbidden),
                _union(one.formats, other.formats),
                one.excluded | other.excluded,
            )
        elif isinstance(one, Array) and isinstance(other, Array):
            found = _common_array(one, other)
        else:
            assert isinstance(one, Object), "shapes of one type are of one class"
            assert isinstance(other, Object), "shapes of one type are of one class"
            found = _common_object(one, other)
        return None if _is_empty(found) else found

    def _fits(self, box: Box, value: Any) -> bool:
        name = next(iter(types_of_value(value) - {"integer"}))
        return name in box and self._suits(box[name], value)

    def _suits(self, shape: Shape, value: Any) -> bool:
        if isinstance(shape, Listed):
            return canonical(value) in shape.texts
        if isinstance(shape, Number):
            return _in_range(shape, _fraction(value))
        if isinstance(shape, Text):
            return (
                shape.minimum <= len(value) <= (len(value) if shape.maximum is None else shape.maximum)
                and all(parse(pattern).matches(value) for pattern in shape.patterns)
                and not any(parse(pattern).matches(value) for pattern in shape.forbidden)
                and all(parse(FORMATS[name]).matches(value) for name in shape.formats)
                and value not in shape.excluded
            )
        if not shape.minimum <= len(value) <= (len(value) if shape.maximum is None else shape.maximum):
            return False
        if isinstance(shape, Array):
            texts = [canonical(item) for item in value]
            return (
                all(self.admits(terms, item) for terms, item in zip(shape.prefix, value, strict=False))
                and all(self.admits(shape.items or (), item) for item in value[len(shape.prefix) :])
                and all(sum(self.admits(terms, item) for item in value) >= least for terms, least in shape.contains)
                and not (shape.is_unique and len(set(texts)) < len(texts))
            )
        return (
            all(name in value for name in shape.required)
            and all(self.admits(shape.names, name) for name in value)
            and all(self.admits(shape.terms_of(name), item) for name, item in value.items())
        )


def key_of(terms: Terms) -> object:
    """Return a key that equal terms of one schema share."""
    return frozenset(
        (term.schema if isinstance(term.schema, bool) else id(term.schema), term.holds, isinstance(term.schema, bool))
        for term in terms
    )


def join(some: Terms, others: Terms) -> Terms:
    """Return all of the terms, each once."""
    keys = {key_of((term,)) for term in some}
    return (*some, *(term for term in others if key_of((term,)) not in keys))


def canonical(value: Any) -> str:
    """Return the same text for equal JSON values."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _terms(schema: Any) -> Terms:
    return () if schema is True else (Term(schema),)


def _fraction(value: float) -> Fraction:
    """Return the number that a JSON text means, without the error of a float."""
    return Fraction(Decimal(repr(value)))


def _listed(part: dict[str, Any]) -> Box:
    """Return the box of enum and const."""
    listed: list[Any] | None = None
    for values in ([part["const"]] if "const" in part else None, part.get("enum")):
        if values is not None:
            texts = None if listed is None else set(map(canonical, listed))
            listed = [value for value in values if texts is None or canonical(value) in texts]
    if listed is None:
        return _FULL
    box: dict[str, list[Any]] = {}
    for value in {canonical(value): value for value in listed}.values():
        box.setdefault(next(iter(types_of_value(value) - {"integer"})), []).append(value)
    return {name: Listed(tuple(values)) for name, values in box.items()}


def _number(part: dict[str, Any], *, is_integer: bool) -> Number:
    number = Number(is_integer=is_integer)
    for key, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        is_open = part.get(flag) is True  # a flag up to draft 4
        bounds = [(part[key], is_open)] if key in part else []
        if flag in part and not isinstance(part[flag], bool):
            bounds.append((part[flag], True))
        for bound, open_end in bounds:
            limit = (
                Number(low=_fraction(bound), is_low_open=open_end)
                if key == "minimum"
                else Number(high=_fraction(bound), is_high_open=open_end)
            )
            number = _common_number(number, limit)
    return replace(number, multiple=_fraction(part["multipleOf"])) if "multipleOf" in part else number


def _text(part: dict[str, Any]) -> Text:
    formats = (part["format"],) if part.get("format") in FORMATS else ()
    patterns = (part["pattern"],) if "pattern" in part else ()
    return Text(part.get("minLength", 0), part.get("maxLength"), patterns, (), formats)


def _array(part: dict[str, Any]) -> Array:
    items = part.get("items")
    prefix = items if isinstance(items, list) else part.get("prefixItems", [])
    others = part.get("additionalItems") if isinstance(items, list) else items
    least = part.get("minContains", 1)
    contains = ((_terms(part["contains"]), least),) if "contains" in part and least else ()
    return Array(
        tuple(map(_terms, prefix)), None if others is None else _terms(others), part.get("minItems", 0),
        part.get("maxItems"), contains, part.get("uniqueItems") is True, sources=(part,),
    )  # fmt: skip


def _object(part: dict[str, Any]) -> Object:
    patterns = tuple((pattern, _terms(schema)) for pattern, schema in part.get("patternProperties", {}).items())
    others = part.get("additionalProperties")
    group = Group(patterns, None if others is None else _terms(others))
    properties = {name: _terms(schema) for name, schema in part.get("properties", {}).items()}
    for pattern, terms in patterns:
        for name, own_terms in properties.items():
            if parse(pattern).matches(name):
                properties[name] = join(own_terms, terms)
    return Object(
        properties, (group,) if patterns or others is not None else (), tuple(dict.fromkeys(part.get("required", ()))),
        part.get("minProperties", 0), part.get("maxProperties"),
        _terms(part["propertyNames"]) if "propertyNames" in part else (), sources=(part,),
    )  # fmt: skip


def _common_number(one: Number, other: Number) -> Number:
    lows = [(shape.low, shape.is_low_open) for shape in (one, other) if shape.low is not None]
    highs = [(shape.high, not shape.is_high_open) for shape in (one, other) if shape.high is not None]
    low, is_low_open = max(lows, default=(None, False))
    high, is_high_closed = min(highs, default=(None, True))
    multiples = [shape.multiple for shape in (one, other) if shape.multiple is not None]
    multiple = multiples[0] if multiples else None
    if len(multiples) == 2:  # the least common multiple of fractions
        scale = lcm(multiples[0].denominator, multiples[1].denominator)
        multiple = Fraction(lcm(int(multiples[0] * scale), int(multiples[1] * scale)), scale)
    return Number(low, high, is_low_open, not is_high_closed, one.is_integer or other.is_integer, multiple)


def _common_array(one: Array, other: Array) -> Array:
    length = max(len(one.prefix), len(other.prefix))
    prefix = tuple(join(one.terms_at(index), other.terms_at(index)) for index in range(length))
    given = [shape.items for shape in (one, other) if shape.items is not None]
    return Array(
        prefix, join(given[0], given[-1]) if given else None, max(one.minimum, other.minimum),
        _least(one.maximum, other.maximum), _union(one.contains, other.contains), one.is_unique or other.is_unique,
        one.is_negated or other.is_negated, one.sources + other.sources,
    )  # fmt: skip


def _common_object(one: Object, other: Object) -> Object:
    names = dict.fromkeys((*one.properties, *other.properties))
    properties = {name: join(one.terms_of(name), other.terms_of(name)) for name in names}
    is_known = {name for shape in (one, other) for name in shape.properties if name not in shape.negated}
    return Object(
        properties, _union(one.groups, other.groups), _union(one.required, other.required),
        max(one.minimum, other.minimum), _least(one.maximum, other.maximum), join(one.names, other.names),
        frozenset(names) - is_known, one.sources + other.sources,
    )  # fmt: skip


def _union(some: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*some, *(box for box in others if box not in some))


def _least(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


def _is_empty(shape: Shape) -> bool:
    if isinstance(shape, Number):
        return not _has_number(shape)
    if isinstance(shape, Listed):
        return not shape.values
    return shape.maximum is not None and shape.minimum > shape.maximum


def _has_number(shape: Number) -> bool:
    if shape.low is None or shape.high is None:
        return True
    step = shape.multiple if shape.multiple is not None else Fraction(1) if shape.is_integer else None
    if step is None:
        is_open = shape.is_low_open or shape.is_high_open
        return shape.low < shape.high or (shape.low == shape.high and not is_open)
    low, high = ceil(shape.low / step), floor(shape.high / step)
    low += shape.is_low_open and low * step == shape.low
    high -= shape.is_high_open and high * step == shape.high
    return low <= high


def _in_range(shape: Number, value: Fraction) -> bool:
    return (
        (shape.low is None or (value > shape.low if shape.is_low_open else value >= shape.low))
        and (shape.high is None or (value < shape.high if shape.is_high_open else value <= shape.high))
        and not (shape.is_integer and value.denominator != 1)
        and not (shape.multiple is not None and (value / shape.multiple).denominator != 1)
    )


def _complement_of(name: str, shape: Shape) -> Iterator[Shape]:
    """Yield the shapes of all other values of a type."""
    if isinstance(shape, Listed):
        yield from _complement_of_values(name, shape.values)
    elif isinstance(shape, Number):
        if shape.is_integer or shape.multiple is not None:
            raise _NoComplementError("integer or multipleOf")
        if shape.low is not None:
            yield Number(high=shape.low, is_high_open=not shape.is_low_open)
        if shape.high is not None:
            yield Number(low=shape.high, is_low_open=not shape.is_high_open)
    elif isinstance(shape, Text):
        if shape.formats:
            raise _NoComplementError("format")
        yield from (Text(patterns=(pattern,)) for pattern in shape.forbidden)
        yield from (Text(forbidden=(pattern,)) for pattern in shape.patterns)
        if shape.excluded:
            yield Listed(tuple(sorted(shape.excluded)))
        yield from (Text(minimum, maximum) for minimum, maximum in _other_counts(shape.minimum, shape.maximum))
    elif isinstance(shape, Array):
        yield from _complement_of_array(shape)
    else:
        yield from _complement_of_object(shape)


def _complement_of_values(name: str, values: tuple[Any, ...]) -> Iterator[Shape]:
    if name in ("null", "boolean"):
        full = _FULL[name]
        assert isinstance(full, Listed), "so are null and boolean"
        others = tuple(value for value in full.values if value not in values)
        if others:
            yield Listed(others)
    elif name == "string":
        yield Text(excluded=frozenset(values))
    elif name == "number":
        edges: list[Fraction | None] = [None, *sorted(map(_fraction, values)), None]
        for low, high in pairwise(edges):
            yield Number(low, high, is_low_open=True, is_high_open=True)
    else:
        raise _NoComplementError(f"an enum or const with an {name}")


def _complement_of_array(shape: Array) -> Iterator[Shape]:
    if shape.is_unique:
        raise _NoComplementError("uniqueItems")
    if (shape.items or shape.contains) and shape.prefix:
        raise _NoComplementError("prefixItems beside other items")
    for minimum, maximum in _other_counts(shape.minimum, shape.maximum):
        yield Array(minimum=minimum, maximum=maximum)
    for index, terms in enumerate(shape.prefix):
        for other in _opposites(terms):
            yield Array((*[()] * index, other), minimum=index + 1, is_negated=True)
    for other in _opposites(shape.items or ()):
        yield Array(contains=((other, 1),), is_negated=True)
    for terms, least in shape.contains:
        if least != 1 or len(terms) != 1:
            raise _NoComplementError("contains")
        yield Array(items=(Term(terms[0].schema, not terms[0].holds),), is_negated=True)


def _complement_of_object(shape: Object) -> Iterator[Shape]:
    if any(group.patterns or group.others for group in shape.groups) or shape.names:
        raise _NoComplementError("additionalProperties, patternProperties or propertyNames")
    for minimum, maximum in _other_counts(shape.minimum, shape.maximum):
        yield Object(minimum=minimum, maximum=maximum)
    for name in shape.required:
        yield Object({name: NOTHING}, negated=frozenset({name}))
    for name, terms in shape.properties.items():
        for other in _opposites(terms):
            yield Object({name: other}, required=(name,), negated=frozenset({name}))


def _consequence(part: dict[str, Any], is_met: bool) -> Any:
    """Return the schema that a condition brings."""
    return part.get("then" if is_met else "else", True) if "if" in part else True


def _dependencies(part: dict[str, Any], value: Any) -> Iterator[Any]:
    """Yield the schemas that a value's properties bring."""
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, dependency in part.get(key, {}).items():
            if isinstance(value, dict) and name in value:
                yield {"required": dependency} if isinstance(dependency, list) else dependency


def _is_listed(part: Any) -> bool:
    return isinstance(part, dict) and ("enum" in part or "const" in part)


def _are_listed(boxes: Iterable[Box]) -> bool:
    return all(isinstance(shape, Listed) for box in boxes for shape in box.values())


def _negated(box: Box) -> Iterator[Term]:
    """Yield the schemas that something inside a value must not meet."""
    for shape in box.values():
        groups: list[Terms] = []
        if isinstance(shape, Object):
            groups += shape.properties.values()
        elif isinstance(shape, Array):
            groups += [*shape.prefix, shape.items or (), *(terms for terms, _ in shape.contains)]
        yield from (term for terms in groups for term in terms if not term.holds)


def _opposites(terms: Terms) -> Iterable[Terms]:
    return ((Term(term.schema, not term.holds),) for term in terms)


def _other_counts(minimum: int, maximum: int | None) -> Iterator[tuple[int, int | None]]:
    if minimum:
        yield 0, minimum - 1
    if maximum is not None:
        yield maximum + 1, None
