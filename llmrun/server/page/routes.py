"""The routes of the page: its files at / and /ui/files/, and what it asks of the chats and models under /ui/.

Owns who may use them; must not know how chats are saved. The guard has let a request through before it comes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from llmrun.errors import UsageError
from llmrun.protocol.codec import as_dict
from llmrun.protocol.logprobs import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerRequest, Message, Stats
from llmrun.server.answer_parts import CompletionRequest
from llmrun.server.catalog import ModelCatalog
from llmrun.server.exchange import CompletionApi, HttpExchange, ServerState
from llmrun.server.guard import App, Receive, Scope, Send
from llmrun.server.http_errors import RouteNotFoundError
from llmrun.server.page.attached import read_uploads
from llmrun.server.page.chats import PageChats, Said, with_images
from llmrun.server.page.files import HEADERS, INDEX, MEDIA_TYPES, read_file
from llmrun.server.page.insights import ExplainPage, PageInsights
from llmrun.server.page.requests import needed_id, own, read_fields, read_id
from llmrun.server.page.writer import PageWriter
from llmrun.server.pool import PooledModel
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import error_body
from llmrun.server.protocols.sampling import read_limits, read_sampling

if TYPE_CHECKING:
    from llmrun.chat.store.turns import Answer

_LONGEST_TEXT = 1 << 20  # characters of a question


class PageRoutes:
    """The routes of the page.

    Args:
        catalog: the models on this disk.
        state_dir: folder with the saved chats.
        explain_page: makes the page of an explained answer.
    """

    def __init__(self, state: ServerState, catalog: ModelCatalog, state_dir: Path, explain_page: ExplainPage) -> None:
        self._state, self._pool, self._catalog = state, state.pool, catalog
        self._chats = PageChats(state_dir)
        self._insights = PageInsights(state, self._chats, explain_page)

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        get, post = ["GET"], ["POST"]
        return [
            Route("/", self._home, methods=get),
            Route("/ui/files/{name:path}", self._file, methods=get),
            Route("/ui/models", own(self._models), methods=get),
            Route("/ui/load", own(self._load), methods=post),
            Route("/ui/chats", own(self._list), methods=get),
            Route("/ui/chats/{chat:int}", own(self._read), methods=get),
            Route("/ui/chats/{chat:int}/head", own(self._head), methods=get),
            Route("/ui/chats/{chat:int}/answers/{question:int}", own(self._answers), methods=get),
            Route("/ui/chats/{chat:int}/branches", own(self._branches), methods=get),
            Route("/ui/chats/{chat:int}/{form}", own(self._export), methods=get),
            Route("/ui/ask", own(self._ask), methods=post),
            Route("/ui/go", own(self._go), methods=post),
            Route("/ui/undo", own(self._undo), methods=post),
            Route("/ui/system", own(self._system), methods=post),
            Route("/ui/answer", own(self._answer), methods=post),
            *self._insights.routes,
        ]

    async def close(self) -> None:
        """Close the saved chats."""
        await self._chats.close()

    # ---- files ----

    async def _home(self, request: Request) -> Response:
        """Return the page to a browser, and a line of text to everything else."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("llmrun is running\n")
        return await self._send_file(INDEX)

    async def _file(self, request: Request) -> Response:
        return await self._send_file(request.path_params["name"])

    async def _send_file(self, name: str) -> Response:
        if name not in MEDIA_TYPES:
            raise RouteNotFoundError(f"the page has no file {name[:200]!r}")
        data = await asyncio.to_thread(read_file, name)
        return Response(data, headers={**HEADERS, "content-type": MEDIA_TYPES[name]})

    # ---- models ----

    async def _models(self, request: Request) -> Response:
        """Return the models of this disk, those in memory with their context window."""
        described = {each.name: each for each in await asyncio.to_thread(self._catalog.described)}
        loaded = {
            pooled.name: pooled.loaded.n_ctx for pooled in self._pool.models if pooled.is_loaded and pooled.loaded
        }
        names = dict.fromkeys((*self._pool.names, *self._pool.adapters.names, *described))
        models = [
            {
                "name": name,
                "n_bytes": described[name].size if name in described else None,
                "n_ctx": loaded.get(name),
            }
            for name in names
        ]
        return JSONResponse({"models": models})

    async def _load(self, request: Request) -> Response:
        """Load a model, and return its context window and the sampling parameters it would use."""
        fields = await read_fields(request)
        async with self._state.engine(fields.text("model") or "") as (_, pooled):
            assert pooled.loaded is not None
            assert pooled.model is not None
            sampling, origins = pooled.model.sampling(dict(self._state.sampling))
            values = as_dict(sampling)
            shown = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
            return JSONResponse(
                {
                    "model": pooled.name,
                    "n_ctx": pooled.loaded.n_ctx,
                    "thinks": bool(pooled.loaded.thinking_tags),
                    "sees": pooled.model.sees,
                    "sampling": {name: {"value": values[name], "origin": origins[name]} for name in shown},
                }
            )

    # ---- chats ----

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"chats": await self._chats.run(self._chats.all)})

    async def _read(self, request: Request) -> Response:
        return JSONResponse(await self._chats.run(partial(self._chats.read, request.path_params["chat"])))

    async def _export(self, request: Request) -> Response:
        """Return a chat as a file to save, "markdown" or "json"."""
        chat, form = request.path_params["chat"], request.path_params["form"]
        if form not in ("markdown", "json"):
            raise RouteNotFoundError("a chat is exported as markdown or json")
        text = await self._chats.run(partial(self._chats.export, chat, form))
        name = f"chat-{chat}.{'md' if form == 'markdown' else 'json'}"
        return PlainTextResponse(text, headers={"content-disposition": f'attachment; filename="{name}"'})

    async def _ask(self, request: Request) -> Response:
        """Save a question: {"chat", "text", "after", "beside", "system", "files", "images"}, see PageChats.ask()."""
        fields = await read_fields(request)
        text = fields.needed_text("text")
        if not text.strip() or len(text) > _LONGEST_TEXT:
            raise UsageError("a question has 1 to 1,048,576 characters")
        chat, after, beside = (read_id(fields, name) for name in ("chat", "after", "beside"))
        system = fields.text("system") or ""
        uploads = read_uploads(fields)
        ask = partial(self._chats.ask, chat, text, after=after, beside=beside, system=system, uploads=uploads)
        return JSONResponse(await self._chats.run(ask))

    async def _go(self, request: Request) -> Response:
        """Go to the newest branch with an entry, or to a branch: {"chat", "entry" or "branch"}."""
        fields = await read_fields(request)
        chat, branch = needed_id(fields, "chat"), fields.text("branch")
        go = (
            partial(self._chats.switch, chat, branch)
            if branch
            else partial(self._chats.go, chat, needed_id(fields, "entry"))
        )
        return JSONResponse(await self._chats.run(go))

    async def _head(self, request: Request) -> Response:
        return JSONResponse(await self._chats.run(partial(self._chats.head, request.path_params["chat"])))

    async def _undo(self, request: Request) -> Response:
        """Go back to before the last question: {"chat"}."""
        chat = needed_id(await read_fields(request), "chat")
        return JSONResponse(await self._chats.run(partial(self._chats.undo, chat)))

    async def _branches(self, request: Request) -> Response:
        found = await self._chats.run(partial(self._chats.branches, request.path_params["chat"]))
        return JSONResponse({"branches": found})

    async def _system(self, request: Request) -> Response:
        """Change the system prompt: {"chat", "system"}."""
        fields = await read_fields(request)
        change = partial(self._chats.set_system, needed_id(fields, "chat"), fields.text("system") or "")
        return JSONResponse(await self._chats.run(change))

    async def _answers(self, request: Request) -> Response:
        chat, question = request.path_params["chat"], request.path_params["question"]
        return JSONResponse({"answers": await self._chats.run(partial(self._chats.answers, chat, question))})

    # ---- answers ----

    async def _answer(self, request: Request) -> Response:
        """Answer a question as a stream: {"chat", "question", "together", "model", "candidates", "begins", ...}."""
        fields = await read_fields(request)
        chat, question = needed_id(fields, "chat"), needed_id(fields, "question")
        said = partial(self._chats.open_question, chat, question, together=fields.flag("together") is True)
        return _StreamedResponse(partial(self._stream, _completion(fields), chat, said))

    async def _stream(
        self,
        asked: CompletionRequest,
        chat: int,
        open_question: Callable[[], Said],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send an answer, and save what was received of it, however it ends."""
        async with self._pool.lease(asked.model) as pooled:
            said = await self._chats.run(open_question)
            writer, answer = PageWriter(asked.request.begins), None
            try:
                messages, notes = await self._with_images(said, pooled)
                request = asked._replace(request=replace(asked.request, messages=messages))
                writer.notes = notes
                api = CompletionApi(lambda body: request, lambda body, envelope: writer, error_body, "ui-")
                await HttpExchange(api, self._state, scope, _with_empty_body(receive), send).run()
            finally:
                if writer.answer.started is not None:
                    sampling = {**asked.sampling, **self._state.sampling}
                    answer = _answer_of(writer, pooled, asked, sampling)
                await asyncio.shield(self._chats.run(partial(self._chats.close_question, chat, answer)))

    async def _with_images(self, said: Said, pooled: PooledModel) -> tuple[tuple[Message, ...], list[str]]:
        """Return messages with their images; the model has to be loaded to know whether it sees them."""
        if not any(files for _, files in said):
            return tuple(message for message, _ in said), []
        await self._pool.ready(pooled)
        assert pooled.model is not None
        return await asyncio.to_thread(with_images, said, "" if pooled.model.sees else pooled.model.name)


class _StreamedResponse(Response):
    """A response that an ASGI application sends."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _completion(fields: Fields) -> CompletionRequest:
    """Return the request for an answer, without the conversation, which is in the store."""
    request = AnswerRequest(
        limits=read_limits(fields, "max_tokens"),
        thinking=fields.flag("thinking"),
        stops_repeats=True,
        logprobs=fields.whole("candidates", 0, MOST_TOP_LOGPROBS),
        begins=fields.text("begins") or "",
    )
    return CompletionRequest(fields.text("model") or "", request, read_sampling(fields), stream=True)


def _with_empty_body(receive: Receive) -> Receive:
    """Return a receive() that begins with an empty JSON object: the body was read before."""
    is_read = False

    async def receiving() -> Any:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": b"{}", "more_body": False}

    return receiving


def _answer_of(
    writer: PageWriter, pooled: PooledModel, asked: CompletionRequest, sampling: Mapping[str, Any]
) -> Answer | None:
    """Return what to save of an answer; None if nothing was received before it was stopped or failed."""
    from llmrun.chat.store.turns import INTERRUPTED, Answer

    started, finished = writer.answer.started, writer.answer.finished
    assert started is not None
    assert pooled.model is not None
    reason = finished.reason if finished else INTERRUPTED if writer.failed else "cancelled"
    if not (writer.answer.text or writer.answer.reasoning) and reason in ("cancelled", INTERRUPTED):
        return None
    return Answer(
        writer.text,
        writer.answer.reasoning.strip(),
        "stop" if reason == "stop_string" else reason,
        pooled.model.used,
        pooled.model.sampling(sampling)[0],
        asked.request.limits,
        finished.stats if finished else Stats(started.prompt_tokens, started.cached_tokens),
        adapters=pooled.model.adapters,
    )
