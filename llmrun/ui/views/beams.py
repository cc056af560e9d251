"""The output of a beam search: its growing tree, the other answers, and the cost.

It is drawn on stderr; the best answer itself is shown like any other answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rich.live import Live
from rich.text import Text

from llmrun.protocol.codec import as_dict
from llmrun.protocol.jobs.beams import ROOT, BeamSettings, BeamsFound, BeamStep, TreeNode
from llmrun.protocol.sizes import readable_size
from llmrun.ui.answer.view import can_show, terminal_size
from llmrun.ui.terminal.cells import cut, width
from llmrun.ui.terminal.format import counted, rate, seconds
from llmrun.ui.terminal.keyboard import Suspendable
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, right, show_table

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


_REDRAW_SECONDS = 0.1
_LEFT_ROWS = 2  # of the terminal, for the cursor and a ^C
_COLUMNS = (*right("SCORE", "SUM", "TOKENS"), Column("ANSWER"))
_MAX_COMMON = 24  # characters of a common beginning that is shown in both answers
_OPEN_ENDED = 64  # tokens; a longer answer without a grammar counts as free text


class BeamsView:
    """The live tree of a search, in a `with` block; `tree` has all nodes, also if the terminal can't draw them."""

    def __init__(self, output: Output, clock: Callable[[], float] = time.monotonic) -> None:
        self.tree: list[TreeNode] = []
        self._output, self._clock, self._drawn_at = output, clock, 0.0
        self._draws = output.stderr_cursor_moves and not output.json
        self._unicode = can_show(output.stderr, "├└│…■")
        self._live: Live | None = None
        self._suspendable = Suspendable(self._clear)

    def __enter__(self) -> BeamsView:
        self._suspendable.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()
        self._suspendable.__exit__()

    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, step: BeamStep) -> None:
        """Add the nodes of a step, and redraw the tree."""
        self.tree += step.nodes
        now = self._clock()
        if self._draws and now - self._drawn_at >= _REDRAW_SECONDS:
            self._drawn_at = now
            with self._suspendable.writing():
                self._draw(step)

    def _draw(self, step: BeamStep) -> None:
        if self._live is None:
            console = self._output.console(stderr=True)
            self._live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        columns, rows = terminal_size(self._output.stderr)
        found = tree_rows(self.tree, step.running, rows - _LEFT_ROWS, columns - 1, unicode=self._unicode)
        text = Text("\n", no_wrap=True).join(Text(row.text, "" if row.alive else "dim") for row in found)
        self._live.update(text, refresh=True)


def show_others(output: Output, found: BeamsFound) -> None:
    """Print the answers and their scores on stderr, the best one first."""
    best = found.answers[0].text
    texts = ["(this answer)", *(_difference(best, answer.text) for answer in found.answers[1:])]
    rows = [
        (f"{each.score:.3f}", f"{each.total:.2f}", str(len(each.tokens)), text)
        for each, text in zip(found.answers, texts, strict=True)
    ]
    output.note("")
    show_table(output, _COLUMNS, rows, stderr=True)


def _difference(best: str, other: str) -> str:
    """Return another answer from the first different word on."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(best, other, strict=False)))
    common = other.rfind(" ", 0, same) + 1
    return f"… {other[common:]}" if common > _MAX_COMMON else other


def show_cost(output: Output, settings: BeamSettings, found: BeamsFound, kv_bytes: int, *, is_free: bool) -> None:
    """Print the cost of the search, and advise sampling for free text."""
    work = "no decode step after the prompt"
    if found.steps:
        speed = rate(found.rows / found.decode_seconds) if found.decode_seconds > 0 else "-"
        work = (
            f"{counted(found.steps, 'step')} of {found.rows / found.steps:.1f} rows in "
            f"{seconds(found.decode_seconds)}, {speed} through the model for "
            f"{counted(len(found.answers[0].tokens), 'token')} of the answer"
        )
    output.note(f"{settings.beams} beams: {work} · KV cache {readable_size(kv_bytes)}")
    if is_free and len(found.answers[0].tokens) >= _OPEN_ENDED:
        output.note(
            "For free text use sampling: the likeliest text is often dull and repeats itself. Beams are for answers "
            "with one correct result, such as translations, names, code, or text with a grammar."
        )


def as_json(settings: BeamSettings, found: BeamsFound, tree: list[TreeNode]) -> dict[str, Any]:
    """Return a search as JSON data."""
    return {"settings": as_dict(settings), **as_dict(found), "tree": [as_dict(node) for node in tree]}
