"""`llmrun help`: the help of a command, and topics that belong to no single one.

Each topic is a text of topics/, but the exit codes: what they mean is asserted by tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmrun.cli.commands import ALIASES, COMMANDS
from llmrun.cli.completion import complete_words
from llmrun.errors import UsageError
from llmrun.ui.terminal.output import Output

EXIT_CODES = {
    0: "ok",
    1: "internal error: a bug in llmrun",
    2: "usage: an invalid argument or option",
    3: "model not found",
    4: "the hub wants a login, or its terms accepted",
    5: "network trouble, or the bytes that arrived are wrong",
    6: "not enough memory or disk",
    7: "bad model file, chat template or grammar",
    8: "the engine crashed",
    9: "a limit cut off an answer that has to follow a grammar or JSON schema",
    10: "rows of a batch failed; the others have their answers",
    130: "stopped by Ctrl-C",
    143: "stopped by SIGTERM, or because the terminal was closed",
}

TOPICS = (
    "agents",
    "beams",
    "embeddings",
    "exit-codes",
    "images",
    "inference",
    "lora",
    "scale",
    "servers",
    "speculation",
    "tools",
    "watermarks",
)


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
    """Show help on a command or topic."""
    if words[0] in TOPICS and len(words) == 1:
        from llmrun.cli.reflow import reflow

        output = Output()
        output.text(reflow(topic(words[0]), output.columns()))
    elif words[0] in COMMANDS or words[0] in ALIASES:
        context.find_root().command.main([*words, "--help"], prog_name="llmrun", standalone_mode=False)
    else:
        raise UsageError(f"there is no help on {words[0]!r}", hint=f"llmrun help, or llmrun help {' or '.join(TOPICS)}")


def topic(name: str) -> str:
    """The text of a topic."""
    if name == "exit-codes":
        return "\n".join(f"{status:>4}  {meaning}" for status, meaning in EXIT_CODES.items())
    return Path(__file__).with_name("topics").joinpath(f"{name}.txt").read_text(encoding="utf-8").rstrip()
