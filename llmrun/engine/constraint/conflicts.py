"""Which lexemes a greedy lexer would read too far.

Owns the analysis alone; lexemes.py says what it is for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmrun.errors import BadGrammarError
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
    can_be_empty,
    closure,
)  # fmt: skip

_MAX_PLACES = 4_000
_MAX_DEPTH = 300
_MAX_PAIRS = 400_000


@dataclass(frozen=True, slots=True, eq=False)
class Lexeme:
    """A node that the lexer reads at once. origin is the Series that it is a part of, if it is not a node itself."""

    node: Node
    origin: Series | None = None


Part = Node | Lexeme


def parsed_references(part: Part) -> Iterator[Reference]:
    """Every rule that the parser has to know for a part."""
    if isinstance(part, Reference):
        yield part
    for child in children(part):
        yield from parsed_references(child)


def children(part: Part) -> tuple[Part, ...]:
    if isinstance(part, Series):
        return part.parts
    if isinstance(part, Choice):
        return part.options
    return (part.part,) if isinstance(part, Repeat) else ()


def greedy_lexemes(bodies: Mapping[str, Part], lexemes: Sequence[Lexeme], rules: Mapping[str, Rule]) -> list[Lexeme]:
    """The lexemes that could eat up what belongs to their neighbours.

    Args:
        bodies: what the parser knows of the rules; ROOT is among them.
        lexemes: all that occur there.
        rules: the whole grammar.

    Raises:
        BadGrammarError: that is too much to look through.
    """
    lexer = _Lexer(lexemes, rules)
    after = _Parser(bodies, lexemes, closure(rules, can_be_empty), lexer.can_be_empty)
    return [lexemes[index] for index in sorted(_Search(lexer, after).greedy())]


class _Alphabet:
    """Sets of characters as bits: one for each stretch of characters that no rule tells apart."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        ranges = {pair for node in nodes for pair in _ranges(node)}
        self._starts = sorted({0, *(first for first, _ in ranges), *(last + 1 for _, last in ranges)})

    def bits(self, ranges: Iterable[tuple[int, int]]) -> int:
        """The set of the characters in some ranges."""
        bits = 0
        for first, last in ranges:
            bits |= (1 << bisect_left(self._starts, last + 1)) - (1 << bisect_left(self._starts, first))
        return bits


def _ranges(node: Node) -> Iterator[tuple[int, int]]:
    if isinstance(node, Literal):
        yield from ((ord(character), ord(character)) for character in node.text)
    elif isinstance(node, Characters):
        yield from node.ranges
    for child in children(node):
        yield from _ranges(child)  # type: ignore[arg-type]  # what a rule says holds no lexemes


@dataclass(slots=True)
class _Fragment:
    """A part of the automaton: whether it can be empty, and the places it begins and ends with."""

    empty: bool
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)


class _Lexer:
    """All lexemes as one automaton, whose states are the places of characters in them (Glushkov's construction).

    Counted repetitions are taken as endless: what is safe with more answers is safe with fewer.

    Attributes:
        characters: of each place, as bits.
        following: the places after each place.
        owner: index of the lexeme that a place belongs to.
        first: of each lexeme, the places that it begins with.
        ends: the places that lexemes end with.
        can_be_empty: of each lexeme.
    """

    def __init__(self, lexemes: Sequence[Lexeme], rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._alphabet = _Alphabet(rule.body for rule in rules.values())
        self.characters: list[int] = []
        self.following: list[set[int]] = []
        self.owner: list[int] = []
        self.first: list[list[int]] = []
        self.ends: set[int] = set()
        self.can_be_empty: list[bool] = []
        for index, lexeme in enumerate(lexemes):
            fragment = self._fragment(lexeme.node)
            self.owner += [index] * (len(self.characters) - len(self.owner))
            self.first.append(fragment.first)
            self.ends.update(fragment.last)
            self.can_be_empty.append(fragment.empty)

    def set_of(self, places: Iterable[int]) -> int:
        """The characters of any of some places."""
        bits = 0
        for place in places:
            bits |= self.characters[place]
        return bits

    def _fragment(self, node: Node, depth: int = 0) -> _Fragment:
        if depth > _MAX_DEPTH:
            raise _too_large()
        if isinstance(node, Literal):
            return self._in_order([self._place(((ord(character), ord(character)),)) for character in node.text])
        if isinstance(node, Characters):
            return self._place(node.ranges)
        if isinstance(node, Reference):
            return self._fragment(self._rules[node.name].body, depth + 1)
        if isinstance(node, Series):
            return self._in_order([self._fragment(part, depth + 1) for part in node.parts])
        if isinstance(node, Choice):
            return _either([self._fragment(option, depth + 1) for option in node.options])
        return self._repeated(self._fragment(node.part, depth + 1), node)

    def _place(self, ranges: Iterable[tuple[int, int]]) -> _Fragment:
        place = len(self.characters)
        if place >= _MAX_PLACES:
            raise _too_large()
        self.characters.append(self._alphabet.bits(ranges))
        self.following.append(set())
        return _Fragment(False, [place], [place])

    def _in_order(self, fragments: list[_Fragment]) -> _Fragment:
        whole = _Fragment(True)
        for fragment in fragments:
            for place in whole.last:
                self.following[place].update(fragment.first)
            if whole.empty:
                whole.first = whole.first + fragment.first
            whole.last = whole.last + fragment.last if fragment.empty else fragment.last
            whole.empty = whole.empty and fragment.empty
        return whole

    def _repeated(self, fragment: _Fragment, node: Repeat) -> _Fragment:
        if node.maximum == 0:
            return _Fragment(True)
        if node.maximum != 1:
            for place in fragment.last:
                self.following[place].update(fragment.first)
        return _Fragment(fragment.empty or node.minimum == 0, fragment.first, fragment.last)


def _either(fragments: list[_Fragment]) -> _Fragment:
    first = [place for fragment in fragments for place in fragment.first]
    last = [place for fragment in fragments for place in fragment.last]
    return _Fragment(any(fragment.empty for fragment in fragments), first, last)


class _Parser:
    """Which lexemes the parser lets come first, and after each; sets of lexemes are bits, one for each index."""

    def __init__(
        self, bodies: Mapping[str, Part], lexemes: Sequence[Lexeme], empty_rules: set[str], empty: Sequence[bool]
    ) -> None:
        self._bodies = bodies
        self._empty_rules = empty_rules
        self._empty = empty
        self._index = {id(lexeme): index for index, lexeme in enumerate(lexemes)}
        self._first = dict.fromkeys(bodies, 0)  # of each rule
        self._find_first()
        self.first = self._first[ROOT]
        self.after = [0] * len(lexemes)
        self._rule_after = dict.fromkeys(bodies, 0)
        waiting = list(bodies)
        while waiting:
            name = waiting.pop()
            waiting += self._spread(bodies[name], self._rule_after[name])

    def _find_first(self) -> None:
        users: dict[str, list[str]] = {name: [] for name in self._bodies}
        for name, body in self._bodies.items():
            for reference in parsed_references(body):
                users[reference.name].append(name)
        waiting = list(users)
        while waiting:
            name = waiting.pop()
            found, _ = self._first_of(self._bodies[name])
            if found != self._first[name]:
                self._first[name] = found
                waiting += users[name]

    def _first_of(self, part: Part) -> tuple[int, bool]:
        """The lexemes that a part begins with, and whether it can be empty."""
        if isinstance(part, Lexeme):
            index = self._index[id(part)]
            return 1 << index, self._empty[index]
        if isinstance(part, Reference):
            return self._first[part.name], part.name in self._empty_rules
        firsts = [self._first_of(child) for child in children(part)]
        if isinstance(part, Repeat):
            ((first, empty),) = firsts
            return (0, True) if part.maximum == 0 else (first, empty or part.minimum == 0)
        found = 0
        for first, empty in firsts:
            found |= first
            if isinstance(part, Series) and not empty:
                return found, False
        return found, isinstance(part, Series) or any(empty for _, empty in firsts)

    def _spread(self, part: Part, after: int) -> Iterator[str]:
        """Note what comes after each lexeme of a part; the rules for which something new was found."""
        if isinstance(part, Lexeme):
            self.after[self._index[id(part)]] |= after
        elif isinstance(part, Reference):
            if after & ~self._rule_after[part.name]:
                self._rule_after[part.name] |= after
                yield part.name
        elif isinstance(part, Series):
            for child in reversed(children(part)):
                yield from self._spread(child, after)
                first, empty = self._first_of(child)
                after = first | (after if empty else 0)
        elif isinstance(part, Repeat):
            again = 0 if part.maximum in (0, 1) else self._first_of(part.part)[0]
            yield from self._spread(part.part, after | again)
        else:
            for child in children(part):
                yield from self._spread(child, after)


class _Search:
    """Goes through all pairs of places that the lexer can be at together, having read the same characters."""

    def __init__(self, lexer: _Lexer, parser: _Parser) -> None:
        self._lexer = lexer
        self._parser = parser
        self._onward = [lexer.set_of(places) for places in lexer.following]
        self._firsts = [lexer.set_of(places) for places in lexer.first]
        self._seen: set[tuple[int, int]] = set()
        self._waiting: list[tuple[int, int]] = []
        self._begun: set[tuple[int, int]] = set()

    def greedy(self) -> set[int]:
        """Indices of the lexemes that could eat up what belongs to their neighbours."""
        lexer, found = self._lexer, set[int]()
        after = [0] * len(lexer.characters)
        for place in lexer.ends:
            after[place] = self._beginning(self._parser.after[lexer.owner[place]])
        self._begin(self._parser.first, self._parser.first)
        while self._waiting:
            one, other = self._waiting.pop()
            # One has ended; if what follows it also carries the other on, the lexer goes on with the other.
            if after[one] & self._onward[other]:
                found.add(lexer.owner[other])
            if after[other] & self._onward[one]:
                found.add(lexer.owner[one])
            self._meet(lexer.following[one], lexer.following[other])
            if one in lexer.ends and other in lexer.ends:
                self._begin(self._parser.after[lexer.owner[one]], self._parser.after[lexer.owner[other]])
        return found

    def _beginning(self, lexemes: int) -> int:
        bits = 0
        for index in _indices(lexemes):
            bits |= self._firsts[index]
        return bits

    def _begin(self, some: int, others: int) -> None:
        """The parser allows some lexemes after one way to read the answer so far, and others after another way."""
        if (some, others) not in self._begun:
            self._begun.add((some, others))
            lexer = self._lexer
            places = [[place for index in _indices(bits) for place in lexer.first[index]] for bits in (some, others)]
            self._meet(*places)
            # Which of two is one and which other makes no difference, so each is also met with itself.
            self._meet(places[0], places[0])
            self._meet(places[1], places[1])

    def _meet(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Both ways go on with the same character."""
        for place in some:
            for beside in others:
                if self._lexer.characters[place] & self._lexer.characters[beside]:
                    pair = (place, beside) if place <= beside else (beside, place)
                    if pair not in self._seen:
                        self._seen.add(pair)
                        self._waiting.append(pair)
        if len(self._seen) > _MAX_PAIRS:
            raise _too_large()


def _indices(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _too_large() -> BadGrammarError:
    return BadGrammarError(
        "the grammar is too large",
        why="its recursive part has too many characters that look alike",
        hint="write what is not recursive in fewer rules, or use a JSON schema",
    )
