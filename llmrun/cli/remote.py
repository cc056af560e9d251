"""The options that name a far server, and what they mean beside the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.completion import complete_servers
from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun.remote.server import ServedModel, Server
    from llmrun.ui.terminal.output import Output

_PANEL = "Remote server"

AtOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="URL",
        help="Use this OpenAI-compatible server instead of an engine on this machine. Default: $LLMRUN_SERVER.",
        autocompletion=complete_servers,
        rich_help_panel=_PANEL,
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="File with the server's API key. Default: $LLMRUN_SERVER_KEY or $LLMRUN_SERVER_KEY_FILE.",
        rich_help_panel=_PANEL,
    ),
]


def remote_server(at: str | None, key_file: Path | None) -> Server | None:
    """The server that --at or LLMRUN_SERVER names; None where the engine is here.

    Raises:
        UsageError: the address or the key can't be used, or there is a key for nobody.
    """
    address = at if at is not None else os.environ.get("LLMRUN_SERVER", "")
    if address.strip():
        from llmrun.remote.server import read_server  # most starts name none

        return read_server(address, os.environ, key_file)
    if at is not None:
        raise UsageError("invalid --at: it is empty", hint="e.g. --at http://127.0.0.1:8080")
    if key_file is not None:
        raise UsageError("--key-file needs --at", hint="e.g. --at https://example.org --key-file key.txt")
    return None


def served_model(output: Output, server: Server, wanted: str | None) -> ServedModel:
    """The server's model of that name, or its only one. What the user should know of the way there is said.

    Raises:
        LlmrunError: the server can't be asked, or nobody can tell which model is meant.
    """
    from llmrun.remote.server import choose_model
    from llmrun.remote.transport import models

    if server.warning:
        output.note(f"warning: {server.warning}")
    return choose_model(server, models(server), wanted)
