"""What clients ask an engine besides answers: its context window, the tokens of a text, the text of tokens.

Owns that these questions count among the requests that wait; must not know what an answer is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.protocol.messages import CountTokens, Detokenize, Detokenized, TokenCount, Tokenize, Tokenized
from llmrun.server.connection import EngineConnection
from llmrun.server.exchange import ServerState
from llmrun.server.http_messages import parse_json, read_body
from llmrun.server.pool import PooledModel
from llmrun.server.protocols import anthropic
from llmrun.server.protocols.fields import Fields

_HIGHEST_TOKEN = 2**31 - 1


class EngineRoutes:
    """llama-server's /props, /tokenize, /detokenize and /lora-adapters, and Anthropic's count_tokens.

    Args:
        shared: with all other requests.
    """

    def __init__(self, shared: ServerState) -> None:
        self._pool, self._traffic, *_ = shared

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            Route("/props", self._props, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
            Route("/lora-adapters", self._adapters, methods=["GET"]),
        ]

    @asynccontextmanager
    async def _engine(self, model: str) -> AsyncIterator[tuple[EngineConnection, PooledModel]]:
        """The engine of a model, loaded if it is not."""
        with self._traffic.admitted(1):
            async with self._pool.lease(model) as kept:
                yield await self._pool.ready(kept), kept

    async def _props(self, request: Request) -> Response:
        """What llama-server's clients look up, of the model that is named behind ?model= or the first one."""
        async with self._engine(request.query_params.get("model", "")) as (_, kept):
            assert kept.loaded is not None
            assert kept.model is not None
            return JSONResponse(
                {
                    "default_generation_settings": {"n_ctx": kept.loaded.n_ctx},
                    "total_slots": kept.model.load.n_seq_max,
                    "model_path": kept.name,
                    "chat_template": kept.model.header.chat_template or "",
                    "modalities": {"vision": kept.model.sees},
                }
            )

    async def _adapters(self, request: Request) -> Response:
        """The adapters that requests may choose of, and what counts where they don't."""
        return JSONResponse(self._pool.adapters.described)

    async def _tokenize(self, request: Request) -> Response:
        """{"content": text} gives {"tokens": [...]}."""
        fields = Fields(parse_json(await read_body(request.receive)))
        text = fields.text("content") or fields.text("prompt") or ""
        special = fields.flag("parse_special") is not False
        async with self._engine(fields.text("model") or "") as (engine, _):
            found = await engine.ask(Tokenize(engine.next_request(), text, special), Tokenized)
        return JSONResponse({"tokens": list(found.tokens), "count": len(found.tokens)})

    async def _detokenize(self, request: Request) -> Response:
        """{"tokens": [...]} gives {"content": text}."""
        fields = Fields(parse_json(await read_body(request.receive)))
        tokens = fields.wholes("tokens", 0, _HIGHEST_TOKEN)
        async with self._engine(fields.text("model") or "") as (engine, _):
            found = await engine.ask(Detokenize(engine.next_request(), tokens), Detokenized)
        return JSONResponse({"content": found.text})

    async def _count(self, request: Request) -> Response:
        """How many tokens a conversation has."""
        asked = anthropic.read_count(parse_json(await read_body(request.receive)))
        async with self._engine(asked.model) as (engine, _):
            counted = await engine.ask(CountTokens(engine.next_request(), asked.request), TokenCount)
        return JSONResponse(anthropic.counted(counted.total))
