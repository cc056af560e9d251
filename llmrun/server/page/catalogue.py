"""The models that llmrun knows by name, and those of the hub, on the page: licence, memory, speed here, and downloads.

Owns the downloads, which go on when the page is closed; must not know how a model is downloaded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from llmrun.config import load_settings
from llmrun.errors import UsageError
from llmrun.models import hub
from llmrun.models.registry import load_catalogue
from llmrun.planning.catalogue import local_estimates, propose, rank
from llmrun.server.answer import NDJSON
from llmrun.server.manage_routes import PullJob, as_ndjson
from llmrun.server.page.requests import own, read_fields

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_MOST_FOUND = 20  # repositories of the hub
_LONGEST_SEARCH = 200  # characters


class Download:
    """A download in a task of its own, whose progress any number of clients see."""

    def __init__(self, name: str) -> None:
        self._line: dict[str, Any] = {"status": "beginning"}  # the last one
        self._changed = asyncio.Event()  # replaced whenever it was set
        self.task = asyncio.ensure_future(self._run(name))
        self.task.add_done_callback(self._end)

    async def _run(self, name: str) -> None:
        async for self._line in PullJob(name, load_settings()).lines():
            self._tell()

    def _end(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled():
            task.exception()  # known to those who see it; else asyncio warns
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the last line of progress and all later ones, until the end or until it is stopped.

        Raises:
            LlmrunError: the model can't be downloaded.
        """
        shown: dict[str, Any] | None = None
        while shown is not self._line or not self.task.done():
            changed = self._changed
            if shown is self._line:
                await changed.wait()
            else:
                shown = self._line
                yield shown
        if not self.task.cancelled():
            self.task.result()


class CatalogueRoutes:
    """The routes of models that can be downloaded."""

    def __init__(self) -> None:
        self._downloads: dict[str, Download] = {}

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            Route("/ui/catalogue", own(self._list), methods=["GET"]),
            Route("/ui/hub", own(self._search), methods=["POST"]),
            Route("/ui/download", own(self._download), methods=["POST"]),
            Route("/ui/download/stop", own(self._stop), methods=["POST"]),
        ]

    @property
    def running(self) -> list[str]:
        """The models that are being downloaded."""
        return [name for name, each in self._downloads.items() if not each.task.done()]

    async def close(self) -> None:
        """Stop all downloads; the next one of a model goes on where it was."""
        for name in self.running:
            self._downloads[name].task.cancel()
            await asyncio.wait((self._downloads[name].task,))

    async def _list(self, request: Request) -> Response:
        """Return the models of `llmrun list --all`, in its order."""
        return JSONResponse({"models": await asyncio.to_thread(_entries)})

    async def _search(self, request: Request) -> Response:
        """Return repositories of the hub with all words of a text in their names: {"text"}."""
        words = (await read_fields(request)).needed_text("text")[:_LONGEST_SEARCH].split()
        found = await asyncio.to_thread(hub.search, words, load_settings(), _MOST_FOUND) if words else []
        return JSONResponse({"models": [asdict(each) for each in found]})

    async def _download(self, request: Request) -> Response:
        """Download a model of the list or of the hub, or show how far it is: {"model"}.

        Return lines of progress as /api/pull does; the last one may be an error.
        """
        name = (await read_fields(request)).needed_text("model")
        if name not in load_catalogue().entries and not _REPOSITORY.fullmatch(name):
            raise UsageError(f"there is no model {name[:80]!r} in the list", hint="llmrun pull takes others")
        if name not in self.running:
            self._downloads[name] = Download(name)
        return StreamingResponse(as_ndjson(self._downloads[name].lines()), media_type=NDJSON)

    async def _stop(self, request: Request) -> Response:
        """Stop a download: {"model"}."""
        name = (await read_fields(request)).needed_text("model")
        if name in self.running:
            self._downloads[name].task.cancel()
        return JSONResponse({})


def _entries() -> list[dict[str, Any]]:
    entries, estimates = load_catalogue().entries.values(), local_estimates(load_settings())
    purposes = {proposal.entry.alias: proposal.purpose for proposal in propose(entries, estimates)}
    rows = [
        {"name": entry.alias, "title": entry.title, "purpose": purposes.get(entry.alias, ""), **estimates.facts(entry)}
        for entry in entries
    ]
    return sorted(rows, key=rank)
