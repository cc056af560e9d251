"""Lark grammars as the rules of GBNF, for texts that stand inside other ones: a tool's text argument, as JSON or plain.

Characters take the place of Lark's terminals, so that a text is right if any split into terminals makes it so; Lark's
own lexer may read it in one way only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from llmrun.grammar import regex
from llmrun.grammar.gbnf import (
    MAX_DEPTH,
    MAX_REPETITIONS,
    ROOT,
    Characters,
    Choice,
    Literal,
    Node,
    Reference,
    Repeat,
    Rule,
    Series,
    check_rules,
    merged,
    references,
    without,
)
from llmrun.grammar.place import GRAMMAR, broken, check_text

_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t\f]|//[^\n]*|\\\n)+)
    |(?P<line>\r?\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"(?P<any_case>i?))
    |(?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/)(?P<flags>[imslux]*)
    |(?P<directive>%[a-z]+)
    |(?P<range>\.\.)
    |(?P<alias>->[ \t]*\w+)
    |(?P<name>[!?]*[A-Za-z_]\w*)
    |(?P<number>\d{1,9})
    |(?P<sign>[:|()\[\]*+?~{},.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_START = "start"
_IN_JSON = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # characters that a JSON string escapes

# The terminals that lark.common has, without look-behind.
_COMMON = r"""
DIGIT: "0".."9"
HEXDIGIT: "a".."f" | "A".."F" | DIGIT
INT: DIGIT+
SIGNED_INT: ["+"|"-"] INT
DECIMAL: INT "." INT? | "." INT
_EXP: ("e"|"E") SIGNED_INT
FLOAT: INT _EXP | DECIMAL _EXP?
SIGNED_FLOAT: ["+"|"-"] FLOAT
NUMBER: FLOAT | INT
SIGNED_NUMBER: ["+"|"-"] NUMBER
ESCAPED_STRING: /"([^"\\\n]|\\[^\n])*"/
LCASE_LETTER: "a".."z"
UCASE_LETTER: "A".."Z"
LETTER: UCASE_LETTER | LCASE_LETTER
WORD: LETTER+
CNAME: ("_"|LETTER) ("_"|LETTER|DIGIT)*
WS_INLINE: (" "|/\t/)+
WS: /[ \t\f\r\n]/+
CR: /\r/
LF: /\n/
NEWLINE: (CR? LF)+
"""


class _Token(NamedTuple):
    kind: str  # a group of _TOKEN, or "end"
    text: str
    offset: int
    flags: str = ""


def parse(text: str) -> dict[str, Rule]:
    """Return the rules of a Lark grammar, and ROOT, which is its `start`.

    Raises:
        BadGrammarError: it is broken, allows no text, or has what can't be enforced inside another text: %ignore,
            templates, left recursion, look-around.
    """
    check_text(GRAMMAR, text)
    rules = {**_Parser(text).rules(), ROOT: Rule(ROOT, 0, Reference(_START, 0))}
    check_rules(text, rules)
    return rules


def of_pattern(pattern: str) -> str:
    """Return the Lark grammar of texts that a regular expression matches as a whole."""
    escaped = re.sub(r"\\?[/\n]", lambda match: "\\n" if match[0].endswith("\n") else "\\/", pattern)
    return f"start: /{escaped}/" if escaped else 'start: ""'


def in_json(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules of the same texts as the content of a JSON string, each in the spelling of json.dumps()."""
    return {name: Rule(name, rule.offset, _escaped(rule.body)) for name, rule in rules.items()}


def before(rules: Mapping[str, Rule], end: str) -> dict[str, Rule]:
    """Return the rules of the same texts with an end behind them."""
    return {**rules, ROOT: Rule(ROOT, 0, Series((rules[ROOT].body, Literal(end))))}


def _escaped(node: Node) -> Node:
    if isinstance(node, Literal):
        return Literal(_content(node.text))
    if isinstance(node, Characters):
        plain = without(merged([*without(node.ranges), *_IN_JSON]))
        codes = (code for first, last in _IN_JSON for code in range(first, last + 1))
        inside = [code for code in codes if any(first <= code <= last for first, last in node.ranges)]
        options: list[Node] = [Characters(plain)] if plain else []
        options += [Literal(_content(chr(code))) for code in inside]
        return options[0] if len(options) == 1 else Choice(tuple(options))
    if isinstance(node, Series):
        return Series(tuple(map(_escaped, node.parts)))
    if isinstance(node, Choice):
        return Choice(tuple(map(_escaped, node.options)))
    return Repeat(_escaped(node.part), node.minimum, node.maximum) if isinstance(node, Repeat) else node


def _content(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Parser:
    """Recursive descent, by the grammar of Lark's own documentation."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*self._significant()]
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Rule]:
        rules: dict[str, Rule] = {}
        while self._now.kind != "end":
            if self._now.kind == "directive":
                self._directive(rules)
            elif self._now.kind == "line":
                self._next()
            else:
                self._add(rules, self._rule())
        return rules

    def _significant(self) -> Iterator[_Token]:
        """Yield the tokens that mean something: no blanks, and no ends of lines inside a rule."""
        at, depth, line = 0, 0, None
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self._fail(at, f"{self._text[at]!r} is not expected here")
            kind = match.lastgroup or ""
            kind = "text" if kind == "any_case" else "regex" if kind == "flags" else kind
            token = _Token(kind, match[kind], at, match["flags"] or match["any_case"] or "")
            at = match.end()
            if kind == "line":
                line = token
            elif kind != "blank":
                if line and not depth and token.text != "|":
                    yield line
                line = None
                depth += (token.text in "([{") - (token.text in ")]}") if kind == "sign" else 0
                yield token
        yield _Token("end", "", len(self._text))

    @property
    def _now(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._now
        self._at += token.kind != "end"
        return token

    def _take(self, text: str) -> bool:
        is_there = self._now.kind in ("sign", "range") and self._now.text == text
        self._at += is_there
        return is_there

    def _needed(self, kind: str, what: str) -> _Token:
        if self._now.kind != kind:
            self._unexpected(f", but {what}")
        return self._next()

    def _add(self, rules: dict[str, Rule], rule: Rule) -> None:
        if rule.name in rules:
            self._fail(rule.offset, f"rule {rule.name!r} is defined twice")
        rules[rule.name] = rule

    def _directive(self, rules: dict[str, Rule]) -> None:
        directive = self._next()
        if directive.text != "%import":
            self._fail(directive.offset, f"{directive.text} can't be enforced inside another text")
        if self._needed("name", "a name").text != "common" or not self._take("."):
            self._fail(directive.offset, "only the terminals of `common` can be imported")
        self._import(rules, self._needed("name", "a name"))

    def _import(self, rules: dict[str, Rule], name: _Token) -> None:
        common = _Parser(_COMMON).rules()
        if name.text not in common:
            self._fail(name.offset, f"there is no common.{name.text}")
        new = self._next().text.removeprefix("->").strip() if self._now.kind == "alias" else name.text
        self._add(rules, Rule(new, name.offset, common[name.text].body))
        waiting = [name.text]
        while waiting:
            for used in (reference.name for reference in references(common[waiting.pop()].body)):
                if used not in rules:
                    rules[used] = common[used]
                    waiting.append(used)

    def _rule(self) -> Rule:
        name = self._needed("name", "the name of a rule")
        if self._take("."):
            self._needed("number", "a priority")  # there is one split only
        if not self._take(":"):
            self._unexpected(" after the name of a rule")
        body = self._choice()
        if self._now.kind not in ("line", "end"):
            self._unexpected()
        return Rule(_name(name.text), name.offset, body)

    def _choice(self) -> Node:
        options = [self._series()]
        while self._take("|"):
            options.append(self._series())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _series(self) -> Node:
        parts: list[Node] = []
        while self._now.kind in ("name", "text", "regex") or self._now.text in ("(", "["):
            parts.append(self._repeated(self._item()))
        if self._now.kind == "alias":
            self._next()
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        if self._now.kind == "sign" and self._now.text in _COUNTS:
            return Repeat(part, *_COUNTS[self._next().text])
        at, is_braced = self._now.offset, self._now.text == "{"
        if not (self._take("~") or self._take("{")):
            return part
        low = int(self._needed("number", "how often").text)
        high: int | None = low
        if self._take(",") or self._take(".."):
            high = int(self._next().text) if self._now.kind == "number" else None
        if is_braced and not self._take("}"):
            self._unexpected()
        if high is not None and high < low:
            self._fail(at, f"from {low} to {high} times is not a range")
        if max(low, high or 0) > MAX_REPETITIONS:
            self._fail(at, f"nothing can be repeated more than {MAX_REPETITIONS:,} times")
        return Repeat(part, low, high)

    def _item(self) -> Node:
        token = self._next()
        if token.kind == "name":
            if self._now.text == "{" and self._tokens[self._at + 1].kind != "number":
                self._fail(token.offset, "templates can't be enforced inside another text")
            return Reference(_name(token.text), token.offset)
        if token.kind == "regex":
            if token.flags:
                self._fail(token.offset, f"the flag {token.flags} of a regular expression is not known")
            return self._pattern(token)
        if token.kind == "text":
            return self._literal(token)
        if self._depth >= MAX_DEPTH:
            self._fail(token.offset, f"parentheses are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        body = self._choice()
        if not self._take(")" if token.text == "(" else "]"):
            self._fail(token.offset, f"this {token.text} is never closed")
        self._depth -= 1
        return Repeat(body, 0, 1) if token.text == "[" else body

    def _pattern(self, token: _Token) -> Node:
        try:
            return regex.node_of(token.text[1:-1].replace("\\/", "/"))
        except regex.PatternError as error:
            self._fail(token.offset, str(error))

    def _literal(self, token: _Token) -> Node:
        text = _unescaped(token)
        if self._take(".."):
            last = _unescaped(self._needed("text", "the last character"))
            if len(text) != 1 or len(last) != 1 or text > last:
                self._fail(token.offset, "a range is of single characters, the first one first")
            return Characters(((ord(text), ord(last)),))
        if not token.flags:
            return Literal(text)
        cases = ({each.lower(), each.upper()} for each in text)
        return Series(
            tuple(Characters(merged([(ord(one), ord(one)) for one in each if len(one) == 1])) for each in cases)
        )

    def _unexpected(self, more: str = "") -> NoReturn:
        token = self._now
        found = {"end": "the end", "line": "the end of the line"}.get(token.kind, repr(token.text))
        self._fail(token.offset, f"{found} is not expected here{more}")

    def _fail(self, offset: int, why: str) -> NoReturn:
        raise broken(GRAMMAR, self._text, offset, why)


def _any_case(character: str) -> Characters:
    cases = {character, character.lower(), character.upper()}
    return Characters(merged([(ord(one), ord(one)) for one in cases if len(one) == 1]))


def _name(text: str) -> str:
    name = text.lstrip("!?")
    return f"{ROOT} of the grammar" if name == ROOT else name


def _unescaped(token: _Token) -> str:
    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        return chr(int(digits, 16)) if digits else _CONTROLS.get(match[4], match[4])

    return _ESCAPE.sub(character, token.text[1 : token.text.rindex('"')])
