"""Tokens in colours by how likely they were."""

from __future__ import annotations

import io
import math

import pytest
from support.clock import Clock

from llmrun.protocol.messages import AnswerPart, TextDelta, TokenLogprob
from llmrun.ui.answer.page import Page
from llmrun.ui.answer.surprise import shade, shaded_pieces, show_legend, show_surprises
from llmrun.ui.terminal.output import Output

LIKELY, RARE = shade(math.log(0.9)), shade(math.log(0.001))


def token(text: str, probability: float, data: bytes = b"") -> TokenLogprob:
    return TokenLogprob(text, tuple(data or text.encode()), math.log(probability), ((" other", (32,), math.log(0.25)),))


def test_every_probability_has_a_style_and_each_step_another_one() -> None:
    shades = [shade(math.log(probability)) for probability in (1.0, 0.5, 0.4, 0.1, 0.05, 0.01, 0.001)]
    assert shades == [shades[0], shades[0], shades[2], shades[2], shades[4], shades[4], shades[6]]
    assert len(set(shades)) == 4
    assert shade(-math.inf) == shades[6]


@pytest.mark.parametrize(
    ("text", "tokens", "pieces"),
    [
        ("abc", [token("abc", 0.9)], [("", LIKELY), ("abc", LIKELY)]),
        ("a b", [token("a", 0.9), token(" b", 0.001)], [("", LIKELY), ("a", LIKELY), (" b", RARE)]),
        ("é", [token("�", 0.001, b"\xc3"), token("�", 0.9, b"\xa9")], [("", RARE), ("", RARE), ("é", LIKELY)]),
        ("the rest x", [token(" x", 0.001)], [("the rest", RARE), (" x", RARE)]),
        ("cut", [token("cut off", 0.001)], [("", RARE), ("cut", RARE)]),
    ],
)
def test_each_token_has_its_part_of_the_text(
    text: str, tokens: list[TokenLogprob], pieces: list[tuple[str, str]]
) -> None:
    assert shaded_pieces(text, tokens) == pieces


def test_a_page_shows_each_token_in_its_colour_and_no_markdown() -> None:
    page = Page(Clock(), markdown=True, shades=True)
    page.add(TextDelta(1, "**a", 1, (token("**a", 0.9),)))
    page.add(TextDelta(1, " b**", 1, (token(" b**", 0.001),)))
    assert page.take(80, last=True) == f"**a\x1b[{RARE}m b**\x1b[0m"


def test_tokens_of_the_reasoning_colour_nothing_of_the_answer() -> None:
    page = Page(Clock(), shades=True, think="hide")
    tokens = (token("Hm", 0.001), token("</think>", 0.001), token("yes", 0.9), token(" no", 0.001))
    parts = (AnswerPart("reasoning", "Hm"), AnswerPart("reasoning_end"), AnswerPart("text", "yes no"))
    page.add(TextDelta(1, "Hm</think>yes no", 4, tokens, parts=parts))
    assert page.take(80, last=True).endswith(f"yes\x1b[{RARE}m no\x1b[0m")


def test_without_colours_the_text_is_as_it_was() -> None:
    page = Page(Clock(), styled=False, shades=True)
    page.add(TextDelta(1, "a", 1, (token("a", 0.001),)))
    assert page.take(80, last=True) == "a"


def test_the_legend_and_the_least_likely_tokens() -> None:
    out = io.StringIO()
    output = Output(stdout=out, stderr=io.StringIO(), environment={})
    show_legend(output)
    assert "50% or more, 10 to 50%, 1 to 10%, less than 1%" in " ".join(out.getvalue().split())
    out.truncate(0)
    show_surprises(output, [token(f"t{number}", 0.5 / number) for number in range(1, 9)] + [token("x", 0.00003)])
    rows = out.getvalue().splitlines()
    assert len(rows) == 6
    assert "'x'" in rows[1]
    assert "<0.1%" in rows[1]
    assert "' other' 25.0%" in rows[1]
    assert "'t8'" in rows[2]
