"""`llmrun help`: the help of a command, and topics that belong to no single one."""

from __future__ import annotations

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
    130: "stopped by Ctrl-C",
    143: "stopped by SIGTERM, or because the terminal was closed",
}

TOOLS = """\
llmrun chat MODEL --tools FILE.py          the functions of a Python file
llmrun chat MODEL --tools "mcp:COMMAND"    the tools of an MCP server, which
                                           COMMAND starts; for this,
                                           pip install 'llmrun[mcp]'

The model may call every public function that the file defines. Type hints
say what it takes, the docstring what it is for:

    from datetime import datetime
    from zoneinfo import ZoneInfo

    def what_time(zone: str) -> str:
        \"\"\"Tells the time in a place.

        Args:
            zone: such as Europe/Rome
        \"\"\"
        return datetime.now(ZoneInfo(zone)).isoformat()

Before a call runs, it is shown with its arguments and asked for: y runs it,
a runs this tool without asking from now on, n refuses it, which the model is
told. Ctrl-C ends a call that runs; at the question it ends the turn.

    --yes-to NAME           this tool runs without asking; may be repeated.
                            In a pipe no other runs.
    --tool-timeout SECONDS  how long a call may take: 60 by default. Results
                            are cut off after 10,000 characters.
    /tools                  in a chat: what there is

Functions and servers run in processes of their own, as you, with all that you
may do. They end with the chat."""

TOPICS = {
    "exit-codes": "\n".join(f"{status:>4}  {meaning}" for status, meaning in EXIT_CODES.items()),
    "tools": TOOLS,
}


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
    """Help on a command or topic."""
    if words[0] in TOPICS and len(words) == 1:
        Output().text(TOPICS[words[0]])
    elif words[0] in COMMANDS or words[0] in ALIASES:
        context.find_root().command.main([*words, "--help"], prog_name="llmrun", standalone_mode=False)
    else:
        raise UsageError(f"there is no help on {words[0]!r}", hint=f"llmrun help, or llmrun help {' or '.join(TOPICS)}")
