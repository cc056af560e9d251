"""Ollama's routes that change the models on this disk: /api/pull, /api/copy and /api/delete.

Only for programs of the user who runs the server, or with --allow-manage: a page must never fill or empty the disk.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from llmrun.config import Settings
from llmrun.errors import CancelledError, LlmrunError, UsageError
from llmrun.models.location import locate
from llmrun.models.registry import resolve
from llmrun.models.store.installed import InstalledModel
from llmrun.models.store.removal import plan_removal, remove
from llmrun.models.store.store import Store, all_models
from llmrun.planning.estimate import choose_files
from llmrun.server.answer import NDJSON, json_line
from llmrun.server.http import OriginRejectedError, model_not_found, read_json
from llmrun.server.page.requests import is_forwarded, is_same_user
from llmrun.server.pool import Pool
from llmrun.server.protocols import ollama
from llmrun.server.protocols.fields import Fields
from llmrun.server.watch import watched

_PROGRESS_SECONDS = 0.2


class ManageRoutes:
    """The routes.

    Args:
        is_open: every client that the guard accepts may use them.
    """

    def __init__(self, pool: Pool, settings: Settings, *, is_open: bool) -> None:
        self._pool, self._settings, self._is_open = pool, settings, is_open

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/api/pull", self._pull, methods=["POST"]),
            Route("/api/copy", self._copy, methods=["POST"]),
            Route("/api/delete", self._delete, methods=["DELETE", "POST"]),
        ]

    async def _fields(self, request: Request) -> Fields:
        """Return the body of a request from a client that may change models.

        Raises:
            OriginRejectedError: the client may not.
        """
        headers = request.headers
        is_page = "origin" in headers or any(name.startswith("sec-fetch-") for name in headers)
        client, server = request.scope.get("client"), request.scope.get("server")
        is_allowed = self._is_open
        if client and server and not (is_allowed or is_page or is_forwarded(headers.raw)):
            is_allowed = await asyncio.to_thread(is_same_user, client, server)
        if not is_allowed:
            raise OriginRejectedError(
                "models are managed only by programs of the user who runs the server, on the same machine",
                hint="to allow it to all clients, start llmrun serve with --allow-manage",
            )
        return Fields(await read_json(request.receive))

    async def _pull(self, request: Request) -> Response:
        fields = await self._fields(request)
        lines = PullJob(_name(fields, "model", "name"), self._settings).lines()
        if fields.flag("stream") is not False:
            return StreamingResponse(as_ndjson(lines), media_type=NDJSON)
        async with watched(request.receive):
            return JSONResponse([each async for each in lines][-1])

    async def _copy(self, request: Request) -> Response:
        from llmrun.models.store.importing import import_model

        fields = await self._fields(request)
        source, name = _name(fields, "source"), _name(fields, "destination")
        found = await asyncio.to_thread(self._find, source)
        await asyncio.to_thread(import_model, found.path, Store(self._settings), name=name)
        return Response()

    async def _delete(self, request: Request) -> Response:
        name = _name(await self._fields(request), "model", "name")
        found = await asyncio.to_thread(self._find, name)
        removal = await asyncio.to_thread(plan_removal, Store(self._settings), found)
        await self._pool.unload(found.path)
        await asyncio.to_thread(remove, removal)
        return Response()

    def _find(self, name: str) -> InstalledModel:
        """Return the model on this disk with this name, or with another name of the same file; never a path."""
        models = all_models(self._settings)
        found = next((each for each in models if each.name == name), None)
        with suppress(LlmrunError):
            located = locate(name, self._settings)
            if found is None and located.spec.path is None:
                found = next((each for each in models if each.path == located.path), None)
        if found is None:
            raise model_not_found(name, "/api/tags")
        return found


def _name(fields: Fields, *keys: str) -> str:
    """Return the name of a model, without Ollama's default tag."""
    name = next(filter(None, map(fields.text, keys)), "").removesuffix(":latest")
    if not name:
        raise UsageError(f"{keys[0]} is missing or empty")
    return name


async def as_ndjson(lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Encode lines; an error is the last of them, since the status was sent before."""
    try:
        async for each in lines:
            yield json_line(each)
    except LlmrunError as error:
        yield json_line(ollama.error_body(error, error.http_status))


class PullJob:
    """The download of one model in a thread, which ends when the client disconnects."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._settings = name, settings
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_abandoned = threading.Event()
        self._reported_at = 0.0

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Yield Ollama's lines of progress.

        Raises:
            LlmrunError: the model can't be downloaded.
        """
        task = asyncio.ensure_future(asyncio.to_thread(self._pull))
        try:
            yield {"status": "pulling manifest"}
            while not (task.done() and self._queue.empty()):
                waiting = asyncio.ensure_future(self._queue.get())
                await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    yield waiting.result()
                else:
                    waiting.cancel()
            await task
            yield {"status": "success"}
        finally:
            self._is_abandoned.set()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio warns

    def _pull(self) -> Path:
        from llmrun.models.pull import pull

        spec = resolve(self._name)
        if spec.path is not None or spec.url is not None:
            why = "must be the name of a model, not a path or link"
            raise UsageError(f"{self._name[:200]!r} can't be pulled", why=why)
        return pull(spec, self._settings, self._progress, self._note, choose=choose_files)

    def _note(self, text: str) -> None:
        self._put({"status": text})

    def _progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._reported_at >= _PROGRESS_SECONDS:
            self._reported_at = now
            self._put({"status": f"pulling {self._name}", "digest": self._name, "total": total, "completed": done})

    def _put(self, line: dict[str, Any]) -> None:
        if self._is_abandoned.is_set():
            raise CancelledError("the client is gone")
        self._loop.call_soon_threadsafe(self._queue.put_nowait, line)
