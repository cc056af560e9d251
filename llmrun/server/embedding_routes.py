"""Routes for embeddings and reranking: OpenAI's /v1/embeddings, Ollama's /api/embed, Jina's /v1/rerank.

Must not know JSON shapes. A request may be several jobs of the engine, with jobs of other requests in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.errors import CancelledError
from llmrun.model.embeddings import Embedding, Ranking, TextVectors, joined
from llmrun.protocol.jobs.text import EmbedTexts, TextsEmbedded
from llmrun.server.connection import EngineConnection
from llmrun.server.embedding_batches import EmbeddingBatches
from llmrun.server.exchange import ServerState
from llmrun.server.http_messages import read_json
from llmrun.server.protocols import embeddings
from llmrun.server.protocols.embeddings import EmbeddingRequest

Read = Callable[[Mapping[str, Any]], EmbeddingRequest]
Write = Callable[[EmbeddingRequest, TextVectors, str], Any]
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")


class EmbeddingRoutes:
    """The routes for embeddings and reranking."""

    def __init__(self, state: ServerState) -> None:
        self._pool, self._traffic, *_ = state
        self._batches: dict[EngineConnection, EmbeddingBatches] = {}

    @property
    def routes(self) -> list[Route]:
        embeds: dict[str, tuple[Read, Write]] = {
            "/v1/embeddings": (embeddings.read_openai, embeddings.openai_body),
            "/api/embed": (embeddings.read_ollama, embeddings.ollama_body),
            "/api/embeddings": (embeddings.read_ollama_prompt, embeddings.ollama_prompt_body),
            "/embedding": (embeddings.read_native, embeddings.native_body),
            "/embeddings": (embeddings.read_native, embeddings.native_body),
        }
        return [
            *(Route(path, self._embedding(*both), methods=["POST"]) for path, both in embeds.items()),
            *(Route(path, self._rerank, methods=["POST"]) for path in _RERANK_PATHS),
        ]

    def _embedding(self, read: Read, write: Write) -> Any:
        async def embed(http: Request) -> Response:
            request = read(await read_json(http.receive))
            self._pool.adapters.refuse(self._pool.true_name(request.model))
            with self._traffic.admitted(1):
                async with self._pool.lease(request.model, request.keep_seconds) as pooled:
                    engine = await self._pool.ready(pooled)
                    assert pooled.model is not None
                    embedding = Embedding(pooled.model.header, pooled.located.spec.embedding, request.options)
                    texts, tokens = request.texts, request.tokens
                    commands = embedding.of_tokens(tokens) if tokens else embedding.commands(texts)
                    results = await self._results(http, engine, list(commands))
            name = self._pool.true_name(request.model) or pooled.name
            _log_usage(http, name, results)
            body = await asyncio.to_thread(lambda: write(request, joined(map(embedding.read, results)), name))
            return await asyncio.to_thread(JSONResponse, body)

        return embed

    async def _results(
        self, http: Request, engine: EngineConnection, commands: Iterable[EmbedTexts]
    ) -> list[TextsEmbedded]:
        """Return the result of each command; stop if the client disconnects."""
        if engine not in self._batches:
            self._batches = {each: batches for each, batches in self._batches.items() if each.alive}
            self._batches[engine] = EmbeddingBatches(engine)
        results = []
        for command in commands:
            if await http.is_disconnected():
                raise CancelledError("the client disconnected")
            results.append(await self._batches[engine].embed(command))
        return results

    async def _rerank(self, http: Request) -> Response:
        request = embeddings.read_rerank(await read_json(http.receive))
        self._pool.adapters.refuse(self._pool.true_name(request.model))
        with self._traffic.admitted(1):
            async with self._pool.lease(request.model) as pooled:
                engine = await self._pool.ready(pooled)
                assert pooled.model is not None
                ranking = Ranking(pooled.model.header, pooled.located.spec.embedding)
                results = await self._results(http, engine, list(ranking.commands(request.query, request.documents)))
        name = self._pool.true_name(request.model) or pooled.name
        tokens = _log_usage(http, name, results)
        return JSONResponse(embeddings.rerank_body(request, ranking.read(results), name, tokens))


def _log_usage(http: Request, name: str, results: Iterable[TextsEmbedded]) -> int:
    tokens = sum(sum(each.tokens) for each in results)
    http.scope["state"] |= {"model": name, "prompt_tokens": tokens}
    return tokens
