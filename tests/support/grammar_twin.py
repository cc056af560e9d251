"""What follows a grammar, told in the slowest and plainest way: the twin of lexemes.py and llguidance."""

from __future__ import annotations

from collections.abc import Mapping

from llmrun.grammar.gbnf import ROOT, Characters, Choice, Literal, Node, Reference, Rule, Series


class Twin:
    """Says of whole texts whether they follow the rules."""

    def __init__(self, rules: Mapping[str, Rule], text: str) -> None:
        self._rules = rules
        self._text = text
        self._known: dict[tuple[Node, int], frozenset[int]] = {}

    @property
    def follows(self) -> bool:
        """Whether the whole text does."""
        return len(self._text) in self._ends(self._rules[ROOT].body, 0)

    def _ends(self, node: Node, start: int) -> frozenset[int]:
        """Where a node can end that begins somewhere."""
        if (node, start) not in self._known:
            self._known[node, start] = frozenset(self._find(node, start))
        return self._known[node, start]

    def _find(self, node: Node, start: int) -> set[int]:
        if isinstance(node, Literal):
            return {start + len(node.text)} if self._text.startswith(node.text, start) else set()
        if isinstance(node, Characters):
            code = ord(self._text[start]) if start < len(self._text) else -1
            return {start + 1} if any(first <= code <= last for first, last in node.ranges) else set()
        if isinstance(node, Reference):
            return set(self._ends(self._rules[node.name].body, start))
        if isinstance(node, Choice):
            return {end for option in node.options for end in self._ends(option, start)}
        places = {start}
        if isinstance(node, Series):
            for part in node.parts:
                places = {end for place in places for end in self._ends(part, place)}
            return places
        # An empty part could be repeated for ever, but nothing new comes after as many rounds as there are places.
        rounds = (
            node.minimum + len(self._text) + 1
            if node.maximum is None
            else min(node.maximum, node.minimum + len(self._text) + 1)
        )
        found = set(places) if node.minimum == 0 else set[int]()
        for number in range(1, rounds + 1):
            places = {end for place in places for end in self._ends(node.part, place)}
            found |= places if number >= node.minimum else set()
        return found
