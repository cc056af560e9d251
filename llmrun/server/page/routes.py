"""The routes of the page: its files at / and /ui/files/, and what it asks of the chats and models under /ui/.

Owns who may use them; must not know how chats are saved. The guard has let a request through before it comes here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from llmrun.chat.attachments import text_of
from llmrun.chat.passages import FolderIndex
from llmrun.errors import UsageError, require_within
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.planning.preferences import CONTEXT_BOUNDS
from llmrun.protocol.codec import as_dict
from llmrun.protocol.params import PARAMETERS
from llmrun.server.answer import NDJSON
from llmrun.server.exchange import ServerState
from llmrun.server.http import RouteNotFoundError
from llmrun.server.manage_routes import as_ndjson
from llmrun.server.model_routes import ModelCatalog
from llmrun.server.page.answering import PageAnswers
from llmrun.server.page.catalogue import CatalogueRoutes
from llmrun.server.page.chats import PageChats, read_upload, read_uploads
from llmrun.server.page.files import HEADERS, INDEX, MEDIA_TYPES, read_file
from llmrun.server.page.insights import Explain, PageInsights
from llmrun.server.page.requests import needed_id, own, read_fields, read_id
from llmrun.server.page.tools import PageTools
from llmrun.server.phone import PhoneAccess, code_of
from llmrun.server.pool import PooledModel

_LONGEST_SEARCH = 500  # characters
_PROGRESS_SECONDS = 0.2
_LONGEST_TEXT = 1 << 20  # characters of a question


class PageRoutes:
    """The routes of the page.

    Args:
        catalog: the models on this disk.
        state_dir: folder with the saved chats.
        explain: explains an answer of the page.
        tools: that a model may call on the page.
        phone: opens the page from the network.
        index: of documents, for the chats of the page.
        presets: reads the user's presets: name, model, system, thinking, and values of the fields of an answer.
    """

    def __init__(
        self,
        state: ServerState,
        catalog: ModelCatalog,
        state_dir: Path,
        explain: Explain,
        tools: PageTools,
        phone: PhoneAccess,
        presets: Callable[[], list[dict[str, Any]]] = list,
        index: FolderIndex | None = None,
    ) -> None:
        self._state, self._pool, self._catalog = state, state.pool, catalog
        self._chats = PageChats(state_dir, index)
        self._tools, self._phone = tools, phone
        self._answering = PageAnswers(state, self._chats, self._tools)
        self._insights = PageInsights(state, self._chats, explain)
        self._catalogue = CatalogueRoutes()
        self._read_presets = presets

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        get, post = ["GET"], ["POST"]
        return [
            Route("/", self._home, methods=get),
            Route("/ui/files/{name:path}", self._file, methods=get),
            Route("/ui/models", own(self._models), methods=get),
            Route("/ui/load", own(self._load), methods=post),
            Route("/ui/applies", own(self._applies), methods=post),
            Route("/ui/folder", own(self._folder), methods=post),
            Route("/ui/presets", own(self._presets), methods=get),
            Route("/ui/phone", own(self._show_phone), methods=get),
            Route("/ui/phone", own(self._switch_phone), methods=post),
            Route("/ui/chats", own(self._list), methods=get),
            Route("/ui/chats/{chat:int}", own(self._read), methods=get),
            Route("/ui/chats/{chat:int}/head", own(self._head), methods=get),
            Route("/ui/chats/{chat:int}/answers/{question:int}", own(self._answers), methods=get),
            Route("/ui/chats/{chat:int}/media/{entry:int}/{number:int}", own(self._media), methods=get),
            Route("/ui/chats/{chat:int}/branches", own(self._branches), methods=get),
            Route("/ui/chats/{chat:int}/{form}", own(self._export), methods=get),
            Route("/ui/search", own(self._search), methods=post),
            Route("/ui/rename", own(self._rename), methods=post),
            Route("/ui/delete", own(self._delete), methods=post),
            Route("/ui/ask", own(self._ask), methods=post),
            Route("/ui/documents", own(self._document), methods=post),
            Route("/ui/go", own(self._go), methods=post),
            Route("/ui/undo", own(self._undo), methods=post),
            Route("/ui/system", own(self._system), methods=post),
            *self._answering.routes,
            *self._catalogue.routes,
            *self._insights.routes,
        ]

    async def close(self) -> None:
        """End all answers and downloads, and close the saved chats."""
        await self._answering.close()
        await self._catalogue.close()
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

    # ---- the phone ----

    async def _show_phone(self, request: Request) -> Response:
        """Return the address of the page for a phone, and its code, see code_of(); "" while nothing listens there."""
        address = self._phone.address
        return JSONResponse({"address": address, "code": await asyncio.to_thread(code_of, address) if address else []})

    async def _switch_phone(self, request: Request) -> Response:
        """Let a phone open the page, or no longer: {"on"}. Return what _show_phone() does."""
        if (await read_fields(request)).flag("on"):
            await self._phone.open()
        else:
            self._phone.end()
        return await self._show_phone(request)

    # ---- models ----

    async def _presets(self, request: Request) -> Response:
        """Return the presets of the settings file."""
        return JSONResponse({"presets": await asyncio.to_thread(self._read_presets)})

    async def _models(self, request: Request) -> Response:
        """Return the models of this disk, with the context window of those in memory, and what is being downloaded."""
        described = {each.name: each for each in await asyncio.to_thread(self._catalog.described)}
        loaded = {pooled.name: pooled.loaded_model.n_ctx for pooled in self._pool.models if pooled.is_loaded}
        loading = {pooled.name for pooled in self._pool.models} - loaded.keys()
        names = dict.fromkeys((*self._pool.names, *self._pool.adapters.names, *described))
        models = [
            {
                "name": name,
                "n_bytes": described[name].size if name in described else None,
                "n_ctx": loaded.get(name),
                "is_loading": name in loading,
            }
            for name in names
        ]
        return JSONResponse({"models": models, "downloads": self._catalogue.running})

    async def _load(self, request: Request) -> Response:
        """Load a model, and return what applies to it: {"model", "ctx"}.

        "ctx" is its context window from now on, 0 for the server's choice.
        """
        fields = await read_fields(request)
        name, n_ctx = fields.text("model") or "", fields.whole("ctx", 0, CONTEXT_BOUNDS[1])
        if n_ctx is not None:
            require_within("ctx", n_ctx or None, CONTEXT_BOUNDS)
            async with self._pool.lease(name) as pooled:
                await self._pool.set_window(pooled, n_ctx)
        async with self._state.engine(name, request.receive) as (_, pooled):
            model = pooled.loaded_model
            loaded = {"n_ctx": model.n_ctx, "thinks": model.thinks, "modalities": sorted(model.modalities)}
            return JSONResponse({**self._values(name, pooled, model.header), **loaded})

    async def _applies(self, request: Request) -> Response:
        """Return what applies to a model as far as it is known before it is loaded: {"model"}."""
        name = (await read_fields(request)).text("model") or ""
        async with self._pool.lease(name) as pooled:
            header = await asyncio.to_thread(read_header, pooled.path)
            known = {"n_ctx": self._pool.n_ctx(pooled.name), "thinks": True}
            return JSONResponse({**self._values(name, pooled, header), **known})

    def _values(self, name: str, pooled: PooledModel, header: Header) -> dict[str, Any]:
        """Return the settings of a model, each sampling parameter with its origin."""
        sampling, origins = self._pool.sampling(pooled, name or pooled.name, self._state.sampling, header)
        values = as_dict(sampling)
        shown = [key for key, row in PARAMETERS.items() if row.label and values[key] is not None]
        return {
            "model": pooled.name,
            "ctx": self._pool.windows.get(pooled.located.identity, 0),
            "n_ctx_train": header.n_ctx_train,
            "tools": [tool.name for tool in self._tools.offered()],
            "sampling": {key: {"value": values[key], "origin": origins[key]} for key in shown},
        }

    async def _folder(self, request: Request) -> Response:
        """Let passages of a folder's documents go along with a chat's questions: {"chat", "folder"}; "" for none.

        Return lines of progress, {"file", "done", "total"}; the last one has the numbers of files and passages, or an
        error.
        """
        fields = await read_fields(request)
        lines = self._indexing(read_id(fields, "chat"), (fields.text("folder") or "").strip())
        return StreamingResponse(as_ndjson(lines), media_type=NDJSON)

    async def _indexing(self, chat: int | None, folder: str) -> AsyncIterator[dict[str, Any]]:
        """Index a folder, and set it as a chat's; a new chat gets it with its first question."""
        latest = deque[dict[str, Any]](maxlen=1)
        state: dict[str, Any] = {}
        if folder:

            def tell(file: str, done: int, total: int) -> None:
                latest.append({"file": file, "done": done, "total": total})

            working = asyncio.ensure_future(asyncio.to_thread(self._chats.index_folder, folder, tell))
            while not working.done():
                await asyncio.wait((working,), timeout=_PROGRESS_SECONDS)
                if latest:
                    yield latest.pop()
            state = working.result().state._asdict()
        if chat is not None:
            await self._chats.run(partial(self._chats.set_documents, chat, folder))
        yield {"folder": folder, **state}

    # ---- chats ----

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"chats": await self._chats.run(self._chats.all)})

    async def _read(self, request: Request) -> Response:
        return JSONResponse(await self._chats.run(partial(self._chats.read, request.path_params["chat"])))

    async def _media(self, request: Request) -> Response:
        """Return the bytes of an image or audio file of a question."""
        read = partial(self._chats.media, **request.path_params)
        return Response(await self._chats.run(read), media_type="application/octet-stream")

    async def _search(self, request: Request) -> Response:
        """Return the chats with all words of a text: {"text"}."""
        text = (await read_fields(request)).needed_text("text")
        return JSONResponse({"chats": await self._chats.run(partial(self._chats.search, text[:_LONGEST_SEARCH]))})

    async def _rename(self, request: Request) -> Response:
        """Rename a chat: {"chat", "name"}."""
        fields = await read_fields(request)
        rename = partial(self._chats.rename, needed_id(fields, "chat"), fields.needed_text("name").strip())
        await self._chats.run(rename)
        return JSONResponse({})

    async def _delete(self, request: Request) -> Response:
        """Delete a chat: {"chat"}."""
        await self._chats.run(partial(self._chats.delete, needed_id(await read_fields(request), "chat")))
        return JSONResponse({})

    async def _export(self, request: Request) -> Response:
        """Return a chat as a file to save, "markdown" or "json"."""
        chat, form = request.path_params["chat"], request.path_params["form"]
        if form not in ("markdown", "json"):
            raise RouteNotFoundError("a chat is exported as markdown or json")
        text = await self._chats.run(partial(self._chats.export, chat, form))
        name = f"chat-{chat}.{'md' if form == 'markdown' else 'json'}"
        return PlainTextResponse(text, headers={"content-disposition": f'attachment; filename="{name}"'})

    async def _ask(self, request: Request) -> Response:
        """Save a question, see PageChats.ask().

        {"chat", "text", "after", "beside", "system", "documents", "files", "media"}.
        """
        fields = await read_fields(request)
        text = fields.needed_text("text")
        if not text.strip() or len(text) > _LONGEST_TEXT:
            raise UsageError("a question has 1 to 1,048,576 characters")
        chat, after, beside = (read_id(fields, name) for name in ("chat", "after", "beside"))
        new = {"system": fields.text("system") or "", "documents": fields.text("documents") or ""}
        uploads = read_uploads(fields)
        ask = partial(self._chats.ask, chat, text, after=after, beside=beside, uploads=uploads, **new)
        return JSONResponse(await self._chats.run(ask))

    async def _document(self, request: Request) -> Response:
        """Return the text of a document, or of a text in any encoding: {"name", "data" in base64}."""
        name, data = read_upload(await read_fields(request))
        read = await asyncio.to_thread(text_of, data, name)
        said = filter(None, (read.note, "without markup" if read.kind == "html" else ""))
        return JSONResponse({"text": read.text, "note": ", ".join(said)})

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
