"""How surprising tokens were: a text in colours, what these mean, and which tokens surprised most.

Owns the colours and which part of a text is a token's; must not know where probabilities come from.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from llmrun.protocol.messages import TokenLogprob
from llmrun.ui.terminal.ansi import paint
from llmrun.ui.terminal.format import percent
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

# The least probability, and one of the terminal's own colours, so that it suits its background.
_LEVELS = ((0.5, ""), (0.1, "33"), (0.01, "35"), (0.0, "1;31"))
_WORDS = ("50% and more", "10 to 50%", "1 to 10%", "less than 1%")
_MOST_SHOWN = 5


def shade(logprob: float) -> str:
    """The style of a token that was so likely."""
    probability = math.exp(logprob)
    return next(style for least, style in _LEVELS if probability >= least)


def shaded_pieces(text: str, tokens: Sequence[TokenLogprob]) -> list[tuple[str, str]]:
    """A text's pieces and their styles.

    Args:
        tokens: whose text begins in it; of the last there may be only a part, and before the first the rest of another.
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
    """What the colours mean."""
    from rich.text import Text

    shades = (paint(words, style) for (_, style), words in zip(_LEVELS, _WORDS, strict=True))
    words = f"Each token by the probability that the model gave it: {', '.join(shades)}."
    output.console(stderr=stderr).print(Text.from_ansi(words))


def show_surprises(output: Output, tokens: Sequence[TokenLogprob], *, stderr: bool = False) -> None:
    """The least likely tokens, and the likeliest ones in their places."""
    least = sorted(tokens, key=lambda token: token.logprob)[:_MOST_SHOWN]
    columns = [Column("TOKEN", style="bold"), Column("PROBABILITY", right=True), Column("LIKELIEST IN ITS PLACE")]
    rows = [(repr(token.text), percent(math.exp(token.logprob)), _likeliest(token)) for token in least]
    n_columns = 3 if any(token.top for token in least) else 2
    show_table(output, columns[:n_columns], [row[:n_columns] for row in rows], stderr=stderr)


def _likeliest(token: TokenLogprob) -> str:
    return ", ".join(f"{text!r} {percent(math.exp(logprob))}" for text, _, logprob in token.top)
