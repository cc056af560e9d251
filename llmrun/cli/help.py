"""`llmrun help`: the help of a command or topic.

Topics are files in topics/, except the exit codes, which tests compare with the errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmrun.cli.commands import ALIASES, COMMANDS, OPTION_TOPICS
from llmrun.cli.completion import complete_words
from llmrun.cli.pages import panel_help, reflow
from llmrun.errors import UsageError
from llmrun.ui.terminal.output import Output

EXIT_CODES = {
    0: "ok",
    1: "internal error: a bug in llmrun",
    2: "usage: an invalid argument or option",
    3: "model not found",
    4: "the hub requires a login, or accepted terms",
    5: "network error, or a damaged download",
    6: "not enough memory or disk",
    7: "bad model file, chat template or grammar",
    8: "the engine crashed",
    9: "a limit cut off an answer that must follow a grammar or JSON schema",
    10: "rows of a batch failed; the others have their answers",
    130: "stopped by Ctrl-C",
    143: "stopped by SIGTERM, or because the terminal was closed",
}

_FOLDER = Path(__file__).with_name("topics")
TOPICS = sorted(["exit-codes", *(path.stem for path in _FOLDER.glob("*.txt"))])


def show_help(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TOPIC",
            help=f"A command, or {', '.join(TOPICS)}.",
            autocompletion=complete_words(*COMMANDS, *TOPICS),
        ),
    ],
) -> None:
    """Show the help of a command or topic."""
    if words[0] in TOPICS and len(words) == 1:
        output = Output()
        output.text(reflow(topic(words[0]), output.columns()))
        if words[0] in OPTION_TOPICS:
            name, panel = OPTION_TOPICS[words[0]]
            root = context.find_root()
            command = root.command.get_command(root, name)  # type: ignore[attr-defined]
            output.text("\n" + panel_help(typer.Context(command, parent=root, info_name=name), panel))
    elif words[0] in COMMANDS or words[0] in ALIASES:
        context.find_root().command.main([*words, "--help"], prog_name="llmrun", standalone_mode=False)
    else:
        raise UsageError(f"there is no help on {words[0]!r}", hint=f"llmrun help, or llmrun help {' or '.join(TOPICS)}")


def topic(name: str) -> str:
    if name == "exit-codes":
        return "\n".join(f"{status:>4}  {meaning}" for status, meaning in EXIT_CODES.items())
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").rstrip()
