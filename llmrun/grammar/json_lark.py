"""The grammar of a JSON schema in llguidance's Lark.

JSON is written as json.dumps does it, without free whitespace, which a small model writes without end. A model also
fills without end what a schema leaves open. So the properties that an object does not list come after those it needs,
and a list has no items after its prefix, unless the schema says so or needs them. In a strict schema an object that
lists properties has no others, and they are in the schema's order.

llguidance 1.9 compiles schemas too (%json), but refuses not, if, oneOf, contains, uniqueItems, dependentRequired,
propertyNames and patterns with a look-ahead or a border of words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from itertools import combinations
from typing import Any, NamedTuple, NoReturn

from llmrun.errors import BadGrammarError
from llmrun.grammar import numbers, schema
from llmrun.grammar.members import MAX_BITS, Members, members_rules, times
from llmrun.grammar.place import SCHEMA
from llmrun.grammar.regex import FORMATS, characters_of_json, literals, parse
from llmrun.grammar.schema import Schema
from llmrun.grammar.shapes import (
    Array,
    Listed,
    Number,
    Object,
    Shape,
    Shapes,
    Term,
    Terms,
    Text,
    canonical,
    join,
    key_of,
)  # fmt: skip

_MAX_PATTERNS = 4  # of one object, whose names may match any combination of them
_LARGEST_MULTIPLE = Fraction(10**15)
_QUOTE = '"\\""'
_KEY_END = '"\\": "'


class Rules(NamedTuple):
    """Rules of Lark.

    Attributes:
        start: an expression that matches the whole.
        lines: the rules, whose names are different for different schemas.
        ignored: the paths of what the rules don't hold a value to, or never write; empty for a strict schema.
        repeating: the paths of each uniqueItems whose lists the rules don't keep from repeating items.
    """

    start: str
    lines: tuple[str, ...]
    ignored: tuple[tuple[str | int, ...], ...] = ()
    repeating: tuple[tuple[str | int, ...], ...] = ()


@lru_cache(maxsize=256)
def rules_of(text: str, *, is_strict: bool = True) -> Rules:
    """Return the rules of a JSON schema.

    Cached, because agents send the same tools with every request.

    Raises:
        BadGrammarError: the schema is broken, can't be met, or can't be enforced.
    """
    try:
        whole = schema.parse(text, is_strict=is_strict)
        prefix = f"{'s' if is_strict else 'o'}{sha256(text.encode()).hexdigest()[:8]}"
        return _Writer(whole, prefix).rules()
    except RecursionError:
        why = "its schemas refer to each other in too long a chain"
        raise BadGrammarError(f"the {SCHEMA} is too complex", why=why) from None


class _Writer:
    def __init__(self, whole: Schema, prefix: str) -> None:
        self._schema = whole
        self._shapes = Shapes(whole)
        self._prefix = prefix
        self._names: dict[object, str] = {}  # key of terms -> rule
        self._terminals: dict[str, str] = {}  # expression -> name
        self._lines: list[str] = []
        self._waiting: list[tuple[str, Terms]] = []
        self._repeating: list[tuple[str | int, ...]] = []

    def rules(self) -> Rules:
        root: Terms = (Term(self._schema.root),)
        if not self._shapes.is_possible(root):
            self._schema.fail_part(self._schema.root, "no value can meet all parts of this schema")
        start = self._rule(root)
        while self._waiting:
            name, terms = self._waiting.pop()
            self._lines.append(f"{name}: {' | '.join(self._options(name, terms))}")
        terminals = [f"{name}: {expression}" for expression, name in self._terminals.items()]
        ignored, repeating = (tuple(dict.fromkeys(paths)) for paths in (self._schema.ignored, self._repeating))
        return Rules(start, (*self._lines, *terminals), ignored, repeating)

    def _rule(self, terms: Terms) -> str:
        """Return the name of the rule for values that meet some schemas."""
        key = key_of(terms)
        if key not in self._names:
            self._names[key] = f"{self._prefix}_{len(self._names)}"
            self._waiting.append((self._names[key], terms))
        return self._names[key]

    def _terminal(self, expression: str) -> str:
        if expression not in self._terminals:
            self._terminals[expression] = f"{self._prefix.upper()}_{len(self._terminals)}"
        return self._terminals[expression]

    def _options(self, name: str, terms: Terms) -> list[str]:
        shapes = [shape for box in self._shapes.alternatives(terms) for shape in box.values()]
        options: dict[str, None] = {}
        for index, shape in enumerate(shapes):
            if self._shapes.has_value(shape):
                options.update(dict.fromkeys(self._shape(f"{name}_{index}", shape)))
        if not options:
            self._schema.fail_part(_part(terms) or self._schema.root, "no value can meet this schema")
        return list(options)

    def _shape(self, name: str, shape: Shape) -> Iterator[str]:
        """Yield the expressions for values of one type; name is free for rules of their own."""
        if isinstance(shape, Listed):
            yield from map(_value, shape.values)
        elif isinstance(shape, Number):
            yield self._number(shape)
        elif isinstance(shape, Text):
            yield self._terminal(f"{_QUOTE} ({self._text(shape)}) {_QUOTE}")
        elif isinstance(shape, Array):
            yield self._array(name, shape)
        else:
            yield from self._object(name, shape)

    def _number(self, shape: Number) -> str:
        if not numbers.needs_multiple(shape):
            return self._terminal(numbers.terminal(shape))
        assert shape.multiple is not None, "it needs one"
        low, high = (
            max(-_LARGEST_MULTIPLE, min(_LARGEST_MULTIPLE, bound))
            for bound in (
                -_LARGEST_MULTIPLE if shape.low is None else shape.low,
                _LARGEST_MULTIPLE if shape.high is None else shape.high,
            )
        )
        is_integer = shape.is_integer or shape.multiple.denominator == 1
        bounds = {
            "exclusiveMinimum" if shape.is_low_open else "minimum": low,
            "exclusiveMaximum" if shape.is_high_open else "maximum": high,
            "multipleOf": shape.multiple,
        }
        written = {key: int(value) if value.denominator == 1 else float(value) for key, value in bounds.items()}
        return f"%json {json.dumps({'type': 'integer' if is_integer else 'number', **written})}"

    def _array(self, name: str, shape: Array) -> str:
        prefix, items = list(shape.prefix), shape.items or ()
        is_closed = shape.items is None and bool(prefix) and shape.minimum <= len(prefix)
        possible = [self._shapes.is_possible(terms) for terms in prefix]
        maximum = shape.maximum
        if False in possible:
            maximum = possible.index(False) if maximum is None else min(maximum, possible.index(False))
        elif is_closed or not self._shapes.is_possible(items):
            maximum = len(prefix) if maximum is None else min(maximum, len(prefix))
        if shape.is_unique and (maximum is None or maximum > 1):
            unique = self._unique(name, shape, maximum)
            if unique is not None:
                return unique
            self._repeating += (
                self._schema.path(part, "uniqueItems") for part in shape.sources if part.get("uniqueItems") is True
            )
        if shape.contains:
            return self._containing(shape, maximum)
        # The first items one by one, then any number of the others.
        n_single = len(prefix) if maximum is None else min(len(prefix), maximum)
        rest = self._repeated(items, shape.minimum, maximum, n_single)
        for index in range(n_single - 1, -1, -1):
            rule = f"{name}_i{index}"
            self._lines.append(f"{rule}: {_quoted(', ') + ' ' if index else ''}{self._rule(prefix[index])} {rest}")
            rest = rule if index < shape.minimum else f"{rule}?"
        return f'"[" {rest} "]"'

    def _repeated(self, items: Terms, minimum: int, maximum: int | None, before: int) -> str:
        """Return an expression of the items after the first ones."""
        least, most = max(0, minimum - before), None if maximum is None else maximum - before
        if most == 0:
            return ""
        item = self._rule(items)
        if before:
            return times(f'(", " {item})', least, most)
        more = f'{item} {times(f"""(", " {item})""", max(0, least - 1), None if most is None else most - 1)}'
        return more if least else f"({more})?"

    def _containing(self, shape: Array, maximum: int | None) -> str:
        (terms, least), *others = shape.contains
        if others or shape.prefix or maximum is not None or shape.minimum > least:
            why = "contains can't be enforced beside prefixItems, minItems, maxItems or another contains"
            self._fail(shape, ("contains",), why, "describe each item with prefixItems")
        items = shape.items or ()
        item, containing = self._rule(items), self._rule(join(items, terms))
        one = f'({item} ", ")* {containing}'
        more = times(f'(", " {one})', least - 1, least - 1)
        return f'"[" {one} {more} (", " {item})* "]"'

    def _unique(self, name: str, shape: Array, maximum: int | None) -> str | None:
        """Write rules for a list of different listed values; None if the items are not listed, or too many."""
        values = self._listed(shape.items or ())
        if shape.prefix or shape.contains or values is None or len(values) > MAX_BITS:
            return None
        if shape.minimum > len(values):
            self._fail(shape, ("minItems",), f"there are only {len(values)} different values")
        members = Members([*map(_value, values)], frozenset(), "", shape.minimum, maximum, any_order=True)
        expression, lines = members_rules(name, members)
        self._lines += lines
        return f'"[" {expression} "]"'

    def _listed(self, terms: Terms) -> list[Any] | None:
        """Return the different values of some schemas; None if they are not listed."""
        shapes = [shape for box in self._shapes.alternatives(terms) for shape in box.values()]
        if not all(isinstance(shape, Listed) for shape in shapes):
            return None
        values = [value for shape in shapes if isinstance(shape, Listed) for value in shape.values]
        return [*{canonical(value): value for value in values}.values()]

    def _object(self, name: str, shape: Object) -> Iterator[str]:
        tail = list(self._tail(shape))
        properties = {key: shape.terms_of(key) for key in (*shape.properties, *shape.required)}
        listed = {
            key: terms
            for key, terms in properties.items()
            if self._shapes.is_possible(terms) and self._shapes.admits(shape.names, key)
        }
        if any(key not in listed for key in shape.required):
            return
        if shape.maximum is not None and shape.maximum < len(shape.required):
            return
        body = self._members(name, shape, listed, tail)
        yield f'"{{" {body} "}}"'

    def _members(self, name: str, shape: Object, listed: dict[str, Terms], tail: Sequence[str]) -> str:
        """Write the rules of an object's properties; return an expression of them."""
        pairs = [f"{_key(key)} {self._rule(terms)}" for key, terms in listed.items()]
        if tail:
            self._lines.append(f"{name}_pair: {' | '.join(tail)}")
        required = frozenset(index for index, key in enumerate(listed) if key in shape.required)
        other = f"{name}_pair" if tail else ""
        members = Members(pairs, required, other, shape.minimum, shape.maximum, any_order=not self._schema.is_strict)
        if members.is_counted and len(pairs) > MAX_BITS:
            why = f"no more than {MAX_BITS} listed properties can be counted while an answer is written"
            self._fail(shape, ("minProperties", "maxProperties"), why, "leave it out")
        if shape.minimum > max(1, len(pairs) + bool(tail)):
            why = "properties can't be counted while an answer is written, more than one or than are required"
            self._fail(shape, ("minProperties",), why, "name them in required")
        expression, lines = members_rules(name, members)
        self._lines += lines
        return expression

    def _tail(self, shape: Object) -> Iterator[str]:
        """Yield expressions of properties without names of their own."""
        is_known = [key for key in shape.properties if key not in shape.negated]
        is_said = any(group.patterns or group.others is not None for group in shape.groups)
        if self._schema.is_strict and is_known and not is_said and set(shape.required) <= set(shape.properties):
            return
        patterns = list(dict.fromkeys(pattern for group in shape.groups for pattern, _ in group.patterns))
        if len(patterns) > _MAX_PATTERNS:
            self._fail(shape, ("patternProperties",), f"more than {_MAX_PATTERNS} patterns can't be told apart")
        taken = dict.fromkeys((*shape.properties, *shape.required))
        for size in range(len(patterns) + 1):
            for matching in combinations(patterns, size):
                terms: Terms = ()
                for group in shape.groups:
                    matching_terms = [met for pattern, met in group.patterns if pattern in matching]
                    for met in matching_terms or [group.others or ()]:
                        terms = join(terms, met)
                if not self._shapes.is_possible(terms):
                    continue
                others = [pattern for pattern in patterns if pattern not in matching]
                key = Text(patterns=tuple(matching), forbidden=tuple(others), excluded=frozenset(taken))
                for name in self._names_of(shape.names, key):
                    yield f"{self._terminal(f'{_QUOTE} ({name}) {_KEY_END}')} {self._rule(terms)}"

    def _names_of(self, terms: Terms, key: Text) -> Iterator[str]:
        """Yield expressions of the names of this shape that meet propertyNames."""
        for box in self._shapes.alternatives(terms):
            shape = self._shapes.common(box["string"], key) if "string" in box else None
            if isinstance(shape, Listed):
                yield literals(shape.values)
            elif isinstance(shape, Text):
                yield self._text(shape)

    def _text(self, shape: Text) -> str:
        """Return an expression of Lark terminals for the content of a string."""
        parts = [f"({parse(pattern).lark})" for pattern in (*shape.patterns, *map(FORMATS.__getitem__, shape.formats))]
        if shape.minimum or shape.maximum is not None:
            parts.insert(0, characters_of_json(shape.minimum, shape.maximum))
        elif not parts:  # a complement needs it too
            parts.append(self._terminal(characters_of_json()))
        parts += [f"~({parse(pattern).lark})" for pattern in shape.forbidden]
        parts += [f"~{literals(sorted(shape.excluded))}"] if shape.excluded else []
        return " & ".join(parts)

    def _fail(self, shape: Array | Object, keys: Sequence[str], why: str, hint: str = "") -> NoReturn:
        """Raise the error for the first of the keywords in the schemas that a shape comes from."""
        for part in shape.sources:
            for key in keys:
                if key in part:
                    self._schema.fail(part, key, why, hint)
        self._schema.fail_part(shape.sources[0] if shape.sources else self._schema.root, why, hint)


def _part(terms: Terms) -> dict[str, Any] | None:
    return next((term.schema for term in terms if isinstance(term.schema, dict)), None)


def _value(value: Any) -> str:
    """Return an expression of a JSON value, of the parts that other values have too: the lexer does not go back."""
    if isinstance(value, list):
        return " ".join(['"["', ' ", " '.join(map(_value, value)), '"]"'])
    if isinstance(value, dict):
        pairs = (f"{_key(key)} {_value(inner)}" for key, inner in value.items())
        return " ".join(['"{"', ' ", " '.join(pairs), '"}"'])
    return _quoted(json.dumps(value, ensure_ascii=False))


def _key(name: str) -> str:
    return _quoted(f"{json.dumps(name, ensure_ascii=False)}: ")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
