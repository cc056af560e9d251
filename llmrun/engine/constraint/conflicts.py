"""The analysis of lexemes that a greedy lexer would read too far; lexemes.py needs it."""

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

_MAX_POSITIONS = 100_000
_MAX_DEPTH = 300
_MAX_PAIRS = 400_000
_MAX_COMPARED = 4_000_000  # pairs, which takes about a second


@dataclass(frozen=True, slots=True, eq=False)
class Lexeme:
    """A node that the lexer reads as a unit."""

    node: Node
    origin: Series | None = None  # if the node is a section of a Series


Part = Node | Lexeme


def parsed_references(part: Part) -> Iterator[Reference]:
    """Yield all references to rules outside the lexemes of a part."""
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
    """Return the lexemes that could match text of their neighbours.

    Args:
        bodies: the rules of the parser, ROOT included.
        lexemes: all lexemes in the bodies.
        rules: the whole grammar.

    Raises:
        BadGrammarError: the grammar is too large for this analysis.
    """
    lexer = _Lexer(lexemes, rules)
    after = _Parser(bodies, lexemes, closure(rules, can_be_empty), lexer.can_be_empty)
    return [lexemes[index] for index in sorted(_Search(lexer, after).greedy())]


class _Alphabet:
    """Sets of characters as bits, one for each range of characters that no rule distinguishes."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        ranges = {pair for node in nodes for pair in _ranges(node)}
        self._starts = sorted({0, *(first for first, _ in ranges), *(last + 1 for _, last in ranges)})

    def bits(self, ranges: Iterable[tuple[int, int]]) -> int:
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
        yield from _ranges(child)  # type: ignore[arg-type]  # rules contain no lexemes


@dataclass(slots=True)
class _Fragment:
    """A part of the automaton, with its first and last positions."""

    can_be_empty: bool
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)


class _Lexer:
    """All lexemes as one automaton, whose states are the positions of characters in them (Glushkov's construction).

    Counted repetitions count as endless: a grammar that is safe with more answers is safe with fewer.
    """

    def __init__(self, lexemes: Sequence[Lexeme], rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._alphabet = _Alphabet(rule.body for rule in rules.values())
        # By position: its characters as bits, the positions after it, the index of its lexeme.
        self.characters: list[int] = []
        self.following: list[set[int]] = []
        self.owner: list[int] = []
        self.ends: set[int] = set()  # the last positions of all lexemes
        # By lexeme: its first positions, and whether it can be empty.
        self.first: list[list[int]] = []
        self.can_be_empty: list[bool] = []
        for index, lexeme in enumerate(lexemes):
            fragment = self._fragment(lexeme.node)
            self.owner += [index] * (len(self.characters) - len(self.owner))
            self.first.append(fragment.first)
            self.ends.update(fragment.last)
            self.can_be_empty.append(fragment.can_be_empty)

    def characters_of(self, positions: Iterable[int]) -> int:
        bits = 0
        for position in positions:
            bits |= self.characters[position]
        return bits

    def _fragment(self, node: Node, depth: int = 0) -> _Fragment:
        if depth > _MAX_DEPTH:
            raise _too_large()
        if isinstance(node, Literal):
            return self._in_order([self._position(((ord(character), ord(character)),)) for character in node.text])
        if isinstance(node, Characters):
            return self._position(node.ranges)
        if isinstance(node, Reference):
            return self._fragment(self._rules[node.name].body, depth + 1)
        if isinstance(node, Series):
            return self._in_order([self._fragment(part, depth + 1) for part in node.parts])
        if isinstance(node, Choice):
            texts = [option for option in node.options if self._text(option)]
            others = [self._fragment(option, depth + 1) for option in node.options if not self._text(option)]
            return _either([*self._trie([self._text(option) for option in texts]), *others])
        return self._repeated(self._fragment(node.part, depth + 1), node)

    def _text(self, node: Node) -> str:
        """Return the text of a literal, or of a rule that is one; "" for anything else."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(node, Reference):
                break
            node = self._rules[node.name].body
        return node.text if isinstance(node, Literal) else ""

    def _trie(self, texts: Iterable[str]) -> list[_Fragment]:
        """Return the automaton of several texts. Equal beginnings are one, so that no two of its positions conflict."""
        fragments: dict[str, _Fragment] = {}  # by the first character
        positions: dict[str, int] = {}  # by the text up to it
        for text in texts:
            for end in range(1, len(text) + 1):
                beginning = text[:end]
                if beginning not in positions:
                    fragment = self._position(((ord(text[end - 1]), ord(text[end - 1])),))
                    (positions[beginning],) = fragment.first
                    if end == 1:
                        fragments[text[0]] = _Fragment(False, fragment.first)
                    else:
                        self.following[positions[text[: end - 1]]].add(positions[beginning])
            if positions[text] not in fragments[text[0]].last:
                fragments[text[0]].last.append(positions[text])
        return list(fragments.values())

    def _position(self, ranges: Iterable[tuple[int, int]]) -> _Fragment:
        position = len(self.characters)
        if position >= _MAX_POSITIONS:
            raise _too_large()
        self.characters.append(self._alphabet.bits(ranges))
        self.following.append(set())
        return _Fragment(False, [position], [position])

    def _in_order(self, fragments: list[_Fragment]) -> _Fragment:
        whole = _Fragment(True)
        for fragment in fragments:
            for position in whole.last:
                self.following[position].update(fragment.first)
            if whole.can_be_empty:
                whole.first = whole.first + fragment.first
            whole.last = whole.last + fragment.last if fragment.can_be_empty else fragment.last
            whole.can_be_empty = whole.can_be_empty and fragment.can_be_empty
        return whole

    def _repeated(self, fragment: _Fragment, node: Repeat) -> _Fragment:
        if node.maximum == 0:
            return _Fragment(True)
        if node.maximum != 1:
            for position in fragment.last:
                self.following[position].update(fragment.first)
        return _Fragment(fragment.can_be_empty or node.minimum == 0, fragment.first, fragment.last)


def _either(fragments: list[_Fragment]) -> _Fragment:
    first = [position for fragment in fragments for position in fragment.first]
    last = [position for fragment in fragments for position in fragment.last]
    return _Fragment(any(fragment.can_be_empty for fragment in fragments), first, last)


class _Parser:
    """The lexemes that the parser allows first, and after each lexeme, as sets: bit i is the lexeme of index i."""

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
        queue = list(bodies)
        while queue:
            name = queue.pop()
            queue += self._spread(bodies[name], self._rule_after[name])

    def _find_first(self) -> None:
        users: dict[str, dict[str, None]] = {name: {} for name in self._bodies}
        for name, body in self._bodies.items():
            for reference in parsed_references(body):
                users[reference.name][name] = None
        queue = list(users)
        while queue:
            name = queue.pop()
            first, _ = self._first_of(self._bodies[name])
            if first != self._first[name]:
                self._first[name] = first
                queue += users[name]

    def _first_of(self, part: Part) -> tuple[int, bool]:
        """Return the first lexemes of a part, and whether it can be empty."""
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
        """Add to the lexemes after each lexeme of a part; yield the rules that have to be visited again."""
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
    """A search through all pairs of positions that the lexer can reach with the same characters."""

    def __init__(self, lexer: _Lexer, parser: _Parser) -> None:
        self._lexer = lexer
        self._parser = parser
        self._next_characters = [lexer.characters_of(positions) for positions in lexer.following]
        self._firsts = [lexer.characters_of(positions) for positions in lexer.first]
        self._seen: set[tuple[int, int]] = set()
        self._queue: list[tuple[int, int]] = []
        self._begun_pairs: set[tuple[int, int]] = set()
        self._n_compared = 0
        self._beginnings: dict[int, int] = {}  # lexemes -> their first characters

    def greedy(self) -> set[int]:
        lexer, owners = self._lexer, set[int]()
        after = [0] * len(lexer.characters)
        for position in lexer.ends:
            after[position] = self._beginning(self._parser.after[lexer.owner[position]])
        self._begin(self._parser.first, self._parser.first)
        while self._queue:
            one, other = self._queue.pop()
            # One can end here. If a character after it also continues the other, the lexer continues the other.
            if after[one] & self._next_characters[other]:
                owners.add(lexer.owner[other])
            if after[other] & self._next_characters[one]:
                owners.add(lexer.owner[one])
            self._add_pairs(lexer.following[one], lexer.following[other])
            if one in lexer.ends and other in lexer.ends:
                self._begin(self._parser.after[lexer.owner[one]], self._parser.after[lexer.owner[other]])
        return owners

    def _beginning(self, lexemes: int) -> int:
        if lexemes not in self._beginnings:
            bits = 0
            for index in _indices(lexemes):
                bits |= self._firsts[index]
            self._beginnings[lexemes] = bits
        return self._beginnings[lexemes]

    def _begin(self, some: int, others: int) -> None:
        """Add the first positions of two sets of lexemes, which two ways of parsing the same text allow next."""
        if (some, others) not in self._begun_pairs:
            self._begun_pairs.add((some, others))
            lexer = self._lexer
            positions = [
                [position for index in _indices(bits) for position in lexer.first[index]] for bits in (some, others)
            ]
            self._add_pairs(*positions)
            # Pairs are unordered, so each set is also paired with itself.
            self._add_pairs(positions[0], positions[0])
            self._add_pairs(positions[1], positions[1])

    def _add_pairs(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Add all pairs of positions with a common character."""
        some, others = list(some), list(others)
        self._n_compared += len(some) * len(others)
        if self._n_compared > _MAX_COMPARED:
            raise _too_large()
        for position in some:
            for other in others:
                if self._lexer.characters[position] & self._lexer.characters[other]:
                    pair = (position, other) if position <= other else (other, position)
                    if pair not in self._seen:
                        self._seen.add(pair)
                        self._queue.append(pair)
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
