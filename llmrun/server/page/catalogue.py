"""The models that llmrun knows by name, on the page: size, speed here, and their download.

Must not know how a model is downloaded.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from llmrun.config import load_settings
from llmrun.errors import LlmrunError, UsageError
from llmrun.models.registry import load_catalogue
from llmrun.models.store.store import all_models
from llmrun.planning.catalogue import Estimates
from llmrun.planning.hardware import probe, this_machine
from llmrun.planning.speed import remembered
from llmrun.server.answer import NDJSON
from llmrun.server.manage_routes import PullJob, as_ndjson
from llmrun.server.page.requests import own, read_fields


async def _list(request: Request) -> Response:
    """Return the models of `llmrun list --all`."""
    return JSONResponse({"models": await asyncio.to_thread(_entries)})


async def _download(request: Request) -> Response:
    """Download a model: {"model"}. Return lines of progress as /api/pull does; the last one may be an error."""
    name = (await read_fields(request)).needed_text("model")
    if name not in load_catalogue().entries:
        raise UsageError(f"there is no model {name[:80]!r} in the list", hint="llmrun pull takes others")
    return StreamingResponse(as_ndjson(PullJob(name, load_settings()).lines()), media_type=NDJSON)


ROUTES = [
    Route("/ui/catalogue", own(_list), methods=["GET"]),
    Route("/ui/download", own(_download), methods=["POST"]),
]


def _entries() -> list[dict[str, Any]]:
    settings = load_settings()
    try:
        hardware = this_machine()
    except LlmrunError:
        hardware = probe()
    estimates = Estimates(all_models(settings), hardware, remembered(hardware, settings.state_dir))
    return [
        {
            "name": entry.alias,
            "title": entry.title,
            "kind": entry.kind,
            "is_here": estimates.file_of(entry) is not None,
            **estimates.size_of(entry)._asdict(),
            **asdict(estimates.of(entry)),
        }
        for entry in load_catalogue().entries.values()
    ]
