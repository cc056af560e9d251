"""The views of `llmrun evaluate` and `score`: figures, their progress, and the tokens of a text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llmrun.protocol.jobs.evaluate import (
    EvaluateResult,
    EvaluateUpdate,
    Figure,
    Needle,
    PositionRange,
    ScoredText,
    ScoredToken,
    least_chunks,
)
from llmrun.protocol.messages import TokenLogprob
from llmrun.ui.answer.surprise import shaded_pieces, show_legend, show_surprises
from llmrun.ui.terminal.activity import Activity, Pace, time_left
from llmrun.ui.terminal.cells import paint
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import Sanitizer
from llmrun.ui.terminal.tables import Column, right, show_facts, show_table


@dataclass(frozen=True, slots=True)
class EvaluationSubject:
    """The names of the models and of the text, and the text's SHA-256."""

    model: str
    reference: str
    text: str
    sha256: str


# ---- progress


@contextmanager
def reading(
    output: Output, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[EvaluateUpdate], None]]:
    """Show progress and partial figures until the end of the block."""
    pace, text = Pace(), "loading"
    with Activity(output, clock=clock) as activity:

        def show(update: EvaluateUpdate) -> None:
            nonlocal text
            if not update.done:
                pace.restart()  # the speed of loading says nothing about reading
            pace.update(update.done, clock())
            if update.so_far is not None:
                text = partial_figures(update.so_far)
            elif update.total and text == "loading":
                text = "reading"
            left = pace.seconds_left(update.total) if update.done < update.total else None
            share = update.done / update.total if update.total else None
            activity.show(text, share, time_left(left))

        yield show


def partial_figures(evaluated: EvaluateResult) -> str:
    """Return one line of the figures that are known before the end."""
    parts = [counted(evaluated.chunks, "chunk")]
    if evaluated.perplexity is not None:
        parts.append(f"perplexity {_with_half(evaluated.perplexity)}")
    if evaluated.divergence is not None:
        parts.append(f"KLD {_with_half(evaluated.divergence.mean)}")
    if evaluated.needles:
        parts.append(f"{sum(needle.found for needle in evaluated.needles)} of {len(evaluated.needles)} facts found")
    return ", ".join(parts)


# ---- the result


def show_evaluated(output: Output, about: EvaluationSubject, found: EvaluateResult, verdict: str) -> None:
    """Print the result on stdout: the subject, tables, and the verdict."""
    show_facts(output, _facts(about, found))
    if found.perplexity is not None:
        output.text("")
        columns = (Column(""), Column("VALUE", right=True, style="bold"), *right("± ERROR"), Column("95 % INTERVAL"))
        show_table(output, columns, _figures(found))
    if found.by_position:
        output.text("")
        _show_positions(output, found.by_position)
    if found.needles:
        output.text("")
        _show_needles(output, found.needles)
    sentences = [each for each in (_too_few(found), verdict) if each]
    if sentences:
        output.text("")
    for sentence in sentences:
        output.sentence(sentence[0].upper() + sentence[1:] + ".")


def _facts(about: EvaluationSubject, found: EvaluateResult) -> list[tuple[str, str]]:
    chunks = f"{found.chunks:,} of {found.chunks_there:,} chunks of {found.n_ctx:,} tokens"
    facts = [("model", about.model)]
    if about.reference:
        facts.append(("reference", about.reference))
    return [*facts, ("text", f"{about.text} (sha256 {about.sha256[:12]}), {chunks}")]


def _figures(found: EvaluateResult) -> list[tuple[str, str, str, str]]:
    assert found.perplexity is not None
    rows = [_row("perplexity", found.perplexity), ("bits per byte", digits(found.bits_per_byte), "", "")]
    if (compared := found.divergence) is not None:
        rows += [
            _row("perplexity of the reference", compared.reference_perplexity),
            _row("ratio of both", compared.ratio),
            _row("KL divergence, mean", compared.mean),
            _row("  median", compared.median),
            _row("  90 % of positions below", compared.p90),
            _row("  95 %", compared.p95),
            _row("  99 %", compared.p99),
            _row("  99.9 %", compared.p999),
            ("  maximum", digits(compared.maximum), "", ""),
            _row("same likeliest token", compared.same_top, percent=True),
            _row("change of the right token's probability", compared.probability_change, percent=True),
            _row("  root mean square", compared.rms_change, percent=True),
        ]
    return rows


def _row(name: str, figure: Figure, *, percent: bool = False) -> tuple[str, str, str, str]:
    show = _percent if percent else digits
    error = show(figure.error) if figure.error else ""
    return name, show(figure.value), error, _interval(figure, show)


def _interval(figure: Figure, show: Callable[[float], str]) -> str:
    return "" if figure.low is None or figure.high is None else f"{show(figure.low)} to {show(figure.high)}"


def _too_few(found: EvaluateResult) -> str:
    """Return a warning about a sample that is too small for intervals; "" if it is large enough."""
    if found.perplexity is None or found.perplexity.half is not None:
        return ""
    minimum = least_chunks(found.n_ctx)
    more = (
        f"--chunks {minimum}"
        if found.chunks_there >= minimum
        else f"a longer --text: this one has {found.chunks_there}"
    )
    return f"too few chunks for an interval: at least {minimum} ({more})"


def _show_positions(output: Output, rows: Sequence[PositionRange]) -> None:
    columns = [Column("POSITIONS"), Column("PERPLEXITY", right=True), Column("95 % INTERVAL")]
    compared = rows[0].divergence is not None
    if compared:
        columns += right("REFERENCE", "KLD", "SAME TOKEN")
    cells = []
    for row in rows:
        figure = row.perplexity
        cell = [f"{row.start:,} to {row.end:,}", digits(figure.value), _interval(figure, digits)]
        if row.reference_perplexity is not None and row.divergence is not None and row.same_top is not None:
            cell += [digits(row.reference_perplexity.value), digits(row.divergence.value), _percent(row.same_top.value)]
        cells.append(cell)
    show_table(output, columns, cells)


def _show_needles(output: Output, needles: Sequence[Needle]) -> None:
    """Print a row for each length: the probability of the right answer by depth, and the number of facts found."""
    depths = sorted({needle.depth for needle in needles})
    compared = needles[0].reference_found is not None
    figures = [*(f"{depth:.0%}".replace("%", " %") for depth in depths), "FOUND", *(["REFERENCE"] if compared else [])]
    columns = [Column("FACTS IN"), *right(*figures)]
    rows = []
    for length, group in groupby(needles, lambda needle: needle.n_tokens):
        row = sorted(group, key=lambda needle: needle.depth)
        found = f"{sum(needle.found for needle in row)} of {len(row)}"
        cells = [f"{length:,}", *(f"{needle.probability:.0%}" for needle in row), found]
        if compared:
            cells.append(f"{sum(bool(needle.reference_found) for needle in row)} of {len(row)}")
        rows.append(cells)
    show_table(output, columns, rows)


def digits(value: float) -> str:
    """Return a number with four significant digits and without an exponent, e.g. "14.66", "0.02539"."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, min(6, 3 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}"


def _with_half(figure: Figure) -> str:
    """Return the figure, with half of its interval unless that is larger than the figure."""
    half = figure.half
    return digits(figure.value) + (f" ± {digits(half)}" if half is not None and half < figure.value else "")


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


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
