"""Streamed answers on an emulated terminal: the live line stays out of the text, and no text is lost."""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
from collections.abc import Iterable

import pyte
import pytest
from support.answers import STATS, SUMMARY, sent
from support.clock import Clock
from support.escapes import SEQUENCES, UNFINISHED, is_allowed
from support.screens import Terminal, rows_of

from llmrun.protocol.loading import Loaded, LoadProgress
from llmrun.protocol.messages import Event, Failed, Finished, PrefillProgress, Rendering, Started, TextDelta
from llmrun.ui.answer.page import Page
from llmrun.ui.answer.view import AnswerView, DisplayOptions, PlainView, answer_view
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean


class Case:
    """A view on a terminal, and a clock."""

    def __init__(self, columns: int = 80, rows: int = 24, *, live: bool = True) -> None:
        self.terminal = Terminal(columns, rows)
        self.clock = Clock()
        self.view = AnswerView(
            self.terminal, self.terminal, n_ctx=8192, live=live, clock=self.clock, size=self.terminal.size
        )

    def show(self, event: Event, after: float = 0.1) -> None:
        self.clock.now += after
        self.view.show(event)

    def text(self, *pieces: str, after: float = 0.1) -> None:
        for piece in pieces:
            self.show(TextDelta(1, piece, 1), after)

    def start(self, prompt_tokens: int = 31) -> None:
        self.show(Rendering(1))
        self.show(Started(1, prompt_tokens, 0, 1234))

    def finish(self) -> None:
        self.show(Finished(1, "stop", STATS))

    @property
    def rows(self) -> list[str]:
        return self.terminal.screen.everything()


def test_waiting_and_live_line() -> None:
    case = Case()
    case.show(LoadProgress(0.43))
    assert case.rows == ["loading the model 43%"]
    case.show(Loaded(8192, 8192, 49152, "llama", True, (), 0.3))
    case.show(Rendering(1))
    assert case.rows == ["reading the prompt"]
    case.show(Started(1, 6000, 0, 1234))
    assert case.rows == ["prefill 0/6,000 tokens"]
    case.show(PrefillProgress(1, 1024, 1024 / 410), after=2.5)
    assert case.rows == ["prefill 1,024/6,000 tokens · 410 tokens/s"]
    case.text("Hello", after=12.5)
    assert case.rows == ["Hello", "prefill 400 tokens/s · TTFT 15.20 s · ctx 6,001/8,192"]
    case.text(" world")
    assert case.rows == ["Hello world", "prefill 400 tokens/s · decode 10.0 tokens/s · TTFT 15.20 s · ctx 6,002/8,192"]
    case.finish()
    assert case.rows[0] == "Hello world"
    assert "".join(case.rows[1:]).replace(" ", "") == SUMMARY.replace(" ", "")


@pytest.mark.parametrize("live", [True, False])
def test_a_silent_engine_is_told(live: bool) -> None:
    case = Case(live=live)
    case.start()
    case.text("one ")
    case.clock.now += 9.9
    case.view.tick()
    assert not any("no word" in row for row in case.rows)
    case.clock.now += 3
    case.view.tick()
    assert case.rows[1].startswith("no output for 13 s, Ctrl-C stops it")
    case.text("two ")
    case.clock.now += 1
    case.view.tick()
    assert not any("no word" in row for row in case.rows)


def test_line_break_moves_the_live_line_not_the_text() -> None:
    case = Case()
    case.start()
    case.text("one")
    assert case.rows[0] == "one"
    case.text("\n")
    assert len(case.rows) == 2
    assert case.rows[1].startswith("prefill")
    case.text("\n\ntwo")
    assert case.rows[:-1] == ["one", "", "", "two"]
    assert case.rows[-1].startswith("prefill")


def test_text_comes_in_bursts_and_nothing_stays_behind() -> None:
    case = Case()
    case.start()
    before = case.terminal.n_writes
    for index in range(1000):  # 1,000 tokens in one second
        case.text(f" {index}", after=0.001)
    assert case.terminal.n_writes - before <= 45  # 30 bursts of text, 12 other drawings
    case.clock.now += 1
    case.view.tick()
    assert "".join(case.rows[:-1]).endswith("999")
    case.text("the end", after=0)
    case.finish()
    assert "999the end" in "".join(case.rows).replace("\n", "")


def test_row_that_is_exactly_full() -> None:
    case = Case(20, 5)
    case.start()
    case.text("x" * 20)
    assert case.rows[0] == "x" * 19  # the last character waits for company
    assert case.rows[1].startswith("prefill")
    case.text("y")
    assert case.rows[:2] == ["x" * 20, "y"]
    case.text("z" * 19)
    case.text("\n")
    assert case.rows[1] == "y" + "z" * 19
    case.text("w" * 20)
    case.finish()
    assert case.rows[:3] == ["x" * 20, "y" + "z" * 19, "w" * 20]
    assert case.rows[3].startswith("prefill 31 tokens")


def test_parts_of_an_emoji_are_written_together() -> None:
    case = Case()
    case.start()
    case.text("a👩")
    assert case.rows[0] == "a"
    case.text("\u200d", "👧", "b")
    assert "👩\u200d👧b" in case.terminal.getvalue()
    case.text("🙂")
    case.finish()
    assert case.rows[0] == "a👩👧b🙂"


def test_terminal_that_became_narrower_this_instant_cuts_the_line() -> None:
    case = Case()
    case.terminal.screen.resize(24, 30)
    case.view = AnswerView(case.terminal, n_ctx=8192, clock=case.clock, size=lambda: (80, 24))
    case.start()
    case.text("text", "text")
    assert len(case.rows) == 2
    assert pyte.modes.DECAWM in case.terminal.screen.mode


def test_small_screen_gets_the_fields_that_fit() -> None:
    case = Case(22, 5)
    case.start()
    case.text("Hi", "!")
    assert case.rows == ["Hi!", "prefill 310 tokens/s"]
    tiny = Case(7, 2)
    tiny.start()
    tiny.text("no room for a line")
    assert tiny.rows == rows_of("no room for a line", 7, 2)


def test_live_line_stays_out_of_the_scrollback() -> None:
    case = Case(22, 5)
    case.start()
    text = "".join(f"line {index} of the text that is long enough to wrap\n" for index in range(40))
    for index in range(0, len(text), 3):
        case.text(text[index : index + 3])
        assert not any("tokens/s" in row for row in case.terminal.screen.scrollback())
        assert sum("tokens/s" in row for row in case.rows) == 1
    case.view.close()
    assert case.rows == rows_of(text, 22, 5)


@pytest.mark.parametrize(("columns", "rows"), [(20, 5), (13, 4), (80, 24), (8, 3)])
def test_random_text_in_random_pieces_is_shown_as_if_written_at_once(columns: int, rows: int) -> None:
    random_ = random.Random(columns)
    atoms = [
        *"abc \n\t",
        "word ",
        "日本",
        "語",
        "🙂",
        "e\u0301",
        "\n\n\n",
        "x" * columns,
        "y" * (columns - 1),
        "\t\t",
        "👩\u200d👧",
    ]
    for _ in range(30):
        case = Case(columns, rows)
        if random_.random() < 0.8:
            case.start()
        text = "".join(random_.choices(atoms, k=random_.randint(1, 120)))
        position = 0
        while position < len(text):
            length = random_.randint(1, 9)
            case.text(text[position : position + length], after=random_.choice((0.001, 0.02, 0.05, 0.2)))
            position += length
        case.view.close()
        assert case.rows == rows_of(text, columns, rows)
        cursor = case.terminal.screen.cursor
        assert cursor.x == 0
        shown = case.terminal.screen.rows_shown()
        assert not any(shown[cursor.y :])


def test_escapes_of_the_model_do_not_reach_the_terminal() -> None:
    case = Case()
    case.text("a\x1b", "]0;title\x07b\x1b[2", "Jc", "\x9b31md")
    case.view.close()
    assert case.rows == ["abcd"]
    assert case.terminal.screen.title == ""


MARKUP = [
    "[bold red]",
    "[link=file:///etc/passwd]x[/link]",
    "[@click=quit]",
    "[/]",
    "{0}",
    "%s",
    "&#27;[2J",
    "\\x1b[2J",
]
PAYLOADS = [*SEQUENCES, *UNFINISHED, *MARKUP]
PLACES = {
    "as it is": "a {} b",
    "text": "a {} b",
    "bold": "a **{}** b",
    "code in a line": "a `{}` b",
    "heading": "# {} b",
    "item": "- {}\n  1. {}",
    "quote": "> {} b",
    "code": "```python\nif {}: # {}\n```",
    "language": "```{}\nx\n```",
    "table": "| {} | b |\n|---|---|\n| a | {} |\n\n",
    "link": "[{}](http://b) b",
    "address": "[a](http://{}) b",
    "image": "![{}](x) b",
    "formula": "\\({} + 1\\) b",
    "HTML": "<div>\n{}\n</div>",
    "thoughts": "<think>{} a</think>b",
    "repeated": "{0}{0}a{0}\n{0}",
}
OURS = re.compile(
    r"\x1b(?:\[\?2026[hl]|\[J|\[A|\[\?7[hl]|[78D]|\[(?:0|[1-4]|9|3[1-6])(?:;(?:[1-4]|9|3[1-6]))*m)|\x1b\[B\r|\r\x1b\[K"
)


def written(text: str, pieces: Iterable[str], place: str) -> str:
    """What a view writes to the terminal for a text in pieces."""
    stream, clock = io.StringIO(), Clock()
    page = Page(clock, markdown=place != "as it is", think="on")
    with AnswerView(stream, clock=clock, size=lambda: (30, 10), page=page) as view:
        started = Started(1, 31, 0, 1234, thinking_tags=("<think>", "</think>"))
        view.show(started)
        for event in sent(started, pieces)[:-1]:
            clock.now += 0.01
            view.show(event)
    return stream.getvalue()


@pytest.mark.parametrize("place", PLACES)
def test_no_payload_reaches_the_terminal_wherever_it_stands_and_is_split(place: str) -> None:
    """Each payload stands in a third of the places."""
    assert len(set(PAYLOADS)) >= 250
    for number, payload in list(enumerate(PAYLOADS))[[*PLACES].index(place) % 3 :: 3]:
        text = PLACES[place].replace("{0}", payload).replace("{}", payload)
        at = text.index(payload)
        # At each character, and cut in two at one of the places in it; test_sanitize.py cuts at all of them.
        cut = at + number % (len(payload) + 1)
        for pieces in (list(text), [text[:cut], text[cut:]]):
            out = written(text, pieces, place)
            assert all(map(is_allowed, OURS.sub("", out))), (payload, out)


@pytest.mark.parametrize("place", PLACES)
def test_no_payload_moves_anything_on_the_screen(place: str) -> None:
    quiet = [payload for payload in SEQUENCES if clean(payload) == ""]
    assert len(quiet) >= 250
    expected = None
    for payload in ["", *quiet[:: max(len(quiet) // 40, 1)]]:
        terminal = Terminal(30, 10)
        modes = set(terminal.screen.mode)
        text = PLACES[place].replace("{0}", payload).replace("{}", payload)
        terminal.write(written(text, list(text), place))
        screen = terminal.screen
        rows = [row for row in screen.everything() if not row.startswith("thought for")]  # tells the number of pieces
        shown = (rows, screen.cursor.x, screen.cursor.y, screen.title, screen.cursor.hidden)
        assert screen.mode == modes
        expected = expected or shown
        assert shown == expected, payload


def test_closing_in_the_middle_erases_the_line_and_ends_the_row() -> None:
    case = Case(20, 5)
    case.start()
    with case.view:
        case.text("half an ans")
        case.text("wer, an\x1b", after=0)
    assert case.rows == ["half an answer, an"]
    assert case.terminal.screen.cursor.x == 0
    written = case.terminal.n_writes
    case.view.close()
    case.view.tick()
    assert case.terminal.n_writes == written


def test_failure_while_loading_leaves_an_empty_row() -> None:
    case = Case()
    case.show(LoadProgress(0.5))
    case.show(Failed(0, "bad-model", "no"))
    assert case.rows == []
    assert case.terminal.screen.cursor.x == 0


def test_interrupt_echo_at_the_start_of_a_row_goes() -> None:
    case = Case()
    case.start()
    case.text("line\n")
    case.terminal.write("^C")
    case.view.close()
    assert case.rows == ["line"]


@pytest.mark.parametrize("n_before", [0, 1])
def test_no_interrupt_can_leave_the_line_behind(n_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    for _ in range(n_before):
        case.start()
    write = Terminal.write

    def interrupted(self: Terminal, text: str) -> int:
        write(self, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(Terminal, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.text("some text")
    monkeypatch.undo()
    case.view.close()
    assert case.rows == ["some text"]


def test_the_line_for_waiting_goes_at_the_first_token() -> None:
    case = Case()
    case.start()
    case.text("Hi", after=0.001)
    assert case.rows == ["Hi", "prefill 31,000 tokens/s · TTFT 0.20 s · ctx 32/8,192"]


def test_cursor_stays_visible_and_colour_is_optional() -> None:
    case = Case()
    case.start()
    case.text("text", "more")
    case.finish()
    raw = case.terminal.getvalue()
    assert "\x1b[?25l" not in raw
    assert "\x1b[2m" in raw
    assert raw.count("\x1b[?2026h") == raw.count("\x1b[?2026l")
    terminal = Terminal()
    with AnswerView(terminal, terminal, n_ctx=10, dim=False, size=terminal.size) as view:
        view.show(TextDelta(1, "text", 1))
        view.show(Finished(1, "stop", STATS))
    assert "m" not in {raw[-1] for raw in terminal.getvalue().split("\x1b[") if raw}
    assert "\x1b[2m" not in terminal.getvalue()


@pytest.mark.parametrize(("styled", "shown"), [(True, "a\x1b[32m **b**\x1b[0m c\n"), (False, "a **b** c\n")])
def test_drafted_tokens_are_tinted_where_that_is_wanted(styled: bool, shown: str) -> None:
    terminal = Terminal()
    page = Page(Clock(), markdown=True, styled=styled, tints=True)
    with AnswerView(terminal, live=False, size=terminal.size, page=page, clock=Clock()) as view:
        for text, drafted in (("a", False), (" **b**", True), (" c", False)):
            view.show(TextDelta(1, text, 1, drafted=drafted))
    assert terminal.getvalue() == shown
    plain = io.StringIO()
    PlainView(plain).show(TextDelta(1, "a", 1, drafted=True))
    assert plain.getvalue() == "a", "no colour gets into a pipe"


def test_resize_while_streaming_keeps_the_text() -> None:
    case = Case(40, 10)
    case.start()
    case.text("a short line")
    case.terminal.screen.resize(6, 20)
    case.text(" and some more")
    case.terminal.screen.resize(10, 60)
    case.text(" text")
    case.view.close()
    assert "more text" in "".join(case.rows)
    assert not any("tokens/s" in row for row in case.rows)


def test_without_stats_only_the_wait_is_shown() -> None:
    case = Case(live=False)
    case.start()
    assert case.rows == ["prefill 0/31 tokens"]
    case.text("text", "more")
    assert case.rows == ["textmore"]


# ---- no terminal, or one that can't move its cursor ------------------------------------------------


def events(*texts: str) -> Iterable[Event]:
    yield LoadProgress(0.5)
    yield Rendering(1)
    yield Started(1, 31, 0, 1234)
    for text in texts:
        yield TextDelta(1, text, 1)
    yield Finished(1, "stop", STATS)


def shown(output: Output, *texts: str, stats: bool = True) -> None:
    with answer_view(output, DisplayOptions(stats=stats, markdown=False)) as view:
        for event in events(*texts):
            view.show(event)


def test_pipe_gets_the_answer_and_nothing_else() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    shown(Output(stdin=io.StringIO(), stdout=stdout, stderr=stderr), "an", "swer\x1b[31m", "\x1b", stats=False)
    assert stdout.getvalue() == "answer"
    assert stderr.getvalue() == ""


def test_figures_that_are_asked_for_go_to_stderr_whatever_that_is() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    shown(Output(stdin=io.StringIO(), stdout=stdout, stderr=stderr), "answer")
    assert (stdout.getvalue(), stderr.getvalue()[:8]) == ("answer", "prefill ")


def test_pipe_is_flushed_at_each_piece() -> None:
    class Pipe(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    pipe = Pipe()
    view = PlainView(pipe)
    for index in range(1, 4):
        view.show(TextDelta(1, "x", 1))
        assert pipe.flushed == index


@pytest.mark.parametrize(("stats", "expected"), [(True, f"{SUMMARY}\n"), (False, "")])
def test_file_and_a_terminal_for_the_rest(stats: bool, expected: str) -> None:
    stdout, stderr = io.StringIO(), Terminal(200)
    output = Output(stdin=io.StringIO(), stdout=stdout, stderr=stderr, environment={"TERM": "x", "NO_COLOR": "1"})
    shown(output, "answer", stats=stats)
    assert stdout.getvalue() == "answer"
    assert stderr.getvalue() == expected


def test_dumb_terminal_gets_text_and_summary_without_any_escape() -> None:
    terminal = Terminal(200)
    shown(
        Output(stdin=io.StringIO(), stdout=terminal, stderr=terminal, environment={"TERM": "dumb"}),
        "an",
        "swer",
    )
    assert terminal.getvalue() == f"answer\n{SUMMARY}\n"


def test_the_summary_of_a_dumb_terminal_breaks_between_its_fields() -> None:
    terminal = Terminal(40)
    environment = {"TERM": "dumb", "COLUMNS": "40"}
    output = Output(stdin=io.StringIO(), stdout=terminal, stderr=terminal, environment=environment)
    view = answer_view(output, DisplayOptions(stats=True))
    for event in (TextDelta(1, "hello", 1), Finished(1, "length", STATS)):
        view.show(event)
    rows = terminal.getvalue().splitlines()[1:]
    assert len(rows) > 2
    assert all(len(row) <= 40 for row in rows)
    assert all(row.endswith(" ·") for row in rows[:-1])


def test_dumb_terminal_gets_the_short_summary_too() -> None:
    terminal = Terminal(200)
    output = Output(stdin=io.StringIO(), stdout=terminal, stderr=terminal, environment={"TERM": "dumb"})
    with answer_view(output, DisplayOptions()) as view:
        view.show(Finished(1, "stop", STATS))
    assert terminal.getvalue() == "131.2 tokens/s · TTFT 0.21 s · ctx 159/8,192\n"


def test_real_terminal_gets_the_live_view() -> None:
    terminal = Terminal()
    output = Output(stdin=io.StringIO(), stdout=terminal, stderr=terminal, environment={"TERM": "xterm-256color"})
    assert isinstance(answer_view(output, DisplayOptions()), AnswerView)


class Encoded(Terminal):
    """A terminal with an encoding."""

    encoding = "ascii"


@pytest.mark.parametrize(
    ("environment", "terminal", "expected"),
    [
        ({"TERM": "xterm"}, Terminal(200), ["• item with bold", "─" * 40]),
        ({"TERM": "xterm", "NO_COLOR": "1"}, Terminal(200), ["• item with **bold**", "─" * 40]),
        ({"TERM": "xterm"}, Encoded(200), ["- item with bold", "-" * 40]),
        ({"TERM": "dumb"}, Terminal(200), ["- item with **bold**", "---"]),
    ],
)
def test_markdown_is_what_the_terminal_can_show(
    environment: dict[str, str], terminal: Terminal, expected: list[str]
) -> None:
    output = Output(stdin=io.StringIO(), stdout=terminal, stderr=terminal, environment=environment)
    with answer_view(output, DisplayOptions(stats=True)) as view:
        for event in events("- item with **bo", "ld**\n", "---\n"):
            view.show(event)
    assert terminal.screen.everything()[:2] == expected
    assert terminal.screen.everything()[2].startswith("prefill 31 tokens 412 tokens/s ")
    has_styles = "\x1b[1m" in terminal.getvalue()
    assert has_styles == ("bold" in expected[0] and "**" not in expected[0])
    if isinstance(terminal, Encoded):
        assert terminal.getvalue().isascii()


def test_reused_tokens_are_in_the_live_line() -> None:
    case = Case(120)
    case.show(Started(1, 31, 20, 1234))
    case.text("Hello")
    assert case.rows[-1].endswith("ctx 32/8,192 · reused 20")


LOADED = """\
import io, sys, time
from llmrun.protocol.loading import LoadProgress
from llmrun.ui.answer.page import Page
from llmrun.ui.answer.view import AnswerView
view = AnswerView(io.StringIO(), page=Page(time.monotonic, markdown=True))
print({"rich", "markdown_it"} & set(sys.modules))
view.show(LoadProgress(0.0))
print({"rich", "markdown_it"} <= set(sys.modules))
"""


def test_parser_and_rich_are_loaded_while_the_model_is_and_not_before() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["set()", "True", ""]
