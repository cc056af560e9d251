"""Remote servers: the options that name one, the options that it excludes, and opening its model."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.completion import complete_servers
from llmrun.cli.sampling import PRESET_ORIGINS
from llmrun.config import model_aliases
from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.models.location import require_modalities
from llmrun.planning.preferences import LOAD_OPTIONS, LoadPreferences
from llmrun.protocol.media import Modality
from llmrun.protocol.settings import SETTINGS

if TYPE_CHECKING:
    from llmrun.cli.options import LoadingOptions
    from llmrun.protocol.messages import AnswerRequest
    from llmrun.remote.model import RemoteModel
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


ANY_MODEL = "default"
"""In place of a model's name: the only one that the server has."""
_LOADS = "the server has loaded its model already"
_KEEPS = "a server does not give access to its logits and KV cache"
_KEPT = frozenset({"--beams", "--record", "--prompt-cache"})


def refuse_with_remote(loading: LoadingOptions, others: Mapping[str, bool] = {}) -> None:
    """Raise for options that need an engine on this machine, if a server is given.

    Args:
        others: flag outside LoadingOptions -> whether it was given.

    Raises:
        UsageError: such an option is given.
    """
    if loading.server is None:
        return
    preferences, unset = loading.preferences, LoadPreferences()
    loads = {
        "--ctx": preferences.n_ctx is not None,
        **{SETTINGS[name].option: getattr(preferences, name) != getattr(unset, name) for name in LOAD_OPTIONS},
        "--speculate": loading.speculate is not None,
        "--draft": loading.draft is not None,
        "--mmproj": loading.projector is not None,
        "--lora": bool(loading.adapters),
        "--rpc": bool(preferences.workers),
        "--verbose": loading.verbose,
    }
    kept = {flag: is_given for flag, is_given in others.items() if flag in _KEPT}
    flag = next((flag for flag, is_given in {**loads, **kept}.items() if is_given), None)
    if flag is not None:
        why = _LOADS if flag in loads else _KEEPS
        server = loading.server.named_by
        away = "leave out --at" if server == "--at" else f"unset {server}"
        hint = f"leave out {flag}; for a model of this machine, {away}"
        raise UsageError(f"{server} and {flag} can't be used together", why=why, hint=hint)


@contextmanager
def open_at(
    output: Output,
    server: Server,
    name: str,
    request: AnswerRequest,
    flags: Mapping[str, Any],
    *,
    modalities: frozenset[Modality] = frozenset(),
) -> Iterator[RemoteModel]:
    """Open a server's model; close its connections afterwards.

    Args:
        name: as the server lists it; "" or ANY_MODEL for its only one.
        request: the request, as far as it is known.
        flags: sampling parameters as typed.
        modalities: kinds of files that will be sent.

    Raises:
        UsageError: the server does not support an option.
        LlmrunError: the server can't be reached, or does not have the model.
    """
    from llmrun.remote.model import RemoteModel

    try:
        served = served_model(output, server, None if name in ("", ANY_MODEL) else name)
    except ModelNotFoundError:
        if len(name.split()) > 1:
            hint = f"llmrun run --at {server.url} {ANY_MODEL} {shlex.quote(name)}"
            raise UsageError(f"{name!r} is in the place of the model's name", hint=hint) from None
        raise
    with closing(RemoteModel(server, served, output.note, yielding=PRESET_ORIGINS)) as model:
        model.sampling(flags)
        model.require(request)
        require_modalities(model.name, modalities, model.modalities, server=server.host)
        yield model
