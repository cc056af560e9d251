"""Token bytes to text: whole characters, and stop strings however the pieces fall."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from llmrun.engine.text import TextStream

SAMPLE = "aé€😀\u200d"  # characters of 1 to 4 bytes


def feed(pieces: Sequence[bytes], stop: tuple[str, ...] = ()) -> tuple[str, bool]:
    """All text that comes out, and whether a stop string was met."""
    stream = TextStream(stop)
    text = "".join(map(stream.push, pieces))
    return text + stream.finish(), stream.stopped


def splits(data: bytes) -> list[list[bytes]]:
    """Every way to cut data into pieces."""
    ways = []
    for cuts in itertools.product([False, True], repeat=len(data) - 1):
        borders = [0, *(at for at, cut in enumerate(cuts, 1) if cut), len(data)]
        ways.append([data[start:end] for start, end in itertools.pairwise(borders)])
    return ways


def random_pieces(rng: random.Random, data: bytes) -> list[bytes]:
    borders = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(5))})
    return [data[start:end] for start, end in itertools.pairwise(borders)]


def first_stop(text: str, stop: tuple[str, ...]) -> str:
    """The obvious twin: read character by character until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ends = [word for word in stop if text[:end].endswith(word)]
        if ends:
            return text[: end - max(map(len, ends))]
    return text


@pytest.mark.parametrize("pieces", splits(SAMPLE[1:4].encode()))
def test_characters_come_out_whole(pieces: list[bytes]) -> None:
    stream = TextStream()
    for piece in pieces:
        assert set(stream.push(piece)) <= set(SAMPLE)
    assert stream.finish() == ""
    assert feed(pieces) == (SAMPLE[1:4], False)


def test_a_character_comes_as_soon_as_it_is_complete() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in SAMPLE.encode()] == [
        *("a", "", "é", "", "", "€", "", "", "", "😀", "", "", "\u200d"),
    ]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff", "\ufffd"),
        (b"a\x80b", "a\ufffdb"),
        (b"\xe2\x82", "\ufffd"),
        (b"\xe2\x82a", "\ufffda"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"\xf0\x9f\x98\xe2\x82\xac", "\ufffd€"),
        (b"\xc0\xaf", "\ufffd\ufffd"),
    ],
)
def test_bytes_that_are_no_text(data: bytes, text: str) -> None:
    for pieces in splits(data):
        assert feed(pieces) == (text, False)


def test_random_bytes_in_random_pieces() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        data = bytes(rng.choice(b"ab\x80\x9f\xa0\xbf\xc3\xe2\xed\xf0\xf4\xff") for _ in range(rng.randrange(12)))
        assert feed(random_pieces(rng, data)) == (data.decode("utf-8", "replace"), False)


def test_stop_string_in_every_split() -> None:
    for pieces in splits("hé<end>more".encode()):
        assert feed(pieces, ("<end>",)) == ("hé", True)


def test_text_that_may_become_a_stop_string_is_held() -> None:
    stream = TextStream(("<end>",))
    assert stream.push(b"a<") == "a"
    assert stream.push(b"en") == ""
    assert stream.push(b"ough") == "<enough"
    assert not stream.stopped


def test_the_shortest_possible_end_is_held() -> None:
    stream = TextStream(("aab",))
    assert stream.push(b"aaaa") == "aa"
    assert stream.push(b"b") == ""
    assert stream.stopped


def test_finish_gives_what_was_held() -> None:
    stream = TextStream(("<end>",))
    assert stream.push(b"a<en") == "a"
    assert stream.finish() == "<en"
    assert stream.finish() == ""


def test_finish_gives_a_replacement_for_half_a_character() -> None:
    assert feed([b"a<e\xe2\x82"], ("<end>",)) == ("a<e\ufffd", False)


def test_finish_may_complete_a_stop_string() -> None:
    assert feed([b"a\xe2\x82"], ("\ufffd",)) == ("a", True)


def test_nothing_comes_after_a_stop_string() -> None:
    stream = TextStream(("x",))
    assert stream.push(b"axb") == "a"
    assert stream.stopped
    assert stream.push(b"more") == ""
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abc", ("bc", "abc"), ""),
        ("abcd", ("abcd", "bc"), "a"),
        ("xaby", ("ab", "b"), "x"),
        ("ababac", ("abac",), "ab"),
        ("a\nUser:", ("\n\n", "\nUser:"), "a"),
        ("xx", ("x",), ""),
        ("stop", ("stop",), ""),
    ],
)
def test_overlapping_stop_strings_in_every_split(text: str, stop: tuple[str, ...], expected: str) -> None:
    assert first_stop(text, stop) == expected
    for pieces in splits(text.encode()):
        assert feed(pieces, stop) == (expected, True)


def test_random_texts_with_random_stop_strings() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        stop = tuple("".join(rng.choices("abé", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        text = "".join(rng.choices("abé", k=rng.randrange(14)))
        expected = first_stop(text, stop)
        assert feed(random_pieces(rng, text.encode()), stop) == (expected, expected != text), (text, stop)
