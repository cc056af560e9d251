"""The routes: which path is answered by what, and what surrounds every answer: errors in shape, a log, the guard.

Owns the only use of Starlette; must not know how models are kept or what protocols mean.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from llmrun.errors import LlmrunError, ModelNotFoundError
from llmrun.server.catalog import ModelCatalog
from llmrun.server.embedding_routes import EmbeddingRoutes
from llmrun.server.engine_routes import EngineRoutes
from llmrun.server.exchange import Dialect, HttpExchange, ServerState, refuse
from llmrun.server.guard import App, Guard, Policy, Receive, Scope, Send
from llmrun.server.http_errors import DrainingError, MethodNotAllowedError, RouteNotFoundError
from llmrun.server.ollama_routes import OllamaRoutes
from llmrun.server.page.routes import PageRoutes
from llmrun.server.protocols import anthropic, ollama, openai, openai_chat, openai_responses, openai_text

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Dialect(openai_chat.read, openai_chat.writer, openai.error_body, "chatcmpl-"),
    "/v1/completions": Dialect(openai_text.read, openai_text.writer, openai.error_body, "cmpl-"),
    "/v1/responses": Dialect(
        openai_responses.read, openai_responses.writer, openai.error_body, "resp_", streams_overflow=True
    ),
    "/v1/messages": Dialect(anthropic.read, anthropic.writer, anthropic.error_body, "msg_"),
    "/api/chat": Dialect(ollama.read_chat, ollama.chat_writer, ollama.error_body, ""),
    "/api/generate": Dialect(ollama.read_generate, ollama.generate_writer, ollama.error_body, ""),
}
"""Path -> the protocol in which answers are asked for there."""


class AccessRecord(NamedTuple):
    """A request that was answered, for the log.

    Attributes:
        client: its address.
        seconds: from its headers to its last byte.
        facts: of an answer: model, prompt_tokens, cached_tokens, completion_tokens, reason; error, where the server
            failed, which a stream's status can't say any more.
    """

    client: str
    method: str
    path: str
    status: int
    seconds: float
    facts: dict[str, Any]


class HttpApp:
    """Everything that is answered.

    Args:
        shared: what all requests have in common.
        shelf: the models on this disk.
        page: the page at `/`.
        on_served: told of every request.
    """

    def __init__(
        self,
        shared: ServerState,
        *,
        shelf: ModelCatalog,
        page: PageRoutes,
        on_served: Callable[[AccessRecord], None] = lambda served: None,
    ) -> None:
        self._shared = shared
        self._pool, self._traffic, self._metrics, *_ = shared
        self._shelf, self._page, self._on_served = shelf, page, on_served

    def app(self, policy: Policy) -> App:
        """The ASGI application."""
        get = ["GET"]
        routes = [
            *(
                Route(path, _AsgiEndpoint(self._exchange(dialect)), methods=["POST"])
                for path, dialect in DIALECTS.items()
            ),
            Route("/health", self._health, methods=get),
            Route("/metrics", self._show_metrics, methods=get),
            Route("/v1/models", self._models, methods=get),
            Route("/v1/models/{name:path}", self._model, methods=get),
            *EngineRoutes(self._shared).routes,
            *EmbeddingRoutes(self._shared).routes,
            *OllamaRoutes(self._pool, self._shelf).routes,
            Route("/api/hello", self._hello, methods=get),  # Claude Code checks whether a server answers
            *self._page.routes,
        ]
        handlers: Any = {HTTPException: _no_route, LlmrunError: _failed, Exception: _mistake}
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        return self._logged(Guard(starlette, policy, _refuse))

    def _exchange(self, dialect: Dialect) -> App:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await HttpExchange(dialect, self._shared, scope, receive, send).run()

        return answer

    def _logged(self, app: App) -> App:
        """The outermost handler: whatever happens is answered and noted."""

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            began, status = time.monotonic(), 0
            facts: dict[str, Any] = {}
            scope["state"] = facts

            async def sending(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, sending)
            except asyncio.CancelledError:  # the server ends
                if not status and self._traffic.is_draining:
                    await _refuse(scope, sending, DrainingError("the server is shutting down"))
                raise
            except Exception:  # a mistake of ours, which _mistake() has answered: the others are served on
                traceback.print_exc()
            finally:
                client = (scope.get("client") or ("",))[0]
                seconds = time.monotonic() - began
                self._on_served(AccessRecord(client, scope["method"], scope["path"], status or 499, seconds, facts))

        return logged

    # ---- routes ----

    async def _hello(self, request: Request) -> Response:
        return PlainTextResponse("llmrun is running\n")

    async def _health(self, request: Request) -> Response:
        if self._traffic.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        text = self._metrics.text(await self._pool.conditions())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_entry(*each) for each in (await self._known()).items()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        known = await self._known()
        if name not in known:
            raise ModelNotFoundError(f"no model is called {name[:200]!r}", hint="GET /v1/models names those there are")
        return JSONResponse(_entry(name, known[name]))

    async def _known(self) -> dict[str, int]:
        """The models that can be asked for: those of the command line first."""
        found = await asyncio.to_thread(self._shelf.created)
        names = (*self._pool.names, *self._pool.adapters.names)
        return {**{name: found.get(name, 0) for name in names}, **found}


class _AsgiEndpoint:
    """An ASGI application as a route's endpoint: Starlette takes a function for one of its own."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _entry(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "llmrun"}


def _error_body(path: str) -> Callable[[LlmrunError, int], dict[str, Any]]:
    """In which shape a path's client wants its errors; what stands below a path of the table is in its protocol."""
    if path.startswith("/api/"):
        return ollama.error_body
    dialect = next((each for start, each in DIALECTS.items() if path.startswith(start)), None)
    return dialect.error_body if dialect else openai.error_body


async def _refuse(scope: Scope, send: Send, error: LlmrunError) -> None:
    """Answer with an error, in the shape of the path's protocol."""
    await refuse(send, error, _error_body(scope["path"]))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        refusal: LlmrunError = MethodNotAllowedError(f"{request.url.path} takes no {request.method}")
    else:
        refusal = RouteNotFoundError(f"there is nothing at {request.scope['path'][:200]!r}")
    return await _failed(request, refusal)


async def _mistake(request: Request, error: Exception) -> Response:
    return await _failed(request, LlmrunError(f"internal error: {type(error).__name__}"))


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, LlmrunError)
    status = error.http_status
    return JSONResponse(_error_body(request.scope["path"])(error, status), status)
