"""Routes beside OpenAI's /v1/responses: kept responses, and the count of a request's tokens."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.protocol.questions import COUNT_TOKENS
from llmrun.server.exchange import ServerState
from llmrun.server.http_messages import read_json
from llmrun.server.protocols import openai_responses


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
