"""The pages that need no command to run: start page, versions, help on all commands and on one.

Owns their words and shape; must not import a command, Typer or Rich, which takes longer than all of these pages.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from llmrun.cli.commands import COMMANDS, PANELS
from llmrun.ui.terminal.output import Output

START_PAGE = """\
llmrun runs large language models on this machine.

  llmrun run smollm2 "Why is the sky blue?"   answer one prompt
  llmrun chat smollm2                         start a chat
  llmrun list --all                           list models to choose from
  llmrun doctor                               check this machine
  llmrun --help                               show all commands\
"""
OPTIONS = {
    "--version": "Print versions and exit.",
    "--debug": "Show tracebacks of errors; works after every command.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Print the completion script for the current shell, to copy or change it.",
    "--help, -h": "Show this message. llmrun COMMAND --help shows the help of a command.",
}
_EPILOG = 'Start with: llmrun run smollm2 "Why is the sky blue?"'
_BOLD, _CYAN, _DIM, _YELLOW = "\x1b[1m", "\x1b[1;36m", "\x1b[2m", "\x1b[1;33m"
_NARROWEST, _USUAL_WIDTH = 40, 80


def page(arguments: Sequence[str]) -> str | None:
    """What these arguments ask for, where that needs no command."""
    if not arguments:
        return START_PAGE
    if arguments[0] == "--version":
        return _versions()
    return root_help() if arguments[0] in {"--help", "-h"} or list(arguments) == ["help"] else None


def root_help() -> str:
    """The help on all commands, as wide as the terminal."""
    panels = {
        "Options": OPTIONS,
        **{panel: {name: each.help for name, each in COMMANDS.items() if each.panel == panel} for panel in PANELS},
    }
    return _help("llmrun [OPTIONS] COMMAND [ARGS]...", "Run large language models on this machine.", panels, _EPILOG)


def command_help(context: Any) -> str:
    """The help on one command, of what Typer knows about it."""
    command = context.command
    panels: dict[str, dict[str, str]] = {"Arguments": {}, "Options": {}}
    for parameter in command.get_params(context):
        name, text = parameter.get_help_record(context) or ("", "")
        panel = getattr(parameter, "rich_help_panel", None) or f"{parameter.param_type_name.title()}s"
        panels.setdefault(panel, {})[_METAVAR.sub(_metavar, name)] = text.removesuffix("  [required]")
    panels["Commands"] = {name: each.get_short_help_str(200) for name, each in getattr(command, "commands", {}).items()}
    pieces = [piece.strip("{}") for piece in command.collect_usage_pieces(context)]
    return _help(" ".join([context.command_path, *pieces]), command.help or "", panels)


_METAVAR = re.compile("<(str|[a-z ]+)>")


def _metavar(match: re.Match[str]) -> str:
    return "TEXT" if match[1] == "str" else "NUMBER"


def _help(usage: str, text: str, panels: dict[str, dict[str, str]], epilog: str = "") -> str:
    output = Output()
    width = max(_width(output), _NARROWEST)
    paint = _Paint(color=output.stdout_has_color)
    lines = ["", f" {paint('Usage:', _YELLOW)} {paint(usage, _BOLD)}", ""]
    for paragraph in text.split("\n\n"):
        lines += [textwrap.fill(paragraph, width - 1, initial_indent=" ", subsequent_indent=" "), ""]
    lines += [_box(title, rows, width, paint) for title, rows in panels.items() if rows]
    return "\n".join([*lines, *(["", f" {epilog}"] if epilog else []), ""])


class _Paint:
    """Styles text where colour is wanted."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def __call__(self, text: str, style: str) -> str:
        return f"{style}{text}\x1b[0m" if self._color else text


def _box(title: str, rows: dict[str, str], width: int, paint: _Paint) -> str:
    """A panel: names in a column, their help beside them, or below one that is too long."""
    column = min(max(map(len, rows)), width * 2 // 5)
    side, room = paint("│", _DIM), width - column - 6
    lines = [paint(f"╭─ {title} {'─' * (width - len(title) - 5)}╮", _DIM)]
    for name, text in rows.items():
        labels, beside = [name], textwrap.wrap(text, room)
        if len(name) > column:
            labels = textwrap.wrap(name, width - 4)
            beside = [""] * len(labels) + beside
        for label, line in zip_longest(labels, beside, fillvalue=""):
            row = f"{label.ljust(column)}  {line}".ljust(width - 4)
            lines.append(f"{side} {paint(label, _CYAN)}{row[len(label) :]} {side}")
    return "\n".join([*lines, paint(f"╰{'─' * (width - 2)}╯", _DIM)])


def _width(output: Output) -> int:
    """Columns of the terminal; COLUMNS says otherwise."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal():
        return int(columns)
    return output.columns() or _USUAL_WIDTH


def _versions() -> str:
    from importlib.metadata import version

    return f"llmrun {version('llmrun')} (llama-cpp-python {version('llama-cpp-python')})"
