"""`llmrun report`: several quants of a model compared; the same as `llmrun quantize --report`."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llmrun.cli.options import PREFERENCES, OutputFileYesOption, with_options
from llmrun.cli.quantize import (
    QUICK_TYPES,
    USUAL_TYPES,
    ImportanceOptions,
    SourceArgument,
    goal,
    importance,
    quantize,
    several,
    tensors,
)
from llmrun.planning.plan import LoadPreferences


@with_options(importance=importance, preferences=PREFERENCES)
def report(
    source: SourceArgument,
    importance: ImportanceOptions,
    preferences: LoadPreferences,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="Keep the files in this folder. Default: they are deleted afterwards."),
    ] = None,
    types: Annotated[str, typer.Option(metavar="TYPE,...", help=f"Types to compare. Default: {USUAL_TYPES}.")] = "",
    to: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report as .html, .md or .json.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure quality on. Default: Python's language reference."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help=f"Take fewer types ({QUICK_TYPES}), less text and two measurements of speed each."
        ),
    ] = False,
    yes: OutputFileYesOption = False,
) -> None:
    """Compare several quants of a model: size, speed, quality.

    Each quant is made and measured on this machine.
    """
    if to is not None:
        from llmrun.ui.views.report import checked_target

        checked_target(to, "--output")
    asked = several(types or QUICK_TYPES * quick, report=True, report_to=to, text=text)
    assert asked is not None
    asked = replace(asked, preferences=preferences, is_quick=quick)
    inspect.unwrap(quantize)(source, tensors(), goal(), importance, asked, out, threads=preferences.threads, yes=yes)
