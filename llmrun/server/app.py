"""The ASGI application: routes, errors in the format of each protocol, the access log and the guard.

Starlette is used here and in the other modules with routes only; must not know how models are loaded.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from llmrun.errors import LlmrunError, as_llmrun_error
from llmrun.server.embedding_routes import EmbeddingRoutes
from llmrun.server.engine_routes import EngineRoutes
from llmrun.server.exchange import CompletionApi, HttpExchange, ServerState
from llmrun.server.guard import Guard, Policy, header
from llmrun.server.http import (
    App,
    DrainingError,
    ErrorBody,
    MethodNotAllowedError,
    Receive,
    RouteNotFoundError,
    Scope,
    Send,
    log_internal,
    send_error,
)
from llmrun.server.manage_routes import ManageRoutes
from llmrun.server.model_routes import ANTHROPIC, ModelCatalog, ModelRoutes
from llmrun.server.page.routes import PageRoutes
from llmrun.server.protocols import anthropic, llama_server, ollama, openai, openai_chat, openai_responses, openai_text
from llmrun.server.protocols.stored_responses import kept_items, kept_messages
from llmrun.server.stored_routes import StoredRoutes

_HEALTH_SECONDS = 0.5  # that a health check waits for the load: some clients ask again at once, and probes wait 1
COMPLETION_APIS: dict[str, CompletionApi] = {
    "/v1/chat/completions": CompletionApi(
        openai_chat.read, openai_chat.writer, openai.error_body, "chatcmpl-", kept=kept_messages
    ),
    "/v1/completions": CompletionApi(openai_text.read, openai_text.writer, openai.error_body, "cmpl-"),
    "/v1/responses": CompletionApi(
        openai_responses.read,
        openai_responses.writer,
        openai.error_body,
        "resp_",
        streams_overflow=True,
        expands=True,
        kept=kept_items,
    ),
    "/v1/responses/compact": CompletionApi(
        openai_responses.read_compaction, openai_responses.CompactionWriter, openai.error_body, "resp_", expands=True
    ),
    **{
        path: CompletionApi(llama_server.read, llama_server.NativeWriter, openai.error_body, "")
        for path in ("/completion", "/completions")
    },
    "/infill": CompletionApi(llama_server.read_infill, llama_server.NativeWriter, openai.error_body, ""),
    "/v1/messages": CompletionApi(anthropic.read, anthropic.writer, anthropic.error_body, "msg_"),
    "/api/chat": CompletionApi(ollama.read_chat, ollama.chat_writer, ollama.error_body, ""),
    "/api/generate": CompletionApi(ollama.read_generate, ollama.generate_writer, ollama.error_body, ""),
}
COMPLETION_APIS |= {
    "/chat/completions": COMPLETION_APIS["/v1/chat/completions"],
    "/responses": COMPLETION_APIS["/v1/responses"],
    "/responses/compact": COMPLETION_APIS["/v1/responses/compact"],
}
"""Path -> protocol of its completions; llama-server has some without /v1 too."""
_SLASHES = re.compile("/{2,}")


class AccessRecord(NamedTuple):
    """A finished request, for the log."""

    client: str  # address
    method: str
    path: str
    status: int
    seconds: float  # from the headers of the request to the last byte of the response
    facts: dict[str, Any]  # model, prompt_tokens, cached_tokens, completion_tokens, reason; error of a failed stream


class HttpApp:
    """The HTTP interface of a server.

    Args:
        page: the page at `/`.
        manage: routes that change the models on this disk.
        on_served: called after every request.
    """

    def __init__(
        self,
        state: ServerState,
        *,
        catalog: ModelCatalog,
        page: PageRoutes,
        manage: ManageRoutes,
        on_served: Callable[[AccessRecord], None] = lambda record: None,
    ) -> None:
        self._state = state
        self._pool, self._traffic, self._metrics, *_ = state
        self._catalog, self._page, self._manage, self._on_served = catalog, page, manage, on_served

    @property
    def routes(self) -> list[Route]:
        get = ["GET"]
        return [
            *(
                Route(path, _CompletionEndpoint(api, self._state), methods=["POST"])
                for path, api in COMPLETION_APIS.items()
            ),
            Route("/health", self._health, methods=get),
            Route("/v1/health", self._health, methods=get),
            Route("/metrics", self._show_metrics, methods=get),
            *ModelRoutes(self._pool, self._catalog).routes,
            *EngineRoutes(self._state).routes,
            *StoredRoutes(self._state.responses).routes,
            *EmbeddingRoutes(self._state).routes,
            *self._manage.routes,
            Route("/api/hello", self._hello, methods=get),  # health check of Claude Code
            *self._page.routes,
        ]

    def app(self, policy: Policy) -> App:
        """Return the ASGI application."""
        handlers: Any = {HTTPException: _no_route, LlmrunError: _failed, Exception: _internal_error}
        starlette = Starlette(routes=self.routes, exception_handlers=handlers)
        return self._logged(Guard(starlette, policy, _refuse))

    def _logged(self, app: App) -> App:
        """Return the outermost application, which logs every request."""

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            started, status = time.monotonic(), 0
            facts: dict[str, Any] = {}
            scope["state"] = facts
            _normalize(scope)

            async def sending(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            def log() -> None:
                client, seconds = (scope.get("client") or ("",))[0], time.monotonic() - started
                self._on_served(AccessRecord(client, scope["method"], scope["path"], status or 499, seconds, facts))

            try:
                try:
                    await app(scope, receive, sending)
                except asyncio.CancelledError:  # by Listener.stop()
                    if not status and self._traffic.is_draining:
                        await _refuse(scope, sending, DrainingError("the server is shutting down"))
                    raise
                finally:
                    goes_on = facts.pop("goes_on", None)
                    if goes_on is None or goes_on.done():
                        log()
                    else:  # the client has left, and sees the rest by another request
                        goes_on.add_done_callback(lambda _: log())
            except Exception as error:  # a bug
                if "error" not in facts:  # the response had begun; else _internal_error() has logged it
                    log_internal(as_llmrun_error(error))

        return logged

    # ---- routes ----

    async def _hello(self, request: Request) -> Response:
        return PlainTextResponse("llmrun is running\n")

    async def _health(self, request: Request) -> Response:
        if self._traffic.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        await self._pool.wait_until_warm(_HEALTH_SECONDS)
        if why := self._pool.unready():  # as llama-server
            return JSONResponse({"error": {"code": 503, "message": why, "type": "unavailable_error"}}, 503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        text = self._metrics.text(await self._pool.statuses())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


class _CompletionEndpoint:
    """An ASGI application for completions in one protocol; a function would get a Request from Starlette."""

    def __init__(self, api: CompletionApi, state: ServerState) -> None:
        self._api, self._state = api, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await HttpExchange(self._api, self._state, scope, receive, send).run()


def _normalize(scope: Scope) -> None:
    """Give a request one form of its path, without a host, doubled slashes and a slash at the end; not the page's.

    The host of a target in absolute form replaces the Host header, see RFC 9112, section 3.2.2.
    """
    path = scope["path"]
    if path.startswith(("http://", "https://")):
        host, _, rest = path.partition("://")[2].partition("/")
        path = f"/{rest}"
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope["headers"] = [*others, (b"host", host.encode("latin-1", "replace"))]
    short = _SLASHES.sub("/", f"/{path}")
    scope["path"] = path if short.startswith("/ui/") else short.rstrip("/") or "/"


def _error_body(scope: Scope) -> ErrorBody:
    """Return the error format of a path; a path below one of COMPLETION_APIS has the format of that protocol."""
    path = scope["path"]
    if path.startswith("/api/"):
        return ollama.error_body
    api = next((each for start, each in COMPLETION_APIS.items() if path.startswith(start)), None)
    if api is not None:
        return api.error_body
    is_anthropic = header(scope["headers"], ANTHROPIC.encode()) is not None
    return anthropic.error_body if is_anthropic else openai.error_body


async def _refuse(scope: Scope, send: Send, error: LlmrunError) -> None:
    await send_error(send, error, _error_body(scope))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        missing: LlmrunError = MethodNotAllowedError(f"{request.url.path} takes no {request.method}")
    else:
        missing = RouteNotFoundError(f"no route for {request.scope['path'][:200]!r}")
    return await _failed(request, missing)


async def _internal_error(request: Request, error: Exception) -> Response:
    internal = as_llmrun_error(error)
    request.scope["state"]["error"] = str(internal)
    return await _failed(request, internal)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, LlmrunError)
    log_internal(error)
    status = error.http_status
    return JSONResponse(_error_body(request.scope)(error, status), status)
