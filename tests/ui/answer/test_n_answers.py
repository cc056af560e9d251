"""Several answers on an emulated terminal and in a pipe."""

from __future__ import annotations

import io
import random
import re

import pytest
from support.clock import Clock
from support.screens import Terminal

from llmrun.protocol.messages import Event, Finished, Started, Stats, TextDelta
from llmrun.ui.answer.columns import CellRows, ColumnsView, SeedIndex, SequentialView, fit_beside, n_answers_view
from llmrun.ui.answer.meter import summary_of_all
from llmrun.ui.answer.page import Page
from llmrun.ui.answer.view import DisplayOptions, PlainView
from llmrun.ui.terminal.cells import bare, paint, width
from llmrun.ui.terminal.output import Output


class Case:
    """Columns on a terminal."""

    def __init__(self, n_answers: int, columns: int = 80, rows: int = 24, *, live: bool = False) -> None:
        self.terminal, self.clock = Terminal(columns, rows), Clock()
        seeds = [50 + place for place in range(n_answers)]
        pages = [Page(self.clock) for _ in seeds]
        self.view = ColumnsView(
            self.terminal, seeds, SeedIndex(seeds), pages, columns,
            live=live, dim=False, clock=self.clock, size=self.terminal.size,
        )  # fmt: skip
        for place, seed in enumerate(seeds):
            self.show(Started(place, 9, 8 if place else 0, seed))

    def show(self, event: Event) -> None:
        self.clock.now += 0.1
        self.view.show(event)

    def say(self, place: int, text: str) -> None:
        self.show(TextDelta(place, text, 1))

    def finish(self, *places: int) -> None:
        for place in places:
            self.show(Finished(place, "stop", Stats()))

    @property
    def rows(self) -> list[str]:
        return self.terminal.screen.everything()


def split(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("│")]


def test_answers_grow_side_by_side_below_their_seeds() -> None:
    case = Case(2)
    case.say(0, "Hello")
    assert [split(row) for row in case.rows] == [["1. seed 50", "2. seed 51"], ["Hello", ""]]
    case.say(1, "Good\nday")
    assert [split(row) for row in case.rows[1:]] == [["Hello", "Good"], ["", "day"]]
    case.say(0, " you")
    case.finish(1, 0)
    case.view.close()
    assert [split(row) for row in case.rows[1:]] == [["Hello you", "Good"], ["", "day"]]


def test_the_line_of_figures_stands_below_and_goes() -> None:
    case = Case(2, live=True)
    assert case.rows[-1] == "prefill 0/9 tokens"
    case.say(0, "Hi")
    case.say(1, "Hi")
    assert case.rows[-1].startswith("prefill ")
    case.finish(0, 1)
    case.view.close()
    assert [split(row) for row in case.rows[1:]] == [["Hi", "Hi"]]


@pytest.mark.parametrize("seed", range(20))
def test_however_answers_come_all_of_each_is_there_in_the_end(seed: int) -> None:
    """Long answers on a low screen: rows scroll away, and none is lost, doubled or changed."""
    rng = random.Random(seed)
    case = Case(3, columns=90, rows=8, live=rng.random() < 0.5)
    texts = ["".join(rng.choices("ab \n日", k=rng.randint(0, 400))) for _ in range(3)]
    left = dict(enumerate(texts))
    while left:
        place = rng.choice(list(left))
        size = rng.randint(1, 40)
        if left[place]:
            case.say(place, left[place][:size])
            left[place] = left[place][size:]
        else:
            del left[place]
            case.finish(place)
    case.view.close()
    whole = [CellRows(28) for _ in texts]
    for rows, text in zip(whole, texts, strict=True):
        rows.feed(text)
        rows.flush()
    n_rows = max(rows.n_rows for rows in whole)
    expected = [[rows.row(number).strip() for rows in whole] for number in range(n_rows)]
    shown = [split(row) if row else ["", "", ""] for row in case.rows[1:]]
    shown = [[*cells, "", ""][:3] for cells in shown]
    assert shown == expected[: len(shown)]
    assert not any(any(cells) for cells in expected[len(shown) :])


def test_what_is_final_is_never_written_again() -> None:
    case = Case(2)
    for number in range(30):
        case.say(0, f"left {number}\n")
        case.say(1, f"right {number}\n")
    written = case.terminal.getvalue()
    assert len(re.findall(r"left 3 +│ right 3", written)) <= 2, "drawn once while it was open, once for good"


def test_text_is_cut_into_rows_by_cells_and_keeps_its_style() -> None:
    rows = CellRows(4)
    rows.feed("ab" + paint("cdef", "1") + "日本語\n\tx")
    rows.flush()
    assert [bare(row) for row in rows.done] == ["abcd", "ef日", "本語", "    ", "x   "]
    assert all(width(bare(row)) == 4 for row in rows.done)
    assert rows.done[0] == "ab\x1b[1mcd\x1b[0m"
    assert rows.done[1].startswith("\x1b[1mef\x1b[0m")


@pytest.mark.parametrize(
    ("n_answers", "columns", "fits"), [(3, 80, True), (4, 80, False), (4, 105, True), (2, 0, False)]
)
def test_columns_need_room(n_answers: int, columns: int, fits: bool) -> None:
    assert fit_beside(n_answers, columns) is fits


def test_where_they_do_not_fit_a_later_answer_waits_for_the_one_before() -> None:
    out, heads = io.StringIO(), list[int]()
    view = SequentialView(SeedIndex([1, 2]), 2, heads.append, lambda: PlainView(out, end_line=True))
    view.show(Started(8, 3, 0, 2))
    view.show(TextDelta(8, "second", 1))
    assert (out.getvalue(), heads) == ("", [])
    view.show(Started(7, 3, 0, 1))
    view.show(TextDelta(7, "first", 1))
    view.show(Finished(8, "stop", Stats()))
    assert (out.getvalue(), heads) == ("first", [0])
    view.show(Finished(7, "stop", Stats()))
    assert (out.getvalue(), heads) == ("first\nsecond\n", [0, 1])
    view.close()


def test_an_answer_that_ends_before_it_begins_has_its_place_too() -> None:
    places = SeedIndex([5, 6])
    assert places.of(Started(3, 1, 0, 6)) == 1
    assert places.of(Finished(9, "cancelled", Stats())) == 0
    assert places.of(TextDelta(3, "x", 1)) == 1


def test_in_a_pipe_nothing_but_text_and_heads_is_written() -> None:
    out = io.StringIO()
    output = Output(stdout=out, stderr=io.StringIO(), environment={})
    with n_answers_view(output, [7], DisplayOptions(stats=False), together=True) as view:
        for event in (Started(1, 3, 0, 7), TextDelta(1, "**Hi**", 1), Finished(1, "stop", Stats())):
            view.show(event)
    assert out.getvalue() == "--- answer 1 of 1, seed 7 ---\n**Hi**\n"


def test_a_summary_of_all_counts_a_shared_prompt_once() -> None:
    first = Stats(40, 0, 0.1, 11, 2.0, 0.1, n_ctx=256)
    later = Stats(40, 39, 0.01, 21, 2.0, 0.2, n_ctx=256)
    ends = [Finished(1, "stop", first), Finished(2, "length", later), Finished(3, "length", later)]
    assert summary_of_all(ends, short=False) == (
        "3 answers · prefill 40 tokens 400 tokens/s · decode 53 tokens 25.0 tokens/s together · TTFT 0.10 s · "
        "2 stopped: max tokens reached"
    )
    assert summary_of_all(ends, short=True) == (
        "3 answers · 25.0 tokens/s together · TTFT 0.10 s · 2 stopped: max tokens reached"
    )


def test_a_prompt_that_could_not_be_shared_counts_for_each() -> None:
    stats = Stats(prompt_tokens=40, prefill_seconds=0.1, completion_tokens=1)
    ends = [Finished(request, "stop", stats) for request in (1, 2)]
    assert summary_of_all(ends, short=False) == "2 answers · prefill 79 tokens"
