"""Nothing that steers a terminal comes out of ui/sanitize.py, however the text is split."""

from __future__ import annotations

import itertools
import random
import unicodedata

import pytest

from llmrun.ui.sanitize import MAX_STRING, Sanitizer, clean

ESC = "\x1b"
BEFORE, AFTER = "before <", "> after"

CSI_BODIES = [
    "m", "31m", "1;31;42m", "38;2;1;2;3m", "38:5:196m", "2J", "3J", "H", "1;1H", "?25l", "?1049h", "?2004h",
    "?1000h", "6n", "c", ">c", "=c", "5i", "4i", "21t", "8;1;1t", "s", "u", "1000A", "1000D", "K", "2K",
    "L", "M", "P", "X", "@", "r", "1;5r", "0 q", "!p", '"q', "?6c", ">4;2m", "<u", "20h", "4h", "b", "Z",
    "I", "d", "G", "E", "F", "S", "T",
]  # fmt: skip
STRING_BODIES = [
    "0;title", "2;title", "1;icon", "8;;https://example.org", "8;id=1;file:///etc/passwd", "8;;",
    "52;c;aGVsbG8=", "52;c;?", "4;1;rgb:ff/00/00", "10;?", "11;?", "7;file://host/tmp", "9;ping",
    "777;notify;a;b", "1337;File=name=a:Zm8=", "133;A", "50;font", "104", "112", "$q\"p", "+q544e",
    "q#0;2;0;0;0#0~~", "Ga=T,f=100;AAAA", "1;2;3|17/17", "",
]  # fmt: skip
SHORT_ESCAPES = [
    "7", "8", "c", "D", "E", "H", "M", "N", "O", "Z", "=", ">", "(B", "(0", ")A", "*B", "+B", "#8", "#3",
    " F", " G", "%G", "%@", "n", "o", "|", "}", "~", "6", "9", "l", "m", "\\",
]  # fmt: skip
CONTROLS = [chr(code) for code in (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))]
INVISIBLE = [
    *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2060, 0x2070)), "\u200b", "\u200e", "\u200f",
    "\u061c", "\ufeff", "\u00ad", "\u180e", "\ufff9", "\ufffb", "\uffff", "\U000e0001", "\U000e0041",
    "\U000e007f",
]  # fmt: skip

SEQUENCES = [
    *(introducer + body for body in CSI_BODIES for introducer in (f"{ESC}[", "\x9b")),
    *(
        introducer + body + end
        for body in STRING_BODIES
        for introducer, end in (
            (f"{ESC}]", "\x07"), (f"{ESC}]", f"{ESC}\\"), ("\x9d", "\x9c"), (f"{ESC}P", f"{ESC}\\"),
            ("\x90", "\x9c"), (f"{ESC}_", f"{ESC}\\"), (f"{ESC}^", f"{ESC}\\"), (f"{ESC}X", f"{ESC}\\"),
            ("\x9f", "\x9c"), ("\x9e", f"{ESC}\\"), ("\x98", "\x07"),
        )
    ),
    *(ESC + body for body in SHORT_ESCAPES),
    *(control for control in CONTROLS if control not in f"{ESC}\x90\x98\x9b\x9d\x9e\x9f"),
    *INVISIBLE,
]  # fmt: skip

UNFINISHED = [
    ESC, f"{ESC}[", f"{ESC}[31", f"{ESC}[?", f"{ESC}[1 ", "\x9b", "\x9b1;", f"{ESC}]", f"{ESC}]0",
    f"{ESC}P", "\x9d", "\x90", f"{ESC}_", f"{ESC}^", f"{ESC}X", f"{ESC}]0{ESC}", f"{ESC}(", f"{ESC}{ESC}",
    f"{ESC}[{ESC}[", f"{ESC}]{ESC}]",
]  # fmt: skip


def is_allowed(char: str) -> bool:
    """The rule again, from Unicode's own tables and not from the list in the code."""
    if char in "\n\t\u200c\u200d":
        return True
    return unicodedata.category(char) not in {"Cc", "Cs", "Zl", "Zp"} and char not in INVISIBLE


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
