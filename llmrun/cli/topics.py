"""`llmrun help`: topics that belong to no single command."""

from __future__ import annotations

from typing import Annotated

import typer

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
    130: "stopped by Ctrl-C",
    143: "stopped by SIGTERM",
}

_TOPICS = {"exit-codes": "\n".join(f"{status:>4}  {meaning}" for status, meaning in EXIT_CODES.items())}


def show_help(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="A command, or exit-codes.")] = None,
) -> None:
    """Help on a command or topic."""
    output = Output()
    if topic in _TOPICS:
        output.text(_TOPICS[topic])
        return
    parent = context.parent
    assert parent is not None
    commands = getattr(parent.command, "commands", {})
    if topic is None:
        output.text(parent.get_help())
    elif topic in commands:
        output.text(commands[topic].get_help(typer.Context(commands[topic], info_name=topic, parent=parent)))
    else:
        raise UsageError(f"there is no help on {topic!r}", hint="llmrun help, or llmrun help exit-codes")
