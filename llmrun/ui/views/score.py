"""A scored text: shaded on a terminal, a line for each token in a pipe, or JSON.

Owns the layout; must not know the source of the figures.
"""

from __future__ import annotations

from typing import Any

from llmrun.protocol.jobs.evaluate import ScoredText, ScoredToken
from llmrun.protocol.messages import TokenLogprob
from llmrun.ui.answer.surprise import shaded_pieces, show_legend, show_surprises
from llmrun.ui.terminal.ansi import paint
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import Sanitizer
from llmrun.ui.terminal.tables import show_facts
from llmrun.ui.views.evaluate import digits


def show_score(output: Output, found: ScoredText) -> None:
    """Print the tokens and the text's perplexity."""
    facts = [("perplexity", digits(found.perplexity.value)), ("bits per byte", digits(found.bits_per_byte))]
    if found.windows > 1:
        output.note(
            f"The text is longer than {found.n_ctx:,} tokens: it was read in {found.windows} windows, each of which "
            "begins with half of the one before."
        )
    if not output.stdout_has_color:
        for token in found.tokens:
            shown = "" if token.logprob is None else f"{token.logprob:.6f}"
            output.text(f"{shown}\t{_entry(token).text!a}")
        output.note("; ".join(f"{name} {value}" for name, value in facts))
        return
    output.text(_shaded(found))
    output.text("")
    show_legend(output)
    show_surprises(output, [_entry(token) for token in found.tokens if token.logprob is not None])
    output.text("")
    show_facts(output, [("tokens", f"{len(found.tokens):,}"), *facts])


def _shaded(found: ScoredText) -> str:
    tokens = [_entry(token) for token in found.tokens]
    text = b"".join(bytes(token.bytes) for token in tokens).decode("utf-8", "replace")
    sanitizer = Sanitizer()
    pieces = [paint(sanitizer.feed(piece), style) for piece, style in shaded_pieces(text, tokens)]
    return "".join([*pieces, sanitizer.flush()])


def _entry(token: ScoredToken) -> TokenLogprob:
    """Return a token as in an answer; the first one, which has no probability, counts as certain."""
    data = bytes.fromhex(token.data)
    return TokenLogprob(data.decode("utf-8", "replace"), tuple(data), token.logprob or 0.0, ())


def score_json(model: str, found: ScoredText) -> dict[str, Any]:
    """Return the scored text as JSON data."""
    entries = map(_entry, found.tokens)
    tokens = [
        {"id": token.id, "token": entry.text, "bytes": list(entry.bytes), "logprob": token.logprob}
        for token, entry in zip(found.tokens, entries, strict=True)
    ]
    return {
        "model": model,
        "perplexity": found.perplexity.value,
        "bits_per_byte": found.bits_per_byte,
        "n_ctx": found.n_ctx,
        "windows": found.windows,
        "tokens": tokens,
    }
