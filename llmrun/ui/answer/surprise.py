"""Token probabilities in colours: shaded text, a legend, and the least likely tokens."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from rich.text import Text

from llmrun.protocol.messages import TokenLogprob
from llmrun.ui.terminal.cells import paint
from llmrun.ui.terminal.format import percent
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

# Minimum probability, and one of the terminal's own colours, which suits its background.
_LEVELS = ((0.5, ""), (0.1, "33"), (0.01, "35"), (0.0, "1;31"))
_WORDS = ("50% or more", "10 to 50%", "1 to 10%", "less than 1%")
_MAX_ROWS = 5


def shade(logprob: float) -> str:
    """Return the style for a log probability."""
    probability = math.exp(logprob)
    return next(style for minimum, style in _LEVELS if probability >= minimum)


def shaded_pieces(text: str, tokens: Sequence[TokenLogprob]) -> list[tuple[str, str]]:
    """Return the pieces of a text and their styles.

    Args:
        tokens: tokens that begin in the text. The last may be incomplete, and the rest of another may precede the
            first.
    """
    data, decoder = text.encode("utf-8", "replace"), codecs.getincrementaldecoder("utf-8")("ignore")
    start = max(0, len(data) - sum(len(token.bytes) for token in tokens))
    pieces = [(decoder.decode(data[:start]), shade(tokens[0].logprob))]
    for token in tokens:
        end = start + len(token.bytes)
        pieces.append((decoder.decode(data[start:end]), shade(token.logprob)))
        start = end
    return pieces


def show_legend(output: Output, *, stderr: bool = False) -> None:
    """Print the legend of the colours."""
    shades = (paint(words, style) for (_, style), words in zip(_LEVELS, _WORDS, strict=True))
    words = f"Colours show the probability of each token: {', '.join(shades)}."
    output.console(stderr=stderr).print(Text.from_ansi(words))


def show_surprises(output: Output, tokens: Sequence[TokenLogprob], *, stderr: bool = False) -> None:
    """Print the least likely tokens, each with the likeliest ones at its place."""
    unlikely = sorted(tokens, key=lambda token: token.logprob)[:_MAX_ROWS]
    columns = [Column("TOKEN", style="bold"), Column("PROBABILITY", right=True), Column("LIKELIEST AT ITS PLACE")]
    rows = [(repr(token.text), percent(math.exp(token.logprob)), _likeliest(token)) for token in unlikely]
    n_columns = 3 if any(token.top for token in unlikely) else 2
    show_table(output, columns[:n_columns], [row[:n_columns] for row in rows], stderr=stderr)


def _likeliest(token: TokenLogprob) -> str:
    return ", ".join(f"{text!r} {percent(math.exp(logprob))}" for text, _, logprob in token.top)
