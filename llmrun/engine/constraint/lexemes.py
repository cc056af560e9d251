"""Translation of GBNF rules to an equivalent Lark grammar for llguidance.

Owns the choice of lexemes; must not know tokens. llguidance splits text into lexemes, which are fast regular
expressions, and parses those. Its lexer is greedy: given the lexemes "a" and "ab" it reads "ab" as one, even if the
rules only continue after "a". GBNF has no lexemes, so they are chosen here such that greed never matters: first as
large as possible, then each one that could match text of its neighbours is split, at last into single characters, which
are always right, but slow. A grammar without recursion is one lexeme.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

from llmrun.engine.constraint.conflicts import Lexeme, Part, children, greedy_lexemes, parsed_references
from llmrun.grammar.gbnf import (
    ROOT,
    Characters,
    Choice,
    Literal,
    Node,
    Reference,
    Repeat,
    Rule,
    Series,
    closure,
    references,
)  # fmt: skip
from llmrun.grammar.json_lark import Rules

_MAX_PARENTHESES = 8


def to_lark(rules: Mapping[str, Rule]) -> str:
    """Return the grammar of these rules (see gbnf.parse) in Lark; see lark_rules()."""
    written = lark_rules(rules)
    return "\n".join([f"start: {written.start}", *written.lines, ""])


def lark_rules(rules: Mapping[str, Rule], prefix: str = "") -> Rules:
    """Return Lark's rules for those of GBNF.

    Args:
        prefix: of the names, in lower case.

    Raises:
        BadGrammarError: the grammar is too large.
    """
    flat = closure(rules, lambda node, known: all(reference.name in known for reference in references(node)))
    outline = _Outline(rules, flat)
    if ROOT not in flat:
        while greedy := greedy_lexemes(outline.bodies, outline.lexemes, rules):
            outline.split(greedy)
    return _Writer(rules, outline, prefix).rules()


class _Outline:
    """The split of rules into parts for the parser and lexemes.

    Attributes:
        bodies: the rules of the parser, with lexemes as leaves.
    """

    def __init__(self, rules: Mapping[str, Rule], flat: set[str]) -> None:
        self._rules = rules
        self._flat = flat
        self._split: set[Node] = set()  # never lexemes as a whole
        self._apart: set[Series] = set()  # their parts are never merged
        self._whole_options: dict[Choice, Choice] = {}  # a choice -> its options that may be one lexeme
        self._make()

    def split(self, lexemes: Iterable[Lexeme]) -> None:
        """Split these into smaller lexemes."""
        for lexeme in lexemes:
            node = lexeme.node
            if lexeme.origin:
                self._apart.add(lexeme.origin)
            else:
                self._split.add(node)
            if isinstance(node, Series):
                self._apart.add(node)
            elif isinstance(node, Reference):
                self._split.add(self._rules[node.name].body)
        self._make()

    def _make(self) -> None:
        self.bodies: dict[str, Part] = {}
        self.lexemes: list[Lexeme] = []
        queue = [ROOT]
        while queue:
            name = queue.pop()
            if name not in self.bodies:
                self.bodies[name] = body = self._part(self._rules[name].body)
                queue += [reference.name for reference in parsed_references(body)]

    def _part(self, node: Node) -> Part:
        if self._is_whole(node):
            return self._lexeme(node)
        if isinstance(node, Literal):
            return Series(_tree(self._lexeme(Literal(character)) for character in node.text))
        if isinstance(node, Series):
            return Series(_tree(self._series(node)))
        if isinstance(node, Choice):
            return Choice(_tree(self._part(option) for option in self._options(node)))
        if isinstance(node, Repeat):
            return Repeat(_tree([self._part(node.part)])[0], node.minimum, node.maximum)
        return node

    def _options(self, node: Choice) -> Iterator[Node]:
        """Yield the options of a choice, those without recursion as one."""
        if node not in self._whole_options:
            self._whole_options[node] = Choice(tuple(filter(self._is_whole, node.options)))
        whole = self._whole_options[node]
        if len(whole.options) > 1 and whole not in self._split and not self._split.intersection(whole.options):
            yield whole
            yield from (option for option in node.options if option not in whole.options)
        else:
            yield from node.options

    def _series(self, node: Series) -> Iterator[Part]:
        """Yield the parts of a series, adjacent ones merged to one lexeme where possible."""
        run: list[Node] = []
        for part in node.parts:
            if node not in self._apart and self._is_whole(part):
                run.append(part)
                continue
            yield from self._merged(run, node)
            run = []
            yield self._part(part)
        yield from self._merged(run, node)

    def _merged(self, run: list[Node], origin: Series) -> Iterator[Part]:
        if len(run) == 1:
            yield self._lexeme(run[0])
        elif run:
            yield self._lexeme(Series(tuple(run)), origin)

    def _lexeme(self, node: Node, origin: Series | None = None) -> Lexeme:
        self.lexemes.append(Lexeme(node, origin))
        return self.lexemes[-1]

    def _is_whole(self, node: Node) -> bool:
        return node not in self._split and all(reference.name in self._flat for reference in references(node))


def _tree(parts: Iterable[Part]) -> tuple[Node, ...]:
    """Cast parts to nodes; only this module and conflicts.py handle nodes that contain lexemes."""
    return cast("tuple[Node, ...]", tuple(parts))


class _Writer:
    """A writer of Lark: behind the prefix, rules are r0, r1 .., terminals T0, T1 .."""

    def __init__(self, rules: Mapping[str, Rule], outline: _Outline, prefix: str) -> None:
        self._rules = rules
        self._rule, self._token = f"{prefix}r", f"{prefix.upper()}T"
        self._outline = outline
        self._lines: list[str] = []
        self._rule_names: dict[str, str] = {}
        self._terminal_names: dict[str, str] = {}
        self._texts: dict[str, str] = {}  # text of a terminal -> its name
        self._queue: list[str] = []  # rules whose terminal has a name, but is not written yet
        self._parser_rules = 0

    def rules(self) -> Rules:
        for name in self._outline.bodies:
            self._rule_names[name] = f"{self._rule}{len(self._rule_names)}"
        self._parser_rules = len(self._rule_names)
        for name, body in self._outline.bodies.items():
            self._lines.append(f"{self._rule_names[name]}: {self._expression(body, self._in_parser)}")
        while self._queue:
            name = self._queue.pop()
            body = self._rules[name].body
            self._lines.append(f"{self._terminal_names[name]}: {self._expression(body, self._in_lexer)}")
        return Rules(f"{self._rule}0", tuple(self._lines))

    def _expression(self, part: Part, leaf: Callable[[Part], str]) -> str:
        return self._nested(part, leaf)[0]

    def _nested(self, part: Part, leaf: Callable[[Part], str]) -> tuple[str, int]:
        """Return a part's text, in parentheses if needed, and their depth."""
        below = children(part)
        if not below:
            return leaf(part), 0
        written = [self._nested(child, leaf) for child in below]
        texts = [text for text, _ in written]
        depth = max(depth for _, depth in written) + 1
        if isinstance(part, Repeat):
            text = _repetition(texts[0], part)
        else:
            text = f"({(' | ' if isinstance(part, Choice) else ' ').join(texts)})"
        if depth < _MAX_PARENTHESES:
            return text, depth
        return self._named(text, leaf), 0

    def _named(self, text: str, leaf: Callable[[Part], str]) -> str:
        """Return a new rule's or terminal's name for a text that is nested too deep for Lark's parser."""
        if leaf == self._in_lexer:
            return self._terminal(text)
        self._parser_rules += 1
        name = f"{self._rule}{self._parser_rules}"
        self._lines.append(f"{name}: {text}")
        return name

    def _terminal(self, text: str) -> str:
        if text not in self._texts:
            self._texts[text] = f"{self._token}{len(self._texts) + len(self._terminal_names)}"
            self._lines.append(f"{self._texts[text]}: {text}")
        return self._texts[text]

    def _in_parser(self, part: Part) -> str:
        if isinstance(part, Reference):
            return self._rule_names[part.name]
        if isinstance(part, Lexeme):
            return self._terminal(self._expression(part.node, self._in_lexer))
        return '""'

    def _in_lexer(self, part: Part) -> str:
        if isinstance(part, Reference):
            if part.name not in self._terminal_names:
                self._terminal_names[part.name] = f"{self._token}{len(self._texts) + len(self._terminal_names)}"
                self._queue.append(part.name)
            return self._terminal_names[part.name]
        if isinstance(part, Literal):
            return json.dumps(part.text)
        if isinstance(part, Characters):
            return f"/[{''.join(map(_range, part.ranges))}]/"
        return '""'


def _repetition(text: str, part: Repeat) -> str:
    if part.maximum == 0:
        return '""'
    simple = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((part.minimum, part.maximum))
    limit = "" if part.maximum is None else part.maximum
    return f"({text}){simple or f'{{{part.minimum},{limit}}}'}"


def _range(pair: tuple[int, int]) -> str:
    first, last = (f"\\x{{{code:X}}}" for code in pair)
    return first if first == last else f"{first}-{last}"
