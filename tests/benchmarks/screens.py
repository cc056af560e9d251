"""Make the README's images: real commands on an emulated terminal, its last screen as SVG.

    python tests/benchmarks/screens.py [--llmrun PATH] [--columns 80] [--light] [--folder FOLDER] [NAME ...]

Not a benchmark. A temporary home keeps the user's chats and settings out of the images.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import peers
import pexpect
import pyte
import pyte.screens
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

FOLDER = Path(__file__).parents[1] / "screens"
PATIENCE = 180  # seconds
PROMPT = rb"\x1b\[\?2004h.*?>>>"  # bracketed paste goes on when a line is asked for
_NAMES = {"brown": "yellow", "default": None}  # pyte's names of colours -> Rich's


class Picture(NamedTuple):
    """A command, and what is typed into it, one line when it asks for one."""

    arguments: tuple[str, ...]
    typed: tuple[str, ...] = ()
    rows: int = 24


PICTURES = {
    "chat": Picture(
        ("chat", "smollm2", "--temp", "0", "--seed", "1", "--max-tokens", "120"),
        ("Compare tea and coffee in a table", "/why"),
        rows=40,
    ),
    "list": Picture(("list", "--all"), rows=80),
    "plan": Picture(("plan", "smollm2"), rows=60),
    "bench": Picture(("bench", "smollm2", "-p", "128", "-n", "32", "-r", "3"), rows=60),
    "report": Picture(("report", "smollm2"), rows=120),
}


def play(
    command: str,
    arguments: Sequence[str],
    typed: Sequence[tuple[object, object]],
    screen: pyte.Screen,
    environment: Mapping[str, str],
) -> int | None:
    """Show on the screen what a command draws in a terminal of that size, to its end; return its exit status.

    Args:
        typed: (pattern, what is done when it comes): keys to type, a number of columns that the terminal gets, or
            None, which ends the command there.

    Raises:
        pexpect.TIMEOUT: a pattern, or the end, doesn't come.
    """
    stream = pyte.ByteStream(screen)
    size = screen.lines, screen.columns
    child = pexpect.spawn(
        command, list(arguments), env=dict(environment), dimensions=size, timeout=PATIENCE, encoding=None
    )
    try:
        for pattern, keys in (*typed, (pexpect.EOF, None)):
            try:
                child.expect(pattern)
            finally:
                stream.feed(child.before if isinstance(child.before, bytes) else child.buffer)
            stream.feed(child.after if isinstance(child.after, bytes) else b"")
            if keys is None:
                break
            if isinstance(keys, str):
                child.send(keys.encode())
            else:
                screen.reflow(keys)
                child.setwinsize(screen.lines, keys)
    finally:
        child.close(force=True)
    return child.exitstatus if child.signalstatus is None else -child.signalstatus


def screen_of(llmrun: str, picture: Picture, columns: int) -> pyte.Screen:
    """What a terminal shows after the command has ended."""
    screen = pyte.Screen(columns, picture.rows)
    lines = [(PROMPT, f"{line}\r") for line in picture.typed]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "TERM": "xterm-256color", "LLMRUN_HOME": home}
        environment.pop("NO_COLOR", None)
        play(llmrun, picture.arguments, [*lines, (PROMPT, None)] if lines else [], screen, environment)
    return screen


def row_of(screen: pyte.Screen, number: int) -> Text:
    """A row of the screen with its colours."""
    cells = [screen.buffer[number][column] for column in range(screen.columns)]
    row = Text()
    for style, run in itertools.groupby(cells, _style):
        row.append("".join(cell.data for cell in run), style)
    row.rstrip()
    return row


def _style(cell: pyte.screens.Char) -> Style:
    return Style(
        color=_colour(cell.fg),
        bgcolor=_colour(cell.bg),
        bold=cell.bold,
        italic=cell.italics,
        underline=cell.underscore,
        reverse=cell.reverse,
    )


def _colour(name: str) -> str | None:
    if name in _NAMES:
        return _NAMES[name]
    return f"#{name}" if len(name) == 6 and not name.isalpha() else name.replace("bright", "bright_")


def main() -> None:
    """Make the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", default=[*PICTURES], choices=[*PICTURES])
    parser.add_argument("--llmrun", metavar="PATH")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--light", action="store_true", help="black on white")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the images")
    arguments = parser.parse_args()
    llmrun = peers.find_llmrun(arguments.llmrun)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    theme = DEFAULT_TERMINAL_THEME if arguments.light else SVG_EXPORT_THEME
    for name in arguments.names:
        screen = screen_of(llmrun, PICTURES[name], arguments.columns)
        rows = [row_of(screen, number) for number in range(screen.lines)]
        while rows and not rows[-1].plain.strip():
            rows.pop()
        console = Console(record=True, width=arguments.columns, file=io.StringIO(), force_terminal=True)
        for row in rows:
            console.print(row, soft_wrap=True)
        target = arguments.folder / f"{name}.svg"
        console.save_svg(str(target), title=f"llmrun {PICTURES[name].arguments[0]}", theme=theme)
        print(target, file=sys.stderr)
        print("\n".join(row.plain for row in rows))


if __name__ == "__main__":
    main()
