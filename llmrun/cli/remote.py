"""A model of a remote server: which one it is, and opening it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from llmrun.config import model_aliases
from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.models.location import require_modalities
from llmrun.protocol.media import Modality
from llmrun.protocol.messages import AnswerRequest
from llmrun.remote.model import RemoteModel
from llmrun.remote.server import ServedModel, Server, choose_model
from llmrun.remote.transport import models
from llmrun.ui.terminal.output import Output


def served_model(output: Output, server: Server, wanted: str | None) -> ServedModel:
    """Return the server's model of a name, or its only one; print warnings about the connection.

    The server's own names come before the user's aliases.

    Raises:
        LlmrunError: the request failed, or the name is ambiguous.
    """
    if server.warning:
        output.note(f"warning: {server.warning}")
    found = models(server)
    if wanted is not None and wanted not in [model.name for model in found]:
        wanted = model_aliases().get(wanted, wanted)
    return choose_model(server, found, wanted)


ANY_MODEL = "default"
"""In place of a model's name: the only one that the server has."""


@contextmanager
def open_at(
    output: Output,
    server: Server,
    name: str,
    request: AnswerRequest,
    flags: Mapping[str, Any],
    *,
    modalities: frozenset[Modality] = frozenset(),
    presets: Collection[str] = (),
) -> Iterator[RemoteModel]:
    """Open a server's model; close its connections afterwards.

    Args:
        name: as the server lists it; "" or ANY_MODEL for its only one.
        request: the request, as far as it is known.
        flags: sampling parameters as typed.
        modalities: kinds of files that will be sent.
        presets: fields that presets have set, which are left out where the server does not support them.

    Raises:
        UsageError: the server does not support an option.
        LlmrunError: the server can't be reached, or does not have the model.
    """
    try:
        served = served_model(output, server, None if name in ("", ANY_MODEL) else name)
    except ModelNotFoundError:
        if len(name.split()) > 1:
            hint = f"llmrun run --at {server.url} {ANY_MODEL} {shlex.quote(name)}"
            raise UsageError(f"{name!r} is in the place of the model's name", hint=hint) from None
        raise
    with closing(RemoteModel(server, served, output.note, yielding=presets)) as model:
        model.sampling(flags)
        model.require(request)
        require_modalities(model.name, modalities, model.modalities, server=server.host)
        yield model
