"""An answer on a terminal that reflows: a copy is the answer but for line breaks, and a resize spoils nothing."""

from __future__ import annotations

import random

import pytest
from support.answers import STATS
from support.clock import Clock
from support.screens import ReflowingScreen, Terminal

from llmrun.protocol.messages import Finished, Started, TextDelta
from llmrun.ui.answer.page import Page
from llmrun.ui.answer.view import AnswerView
from llmrun.ui.terminal.cells import bare

STORY = (
    "Once upon a time there was a tale that spans many rows of the terminal, about bread serving those who survive in "
    "a world of narrow windows. It went on and on, from one word to the next one, a-b-c, and its end was far away.\n\n"
    "The second paragraph names https://example.org/a/very/long/address/that/no/terminal/of/sixty/columns/holds/in/one"
    "/row and goes on after it, so that words follow it, and more words follow those until there are enough of them.\n"
)
CODE = (
    "Do it so:\n\n```python\ndef bake(minutes, temperature=240, flour='rye'):\n"
    "    return f'{minutes} minutes at {temperature} degrees, a long line that no narrow terminal holds'\n```\n"
)
WIDE = "日本語のパンもおいしいですと思います。" * 6 + "\n"
TEXTS = {"story": STORY, "wide": WIDE, "code": CODE}


class Case:
    def __init__(self, columns: int, *, markdown: bool, live: bool = True) -> None:
        self.terminal = Terminal(columns, 12, ReflowingScreen)
        assert isinstance(self.terminal.screen, ReflowingScreen)
        self.screen = self.terminal.screen
        self.clock = Clock()
        page = Page(self.clock, markdown=markdown)
        self.view = AnswerView(
            self.terminal, n_ctx=8192, live=live, clock=self.clock, size=self.terminal.size, page=page
        )
        self.view.show(Started(1, 31, 0, 1234))

    def say(self, text: str, seed: int = 0) -> None:
        random_ = random.Random(seed)
        while text:
            length = random_.randint(1, 9)
            self.clock.now += 0.1
            self.view.show(TextDelta(1, text[:length], 1))
            text = text[length:]

    def end(self) -> str:
        self.view.show(Finished(1, "stop", STATS))
        return self.screen.copied()


def same_but_for_line_breaks(copied: str, text: str) -> None:
    assert "  " not in copied.replace("    ", ""), "no padding"
    assert not [line for line in copied.split("\n") if line != line.rstrip()]
    assert " ".join(copied.split()) == " ".join(text.split())


@pytest.mark.parametrize("columns", [40, 60, 100])
@pytest.mark.parametrize("markdown", [True, False])
def test_a_copy_is_the_answer_but_for_line_breaks(columns: int, markdown: bool) -> None:
    case = Case(columns, markdown=markdown)
    case.say(STORY)
    copied = case.end()
    same_but_for_line_breaks(copied, STORY)
    if not markdown:
        assert copied + "\n" == STORY, "the terminal wraps it"
    case = Case(columns, markdown=markdown)
    case.say(WIDE)
    assert case.end().replace("\n", "") == WIDE.strip()


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_code_is_copied_line_by_line(columns: int) -> None:
    case = Case(columns, markdown=True)
    case.say(CODE)
    copied = case.end().split("\n")
    assert [line for line in copied if "──" not in line] == [
        line for line in CODE.strip().split("\n") if "```" not in line
    ]


@pytest.mark.parametrize("before", [40, 60, 100])
@pytest.mark.parametrize("after", [40, 60, 100])
@pytest.mark.parametrize("markdown", [True, False])
def test_a_resize_in_mid_answer_spoils_nothing(before: int, after: int, markdown: bool) -> None:
    for cut in range(5, len(STORY), 61):
        case = Case(before, markdown=markdown)
        case.say(STORY[:cut], cut)
        case.screen.reflow(after)
        case.say(STORY[cut:], cut)
        same_but_for_line_breaks(case.end(), STORY)
    case.screen.reflow(before)
    same_but_for_line_breaks(case.screen.copied(), STORY)


@pytest.mark.parametrize("columns", [60, 100])
def test_a_wider_window_keeps_the_words_of_a_finished_answer_whole(columns: int) -> None:
    case = Case(40, markdown=True)
    case.say(STORY)
    case.end()
    case.screen.reflow(columns)
    shown = [word for row in case.screen.everything() for word in row.split()]
    assert [word for word in STORY.split() if "//" not in word and word not in shown] == []


def test_the_terminal_of_these_tests_reflows() -> None:
    screen = ReflowingScreen(10, 5)
    terminal = Terminal(10, 5, ReflowingScreen)
    screen = terminal.screen
    assert isinstance(screen, ReflowingScreen)
    terminal.write("0123456789abcde\nx  \n\x1b[31m日本語日本語\x1b[0m")
    assert screen.everything() == ["0123456789", "abcde", "x", "日本語日本", "語"]
    assert screen.copied() == "0123456789abcde\nx  \n日本語日本語"
    screen.reflow(7)
    assert screen.everything() == ["0123456", "789abcd", "e", "x", "日本語", "日本語"]
    screen.reflow(20)
    assert screen.everything() == ["0123456789abcde", "x", "日本語日本語"]
    terminal.write("!")
    assert screen.everything()[-1] == bare("日本語日本語!")
