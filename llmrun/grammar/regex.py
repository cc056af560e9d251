"""Patterns of JSON schemas (ECMA-262 regular expressions) as terminals of Lark, whose `&` and `~` express look-ahead.

A pattern is searched for, so text may stand around it unless it begins with ^ and ends with $.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NoReturn

from llmrun.grammar.gbnf import ANY, Characters, Choice, Node, Repeat, Series, merged, without

_MAX_DEPTH = 100
_MAX_REPETITIONS = 10_000
_MAX_ALTERNATIVES = 64
_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = (
    (9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_JSON_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\\\"}
_NOT_RAW = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))  # have to be escaped in a JSON string
_LETTERS = frozenset(string.ascii_letters + string.digits + "_")
_LOW_SURROGATE = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_COUNTS = re.compile(r"\{(\d{1,9})(?:(,)(\d{1,9})?)?\}")
_CATEGORIES = {"Letter": "L", "Mark": "M", "Number": "N", "Punctuation": "P", "Symbol": "S", "Separator": "Z",
               "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Decimal_Number": "Nd"}  # fmt: skip


class PatternError(ValueError):
    """A pattern is broken, or can't be enforced while an answer is written."""


@dataclass(frozen=True, slots=True, eq=False)
class _Edge:
    """A condition on a place: "^" and "$" are the ends of the text, "b" and "B" are about borders of words."""

    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """A look-ahead."""

    node: _Tree
    is_negative: bool


_Tree = Node | _Edge | _Look
_EVERYTHING = Repeat(Characters(ANY), 0, None)
_NO_WORD = Characters(without(_WORD))


@dataclass(frozen=True, slots=True)
class _Alternative:
    """A language: a regular expression, and look-aheads that have to match the same text, or must not."""

    body: Node
    needed: tuple[tuple[_Alternative, ...], ...] = ()
    forbidden: tuple[tuple[_Alternative, ...], ...] = ()


class Pattern:
    """A parsed pattern.

    Raises:
        PatternError: it is broken, or can't be enforced.
    """

    def __init__(self, text: str) -> None:
        self._alternatives = _languages(_Parser(text).tree(), is_anchored=False)

    @cached_property
    def lark(self) -> str:
        """An expression of Lark terminals that matches the content of a JSON string, between the quotes."""
        return _union(self._alternatives)

    def matches(self, text: str) -> bool:
        return _matches(self._alternatives, text)


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Return a pattern; see Pattern."""
    return Pattern(text)


def node_of(text: str) -> Node:
    """Return a pattern that has to match the whole text, whose dot is all but \\n, as in Python and Rust.

    Raises:
        PatternError: it is broken, or has edges or look-around.
    """
    tree = _Parser(text, ((10, 10),)).tree()
    if _has_edge(tree):
        raise PatternError("look-around, ^, $ and borders of words can't be enforced inside another text")
    return tree  # type: ignore[return-value]  # the other nodes are edges


@lru_cache(maxsize=256)
def characters_of_json(minimum: int = 0, maximum: int | None = None) -> str:
    """Return a regular expression, for Lark, of the content of a JSON string by its number of characters."""
    return _terminal(Repeat(Characters(ANY), minimum, maximum))


def literals(texts: Sequence[str]) -> str:
    """Return a regular expression, for Lark, of texts as the content of a JSON string, in all of their spellings."""
    options = tuple(Series(tuple(_one(ord(character)) for character in text)) for text in texts)
    return _terminal(Choice(options) if len(options) > 1 else options[0])


def _terminal(node: Node) -> str:
    written = _quoted(node)
    return f"/{written}/" if written else '""'


def _union(alternatives: Sequence[_Alternative]) -> str:
    if not alternatives:
        return "/[^\\x{0}-\\x{10FFFF}]/"
    return " | ".join(
        " & ".join([
            _terminal(alternative.body),
            *(f"({_union(look)})" for look in alternative.needed),
            *(f"~({_union(look)})" for look in alternative.forbidden),
        ])
        for alternative in alternatives
    )  # fmt: skip


def _matches(alternatives: Sequence[_Alternative], text: str) -> bool:
    return any(
        re.fullmatch(_python(alternative.body), text) is not None
        and all(_matches(look, text) for look in alternative.needed)
        and not any(_matches(look, text) for look in alternative.forbidden)
        for alternative in alternatives
    )


def _languages(tree: _Tree, *, is_anchored: bool) -> tuple[_Alternative, ...]:
    alternatives = []
    for parts in _alternatives(tree):
        starts = is_anchored
        needed: list[tuple[_Alternative, ...]] = []
        forbidden: list[tuple[_Alternative, ...]] = []
        while parts and isinstance(parts[0], _Edge | _Look) and _is_start(parts[0], starts):
            first = parts.pop(0)
            if isinstance(first, _Look):
                (forbidden if first.is_negative else needed).append(_languages(first.node, is_anchored=True))
            starts = True
        ends = False
        while parts and isinstance(parts[-1], _Edge) and parts[-1].kind == "$":
            parts.pop()
            ends = True
        before: list[Node] = [] if starts else [_EVERYTHING]
        after: list[Node] = [] if ends else [_EVERYTHING]
        if parts and _is_border(parts[0]):
            before = [] if starts else [Repeat(Series((_EVERYTHING, _NO_WORD)), 0, 1)]
            _check_word(parts[1:2], 0)
            parts.pop(0)
        if parts and _is_border(parts[-1]):
            after = [] if ends else [Repeat(Series((_NO_WORD, _EVERYTHING)), 0, 1)]
            _check_word(parts[-2:-1], -1)
            parts.pop()
        body: list[Node] = []
        for part in parts:
            if isinstance(part, _Edge | _Look):
                what = "a look-ahead" if isinstance(part, _Look) else {"^": "^", "$": "$"}.get(part.kind, "\\b")
                raise PatternError(f"{what} in the middle of a pattern can't be enforced while an answer is written")
            body.append(part)
        alternatives.append(_Alternative(Series((*before, *body, *after)), tuple(needed), tuple(forbidden)))
    return tuple(alternatives)


def _is_start(part: _Edge | _Look, starts: bool) -> bool:
    return part.kind == "^" if isinstance(part, _Edge) else starts


def _is_border(part: _Tree) -> bool:
    return isinstance(part, _Edge) and part.kind == "b"


def _check_word(neighbour: Sequence[_Tree], end: int) -> None:
    """Raise PatternError unless the part beside a border begins (0) or ends (-1) with characters of words."""
    characters = _at_end(neighbour[0], end) if neighbour else None
    if characters is None or any(not _inside(pair, _WORD) for pair in characters):
        raise PatternError(r"\b can only be enforced at the beginning or the end of a pattern, beside a letter")


def _inside(pair: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> bool:
    return any(first <= pair[0] and pair[1] <= last for first, last in ranges)


def _at_end(node: _Tree, end: int) -> tuple[tuple[int, int], ...] | None:
    """Return the first (0) or last (-1) characters of a node; None if it may be empty, or they are not known."""
    if isinstance(node, Characters):
        return node.ranges
    if isinstance(node, Series) and node.parts:
        return _at_end(node.parts[end], end)
    if isinstance(node, Repeat) and node.minimum:
        return _at_end(node.part, end)
    if isinstance(node, Choice):
        ends = [_at_end(option, end) for option in node.options]
        bounded = [ranges for ranges in ends if ranges is not None]
        return merged([pair for ranges in bounded for pair in ranges]) if len(bounded) == len(ends) else None
    return None


def _alternatives(tree: _Tree) -> list[list[_Tree]]:
    """Return a pattern's alternatives as series, such that edges and look-aheads are in no group."""
    if not _has_edge(tree):
        return [[tree]]
    if isinstance(tree, Choice):
        alternatives = [parts for option in tree.options for parts in _alternatives(option)]
    elif isinstance(tree, Series):
        options = [_alternatives(part) for part in tree.parts]
        alternatives = [[part for parts in chosen for part in parts] for chosen in product(*options)]
    elif isinstance(tree, Repeat):
        alternatives = _repeated(tree)
    else:
        alternatives = [[tree]]
    if len(alternatives) > _MAX_ALTERNATIVES:
        raise PatternError("the pattern has too many alternatives")
    return alternatives


def _repeated(tree: Repeat) -> list[list[_Tree]]:
    """Return the alternatives of a repetition with edges, which may only be a $ at the end of what is repeated."""
    options = _alternatives(tree.part)
    if tree.maximum == 1:
        return [*([[]] if tree.minimum == 0 else []), *options]
    nodes = [[part for part in parts if not isinstance(part, _Edge | _Look)] for parts in options]
    plain = [Series(tuple(some)) for some, parts in zip(nodes, options, strict=True) if len(some) == len(parts)]
    ended = [parts for parts in options if any(map(_has_edge, parts))]
    for *parts, last in ended:
        is_end = isinstance(last, _Edge) and last.kind == "$" and not any(map(_has_edge, parts))
        # What may be empty can end the text several times.
        if not is_end or (tree.minimum > 1 and (not parts or _at_end(parts[0], 0) is None)):
            raise PatternError("a repeated ^, $, border or look-ahead can't be enforced while an answer is written")
    if not plain:
        return [*([[]] if tree.minimum == 0 else []), *(ended if tree.minimum < 2 else [])]
    most = None if tree.maximum is None else tree.maximum - 1
    before = Repeat(Choice(tuple(plain)), max(0, tree.minimum - 1), most)
    return [[Repeat(Choice(tuple(plain)), tree.minimum, tree.maximum)], *([before, *parts] for parts in ended)]


def _has_edge(tree: _Tree) -> bool:
    if isinstance(tree, Series):
        return any(map(_has_edge, tree.parts))
    if isinstance(tree, Choice):
        return any(map(_has_edge, tree.options))
    return _has_edge(tree.part) if isinstance(tree, Repeat) else isinstance(tree, _Edge | _Look)


def _quoted(node: Node) -> str:
    return _written(node, _json_characters)


def _python(node: Node) -> str:
    return _written(node, lambda ranges: f"[{''.join(_range(pair, _python_character) for pair in ranges)}]")


def _written(node: Node, characters: Callable[[tuple[tuple[int, int], ...]], str]) -> str:
    if isinstance(node, Characters):
        return characters(node.ranges)
    if isinstance(node, Series):
        return "".join(_written(part, characters) for part in node.parts)
    if isinstance(node, Choice):
        return f"(?:{'|'.join(_written(option, characters) for option in node.options)})"
    assert isinstance(node, Repeat), "a pattern has no other nodes"
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((node.minimum, node.maximum))
    if counts is None:
        counts = f"{{{node.minimum},{'' if node.maximum is None else node.maximum}}}"
    return f"(?:{_written(node.part, characters)}){counts}"


@lru_cache(maxsize=1024)
def _json_characters(ranges: tuple[tuple[int, int], ...]) -> str:
    """Return a regular expression of one character in a JSON string, escaped where JSON needs it."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and chr(ranges[0][0]) in _LETTERS:
        return chr(ranges[0][0])
    raw = without(merged([*without(ranges), *_NOT_RAW]))
    options = [f"[{''.join(_range(pair, _lark_character) for pair in raw)}]"] if raw else []
    escaped = [code for pair in _NOT_RAW for code in range(pair[0], pair[1] + 1) if _inside((code, code), ranges)]
    letters = "".join(_JSON_ESCAPES.get(code, "") for code in escaped)
    if letters:
        options.append(f"\\\\[{letters}]")
    for high in ("0", "1", "7"):
        digits = [f"{code & 15:x}" for code in escaped if code not in (0x22, 0x5C) and code >> 4 == int(high)]
        if digits:
            upper = [digit.upper() for digit in digits if digit.isalpha()]
            options.append(f"\\\\u00{high}[{''.join([*digits, *upper])}]")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _range(pair: tuple[int, int], written: Callable[[int], str]) -> str:
    first, last = map(written, pair)
    return first if first == last else f"{first}-{last}"


def _lark_character(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"


def _python_character(code: int) -> str:
    return f"\\U{code:08X}"


class _Parser:
    def __init__(self, text: str, line_ends: tuple[tuple[int, int], ...] = _LINE_ENDS) -> None:
        self._text = text
        self._line_ends = line_ends
        self._at = 0
        self._depth = 0

    def tree(self) -> _Tree:
        tree = self._choice()
        if self._at < len(self._text):
            self._fail(f"{self._text[self._at]!r} was never opened")
        return tree

    def _choice(self) -> _Tree:
        options = [self._series()]
        while self._take("|"):
            options.append(self._series())
        return options[0] if len(options) == 1 else Choice(tuple(options))  # type: ignore[arg-type]

    def _series(self) -> _Tree:
        parts: list[_Tree] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._item()))
        return parts[0] if len(parts) == 1 else Series(tuple(parts))  # type: ignore[arg-type]

    def _repeated(self, part: _Tree) -> _Tree:
        sign = self._text[self._at : self._at + 1]
        counts = _COUNTS.match(self._text, self._at)
        if sign and sign in "*+?":
            self._at += 1
            minimum, maximum = int(sign == "+"), 1 if sign == "?" else None
        elif counts:
            self._at = counts.end()
            minimum = int(counts[1])
            maximum = minimum if not counts[2] else int(counts[3]) if counts[3] else None
        else:
            return part
        if maximum is not None and minimum > maximum:
            self._fail("the numbers of a repetition are the wrong way round")
        if max(minimum, maximum or 0) > _MAX_REPETITIONS:
            self._fail(f"more than {_MAX_REPETITIONS:,} repetitions are too many")
        self._take("?")  # a lazy repetition matches the same texts
        if self._text[self._at : self._at + 1] in ("*", "+", "?"):
            self._fail("a repetition can't be repeated without a group")
        return Repeat(part, minimum, maximum)  # type: ignore[arg-type]

    def _item(self) -> _Tree:
        character = self._text[self._at]
        self._at += 1
        if character in "^$":
            return _Edge(character)
        if character == ".":
            return Characters(without(self._line_ends))
        if character == "(":
            return self._group()
        if character == "[":
            return self._characters()
        if character == "\\":
            return self._escape()
        if character in "*+?":
            self._fail(f"there is nothing before {character!r} to repeat")
        return _one(ord(character))

    def _group(self) -> _Tree:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail(f"parentheses are nested more than {_MAX_DEPTH} deep")
        look = next((sign for sign in ("?=", "?!", "?<=", "?<!") if self._take(sign)), "")
        if not look and self._take("?") and not self._take(":"):
            name = re.compile(r"P?<\w+>").match(self._text, self._at)
            if name is None:
                self._fail("flags and other groups that begin with (? are not known")
            self._at = name.end()
        if look.startswith("?<"):
            self._fail("look-around and back-references can't be enforced while an answer is written")
        tree = self._choice()
        if not self._take(")"):
            self._fail("a ( is never closed")
        self._depth -= 1
        return _Look(tree, look == "?!") if look else tree

    def _characters(self) -> _Tree:
        is_negative = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                self._fail("a [ is never closed")
            one = self._member()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                if self._at >= len(self._text):
                    self._fail("a [ is never closed")
                other = self._member()
                if len(one) == len(other) == 1 and one[0][0] == one[0][1] and other[0][0] == other[0][1]:
                    if one[0][0] > other[0][0]:
                        self._fail("a range of characters is the wrong way round")
                    one = ((one[0][0], other[0][0]),)
                else:
                    one = (*one, (0x2D, 0x2D), *other)
            ranges += one
        chosen = without(merged(ranges)) if is_negative else without(without(merged(ranges)))
        if not chosen:
            self._fail("a [] allows no character at all")
        return Characters(chosen)

    def _member(self) -> tuple[tuple[int, int], ...]:
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return ((ord(character), ord(character)),)
        if self._take("b"):
            return ((8, 8),)
        escaped = self._escape(in_class=True)
        assert isinstance(escaped, Characters), "other escapes are no members"
        return escaped.ranges

    def _escape(self, *, in_class: bool = False) -> _Tree:
        character = self._text[self._at : self._at + 1]
        self._at += 1
        if not character:
            self._fail("a \\ is the last character")
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return Characters(ranges if character.islower() else without(ranges))
        if character in _CONTROLS:
            return _one(_CONTROLS[character])
        if character == "0":
            return _one(0)
        if character in "xuc":
            return self._coded(character)
        if character in "pP":
            return self._property(is_negative=character == "P")
        if not in_class and character in "AZz":  # Python's names of ^ and $
            return _Edge("^" if character == "A" else "$")
        if not in_class and character in "bB":
            return _Edge(character)
        if character.isdecimal() or (character == "k" and self._text.startswith("<", self._at)):
            self._fail("look-around and back-references can't be enforced while an answer is written")
        return _one(ord(character))

    def _coded(self, letter: str) -> _Tree:
        forms = {"x": r"([0-9A-Fa-f]{2})", "u": r"([0-9A-Fa-f]{4})|\{([0-9A-Fa-f]{1,6})\}", "c": r"([A-Za-z])"}
        match = re.compile(forms[letter]).match(self._text, self._at)
        if match is None:
            return _one(ord(letter))
        self._at = match.end()
        digits = next(group for group in match.groups() if group)
        code = ord(digits) % 32 if letter == "c" else int(digits, 16)
        if 0xD800 <= code < 0xDC00 and (low := _LOW_SURROGATE.match(self._text, self._at)):
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            self._fail("half a character can't be written")
        return _one(code)

    def _property(self, *, is_negative: bool) -> _Tree:
        match = re.compile(r"\{(?:General_Category=|gc=)?(\w+)\}").match(self._text, self._at)
        name = _CATEGORIES.get(match[1], match[1]) if match else ""
        ranges = _category(name) if len(name) in (1, 2) else ()
        if match is None or not ranges:
            self._fail("of the properties of characters only general categories are known, e.g. \\p{L}")
        self._at = match.end()
        return Characters(without(ranges) if is_negative else ranges)

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) if is_there else 0
        return is_there

    def _fail(self, why: str) -> NoReturn:
        raise PatternError(why)


def _one(code: int) -> Characters:
    return Characters(((code, code),))


@lru_cache(maxsize=32)
def _category(name: str) -> tuple[tuple[int, int], ...]:
    """Return the characters of a general category of Unicode."""
    return merged(list(_runs(name)))


def _runs(name: str) -> Iterator[tuple[int, int]]:
    first = None
    for code in range(0x110000):
        if unicodedata.category(chr(code)).startswith(name) and not 0xD800 <= code <= 0xDFFF:
            first = code if first is None else first
        elif first is not None:
            yield first, code - 1
            first = None


# ---- formats ----

# Somewhat stricter than RFC 3339 for dates and times (no leap second, no year 0), RFC 5321 for addresses, RFC 3986 for
# URIs and RFC 9562 for UUIDs.
_LOWER = "a-zA-Z0-9"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_OCTET}\\.){{3}}{_OCTET}"
_H16 = "[0-9a-fA-F]{1,4}"
_IPV6 = "(?:" + "|".join([
    f"(?:{_H16}:){{7}}{_H16}",
    *(f"(?:{_H16}(?::{_H16}){{0,{n}}})?::(?:{_H16}(?::{_H16}){{0,{5 - n}}})?" for n in range(6)),
]) + ")"  # fmt: skip
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    f"02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_COUNT = "[0-9]{1,9}"
_CLOCK = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DAYS = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_LABEL = f"[{_LOWER}](?:[{_LOWER}-]{{0,61}}[{_LOWER}])?"
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL})*"
_PCHAR = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_AUTHORITY = (
    r"(?:(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2})*@)?"
    rf"(?:\[{_IPV6}\]|(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{{2}})*)(?::[0-9]{{0,5}})?"
)
FORMATS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|{_COUNT}W)",
        "email": f"{_ATOM}(?:\\.{_ATOM})*@(?:{_HOSTNAME}|\\[{_IPV4}\\])",
        "hostname": _HOSTNAME,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uri": (
            f"[a-zA-Z][a-zA-Z0-9+\\-.]*:(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
            f"|{_PCHAR}+(?:/{_PCHAR}*)*)?(?:\\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
        ),
        "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    }.items()
}  # fmt: skip
