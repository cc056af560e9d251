"""ui/terminal/sanitize.py removes everything that controls a terminal, however the text is split."""

from __future__ import annotations

import itertools
import random

import pytest
from support.escapes import (
    ESC,
    SEQUENCES,
    UNFINISHED,
    is_allowed,
)

from llmrun.ui.terminal.sanitize import MAX_STRING, Sanitizer, clean

BEFORE, AFTER = "before <", "> after"


def feed_all(pieces: list[str]) -> str:
    sanitizer = Sanitizer()
    return "".join(map(sanitizer.feed, pieces)) + sanitizer.flush()


def test_there_are_enough_payloads() -> None:
    assert len(set(SEQUENCES + UNFINISHED)) >= 250


@pytest.mark.parametrize("sequence", SEQUENCES, ids=ascii)
def test_whole_sequence_goes_and_its_surroundings_stay_wherever_it_is_split(sequence: str) -> None:
    text = BEFORE + sequence + AFTER
    assert clean(text) == BEFORE + AFTER
    for index in range(len(text) + 1):
        assert feed_all([text[:index], text[index:]]) == BEFORE + AFTER
    assert feed_all(list(text)) == BEFORE + AFTER


@pytest.mark.parametrize("start", UNFINISHED, ids=ascii)
def test_unfinished_sequence_is_harmless_and_swallows_no_later_line(start: str) -> None:
    text = f"{BEFORE}{start}\nnext line"
    for pieces in ([text], list(text)):
        out = feed_all(pieces)
        assert all(map(is_allowed, out))
        assert out.startswith(BEFORE)
        assert out.endswith("\nnext line")
    assert all(map(is_allowed, feed_all([BEFORE + start])))


def test_random_mixtures_come_out_the_same_however_they_are_split() -> None:
    random_ = random.Random(1)
    parts = [
        *SEQUENCES,
        *UNFINISHED,
        "text",
        "\n",
        "\t",
        "é",
        "🙂",
        "\ud800",
        "\u2028",
        "\r\n",
        "]",
        "\\",
        "m",
        "\x07",
    ]
    for _ in range(2000):
        text = "".join(random_.choices(parts, k=random_.randint(1, 8)))
        cuts = sorted(random_.choices(range(len(text) + 1), k=random_.randint(0, 6)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        out = feed_all(pieces)
        assert out == clean(text, newlines=True)
        assert all(map(is_allowed, out))


@pytest.mark.parametrize(
    "text",
    ["plain", "tab\there\nline", "naïve café\u00a0!", "日本語", "🙂 👩\u200d👩\u200d👧 ❤\ufe0f", "न\u200cम",
    "\ue0b0 icon", ""],
)  # fmt: skip
def test_harmless_text_is_unchanged(text: str) -> None:
    assert feed_all([text]) == text
    assert clean(text, newlines=True) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb", "a\nb"),
        ("password: hidden\rinnocent", "password: hiddeninnocent"),
        ("a\u2028b\u2029c", "a\nb\nc"),
        ("a\udc80b", "a\ufffdb"),
        ("a\x08b", "ab"),
        (f"{ESC}]0;never ended", "0;never ended"),
        (f"{ESC}[31;never", "ever"),  # "n" ends a CSI sequence
        (f"{ESC}é", "é"),
    ],
)
def test_what_becomes_of(text: str, expected: str) -> None:
    assert clean(text, newlines=True) == expected
    assert feed_all(list(text)) == expected


def test_one_line_texts_lose_their_newlines() -> None:
    assert clean("a\nb\tc\u2028d") == "a b c d"


def test_overlong_string_sequence_gives_up_and_shows_its_text() -> None:
    body = "x" * (MAX_STRING + 1)
    assert clean(f"{ESC}]{body}\x07") == body
    assert feed_all([f"{ESC}]", *body, "\x07"]) == body
    assert clean(f"{ESC}]{body[:-1]}\x07") == ""


@pytest.mark.parametrize("unit", ["\x9d", f"{ESC}]", f"{ESC}[1", "x", f"{ESC}]" + "y" * 5000, "\x1b[" + "1" * 500])
def test_huge_hostile_lines_take_linear_time(unit: str) -> None:
    out = feed_all([unit * (1_000_000 // len(unit))])
    assert all(map(is_allowed, set(out)))


def test_text_without_anything_special_is_handed_back_itself() -> None:
    text = "a token"
    assert Sanitizer().feed(text) is text
