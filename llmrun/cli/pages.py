"""The start page, the versions, and the help of all commands or of one.

Must not import a command, Typer or Rich: each takes longer than all of these pages.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from llmrun.cli.commands import BASICS, COMMANDS, OPTION_TOPICS, PANELS
from llmrun.ui.terminal.cells import wrapped
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
HELP_ALL = "--help-all"


def page(arguments: Sequence[str]) -> str | None:
    """Return the page for arguments that need no command, else None."""
    if not arguments:
        return _start_page(Output().columns())
    if arguments[0] == "--version":
        return _versions()
    return root_help() if arguments[0] in {"--help", "-h", HELP_ALL} or list(arguments) == ["help"] else None


def _start_page(columns: int) -> str:
    return reflow(START_PAGE, columns) if 0 < columns < _USUAL_WIDTH else START_PAGE


def root_help() -> str:
    """Return the help of all commands, as wide as the terminal."""
    panels = {
        "Options": OPTIONS,
        **{panel: {name: each.help for name, each in COMMANDS.items() if each.panel == panel} for panel in PANELS},
    }
    return _help("llmrun [OPTIONS] COMMAND [ARGS]...", "Run large language models on this machine.", panels, _EPILOG)


def command_help(context: Any, *, shows_all: bool = False) -> str:
    """Return the help of a command, with its BASICS only unless shows_all."""
    command = context.command
    parameters = [each for each in command.get_params(context) if not getattr(each, "hidden", False)]
    basics = [*BASICS.get(command.name, "").split(), "--yes", "--help", HELP_ALL]
    if command.name not in BASICS:
        shown = [parameter for parameter in parameters if parameter.opts != [HELP_ALL]]
    elif shows_all:
        shown = parameters
    else:
        shown = [
            parameter
            for parameter in parameters
            if parameter.param_type_name == "argument" or {*parameter.opts} & {*basics}
        ]
    hidden = [parameter for parameter in parameters if parameter not in shown and parameter.opts != [HELP_ALL]]
    panels = {each.rich_help_panel for each in hidden}
    topics = ", ".join(topic for topic, (_, panel) in OPTION_TOPICS.items() if panel in panels)
    more = f"{len(hidden)} more options: {context.command_path} {HELP_ALL}" if hidden else ""
    more += f", or llmrun help TOPIC ({topics})" if topics else ""
    pieces = [piece.strip("{}") for piece in command.collect_usage_pieces(context)]
    return _help(" ".join([context.command_path, *pieces]), command.help or "", _panels(context, shown), more)


def panel_help(context: Any, panel: str) -> str:
    """Return one panel of a command's help."""
    rows = _panels(context, context.command.params)[panel]
    return _box(f"{panel}: options of {context.command_path}", rows, *_canvas())


def _panels(context: Any, parameters: Sequence[Any]) -> dict[str, dict[str, str]]:
    panels: dict[str, dict[str, str]] = {"Arguments": {}, "Options": {}}
    for parameter in parameters:
        if getattr(parameter, "hidden", False):
            continue
        name, text = parameter.get_help_record(context)
        panel = getattr(parameter, "rich_help_panel", None) or f"{parameter.param_type_name.title()}s"
        panels.setdefault(panel, {})[_METAVAR.sub(_metavar, name)] = _with_default(text, parameter)
    commands = getattr(context.command, "commands", {})
    return panels | {"Commands": {name: each.get_short_help_str(200) for name, each in commands.items()}}


def _with_default(text: str, parameter: Any) -> str:
    """Write Typer's "[default: 5; x>=1; required]" as a sentence; bounds are in the errors."""
    text, _, notes = text.partition("  [")
    if not (default := re.search(r"default: ([^;\]]*)", notes)):
        return text
    return f"{text} Default: {'on' if parameter.secondary_opts else default[1].removesuffix('.0')}."


_METAVAR = re.compile("<([^<>]+)>")


def _metavar(match: re.Match[str]) -> str:
    return match[1] if "|" in match[1] else "TEXT" if match[1] == "str" else "NUMBER"


def _canvas() -> tuple[int, _Paint]:
    output = Output()
    return max(_width(output), _NARROWEST), _Paint(color=output.stdout_has_color)


def _help(usage: str, text: str, panels: dict[str, dict[str, str]], epilog: str = "") -> str:
    width, paint = _canvas()
    lines = ["", f" {paint('Usage:', _YELLOW)} {paint(usage, _BOLD)}", ""]
    for paragraph in text.split("\n\n"):
        lines += [_fill(paragraph, width), ""]
    lines += [_box(title, rows, width, paint) for title, rows in panels.items() if rows]
    return "\n".join([*lines, *(["", _fill(epilog, width)] if epilog else []), ""])


def _fill(paragraph: str, width: int) -> str:
    return textwrap.fill(paragraph, width - 1, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)


class _Paint:
    """A function that styles text, or leaves it plain."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def __call__(self, text: str, style: str) -> str:
        return f"{style}{text}\x1b[0m" if self._color else text


def _box(title: str, rows: dict[str, str], width: int, paint: _Paint) -> str:
    """Draw a panel: a column of names with their help beside them, or below a name that is too long."""
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
    """Return COLUMNS if set, else the columns of the terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal():
        return int(columns)
    return output.columns() or _USUAL_WIDTH


def _versions() -> str:
    from importlib.metadata import version

    from llmrun.protocol.llama_folder import llama_version

    return f"llmrun {version('llmrun')} (llama-cpp-python {llama_version() or 'missing'})"


# ---- help topics, written for 80 columns, on a terminal of another width

_WRITTEN = 80
_WIDEST = 100  # longer rows are hard to read
_LEAST_TEXT = 24  # cells beside a term; with less it stands below
_TERM = re.compile(r"( *)([^\s|](?:.*?\S)?)  +(?=\S)")  # a row that begins with | is output of a command
_NUMBERED = re.compile(r"\d+  ")  # an item of a list beside a term


class _Entry(NamedTuple):
    """A paragraph, or a term with the text beside it."""

    indent: int
    column: int
    texts: list[str]
    terms: list[str]

    def lines(self, columns: int) -> list[str]:
        text, margin = " ".join(self.texts), " " * self.indent
        if not self.terms and self.indent:
            return [(margin if self.indent <= columns // 3 else "    ") + text]
        room = columns - self.column
        if room >= min(len(text), _LEAST_TEXT):
            pairs = zip_longest(self.terms, wrapped(text, room), fillvalue="")
            return [f"{margin + term:<{self.column}}{row}".rstrip() for term, row in pairs]
        return [
            margin + " ".join(self.terms),
            *(f"{margin}  {row}" for row in wrapped(text, columns - self.indent - 2)),
        ]


def reflow(text: str, columns: int) -> str:
    """Return the text in rows of at most `columns`; 0, for a pipe, leaves the text as it is.

    Paragraphs and texts beside terms are wrapped. Indented lines without a term are examples: they keep their lines, so
    that they can be copied. So do indented lines that begin with |, the output of a command.
    """
    if columns in (0, _WRITTEN):
        return text
    width, shown = min(columns, _WIDEST), list[str]()
    entry: _Entry | None = None
    previous = ""
    for line in [*text.split("\n"), ""]:
        if entry is not None and _goes_on(entry, previous, line):
            entry.texts.append(line[entry.column :].strip())
            entry.terms.extend(filter(None, [line[: entry.column].strip()]))
        else:
            shown += entry.lines(width) if entry else []
            entry = _entry(line) if line.strip() else None
            shown += [] if entry else [""]
        previous = line
    return "\n".join(shown[:-1])


def _entry(line: str) -> _Entry:
    indent = len(line) - len(line.lstrip())
    if match := _TERM.match(line):
        return _Entry(indent, match.end(), [line[match.end() :]], [match[2]])
    return _Entry(indent, indent, [line.strip()], [])


def _goes_on(entry: _Entry, previous: str, line: str) -> bool:
    """Return whether a line continues the previous one."""
    rest, left = line[entry.column :], line[: entry.column]
    if not rest.strip() or rest[0] == " " or _NUMBERED.match(rest):
        return False
    if not entry.terms:
        return entry.indent == 0 and not _TERM.match(line)
    if not left.strip():
        return True
    # Otherwise it is the rest of a term, whose text goes on too, or the next term.
    is_full = len(previous) <= _WRITTEN < len(previous) + 1 + len(rest.split()[0])
    is_beside = len(entry.texts) == 1 and left.endswith("  ") and len(left) - len(left.lstrip()) == entry.indent
    return is_full and is_beside and not left.strip().startswith(("-", "llmrun"))
