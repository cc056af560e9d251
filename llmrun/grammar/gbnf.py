"""A parser and checks of GBNF, llama.cpp's grammar language, with errors at line and column.

Accepts llama.cpp's syntax, underscores in names, and rules that continue with
`|` on the next line. Unlike llama.cpp, refuses rules that are defined twice or can never end and repetitions of
repetitions, and never repeats more often than written. No input can exhaust the stack: walks over rules are loops, and
nesting is limited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from llmrun.errors import BadGrammarError, did_you_mean
from llmrun.grammar.place import GRAMMAR, broken, check_text, place

MAX_DEPTH = 100
MAX_REPETITIONS = 10_000
ROOT = "root"
_MAX_POSTFIXES = 8
_LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
ANY = ((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST_CHARACTER))

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNTS = re.compile(r"\{\s*(\d{1,12})\s*(,?)\s*(\d{1,12})?\s*\}")
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]*")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES_HINT = r"the escapes are \n \r \t \\ \" \[ \] \- \xXX \uXXXX \UXXXXXXXX"


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A text, maybe empty."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Characters:
    """One character of these ranges: inclusive (first, last) code points, sorted and disjoint."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The name of a rule."""

    name: str
    offset: int  # in the text


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """All parts, in order."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A part, several times."""

    part: Node
    minimum: int
    maximum: int | None  # None is no limit


Node = Literal | Characters | Reference | Series | Choice | Repeat


@dataclass(frozen=True, slots=True)
class Rule:
    """The definition of a rule."""

    name: str
    offset: int  # in the text
    body: Node


def parse(text: str) -> dict[str, Rule]:
    """Return the rules of a grammar, ROOT among them.

    Raises:
        BadGrammarError: the grammar is broken, or allows no answer.
    """
    check_text(GRAMMAR, text)
    rules = _Parser(text).rules()
    check_rules(text, rules)
    return rules


def check_rules(text: str, rules: Mapping[str, Rule]) -> None:
    """Raise BadGrammarError for a rule that is missing, begins with itself or can never end; `text` has all rules."""
    _check_names(text, rules)
    _check_left_recursion(text, rules)
    _check_ends(text, rules)


class _Parser:
    """Recursive descent, as in llama.cpp's llama_grammar_parser."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._open: list[int] = []  # offsets of the parentheses around this place

    def rules(self) -> dict[str, Rule]:
        rules: dict[str, Rule] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            rule = self._rule()
            if rule.name in rules:
                first = place(self._text, rules[rule.name].offset)
                raise self._error(f"rule {rule.name!r} is defined twice, first at {first}", offset=rule.offset)
            rules[rule.name] = rule
            self._skip(lines=True)
        return rules

    def _rule(self) -> Rule:
        name, offset = self._name(), self._at
        if not name:
            raise self._error(f"a rule begins with its name, not with {self._found()}", hint='write: name ::= "text"')
        self._at += len(name)
        self._skip()
        if not self._text.startswith("::=", self._at):
            raise self._error(f"after the name {name!r} there should be '::=', not {self._found()}")
        self._at += len("::=")
        self._skip(lines=True)
        body = self._choice()
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            raise self._unexpected()
        return Rule(name, offset, body)

    def _choice(self) -> Node:
        options = [self._series()]
        while self._another_option():
            self._at += 1
            self._skip(lines=True)
            options.append(self._series())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _another_option(self) -> bool:
        after = _BLANKS_AND_LINES.match(self._text, self._at)
        end = after.end() if after else self._at
        if self._text.startswith("|", end):
            self._at = end
            return True
        return False

    def _series(self) -> Node:
        parts: list[Node] = []
        while part := self._item():
            parts.append(self._repeated(part))
            self._skip(lines=bool(self._open))
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _item(self) -> Node | None:
        character = self._text[self._at : self._at + 1]
        if character == '"':
            return self._literal()
        if character == "[":
            return self._characters()
        if character == "(":
            return self._group()
        if character == ".":
            self._at += 1
            return Characters(ANY)
        if character in ("<", "!"):
            raise self._error(
                "a token in angle brackets can't be enforced here", hint='name its text in quotes, as in "<think>"'
            )
        return self._reference()

    def _reference(self) -> Reference | None:
        name, offset = self._name(), self._at
        if not name:
            return None
        after = _BLANKS.match(self._text, offset + len(name))
        if after and self._text.startswith("::=", after.end()):
            if self._open:
                raise self._error("this ( is never closed", offset=self._open[-1])
            raise self._error(f"rule {name!r} should begin on a line of its own")
        self._at += len(name)
        return Reference(name, offset)

    def _group(self) -> Node:
        if len(self._open) >= MAX_DEPTH:
            raise self._error(f"parentheses are nested more than {MAX_DEPTH} deep", hint="give the inner part a name")
        self._open.append(self._at)
        self._at += 1
        self._skip(lines=True)
        body = self._choice()
        self._skip(lines=True)
        if self._at >= len(self._text):
            raise self._error("this ( is never closed", offset=self._open[-1])
        if self._text[self._at] != ")":
            raise self._unexpected()
        self._open.pop()
        self._at += 1
        return body

    def _literal(self) -> Literal:
        start = self._at
        self._at += 1
        characters: list[str] = []
        while not self._text.startswith('"', self._at):
            characters.append(self._character('this " is never closed', start))
        self._at += 1
        return Literal("".join(characters))

    def _characters(self) -> Characters:
        start = self._at
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            ranges.append(self._range(start))
        self._at += 1
        if not ranges:
            raise self._error("[] allows no character at all", offset=start)
        chosen = without(tuple(ranges)) if negated else merged(ranges)
        if not chosen:
            raise self._error("this [^...] allows no character at all", offset=start)
        return Characters(chosen)

    def _range(self, start: int) -> tuple[int, int]:
        offset, unclosed = self._at, "this [ is never closed"
        first = last = ord(self._character(unclosed, start))
        if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
            self._at += 1
            last = ord(self._character(unclosed, start))
        if first > last:
            written = self._text[offset : self._at]
            raise self._error(f"the range {written} goes backwards", offset=offset)
        return first, last

    def _character(self, unclosed: str, start: int) -> str:
        """Read one character inside quotes or brackets, maybe escaped."""
        character = self._text[self._at : self._at + 1]
        if character in ("", "\n", "\r"):
            hint = "a line break is written \\n" if character else ""
            raise self._error(unclosed, hint, offset=start)
        self._at += 1
        return self._escaped() if character == "\\" else character

    def _escaped(self) -> str:
        start = self._at - 1
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        if letter in _ESCAPES:
            return _ESCAPES[letter]
        digits = _HEX_DIGITS.get(letter)
        if digits is None:
            raise self._error(f"there is no escape \\{letter}", _ESCAPES_HINT, offset=start)
        match = _HEXADECIMAL.match(self._text, self._at, self._at + digits)
        written = match[0] if match else ""
        if len(written) < digits:
            raise self._error(f"\\{letter} needs {digits} hexadecimal digits", offset=start)
        self._at += digits
        code = int(written, 16)
        if code > _LAST_CHARACTER or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise self._error(f"\\{letter}{written} is not a character of Unicode", offset=start)
        return chr(code)

    def _repeated(self, part: Node) -> Node:
        """Apply the operators after a part."""
        for _ in range(_MAX_POSTFIXES):
            self._skip(lines=bool(self._open))
            operator = self._text[self._at : self._at + 1]
            if not operator or operator not in "*+?{":
                return part
            part = Repeat(part, *self._counts(operator))
        raise self._error("too many repetitions of repetitions")

    def _counts(self, operator: str) -> tuple[int, int | None]:
        if operator != "{":
            self._at += 1
            return (1 if operator == "+" else 0), (1 if operator == "?" else None)
        match = _COUNTS.match(self._text, self._at)
        if match is None:
            raise self._error("a repetition is written {2}, {2,} or {2,5}")
        low = int(match[1])
        high = int(match[3]) if match[3] else None if match[2] else low
        if match[3] and not match[2]:
            raise self._error("a repetition is written {2}, {2,} or {2,5}")
        if high is not None and high < low:
            raise self._error(f"from {low} to {high} times is not a range")
        if max(low, high or 0) > MAX_REPETITIONS:
            raise self._error(f"nothing can be repeated more than {MAX_REPETITIONS:,} times", "for no limit write {1,}")
        self._at = match.end()
        return low, high

    def _name(self) -> str:
        match = _NAME.match(self._text, self._at)
        return match[0] if match else ""

    def _skip(self, *, lines: bool = False) -> None:
        match = (_BLANKS_AND_LINES if lines else _BLANKS).match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _found(self) -> str:
        character = self._text[self._at : self._at + 1]
        return "the end" if not character else "the end of the line" if character in "\r\n" else repr(character)

    def _unexpected(self) -> BadGrammarError:
        unexpected = self._found()
        if unexpected in ("'*'", "'+'", "'?'", "'{'"):
            return self._error(f"there is nothing that {unexpected} could repeat")
        if unexpected == "')'":
            return self._error("this ) was never opened")
        return self._error(f"{unexpected} is not expected here")

    def _error(self, why: str, hint: str = "", *, offset: int | None = None) -> BadGrammarError:
        return broken(GRAMMAR, self._text, min(self._at, len(self._text)) if offset is None else offset, why, hint)


def merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the characters of all ranges as sorted and disjoint ones."""
    ranges_so_far: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if ranges_so_far and first <= ranges_so_far[-1][1] + 1:
            ranges_so_far[-1] = (ranges_so_far[-1][0], max(ranges_so_far[-1][1], last))
        else:
            ranges_so_far.append((first, last))
    return tuple(ranges_so_far)


def without(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return all other characters."""
    left: list[tuple[int, int]] = []
    start = 0
    for first, last in merged([*ranges, _SURROGATES]):
        if start < first:
            left.append((start, first - 1))
        start = last + 1
    if start <= _LAST_CHARACTER:
        left.append((start, _LAST_CHARACTER))
    return tuple(left)


def references(node: Node) -> Iterator[Reference]:
    """Yield the rules that a node names, in order."""
    if isinstance(node, Reference):
        yield node
    elif isinstance(node, Series | Choice):
        for part in node.parts if isinstance(node, Series) else node.options:
            yield from references(part)
    elif isinstance(node, Repeat):
        yield from references(node.part)


def closure(rules: Mapping[str, Rule], holds: Callable[[Node, set[str]], bool]) -> set[str]:
    """Return the names of the rules with a property that depends on the rules they name.

    Args:
        holds: returns whether a node has the property, given the rules that are known to; monotonic.
    """
    users: dict[str, list[str]] = {name: [] for name in rules}
    for rule in rules.values():
        for reference in references(rule.body):
            users[reference.name].append(rule.name)
    names: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in names and holds(rules[name].body, names):
            names.add(name)
            waiting += users[name]
    return names


def can_be_empty(node: Node, empty_rules: set[str]) -> bool:
    """Return whether a node can match the empty text."""
    if isinstance(node, Literal):
        return not node.text
    if isinstance(node, Characters):
        return False
    if isinstance(node, Reference):
        return node.name in empty_rules
    if isinstance(node, Series):
        return all(can_be_empty(part, empty_rules) for part in node.parts)
    if isinstance(node, Choice):
        return any(can_be_empty(option, empty_rules) for option in node.options)
    return node.minimum == 0 or can_be_empty(node.part, empty_rules)


def _can_end(node: Node, ending_rules: set[str]) -> bool:
    if isinstance(node, Reference):
        return node.name in ending_rules
    if isinstance(node, Series):
        return all(_can_end(part, ending_rules) for part in node.parts)
    if isinstance(node, Choice):
        return any(_can_end(option, ending_rules) for option in node.options)
    return not isinstance(node, Repeat) or node.minimum == 0 or _can_end(node.part, ending_rules)


def _first_references(node: Node, empty_rules: set[str]) -> Iterator[Reference]:
    """Yield the rules that can begin a node."""
    if isinstance(node, Reference):
        yield node
    elif isinstance(node, Choice):
        for option in node.options:
            yield from _first_references(option, empty_rules)
    elif isinstance(node, Repeat):
        if node.maximum != 0:
            yield from _first_references(node.part, empty_rules)
    elif isinstance(node, Series):
        for part in node.parts:
            yield from _first_references(part, empty_rules)
            if not can_be_empty(part, empty_rules):
                return


def _check_names(text: str, rules: Mapping[str, Rule]) -> None:
    for rule in rules.values():
        for reference in references(rule.body):
            if reference.name not in rules:
                why = f"rule {reference.name!r} is used but never defined"
                raise broken(GRAMMAR, text, reference.offset, why, did_you_mean(reference.name, rules))
    if ROOT not in rules:
        first = next(iter(rules.values()), None)
        offset = first.offset if first else len(text.rstrip())
        raise broken(GRAMMAR, text, offset, f"no rule is named {ROOT!r}", "the answer begins with the rule 'root'")


def _check_left_recursion(text: str, rules: Mapping[str, Rule]) -> None:
    empty = closure(rules, can_be_empty)
    done: set[str] = set()
    for start in rules:
        # A walk along the first references; `path` holds the rules around the current one.
        path: dict[str, Iterator[Reference]] = {}
        following: str | None = None if start in done else start
        while following or path:
            if following:
                path[following] = _first_references(rules[following].body, empty)
                following = None
            name = next(reversed(path))
            reference = next(path[name], None)
            if reference is None:
                done.add(name)
                del path[name]
            elif reference.name in path:
                raise _left_recursion(text, list(path), reference)
            elif reference.name not in done:
                following = reference.name


def _left_recursion(text: str, path: list[str], reference: Reference) -> BadGrammarError:
    circle = [*path[path.index(reference.name) :], reference.name]
    shown = circle if len(circle) <= 6 else [*circle[:3], "...", *circle[-2:]]
    why = f"rule {reference.name!r} begins with itself ({' > '.join(shown)})"
    return broken(GRAMMAR, text, reference.offset, why, 'write it as a repetition: item ("," item)*')


def _check_ends(text: str, rules: Mapping[str, Rule]) -> None:
    ending = closure(rules, _can_end)
    for rule in rules.values():
        if rule.name not in ending:
            why = f"rule {rule.name!r} can never end, because every option leads back to it"
            raise broken(GRAMMAR, text, rule.offset, why, "give it an option that does not name it again")
