"""Thoughts are told from answers however the text is split, and shown as asked for."""

from __future__ import annotations

import io
import itertools

import pytest
from support.answers import sent, split, splitter_of
from support.clock import Clock
from support.screens import Terminal

from llmrun.protocol.messages import Event, Started, TextDelta
from llmrun.protocol.reasoning import ReasoningSplitter
from llmrun.ui.answer.page import Page, Think
from llmrun.ui.answer.reasoning import FOLD_CHARACTERS
from llmrun.ui.answer.view import AnswerView, DisplayOptions, answer_view
from llmrun.ui.terminal.output import Output

TAGS = ("<think>", "</think>")


def parts(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    """Thoughts and answer of a text in pieces."""
    splitter = ReasoningSplitter(TAGS, inside=inside)
    found = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
    return tuple("".join(part.text for part in found if part.kind == kind) for kind in ("reasoning", "text"))


@pytest.mark.parametrize(
    ("text", "inside", "thoughts", "answer"),
    [
        ("<think>a</think>b", False, "a", "b"),
        ("\n <think>\na\n</think>\n\nb\n", False, "\na\n", "b\n"),
        ("a</think>b", True, "a", "b"),
        ("a < b </thin k> c</think>b", True, "a < b </thin k> c", "b"),
        ("<think></think>\n\nb", False, "", "b"),
        ("<think>a</think> <think>b</think>c", False, "ab", "c"),
        ("<think>never ended </thi", False, "never ended </thi", ""),
        ("about <think> tags</think>", False, "", "about <think> tags</think>"),
        ("  \n b", False, "", "  \n b"),
        ("<thi", False, "", "<thi"),
        ("</think>b", False, "", "b"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>a</think>\n", False, "a", ""),
        ("", True, "", ""),
    ],
)
def test_split_at_any_place(text: str, inside: bool, thoughts: str, answer: str) -> None:
    received = split(Started(1, 9, 0, 5, thinking=inside, thinking_tags=TAGS), text)
    assert (received.reasoning, received.text) == (thoughts, answer)
    for index in range(len(text) + 1):
        assert parts([text[:index], text[index:]], inside=inside) == (thoughts, answer)
    assert parts(list(text), inside=inside) == (thoughts, answer)


HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>")
FRAMED = ("<o>think<s>", "<c>think<s>", "<o>response<s>", "<c>response<s>", "<c>message<s>")
GEMMA = ("<|channel>thought", "<channel|>")
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("syntax", "text", "thoughts", "answer"),
    [
        (HARMONY, f"<|channel|>analysis<|message|>a{NEXT}<|channel|>final<|message|>b", "a", "b"),
        (HARMONY, f"<|channel|>analysis<|message|>a{NEXT}<|channel|>final <|constrain|>json<|message|>b", "a", "b"),
        (HARMONY, "<|channel|>final<|message|>b", "", "b"),
        (HARMONY, f"<|channel|>commentary<|message|>b{NEXT}<|channel|>final<|message|>c", "", "bc"),
        (HARMONY, f"<|channel|>commentary<|message|>b{NEXT}<|channel|>analysis<|message|>a", "a", "b"),
        (HARMONY, f"<|channel|>commentary to=assistant<|channel|>analysis<|message|>a{NEXT}{HARMONY[2]}b", "a", "b"),
        (HARMONY, f" to=assistant<|channel|>analysis<|message|>a{NEXT}{HARMONY[2]}b", "a", "b"),
        (HARMONY, "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b"),
        (HARMONY, "total", "", "total"),
        (HARMONY, "<|channel|>analysis<|message|>a<|end|>", "a", ""),
        (HARMONY, "<|channel|>final<|message|>b <|end|>", "", "b "),
        (HARMONY, "<|channel|>final<|message|>1 <", "", "1 <"),
        (HARMONY, "<|channel|>analysis to=functions.f<|message|>{}", "",
         "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"),
        (HARMONY, " to=container.exec<|channel|>commentary<|message|>ls", "", "ls"),
        (FRAMED, "<o>think<s>a<c>think<s><o>response<s>b<c>response<s><c>message<s>", "a", "b"),
        (FRAMED, "<o>response<s>b<c>response<s>", "", "b"),
        (FRAMED, "b", "", "b"),
        (GEMMA, "<|channel>thought\na<channel|>b", "\na", "b"),
        (GEMMA, "<|channel>thought<channel|>b<|channel>thought\n<channel|>", "\n", "b"),
        (GEMMA, "b<channel|>", "", "b"),
    ],
)  # fmt: skip
def test_channels_are_told_at_any_place(syntax: tuple[str, ...], text: str, thoughts: str, answer: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        splitter = ReasoningSplitter(syntax)
        found = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
        for kind, expected in (("reasoning", thoughts), ("text", answer)):
            assert "".join(part.text for part in found if part.kind == kind) == expected


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("<think>a <answer> b</think>\n<answer>c</answer>", "a <answer> b", "c"),
        ("<think>a</think>c", "a", "c"),
        ("<think>a</think><answer>c < d", "a", "c < d"),
        ("◁think▷a◁/think▷b", "a", "b"),
        ("◁thin b", "", "◁thin b"),
        ("a ◁think▷b", "", "a ◁think▷b"),
    ],
)
def test_tags_of_other_families_and_around_the_answer(text: str, thoughts: str, answer: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        splitter = ReasoningSplitter((*TAGS, "<answer>", "</answer>"))
        found = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
        for kind, expected in (("reasoning", thoughts), ("text", answer)):
            assert "".join(part.text for part in found if part.kind == kind).strip() == expected


@pytest.mark.parametrize(
    ("text", "is_cut_off", "thoughts", "answer"),
    [
        ("a</think>b", False, "a", "b"),
        ("<think>a</think>b", False, "a", "b"),
        ("<think>a", False, "a", ""),
        ("only an answer", False, "only an answer", "only an answer"),  # it was shown as reasoning, and is not lost
        ("cut o", True, "cut o", ""),
    ],
)
def test_the_opening_tag_may_be_implied(text: str, is_cut_off: bool, thoughts: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter((*TAGS, "", "", "", "", True))
        found = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush(is_cut_off=is_cut_off)
        said = ["".join(part.text for part in found if part.kind == kind) for kind in ("reasoning", "text")]
        assert said == [thoughts, answer]


def test_reasoning_begins_with_the_words_in_the_prompt() -> None:
    splitter = ReasoningSplitter(("", "[END]", "", "", "", "Well, "), inside=True)
    assert [part[:2] for part in splitter.feed("yes[END]no")] == [
        ("reasoning", "Well, "), ("reasoning", "yes"), ("reasoning_end", ""), ("text", "no"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "thoughts", "answer", "is_control"),
    [
        ("a\n<call>b", "a", "<call>b", False),
        ("\n<call>b", "", "<call>b", False),
        ("about <call>s</think>b", "about <call>s", "b", False),
        ("about <call>b", "about ", "<call>b", True),
        ("about <one>b", "about ", "<one>b", True),
        ("a</think>\n<call>b", "a", "<call>b", False),
    ],
)
def test_a_call_ends_it(text: str, thoughts: str, answer: str, is_control: bool) -> None:
    """At the start of a line, or anywhere if a control token begins calls."""
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(TAGS, inside=True, calls=("<call>", "<one>"), anywhere=is_control)
        found = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
        assert "".join(part.text for part in found if part.kind == "reasoning") == thoughts
        assert "".join(part.text for part in found if part.kind == "text") == answer


@pytest.mark.parametrize("text", ["<|a><|a>thought x<b>y", "<|a>thought x<b>y"])
def test_the_first_tag_may_stand_twice(text: str) -> None:
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(("<|a>thought", "<b>"))
        found = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
        texts = ["".join(part.text for part in found if part.kind == kind) for kind in ("reasoning", "text")]
        assert texts == [" x", "y"]


def test_thoughts_come_at_once_and_only_a_tag_is_held_back() -> None:
    splitter = ReasoningSplitter(("[THINK]", "[/THINK]"))
    assert [[part[:2] for part in splitter.feed(piece)] for piece in ("[TH", "INK]", "a [", "b", "[/THINK]")] == [
        [], [], [("reasoning", "a ")], [("reasoning", "[b")], [("reasoning_end", "")],
    ]  # fmt: skip


def test_without_tags_all_is_answer() -> None:
    for inside in (False, True):
        received = split(Started(1, 9, 0, 5, thinking=inside), "<think>a</think>b")
        assert (received.reasoning, received.text) == ("", "<think>a</think>b")


# ---- on a terminal ---------------------------------------------------------------------------------

THOUGHTS = ["The user", " greets", " me.\n", "\n", "I will", " greet", " back.\n", "Kindly.", "\nOnce.", " Well."]


class Case:
    """An answer with thoughts, shown on a terminal."""

    def __init__(self, think: Think, columns: int = 60, *, styled: bool = True, unicode: bool = True) -> None:
        self.terminal, self.clock = Terminal(columns, 12), Clock()
        page = Page(self.clock, think=think, markdown=True, styled=styled, unicode=unicode)
        self.view = AnswerView(
            self.terminal, clock=self.clock, size=self.terminal.size, page=page, unicode=unicode, dim=styled
        )
        started = Started(1, 31, 0, 1234, thinking=True, thinking_tags=TAGS)
        self.splitter = splitter_of(started)
        self.view.show(started)

    def text(self, *pieces: str) -> None:
        for piece in pieces:
            self.clock.now += 0.1
            self.view.show(TextDelta(1, piece, 1, parts=self.splitter.feed(piece)))

    @property
    def rows(self) -> list[str]:
        return self.terminal.screen.everything()


@pytest.mark.parametrize(
    ("think", "during", "after"),
    [
        ("on", ["│ The user greets me.", "│", "│ I will greet back.", "│ Kindly."],
         ["│ The user greets me.", "│", "│ I will greet back.", "│ Kindly.", "│ Once. Well."]),
        ("fold", ["│ The user greets me.", "│ I will greet back.", "│ Kindly."],
         ["│ The user greets me.", "│ I will greet back.", "│ Kindly."]),
        ("hide", [], []),
    ],
)  # fmt: skip
def test_shown_as_asked_for(think: Think, during: list[str], after: list[str]) -> None:
    case = Case(think)
    case.text(*THOUGHTS[:-1])
    assert case.rows[:-1] == during
    assert case.rows[-1].startswith("thinking… 9 tokens, 0.8 s · ")
    case.text(THOUGHTS[-1], "</think>", "\n\n**Hello**", " to you!")
    case.view.close()
    assert case.rows == [*after, "thought for 1.0 s, 11 tokens", "", "Hello to you!"]
    assert "\x1b[2mthought for" in case.terminal.getvalue()
    assert case.terminal.getvalue().count("thought for") == 1


def test_a_long_line_of_thoughts_is_folded_at_a_word() -> None:
    case = Case("fold")
    case.text(*["word "] * 100)
    case.view.close()
    shown = " ".join(row.removeprefix("│ ") for row in case.rows[:-1])
    assert shown.endswith("word …")
    assert len(shown) <= FOLD_CHARACTERS + len("word  …")
    assert case.rows[-1].startswith("thought for ")


@pytest.mark.parametrize("think", ["on", "fold", "hide"])
def test_thoughts_that_are_blank_leave_no_trace(think: Think) -> None:
    case = Case(think)
    case.text("\n\n", "</think>", "\n\n", "Hello")
    case.view.close()
    assert case.rows == ["Hello"]


@pytest.mark.parametrize("think", ["on", "fold"])
def test_screen_does_not_depend_on_pieces(think: Think) -> None:
    text = "".join(THOUGHTS) + "</think>\n\nHello **you**"
    screens = set()
    for cuts in itertools.chain([()], ((index,) for index in range(len(text)))):
        case = Case(think, 20)
        case.text(*(text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]) if b > a))
        case.view.close()
        screens.add("\n".join(row for row in case.rows if not row.startswith("thought for")))
    assert len(screens) == 1


def test_plain_terminal_gets_ascii_and_no_style() -> None:
    case = Case("fold", styled=False, unicode=False)
    case.text("thinking " * 60)
    assert case.rows[-1].startswith("thinking... 1 tokens, 0.0 s - ")
    case.text("</think>", "**Hello**")
    case.view.close()
    assert case.rows[0].startswith("| thinking thinking")
    assert case.rows[-1] == "**Hello**"
    assert "..." in case.rows[-4]
    assert "m" not in {raw[-1] for raw in case.terminal.getvalue().split("\x1b[")[1:]}
    assert case.terminal.getvalue().isascii()


# ---- without a terminal ----------------------------------------------------------------------------


def events(*texts: str) -> list[Event]:
    started = Started(1, 31, 0, 1234, thinking_tags=TAGS)
    return [started, *sent(started, texts)]


@pytest.mark.parametrize(
    ("think", "expected"),
    [("on", "<think>\na b</think>\n\n**Hello**\n"), ("fold", "**Hello**\n"), ("hide", "**Hello**\n")],
)
def test_pipe_gets_the_answer_as_it_is_and_thoughts_only_when_they_are_on(think: Think, expected: str) -> None:
    stdout = io.StringIO()
    output = Output(stdin=io.StringIO(), stdout=stdout, stderr=io.StringIO())
    with answer_view(output, DisplayOptions(stats=True, think=think)) as view:
        for event in events("<th", "ink>\na", " b</think", ">\n\n**Hel", "lo**\n"):
            view.show(event)
    assert stdout.getvalue() == expected


def test_dumb_terminal_says_why_nothing_comes() -> None:
    terminal = Terminal()
    output = Output(stdin=io.StringIO(), stdout=terminal, stderr=terminal, environment={"TERM": "dumb"})
    with answer_view(output, DisplayOptions(stats=False)) as view:
        for event in events("<think>a", "b</think>", "\n\nHello"):
            view.show(event)
    assert terminal.getvalue() == "(thinking ...)\nHello\n"
