"""Several answers to one prompt: side by side if the terminal is wide enough, else one after the other.

Owns the order in which events are shown; must not know drawing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from llmrun.protocol.messages import Event, Finished
from llmrun.ui.answer.columns import ColumnsView, SeedIndex, fit_beside
from llmrun.ui.answer.page import Page, Think
from llmrun.ui.answer.view import View, answer_view, can_show
from llmrun.ui.terminal.ansi import DIM, paint
from llmrun.ui.terminal.output import Output


def n_answers_view(
    output: Output,
    seeds: Sequence[int],
    *,
    together: bool,
    stats: bool,
    markdown: bool,
    think: Think,
    short: bool,
) -> View:
    """Return the view of several answers for the kind of stdout.

    Args:
        seeds: of the answers.
        together: the answers are decoded at the same time; else each has its own figures.
        stats, markdown, think, short: as in answer_view(); each answer ends with a newline.
    """
    columns, is_terminal = output.columns(), output.stdout_is_terminal
    places, stream, styled = SeedIndex(seeds), output.stdout, output.stdout_has_color
    if together and output.cursor_moves and fit_beside(len(seeds), columns):
        unicode = can_show(stream, "•│─·…")
        looks = partial(Page, time.monotonic, think=think, markdown=markdown, styled=styled, unicode=unicode)
        pages = [looks() for _ in seeds]
        return ColumnsView(stream, seeds, places, pages, columns, live=stats, dim=styled, unicode=unicode)

    def head(place: int) -> None:
        text = f"--- answer {place + 1} of {len(seeds)}, seed {seeds[place]} ---"
        gap = "\n" if place and is_terminal else ""
        output.text(gap + paint(text, DIM if styled else ""))

    def view() -> View:
        own = stats and not together
        return answer_view(output, stats=own, markdown=markdown, think=think, end_line=True, short=short)

    return SequentialView(places, len(seeds), head, view)


class SequentialView(View):
    """Answers shown one after the other: events of a later one wait until all before it are complete.

    Args:
        places: the index of each event's answer.
        n_answers: number of answers.
        head: writes the heading of an answer.
        view: makes the view of an answer.
    """

    def __init__(
        self, places: SeedIndex, n_answers: int, head: Callable[[int], None], view: Callable[[], View]
    ) -> None:
        self._places, self._head, self._make = places, head, view
        self._waiting: list[list[Event]] = [[] for _ in range(n_answers)]
        self._turn = 0
        self._view: View | None = None
        self._open = ExitStack()

    def show(self, event: Event) -> None:
        """Show an event of the current answer, and then waiting events of the next ones."""
        self._waiting[self._places.of(event)].append(event)
        while self._turn < len(self._waiting) and self._waiting[self._turn]:
            events, self._waiting[self._turn] = self._waiting[self._turn], []
            for each in events:
                self._show(each)
            if isinstance(events[-1], Finished):
                self.close()
                self._turn += 1

    def _show(self, event: Event) -> None:
        if self._view is None:
            self._head(self._turn)
            self._view = self._open.enter_context(self._make())
        self._view.show(event)

    def tick(self) -> None:
        if self._view is not None:
            self._view.tick()

    def close(self) -> None:
        self._view = None
        self._open.close()
