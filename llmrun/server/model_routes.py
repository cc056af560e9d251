"""The models on this disk, and the routes that list and describe them: OpenAI's, Anthropic's and Ollama's."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.config import Settings
from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.gguf.pooling import makes_embeddings
from llmrun.gguf.reader import read_header, read_modalities
from llmrun.models.fingerprint import promised_sha256
from llmrun.models.location import find_projector
from llmrun.models.store.installed import LINK, InstalledModel
from llmrun.models.store.store import all_models
from llmrun.protocol.media import Modality
from llmrun.server.http import model_not_found, read_json
from llmrun.server.pool import Pool, PooledModel
from llmrun.server.protocols import models
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.models import ListedModel, ModelDescription, ModelFacts


class ModelCatalog:
    """Lists models; too slow for the event loop's thread.

    Args:
        files: served files outside the store, by their names.
    """

    def __init__(self, settings: Settings, files: Mapping[str, Path] = MappingProxyType({})) -> None:
        self._settings, self._files = settings, files
        self._headers: dict[Path, tuple[float, Header]] = {}  # and the time of the file

    def created(self) -> dict[str, int]:
        """Return names and Unix times of files."""
        return {each.name: int(each.modified) for each in self._models()}

    def described(self) -> list[ModelDescription]:
        """Return the models whose headers are readable."""
        found: list[ModelDescription] = []
        for each in self._models():
            try:
                found.append(_describe(each, self._header(each)))
            except (LlmrunError, OSError):
                continue  # damaged, or just removed; a request for it gets the error
        return found

    def facts(self) -> dict[str, ModelFacts]:
        """Return names and facts of the models whose headers are readable."""
        found: dict[str, ModelFacts] = {}
        for each in self._models():
            with suppress(LlmrunError, OSError):
                found[each.name] = _facts(self._header(each), each)
        return found

    def find(self, name: str) -> tuple[ModelDescription, Header, Path | None]:
        """Return a model, its header, and its projector.

        Raises:
            ModelNotFoundError: no model has this name.
            BadModelError: its file is damaged.
        """
        name = name.removesuffix(":latest")
        for each in self._models():
            if each.name.removesuffix(":latest") == name:
                header = self._header(each)
                return _describe(each, header), header, find_projector(each.path, stored=each.projector)
        raise model_not_found(name, "/api/tags")

    def _models(self) -> list[InstalledModel]:
        served = (_outside(name, path) for name, path in self._files.items() if path.is_file())
        return [*served, *all_models(self._settings)]

    def _header(self, installed: InstalledModel) -> Header:
        modified, header = self._headers.get(installed.path, (None, None))
        if header is None or modified != installed.modified:
            header = read_header(installed.path)
            self._headers[installed.path] = installed.modified, header
        return header


def _outside(name: str, path: Path) -> InstalledModel:
    stat = path.stat()
    return InstalledModel(name, "", path.name, "", stat.st_size, "", path, LINK, stat.st_mtime)


def _describe(installed: InstalledModel, header: Header) -> ModelDescription:
    return ModelDescription(
        name=installed.name,
        modified=installed.modified,
        size=installed.size,
        digest=_digest(installed),
        architecture=header.architecture,
        parameters=header.readable_parameters,
        quantization=installed.quant or header.quant,
    )


def _facts(header: Header, installed: InstalledModel) -> ModelFacts:
    modalities = frozenset[Modality]()
    with suppress(LlmrunError):  # several projectors may be meant
        modalities = read_modalities(find_projector(installed.path, stored=installed.projector))
    return ModelFacts(
        n_ctx_train=header.n_ctx_train,
        n_vocab=header.n_vocab,
        n_embd=header.n_embd,
        n_parameters=header.n_parameters,
        weight_bytes=header.weight_bytes,
        quant=header.quant,
        has_template=bool(header.chat_template),
        thinks=_thinks(header),
        embeds=makes_embeddings(header),
        modalities=modalities,
    )


def _thinks(header: Header) -> bool:
    template = header.chat_template or ""
    return "<think>" in template or "enable_thinking" in template


def _digest(installed: InstalledModel) -> str:
    """Return the SHA-256 in the file's name in the store, otherwise a hash of path, size and time."""
    identity = f"{installed.path} {installed.size} {installed.modified}"
    return promised_sha256(installed, installed.path) or hashlib.sha256(identity.encode()).hexdigest()


ANTHROPIC = "anthropic-version"
"""A header of all requests of Anthropic's clients."""
_CODEX = "client_version"  # a parameter of Codex's request


class ModelRoutes:
    """/v1/models, and Ollama's /api but for its answers and ManageRoutes."""

    def __init__(self, pool: Pool, catalog: ModelCatalog) -> None:
        self._pool, self._catalog = pool, catalog

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/api/version", self._version, methods=["GET"]),
            Route("/api/tags", self._tags, methods=["GET"]),
            Route("/api/ps", self._running, methods=["GET"]),
            Route("/api/show", self._show, methods=["POST"]),
        ]

    async def _models(self, request: Request) -> Response:
        write = models.anthropic_models if ANTHROPIC in request.headers else models.openai_models
        if _CODEX in request.query_params:
            write = models.codex_models
        return JSONResponse(write([*(await self._by_name()).values()]))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        listed = await self._by_name()
        found = listed.get(name)
        if found is None and name and not self._pool.true_name(name):  # --any-model: requests for it are answered
            first = self._pool.names[0]
            found = listed[first]._replace(name=name, alias_of=first)
        if found is None:
            raise model_not_found(name)
        write = models.anthropic_model if ANTHROPIC in request.headers else models.openai_model
        return JSONResponse(write(found))

    async def _by_name(self) -> dict[str, ListedModel]:
        """Return the models of the command line, then all others on this disk."""
        pool = self._pool
        created = await asyncio.to_thread(self._catalog.created)
        facts = await asyncio.to_thread(self._catalog.facts)
        names = dict.fromkeys((*pool.names, *pool.aliases, *pool.adapters.names, *created))
        return {name: self._listed(name, created, facts) for name in names}

    def _listed(self, name: str, created: dict[str, int], facts: dict[str, ModelFacts]) -> ListedModel:
        model = self._pool.base_name(name)
        found, modalities = facts.get(model), self._pool.modalities(model)
        if found is not None and modalities is not None:
            found = found._replace(modalities=modalities)
        n_ctx = self._pool.n_ctx(model) or (found.n_ctx_train if found is not None else 0)
        return ListedModel(name, created.get(model, 0), n_ctx, self._pool.alias_target(name), found)

    # ---- Ollama's ----

    async def _version(self, request: Request) -> Response:
        return JSONResponse(models.VERSION)

    async def _tags(self, request: Request) -> Response:
        described = {each.name: each for each in await asyncio.to_thread(self._catalog.described)}
        for alias, model in self._pool.aliases.items():
            if alias not in described and (found := described.get(self._pool.base_name(model))) is not None:
                described[alias] = found._replace(name=alias)
        return JSONResponse(models.tags([*described.values()]))

    async def _running(self, request: Request) -> Response:
        described = {each.name: each for each in await asyncio.to_thread(self._catalog.described)}
        loaded = [pooled for pooled in self._pool.models if pooled.is_loaded]
        return JSONResponse({"models": [_running(pooled, described.get(pooled.name)) for pooled in loaded]})

    async def _show(self, request: Request) -> Response:
        fields = Fields(await read_json(request.receive))
        name = fields.text("model") or fields.needed_text("name")
        described, header, projector = await asyncio.to_thread(self._catalog.find, self._pool.base_name(name) or name)
        return JSONResponse(
            models.show(
                described,
                n_ctx_train=header.n_ctx_train,
                template=header.chat_template or "",
                thinks=_thinks(header),
                modalities=read_modalities(projector),
                embeds=makes_embeddings(header),
            )
        )


def _running(pooled: PooledModel, described: ModelDescription | None) -> dict[str, Any]:
    """Describe a loaded model; a file outside the store has a short description."""
    model, plan = pooled.loaded_model, pooled.loaded_model.plan
    unknown = ModelDescription(pooled.name, 0.0, model.header.weight_bytes, "", model.header.architecture, "", "")
    remaining = None if pooled.expiry is None else pooled.expiry.when() - asyncio.get_running_loop().time()
    expires = None if remaining is None or pooled.users else time.time() + remaining
    size = plan.ram_bytes + plan.vram_bytes
    return models.running(
        described or unknown, expires=expires, size=size, size_vram=plan.vram_bytes, n_ctx=model.n_ctx
    )
