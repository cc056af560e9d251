"""The tree of a beam search as rows of text. Running and finished branches are alive, the others are pruned.

Pure; must not know the terminal. Tokens without a fork between them share a row, so a tree of a few beams fits any
screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmrun.protocol.jobs.beams import ROOT, TreeNode
from llmrun.ui.terminal.cells import cut, width
from llmrun.ui.terminal.sanitize import clean

_LINES, _ASCII_LINES = ("├─", "└─", "│ ", "…", "■"), ("|-", "`-", "| ", "...", "#")


class TreeRow(NamedTuple):
    """A row of the tree, with its branch lines."""

    text: str
    alive: bool


def tree_rows(
    tree: Sequence[TreeNode], running: Sequence[int], rows: int, columns: int, *, unicode: bool = True
) -> list[TreeRow]:
    """Return the part of a tree that fits: running branches first, then finished ones, then the last pruned ones.

    Args:
        running: numbers of the running nodes, the best one first.
        rows, columns: size of the screen.
    """
    ended = (number for number, node in enumerate(tree) if node.ended)
    alive_ends = [*running, *sorted(ended, key=lambda node: -tree[node].total)]
    alive = _with_ancestors(tree, alive_ends)
    inner = {node.parent for node in tree}
    pruned = [node for node in reversed(range(len(tree))) if node not in inner and node not in alive]
    shown = [*alive_ends, *pruned]
    n_leaves = max(1, rows)
    while True:  # each further leaf may need a row for its fork, too
        drawing = _Drawing(tree, shown[:n_leaves], alive, columns, _LINES if unicode else _ASCII_LINES)
        drawn = drawing.rows()
        if len(drawn) <= rows or n_leaves == 1:
            return drawn[-rows:]
        n_leaves = min(n_leaves, len(shown)) - 1


def _with_ancestors(tree: Sequence[TreeNode], nodes: Iterable[int]) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        while node != ROOT and node not in found:
            found.add(node)
            node = tree[node].parent
    return found


class _Drawing:
    """The rows of some leaves and their ancestors."""

    def __init__(
        self, tree: Sequence[TreeNode], leaves: Sequence[int], alive: set[int], columns: int, lines: Sequence[str]
    ) -> None:
        self._tree, self._alive, self._columns = tree, alive, columns
        self._fork, self._last, self._pass, self._more, self._end = lines
        self._children: dict[int, list[int]] = {}
        for node in sorted(_with_ancestors(tree, leaves)):
            self._children.setdefault(tree[node].parent, []).append(node)
        self._rows: list[TreeRow] = []

    def rows(self) -> list[TreeRow]:
        """Return rows from the root down, branches in the order of their creation."""
        stack = [(child, "", "") for child in reversed(self._children.get(ROOT, []))]
        while stack:
            node, before, line = stack.pop()
            path = [node]
            while len(children := self._children.get(path[-1], [])) == 1:
                path.append(children[0])
            self._add(before + line, path)
            inner = before + (self._pass if line == self._fork else " " * len(line))
            stack += [
                (child, inner, self._fork if number else self._last) for number, child in enumerate(reversed(children))
            ]
        return self._rows

    def _add(self, before: str, path: Sequence[int]) -> None:
        tree, last = self._tree, self._tree[path[-1]]
        text = clean("".join(tree[node].text for node in path if not tree[node].ended).replace("\n", "\\n"))
        end = f" {self._end}" if last.ended else ""
        score = f"{end} {last.total:.2f}" if path[-1] not in self._children else ""
        room = self._columns - width(before) - width(score)
        if width(text) > room:  # the end of a branch is the news
            text = self._more + cut(text[::-1], room - len(self._more))[::-1]
        self._rows.append(TreeRow(cut(f"{before}{text}{score}", self._columns), path[-1] in self._alive))
