"""Vectors and rankings over HTTP: OpenAI's /v1/embeddings, Ollama's /api/embed, Jina's /v1/rerank.

Owns the way from a request to jobs of an engine; must not know JSON shapes. What is asked may be several jobs, and what
others ask comes in between.
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
from llmrun.protocol.jobs.embed import EmbedTexts, TextsEmbedded
from llmrun.server.connection import EngineConnection
from llmrun.server.embedding_batches import EmbeddingBatches
from llmrun.server.exchange import ServerState
from llmrun.server.http_messages import parse_json, read_body
from llmrun.server.protocols import embeddings
from llmrun.server.protocols.embeddings import EmbeddingRequest

Read = Callable[[Mapping[str, Any]], EmbeddingRequest]
Write = Callable[[EmbeddingRequest, TextVectors, str], dict[str, Any]]
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


class EmbeddingRoutes:
    """What makes vectors, or ranks by them.

    Args:
        shared: with all other requests.
    """

    def __init__(self, shared: ServerState) -> None:
        self._pool, self._traffic, *_ = shared
        self._batches: dict[EngineConnection, EmbeddingBatches] = {}

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        embeds: dict[str, tuple[Read, Write]] = {
            "/v1/embeddings": (embeddings.read_openai, embeddings.openai_body),
            "/api/embed": (embeddings.read_ollama, embeddings.ollama_body),
            "/api/embeddings": (embeddings.read_ollama_prompt, embeddings.ollama_prompt_body),
        }
        return [
            *(Route(path, self._embedding(*both), methods=["POST"]) for path, both in embeds.items()),
            *(Route(path, self._rerank, methods=["POST"]) for path in _RERANK_PATHS),
        ]

    def _embedding(self, read: Read, write: Write) -> Any:
        async def answer(request: Request) -> Response:
            asked = read(parse_json(await read_body(request.receive)))
            self._pool.adapters.refuse(asked.model)
            with self._traffic.admitted(1):
                async with self._pool.lease(asked.model, asked.keep_seconds) as kept:
                    engine = await self._pool.ready(kept)
                    assert kept.model is not None
                    embedding = Embedding(kept.model.header, kept.located.spec.embedding, asked.options)
                    commands = embedding.of_tokens(asked.tokens) if asked.tokens else embedding.commands(asked.texts)
                    done = await self._done(request, engine, list(commands))
            name = asked.model or kept.name
            _note(request, name, done)
            body = await asyncio.to_thread(lambda: write(asked, joined(map(embedding.read, done)), name))
            return await asyncio.to_thread(JSONResponse, body)

        return answer

    async def _done(
        self, request: Request, engine: EngineConnection, commands: Iterable[EmbedTexts]
    ) -> list[TextsEmbedded]:
        """What the engine gives for each command; nothing more is computed for a client that has left."""
        if engine not in self._batches:
            self._batches = {each: batches for each, batches in self._batches.items() if each.alive}
            self._batches[engine] = EmbeddingBatches(engine)
        found = []
        for command in commands:
            if await request.is_disconnected():
                raise CancelledError("the client has left")
            found.append(await self._batches[engine].embed(command))
        return found

    async def _rerank(self, request: Request) -> Response:
        asked = embeddings.read_rerank(parse_json(await read_body(request.receive)))
        self._pool.adapters.refuse(asked.model)
        with self._traffic.admitted(1):
            async with self._pool.lease(asked.model) as kept:
                engine = await self._pool.ready(kept)
                assert kept.model is not None
                ranking = Ranking(kept.model.header, kept.located.spec.embedding)
                done = await self._done(request, engine, list(ranking.commands(asked.query, asked.documents)))
        name = asked.model or kept.name
        _note(request, name, done)
        tokens = sum(sum(each.tokens) for each in done)
        return JSONResponse(embeddings.rerank_body(asked, ranking.read(done), name, tokens))


def _note(request: Request, name: str, done: Iterable[TextsEmbedded]) -> None:
    """For the log."""
    request.scope["state"] |= {"model": name, "prompt_tokens": sum(sum(each.tokens) for each in done)}
