"""What Ollama's clients ask about models, besides answers."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.gguf.pooling import makes_embeddings
from llmrun.models.location import find_projector
from llmrun.server.catalog import ModelCatalog
from llmrun.server.http_messages import parse_json, read_body
from llmrun.server.pool import Pool, PooledModel
from llmrun.server.protocols import ollama_models
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.ollama_models import ModelDescription, RunningModel


class OllamaRoutes:
    """Ollama's /api, without /api/chat and /api/generate.

    Args:
        pool: the models in memory.
        shelf: those on this disk.
    """

    def __init__(self, pool: Pool, shelf: ModelCatalog) -> None:
        self._pool, self._shelf = pool, shelf

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            Route("/api/version", self._version, methods=["GET"]),
            Route("/api/tags", self._tags, methods=["GET"]),
            Route("/api/ps", self._running, methods=["GET"]),
            Route("/api/show", self._show, methods=["POST"]),
        ]

    async def _version(self, request: Request) -> Response:
        return JSONResponse(ollama_models.VERSION)

    async def _tags(self, request: Request) -> Response:
        return JSONResponse(ollama_models.tags(await asyncio.to_thread(self._shelf.described)))

    async def _running(self, request: Request) -> Response:
        described = {each.name: each for each in await asyncio.to_thread(self._shelf.described)}
        loaded = [kept for kept in self._pool.kept if kept.is_loaded]
        return JSONResponse(ollama_models.running([_running(kept, described.get(kept.name)) for kept in loaded]))

    async def _show(self, request: Request) -> Response:
        fields = Fields(parse_json(await read_body(request.receive)))
        name = fields.text("model") or fields.needed_text("name")
        described, header = await asyncio.to_thread(self._shelf.find, name)
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


def _running(kept: PooledModel, described: ModelDescription | None) -> RunningModel:
    """A model in memory; of one that is no file of the store, little is known."""
    assert kept.model is not None
    assert kept.loaded is not None
    plan = kept.model.plan
    unknown = ModelDescription(
        kept.name, 0.0, kept.model.header.weight_bytes, "", kept.model.header.architecture, "", ""
    )
    left = None if kept.expiry is None else kept.expiry.when() - asyncio.get_running_loop().time()
    expires = None if left is None or kept.users else time.time() + left
    size = plan.ram_bytes + plan.vram_bytes
    return RunningModel(described or unknown, expires, size, plan.vram_bytes, kept.loaded.n_ctx)
