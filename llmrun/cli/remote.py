"""The options that name a remote server, and their environment variables."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.completion import complete_servers
from llmrun.config import model_aliases
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
        help="Use this OpenAI-compatible server instead of an engine on this machine; ollama is that of "
        "$OLLAMA_HOST. Default: $LLMRUN_SERVER.",
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
    """Return the server of --at or LLMRUN_SERVER; None if the engine is here.

    Raises:
        UsageError: the address or the key is invalid, or there is a key without a server.
    """
    address = at if at is not None else os.environ.get("LLMRUN_SERVER", "")
    if address.strip():
        from llmrun.remote.server import ollama_address, read_server  # most starts name none

        if address.strip().lower() == "ollama":
            address = ollama_address(os.environ)
        server = read_server(address, os.environ, key_file)
        return server if at is not None else replace(server, named_by="LLMRUN_SERVER")
    if at is not None:
        raise UsageError("invalid --at: it is empty", hint="e.g. --at http://127.0.0.1:8080")
    if key_file is not None:
        raise UsageError("--key-file needs --at", hint="e.g. --at https://example.org --key-file key.txt")
    return None


def served_model(output: Output, server: Server, wanted: str | None) -> ServedModel:
    """Return the server's model of a name, or its only one; print warnings about the connection.

    The server's own names come before the user's aliases.

    Raises:
        LlmrunError: the request failed, or the name is ambiguous.
    """
    from llmrun.remote.server import choose_model
    from llmrun.remote.transport import models

    if server.warning:
        output.note(f"warning: {server.warning}")
    found = models(server)
    if wanted is not None and wanted not in [model.name for model in found]:
        wanted = model_aliases().get(wanted, wanted)
    return choose_model(server, found, wanted)
