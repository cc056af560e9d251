"""Token bytes to text: whole characters, and stop strings however the pieces fall."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from support.seeds import for_seeds
from support.text_twin import SlowTextStream

from llmrun.engine.core.text import TextStream
from llmrun.protocol.answer import AnswerSplitter
from llmrun.protocol.messages import AnswerPart
from llmrun.protocol.reasoning import MESSAGE_BEGINS, ReasoningSplitter

SAMPLE = "aé€😀\u200d"  # characters of 1 to 4 bytes


def feed(pieces: Sequence[bytes], stop: tuple[str, ...] = ()) -> tuple[str, str]:
    """All text that comes out, and the stop string that was met."""
    stream = TextStream(stop)
    text = "".join(map(stream.push, pieces))
    return text + stream.finish(), stream.stopped_by


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
    assert feed(pieces) == (SAMPLE[1:4], "")


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
        assert feed(pieces) == (text, "")


def test_random_bytes_in_random_pieces() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        data = bytes(rng.choice(b"ab\x80\x9f\xa0\xbf\xc3\xe2\xed\xf0\xf4\xff") for _ in range(rng.randrange(12)))
        assert feed(random_pieces(rng, data)) == (data.decode("utf-8", "replace"), "")


def test_stop_string_in_every_split() -> None:
    for pieces in splits("hé<end>more".encode()):
        assert feed(pieces, ("<end>",)) == ("hé", "<end>")


def test_text_that_may_become_a_stop_string_is_held() -> None:
    stream = TextStream(("<end>",))
    assert stream.push(b"a<") == "a"
    assert stream.push(b"en") == ""
    assert stream.push(b"ough") == "<enough"
    assert not stream.stopped_by


def test_the_shortest_possible_end_is_held() -> None:
    stream = TextStream(("aab",))
    assert stream.push(b"aaaa") == "aa"
    assert stream.push(b"b") == ""
    assert stream.stopped_by


def test_finish_gives_what_was_held() -> None:
    stream = TextStream(("<end>",))
    assert stream.push(b"a<en") == "a"
    assert stream.finish() == "<en"
    assert stream.finish() == ""


def test_finish_gives_a_replacement_for_half_a_character() -> None:
    assert feed([b"a<e\xe2\x82"], ("<end>",)) == ("a<e\ufffd", "")


def test_finish_may_complete_a_stop_string() -> None:
    assert feed([b"a\xe2\x82"], ("\ufffd",)) == ("a", "\ufffd")


def test_nothing_comes_after_a_stop_string() -> None:
    stream = TextStream(("x",))
    assert stream.push(b"axb") == "a"
    assert stream.stopped_by
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
        assert feed(pieces, stop)[0] == expected


def test_random_texts_with_random_stop_strings() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        stop = tuple("".join(rng.choices("abé", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        text = "".join(rng.choices("abé", k=rng.randrange(14)))
        expected = first_stop(text, stop)
        found, stopped_by = feed(random_pieces(rng, text.encode()), stop)
        assert (found, bool(stopped_by)) == (expected, expected != text), (text, stop)


def test_the_text_of_a_token_is_known_whether_or_not_it_is_shown() -> None:
    stream = TextStream(stop=("<end>",), ban=("no",))
    decoded = []
    for piece in (b"a", b"\xe2\x82", b"\xac<", b"end", b">"):
        stream.push(piece)
        decoded.append(stream.decoded)
    assert decoded == ["a", "", "€<", "end", ">"]
    assert stream.stopped_by


# ---- banned phrases ---------------------------------------------------------------------------------


def test_a_banned_phrase_is_held_back_and_undone_from_the_token_it_begins_in() -> None:
    stream = TextStream(ban=("as an AI",))
    assert [stream.push(piece) for piece in (b"Well, ", b"speaking", b" a", b"s an")] == ["Well, ", "speaking", "", ""]
    assert stream.push(b" AI!") == ""
    assert stream.banned
    assert stream.step_back() == 3, "the phrase begins inside ' a'"
    assert not stream.banned
    assert stream.push(b" ask") == " ask"
    assert stream.finish() == ""


def test_what_stands_before_the_phrase_in_its_first_token_is_not_shown_yet() -> None:
    stream = TextStream(ban=("no",))
    assert stream.push(b"I say n") == ""
    assert stream.push(b"o") == ""
    assert stream.step_back() == 2
    assert stream.push(b"yes") == "yes"


def test_a_phrase_is_banned_whatever_its_case() -> None:
    for phrase, text in (("Hello", "hELLO"), ("straße", "STRAßE"), ("İstanbul", "İSTANBUL"), ("ÉTÉ", "été")):
        stream = TextStream(ban=(phrase,))
        stream.push(text.encode())
        assert stream.banned, phrase


@pytest.mark.parametrize("text", ["ΟΔΟΣ", "οδος", "ΟΔΟΣΑ", "ΟΔΟΣ ", "οδοσα"])
@pytest.mark.parametrize("phrase", ["ΟΔΟΣ", "οδος", "οδοσ"])
def test_what_stands_after_a_final_sigma_does_not_matter(text: str, phrase: str) -> None:
    stream = TextStream(ban=(phrase,))
    stream.push(text.encode())
    assert stream.banned


def test_a_phrase_within_one_token() -> None:
    stream = TextStream(ban=("b",))
    stream.push(b"abc")
    assert stream.step_back() == 1
    assert (stream.push(b"ac"), stream.finish()) == ("ac", "")


def test_a_stop_string_that_ends_with_or_before_a_banned_phrase_wins() -> None:
    stream = TextStream(stop=("END",), ban=("THE END", "ending"))
    assert stream.push(b"THE END") == "THE "
    assert stream.stopped_by
    assert not stream.banned


def test_a_phrase_that_the_answer_ends_within_is_shown() -> None:
    stream = TextStream(ban=("as an AI",))
    stream.push(b"x as an")
    assert stream.finish() == "x as an"


@for_seeds(300)
def test_no_banned_phrase_ever_comes_and_what_was_shown_stays(seed: int) -> None:
    """Tokens of up to three characters, whole or cut, from a small alphabet; each ban undoes what it says."""
    rng = random.Random(seed)
    letters = "abAÉé😀"
    bans = tuple("".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
    stream, tokens, shown = TextStream(ban=bans), list[bytes](), ""
    left = b""
    for _ in range(60):
        if not left:
            left = "".join(rng.choices(letters, k=3)).encode()
        cut = rng.randint(1, len(left))
        tokens.append(left[:cut])
        left = left[cut:]
        shown += stream.push(tokens[-1])
        if stream.banned:
            undone = stream.step_back()
            assert 1 <= undone <= len(tokens)
            del tokens[len(tokens) - undone :]
            left = b""  # another character begins, maybe inside the one that was cut
        assert b"".join(tokens).decode("utf-8", "replace").startswith(shown.rstrip("\ufffd"))
    text = shown + stream.finish()
    assert text == b"".join(tokens).decode("utf-8", "replace")
    folded = text.lower()
    assert not any(ban.lower() in folded for ban in bans)


# ---- against the twin -------------------------------------------------------------------------------


@for_seeds(200)
def test_every_step_is_the_twins(seed: int) -> None:
    """Few letters, so that phrases overlap, begin with each other and come often; tokens end inside characters."""
    rng = random.Random(seed)
    letters = rng.choice(["ab", "abB", "aAéÉ", "σΣςİi", "ab\ufffd😀"])

    def phrases(most: int) -> tuple[str, ...]:
        longest = rng.choice([2, 4, 9])
        return tuple("".join(rng.choices(letters, k=rng.randint(1, longest))) for _ in range(rng.randint(0, most)))

    for _ in range(5):
        stop, ban = phrases(rng.choice([0, 2, 30])), phrases(rng.choice([0, 3, 30]))
        fast, slow = TextStream(stop, ban), SlowTextStream(stop, ban)
        left = b""
        for _ in range(60):
            left = left or "".join(rng.choices(letters, k=4)).encode()
            cut = rng.randint(0, len(left))
            piece, left = left[:cut], left[cut:]
            assert fast.push(piece) == slow.push(piece)
            assert (fast.stopped_by, fast.banned) == (slow.stopped_by, slow.banned)
            if fast.banned:
                assert fast.step_back() == slow.step_back()
                left = b""  # another token begins, maybe inside the character that was cut
        assert (fast.finish(), fast.stopped_by) == (slow.finish(), slow.stopped_by)


# ---- stops count in the answer, not in the reasoning ------------------------------------------------

THINK = ("<think>", "</think>")
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>")
FRAMED = ("<o>think<s>", "<c>think<s>", "<o>response<s>", "<c>response<s>", "<c>message<s>")


def answered(
    syntax: Sequence[str | bool], pieces: Sequence[str], stop: Sequence[str], ban: Sequence[str] = (), **more: bool
) -> tuple[str, str, str]:
    """Reasoning, answer and stop string of an answer in pieces, the engine's way."""
    stream, splitter, parts = TextStream(stop, ban), AnswerSplitter(syntax, **more), list[AnswerPart]()
    stream.mask = splitter.mask
    for piece in pieces:
        parts += splitter.feed(stream.push(piece.encode()))
        if stream.banned:
            stream.step_back()
        if stream.stopped_by:
            break
    parts += (*splitter.feed(stream.finish()), *splitter.flush(stop=stop))
    reasoning, text = ("".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "text"))
    return reasoning, text, stream.stopped_by


def answered_whole(syntax: Sequence[str | bool], text: str, stop: tuple[str, ...], **more: bool) -> tuple[str, str]:
    """The obvious twin: split the whole text, and read each of its messages up to a stop string."""
    splitter = ReasoningSplitter(syntax, **more)
    reasoning, said, message = "", "", ""
    for part in (*splitter.feed(text), *splitter.flush(), MESSAGE_BEGINS):
        if part.kind == "text" and part is not MESSAGE_BEGINS:
            message += part.text
            continue
        if (cut := first_stop(message, stop)) != message:
            return reasoning, said + cut
        said, message = said + message, ""
        reasoning += part.text
    return reasoning, said


@pytest.mark.parametrize(
    ("syntax", "inside", "text", "expected"),
    [
        (THINK, False, "<think>a END\n\nb</think>\n\nyes END no", ("a END\n\nb", "yes ", "END")),
        (THINK, True, "a END b</think>yes\n\nno", ("a END b", "yes", "\n\n")),
        (THINK, False, "\n\n<think>a</think>yes", ("a", "yes", "")),
        (THINK, False, "\n\nyes", ("", "", "\n\n")),
        (THINK, False, "<think>a</think>EN", ("a", "EN", "")),
        (THINK, False, "<think>a EN</think>D END", ("a EN", "D ", "END")),
        (THINK, False, "no <think>END</think>", ("", "no <think>", "END")),
        (THINK, False, "<think>never closed END", ("never closed END", "", "")),
        (CHANNELS, False, f"{CHANNELS[0]}a END{CHANNELS[1]}{CHANNELS[2]}b END", ("a END", "b ", "END")),
        (FRAMED, False, "<o>think<s>END<c>think<s><o>response<s>b\n\nc", ("END", "b", "\n\n")),
        ((*THINK, "", "", "", "", True), False, "a END b</think>c END", ("a END b", "c ", "END")),
        ((*THINK, "", "", "", "", True), False, "an answer END", ("an answer END", "an answer ", "")),
    ],
)  # fmt: skip
def test_a_stop_string_counts_in_the_answer_only(
    syntax: tuple[str | bool, ...], inside: bool, text: str, expected: tuple[str, str, str]
) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert answered(syntax, pieces, ("\n\n", "END"), inside=inside) == expected


def test_tags_and_headers_are_not_the_answer() -> None:
    text = f"{CHANNELS[0]}a{CHANNELS[1]}{CHANNELS[2]}b"
    stop = ("final", "assistant", "<|", "message")
    assert answered(CHANNELS, list(text), stop) == answered(CHANNELS, [text], stop) == ("a", "b", "")
    assert answered(THINK, list("<think>a</think>b"), ("<", "k>")) == ("a", "b", "")


@pytest.mark.parametrize("syntax", [THINK, CHANNELS, FRAMED, (*THINK, "", "", "", "", True)])
def test_random_answers_with_reasoning_end_where_the_whole_text_says(syntax: tuple[str | bool, ...]) -> None:
    rng = random.Random(5)
    words = [*filter(None, map(str, syntax[:5])), "a", "b", "\n", " ", "<", "</", "ab\n", "é"]
    for _ in range(1500):
        text = "".join(rng.choices(words, k=rng.randrange(12)))
        stop = tuple(rng.sample(["a", "ab", "\n", "\n\n", "<", "b<", "é", " a"], k=rng.randint(1, 3)))
        more = {"inside": rng.random() < 0.5}
        borders = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(6))})
        pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
        assert answered(syntax, pieces, stop, **more)[:2] == answered_whole(syntax, text, stop, **more), (pieces, stop)


def test_a_step_back_into_what_may_become_a_tag_loses_nothing() -> None:
    found = answered(THINK, ["<", "thi", "s", "think>a END</think>b", " END"], ("END", "<x"), ban=("his",))
    assert found == ("a END", "b ", "END"), "the tokens before the phrase stay, and become a tag"
