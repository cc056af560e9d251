"""The report card on a terminal and in files, and the progress of a report.

Owns the layouts of the terminal and of Markdown, and the format of each file; must not measure or judge.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmrun.bench.formats import escape, markdown_table
from llmrun.errors import CancelledError, UsageError
from llmrun.quantize.card import Card, recommended, to_json, verdicts
from llmrun.quantize.report import ReportUpdate
from llmrun.storage import check_target, write_whole
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.cells import width
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.progress import time_left
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, show_table
from llmrun.ui.views.machine_facts import machine_facts
from llmrun.ui.views.report_text import finished, headings, how, legend, lines, notes, took, wall

FORMATS = (".md", ".json", ".html")
"""Suffixes of files for cards."""

_DOING = {"quantizing": "quantizing", "judging": "measuring quality", "timing": "measuring speed"}
_GAP = 2


def checked_target(path: Path, label: str = "report file") -> Path:
    """Return a path for a card; check it before hours of measuring.

    Raises:
        UsageError: the suffix names no format, or the folder does not exist.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"invalid {label} {str(path)!r}",
            why="the suffix must name the format",
            hint=f"use one of {', '.join(path.stem + suffix for suffix in FORMATS)}",
        )
    check_target(path)
    return path


def write(card: Card, path: Path) -> None:
    """Write a card in the format of the file's suffix. An existing file is replaced once the new one is complete.

    Raises:
        UsageError: the suffix names no format.
        ResourceError: the file can't be written.
    """
    suffix = checked_target(path).suffix.lower()
    if suffix == ".html":
        from llmrun.ui.views.report_html import report_page

        text = report_page(card)
    else:
        text = markdown(card) if suffix == ".md" else json_text(card)
    write_whole(path, text)


def show(output: Output, card: Card) -> None:
    """Print a card on stdout as a table or JSON, and the method on stderr.

    Raises:
        CancelledError: after the output, if the user stopped the report: the exit status should tell.
    """
    if output.json:
        output.result_json(_data(card))
    else:
        line = wall(card)
        if line:
            output.sentence(line)
            output.text("")
        _show_table(output, card)
        _show_notes(output, [*how(card), *notes(card)])
    if not card.is_complete:
        raise CancelledError("the report was stopped")


def json_text(card: Card) -> str:
    """Return a card as a JSON document."""
    return json.dumps(_data(card), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def _data(card: Card) -> dict[str, Any]:
    best = recommended(card.rows)
    return to_json(card, verdicts(card.rows), best.type if best else "")


# ---- terminal


def _show_table(output: Output, card: Card) -> None:
    """Print the table; on a narrow terminal the verdicts are below it."""
    rows = lines(card)
    columns = [Column(name, right=name not in ("TYPE", "VERDICT")) for name in headings(card)]
    columns[0] = Column("TYPE", style="bold")
    widths = [max(width(clean(row[i])) for row in (headings(card), *rows)) for i in range(len(columns))]
    if not 0 < output.columns() < sum(widths) + _GAP * len(widths):
        show_table(output, columns, rows)
        return
    show_table(output, columns[:-1], [row[:-1] for row in rows])
    output.text("")
    for row in rows:
        _show_verdict(output, row[0], row[-1], widths[0])


def _show_notes(output: Output, sentences: Sequence[str]) -> None:
    """Print notes on stderr, with an empty line before them on a terminal."""
    for sentence in [""] * output.stderr_is_terminal + [*sentences]:
        output.note(sentence)


def _show_verdict(output: Output, kind: str, words: str, indent: int) -> None:
    import textwrap

    kind, bold, plain = clean(kind), *(("\x1b[1m", "\x1b[0m") if output.stdout_has_color else ("", ""))
    room = max((output.columns() or 80) - indent - _GAP, 20)
    first, *more = textwrap.wrap(clean(words), room) or [""]
    output.text(f"{bold}{kind}{plain}{' ' * (indent - width(kind) + _GAP)}{first}")
    for line in more:
        output.text(" " * (indent + _GAP) + line)


# ---- Markdown


def markdown(card: Card) -> str:
    """Return a card as Markdown with an aligned table."""
    parts = [f"# {_markdown_text(card.name)}: quantized"]
    line = wall(card)
    if line:
        parts.append(f"**{_markdown_text(line)}**")
    parts.append(_markdown_table(card))
    parts.append("\n".join(f"- **{name}**: {meaning}" for name, meaning in legend()))
    parts.append("## How it was measured")
    parts.append("\n".join(f"- {_markdown_text(sentence)}" for sentence in how(card)))
    facts = [*machine_facts(card.machine), ("Measured", took(card)), ("Source", card.source)]
    parts.append("\n".join(f"- {_markdown_text(name)}: {_markdown_text(value)}" for name, value in facts))
    if notes(card):
        parts += ["## Notes", "\n".join(f"- {_markdown_text(note)}" for note in notes(card))]
    return "\n\n".join(parts) + "\n"


def _markdown_table(card: Card) -> str:
    names = [name.capitalize() if name not in ("KLD", "PPL") else name for name in headings(card)]
    names = [name.replace(" mb", " (MB)").replace(" gb", " (GB)").replace("Ram", "RAM") for name in names]
    names = [f"{name} (tokens/s)" if name in ("Prefill", "Decode") else name for name in names]
    return markdown_table(names, [[clean(cell) for cell in line] for line in lines(card)], ("Type", "Verdict"))


def _markdown_text(text: str) -> str:
    return escape(clean(text))


# ---- progress


@contextmanager
def report_progress(
    output: Output, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[ReportUpdate], None]]:
    """Show the progress of a report until the end of the block, and a line for each type once its speed is known.

    Args:
        clock: monotonic seconds.
    """
    reported: set[str] = set()
    with Activity(output, clock=clock) as activity:

        def show(update: ReportUpdate) -> None:
            row = update.row
            if row is not None and row.type not in reported and (row.failure or update.doing == "timing"):
                reported.add(row.type)
                activity.note(finished(row))
            doing = f"{clean(update.type)}: {_DOING.get(update.doing, update.doing)}"
            activity.show(doing, update.share, time_left(update.seconds_left))

        yield show
