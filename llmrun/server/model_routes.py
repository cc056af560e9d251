"""The routes that list models, in OpenAI's protocol, or in Anthropic's for its clients."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.server.catalog import ModelCatalog
from llmrun.server.http_errors import model_not_found
from llmrun.server.pool import Pool
from llmrun.server.protocols import models
from llmrun.server.protocols.models import ListedModel

ANTHROPIC = "anthropic-version"
"""A header of all requests of Anthropic's clients."""
_CODEX = "client_version"  # a parameter of Codex's request


class ModelRoutes:
    """GET /v1/models and /v1/models/NAME."""

    def __init__(self, pool: Pool, catalog: ModelCatalog) -> None:
        self._pool, self._catalog = pool, catalog

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
        ]

    async def _models(self, request: Request) -> Response:
        write = models.anthropic_models if ANTHROPIC in request.headers else models.openai_models
        if _CODEX in request.query_params:
            write = models.codex_models
        return JSONResponse(write([*(await self._by_name()).values()]))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        listed = await self._by_name()
        if name not in listed:
            raise model_not_found(name)
        write = models.anthropic_model if ANTHROPIC in request.headers else models.openai_model
        return JSONResponse(write(listed[name]))

    async def _by_name(self) -> dict[str, ListedModel]:
        """Return the models of the command line, then all others on this disk."""
        pool = self._pool
        created = await asyncio.to_thread(self._catalog.created)
        trained = await asyncio.to_thread(self._catalog.trained_contexts)
        names = dict.fromkeys((*pool.names, *pool.aliases, *pool.adapters.names, *created))
        return {name: self._listed(name, created, trained) for name in names}

    def _listed(self, name: str, created: dict[str, int], trained: dict[str, int]) -> ListedModel:
        model = self._pool.base_name(name)
        n_ctx = self._pool.n_ctx(model) or trained.get(model, 0)
        return ListedModel(name, created.get(model, 0), n_ctx, self._pool.alias_target(name))
