"""Routes that ask an engine a question, and those of kept responses. They count for the queue's limit too."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.protocol.jobs import Empty, JobKind
from llmrun.protocol.jobs.text import TokenizeText
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.questions import APPLY_TEMPLATE, COUNT_TOKENS, DETOKENIZE, TOKENIZE_LOADED, Detokenize
from llmrun.server.exchange import ServerState
from llmrun.server.http import read_json
from llmrun.server.protocols import anthropic, openai_chat, openai_responses
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai_text import HIGHEST_TOKEN

_Result = TypeVar("_Result")


class EngineRoutes:
    """llama-server's /props, /tokenize, /detokenize, /apply-template and /lora-adapters, and counts of tokens."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/props", self._props, methods=["GET"]),
            Route("/slots", self._slots, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/apply-template", self._apply_template, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
            Route("/v1/chat/completions/input_tokens", self._count_chat, methods=["POST"]),
            Route("/chat/completions/input_tokens", self._count_chat, methods=["POST"]),
            Route("/lora-adapters", self._adapters, methods=["GET"]),
        ]

    async def _props(self, request: Request) -> Response:
        """Describe the model in ?model=, or the first one, as llama-server does."""
        async with self._state.engine(request.query_params.get("model", "")) as (_, pooled):
            assert pooled.loaded is not None
            assert pooled.model is not None
            return JSONResponse(
                {
                    "default_generation_settings": {"n_ctx": pooled.loaded.n_ctx},
                    "total_slots": pooled.model.load.n_seq_max,
                    "model_path": pooled.name,
                    "chat_template": pooled.model.header.chat_template or "",
                    "modalities": {
                        "vision": "image" in pooled.model.modalities,
                        "audio": "audio" in pooled.model.modalities,
                    },
                    "reasoning": bool(pooled.loaded.thinking_tags),
                }
            )

    async def _slots(self, request: Request) -> Response:
        """List the places for requests of each loaded model; prefixes are shared, so none has a prompt of its own."""
        pool = self._state.pool
        statuses, slots = await pool.statuses(), list[dict[str, Any]]()
        for pooled in pool.models:
            status = statuses.get(pooled.name)
            if status is None or pooled.model is None or pooled.loaded is None:
                continue
            figures = {"n_ctx": pooled.loaded.n_ctx, "model": pooled.name}
            n_slots = pooled.model.load.n_seq_max
            slots += [{"id": index, **figures, "is_processing": index < status.running} for index in range(n_slots)]
        return JSONResponse(slots)

    async def _adapters(self, request: Request) -> Response:
        return JSONResponse(self._state.pool.adapters.described)

    async def _tokenize(self, request: Request) -> Response:
        fields = Fields(await read_json(request.receive))
        text = fields.text("content") or fields.text("prompt") or ""
        special = fields.flag("parse_special") is not False
        async with self._state.engine(fields.text("model") or "") as (engine, _):
            found = await engine.do(TOKENIZE_LOADED, TokenizeText("", text, special))
        return JSONResponse({"tokens": list(found.tokens), "count": len(found.tokens)})

    async def _detokenize(self, request: Request) -> Response:
        fields = Fields(await read_json(request.receive))
        tokens = fields.wholes("tokens", 0, HIGHEST_TOKEN)
        async with self._state.engine(fields.text("model") or "") as (engine, _):
            found = await engine.do(DETOKENIZE, Detokenize(tokens))
        return JSONResponse({"content": found.text})

    async def _count(self, request: Request) -> Response:
        completion = anthropic.read_count(await read_json(request.receive))
        async with self._state.engine(completion.model) as (engine, pooled):
            asked = self._state.pool.complete(pooled, completion.model, completion.request)
            counted = await engine.do(COUNT_TOKENS, asked)
        return JSONResponse(anthropic.counted(counted.total))

    async def _count_chat(self, request: Request) -> Response:
        counted = await self._ask(COUNT_TOKENS, request)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted.total})

    async def _apply_template(self, request: Request) -> Response:
        return JSONResponse({"prompt": (await self._ask(APPLY_TEMPLATE, request)).text})

    async def _ask(self, kind: JobKind[AnswerRequest, Empty, _Result], request: Request) -> _Result:
        """Return an engine's answer about a body of chat completions."""
        body = await read_json(request.receive)
        completion = await asyncio.to_thread(openai_chat.read, body)
        async with self._state.engine(completion.model) as (engine, pooled):
            asked = self._state.pool.complete(pooled, completion.model, completion.request)
            return await engine.do(kind, asked)


class ResponseRoutes:
    """GET and DELETE /v1/responses/ID, its input_items, and /v1/responses/input_tokens."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/input_tokens", self._count, methods=["POST"]),
            Route("/responses/input_tokens", self._count, methods=["POST"]),
            Route("/v1/responses/{name}", self._get, methods=["GET"]),
            Route("/v1/responses/{name}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{name}/input_items", self._items, methods=["GET"]),
        ]

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._state.responses.get(request.path_params["name"]).response)

    async def _delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._state.responses.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _items(self, request: Request) -> Response:
        items = self._state.responses.get(request.path_params["name"]).input
        return JSONResponse({"object": "list", "data": items, "has_more": False})

    async def _count(self, request: Request) -> Response:
        body = self._state.responses.expanded(await read_json(request.receive))
        completion = await asyncio.to_thread(openai_responses.read, body)
        async with self._state.engine(completion.model) as (engine, pooled):
            asked = self._state.pool.complete(pooled, completion.model, completion.request)
            counted = await engine.do(COUNT_TOKENS, asked)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted.total})
