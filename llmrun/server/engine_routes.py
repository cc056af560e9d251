"""Routes that ask an engine a question, which counts for the queue's limit too, and those of kept responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.protocol.jobs import Empty, JobKind
from llmrun.protocol.jobs.text import TokenizeText
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.questions import APPLY_TEMPLATE, COUNT_TOKENS, DETOKENIZE, TOKENIZE_LOADED
from llmrun.server.answer import CompletionRequest
from llmrun.server.exchange import ServerState
from llmrun.server.http import read_json
from llmrun.server.protocols import anthropic, openai_chat, openai_responses
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.options import HIGHEST_TOKEN
from llmrun.server.protocols.stored_responses import StoredResponse

_Result = TypeVar("_Result")


class EngineRoutes:
    """llama-server's /props, /slots, /tokenize, /detokenize, /apply-template and /lora-adapters; counts of tokens;
    GET and DELETE /v1/responses/ID, and its input_items."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    @property
    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/props", self._props, methods=get),
            Route("/slots", self._slots, methods=get),
            Route("/tokenize", self._tokenize, methods=post),
            Route("/detokenize", self._detokenize, methods=post),
            Route("/apply-template", self._apply_template, methods=post),
            Route("/lora-adapters", self._adapters, methods=get),
            Route("/v1/messages/count_tokens", self._count_messages, methods=post),
            Route("/v1/chat/completions/input_tokens", self._count_chat, methods=post),
            Route("/chat/completions/input_tokens", self._count_chat, methods=post),
            Route("/v1/responses/input_tokens", self._count_response, methods=post),
            Route("/responses/input_tokens", self._count_response, methods=post),
            Route("/v1/responses/{name}", self._get, methods=get),
            Route("/v1/responses/{name}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{name}/input_items", self._items, methods=get),
        ]

    async def _props(self, request: Request) -> Response:
        """Describe the model in ?model=, or the first one, as llama-server does."""
        async with self._state.engine(request.query_params.get("model", ""), request.receive) as (_, pooled):
            model = pooled.loaded_model
            return JSONResponse(
                {
                    "default_generation_settings": {"n_ctx": model.n_ctx},
                    "total_slots": model.parallel,
                    "model_path": pooled.name,
                    "chat_template": model.header.chat_template or "",
                    "modalities": {"vision": "image" in model.modalities, "audio": "audio" in model.modalities},
                    "reasoning": model.thinks,
                }
            )

    async def _slots(self, request: Request) -> Response:
        """List the places for requests of each loaded model; prefixes are shared, so none has a prompt of its own."""
        pool = self._state.pool
        statuses, slots = await pool.statuses(), list[dict[str, Any]]()
        for pooled in pool.models:
            status = statuses.get(pooled.name)
            if status is None or not pooled.is_loaded:
                continue
            model = pooled.loaded_model
            figures = {"n_ctx": model.n_ctx, "model": pooled.name}
            slots += [
                {"id": index, **figures, "is_processing": index < status.running} for index in range(model.parallel)
            ]
        return JSONResponse(slots)

    async def _adapters(self, request: Request) -> Response:
        return JSONResponse(self._state.pool.adapters.described)

    async def _tokenize(self, request: Request) -> Response:
        fields = Fields(await read_json(request.receive))
        text = fields.text("content") or fields.text("prompt") or ""
        special = fields.flag("parse_special") is not False
        async with self._state.engine(fields.text("model") or "", request.receive) as (engine, _):
            found = await engine.do(TOKENIZE_LOADED, TokenizeText("", text, special))
        return JSONResponse({"tokens": list(found.tokens), "count": len(found.tokens)})

    async def _detokenize(self, request: Request) -> Response:
        fields = Fields(await read_json(request.receive))
        tokens = fields.wholes("tokens", 0, HIGHEST_TOKEN)
        async with self._state.engine(fields.text("model") or "", request.receive) as (engine, _):
            text = await engine.do(DETOKENIZE, tokens)
        return JSONResponse({"content": text})

    # ---- about the prompt of a request for completions ----

    async def _apply_template(self, request: Request) -> Response:
        prompt = await self._ask(request, APPLY_TEMPLATE, openai_chat.read)
        return JSONResponse({"prompt": prompt})

    async def _count_messages(self, request: Request) -> Response:
        counted = await self._ask(request, COUNT_TOKENS, anthropic.read_count)
        return JSONResponse({"input_tokens": counted.total})

    async def _count_chat(self, request: Request) -> Response:
        counted = await self._ask(request, COUNT_TOKENS, openai_chat.read)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted.total})

    async def _count_response(self, request: Request) -> Response:
        def read(body: dict[str, Any]) -> CompletionRequest:
            return openai_responses.read(self._state.responses.expanded(request.scope["owner"], body))

        counted = await self._ask(request, COUNT_TOKENS, read)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted.total})

    async def _ask(
        self,
        request: Request,
        kind: JobKind[AnswerRequest, Empty, _Result],
        read: Callable[[dict[str, Any]], CompletionRequest],
    ) -> _Result:
        """Return an engine's result for the prompt of a request that `read` takes from its body."""
        completion = await asyncio.to_thread(read, await read_json(request.receive))
        completion = completion.owned_by(request.scope["owner"])
        async with self._state.engine(completion.model, request.receive) as (engine, pooled):
            prompt = self._state.pool.complete(pooled, completion.model, completion.request)
            return await engine.do(kind, prompt)

    # ---- kept responses ----

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._kept(request).response)

    async def _delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._state.responses.remove(request.scope["owner"], name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _items(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._kept(request).input, "has_more": False})

    def _kept(self, request: Request) -> StoredResponse:
        return self._state.responses.get(request.scope["owner"], request.path_params["name"])
