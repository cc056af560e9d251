"""Routes of Ollama's protocol that describe models."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.gguf.pooling import makes_embeddings
from llmrun.models.location import find_projector
from llmrun.server.catalog import ModelCatalog
from llmrun.server.http_messages import read_json
from llmrun.server.pool import Pool, PooledModel
from llmrun.server.protocols import ollama_models
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.ollama_models import ModelDescription, RunningModel


class OllamaRoutes:
    """Ollama's /api, without /api/chat and /api/generate."""

    def __init__(self, pool: Pool, catalog: ModelCatalog) -> None:
        self._pool, self._catalog = pool, catalog

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/api/version", self._version, methods=["GET"]),
            Route("/api/tags", self._tags, methods=["GET"]),
            Route("/api/ps", self._running, methods=["GET"]),
            Route("/api/show", self._show, methods=["POST"]),
        ]

    async def _version(self, request: Request) -> Response:
        return JSONResponse(ollama_models.VERSION)

    async def _tags(self, request: Request) -> Response:
        described = {each.name: each for each in await asyncio.to_thread(self._catalog.described)}
        for alias, model in self._pool.aliases.items():
            if alias not in described and (found := described.get(self._pool.base_name(model))) is not None:
                described[alias] = found._replace(name=alias)
        return JSONResponse(ollama_models.tags([*described.values()]))

    async def _running(self, request: Request) -> Response:
        described = {each.name: each for each in await asyncio.to_thread(self._catalog.described)}
        loaded = [pooled for pooled in self._pool.models if pooled.is_loaded]
        return JSONResponse(ollama_models.running([_running(pooled, described.get(pooled.name)) for pooled in loaded]))

    async def _show(self, request: Request) -> Response:
        fields = Fields(await read_json(request.receive))
        name = fields.text("model") or fields.needed_text("name")
        described, header = await asyncio.to_thread(self._catalog.find, self._pool.base_name(name) or name)
        template = header.chat_template or ""
        thinks = "<think>" in template or "enable_thinking" in template
        return JSONResponse(
            ollama_models.show(
                described,
                n_ctx_train=header.n_ctx_train,
                template=template,
                thinks=thinks,
                sees=find_projector(header.path) is not None,
                embeds=makes_embeddings(header),
            )
        )


def _running(pooled: PooledModel, described: ModelDescription | None) -> RunningModel:
    """Describe a loaded model; a file outside the store has a short description."""
    assert pooled.model is not None
    assert pooled.loaded is not None
    plan = pooled.model.plan
    unknown = ModelDescription(
        pooled.name, 0.0, pooled.model.header.weight_bytes, "", pooled.model.header.architecture, "", ""
    )
    remaining = None if pooled.expiry is None else pooled.expiry.when() - asyncio.get_running_loop().time()
    expires = None if remaining is None or pooled.users else time.time() + remaining
    size = plan.ram_bytes + plan.vram_bytes
    return RunningModel(described or unknown, expires, size, plan.vram_bytes, pooled.loaded.n_ctx)
