"""A whole server: models, routes and listener, and its graceful shutdown. Must not know terminals."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrun.chat.passages import FolderIndex
from llmrun.config import Settings
from llmrun.errors import LlmrunError
from llmrun.model import Model
from llmrun.model.loading import prepare
from llmrun.models.location import ModelLocation, find_projector, locate
from llmrun.models.registry import resolve
from llmrun.models.store.other_programs import PROGRAMS
from llmrun.planning.pairs import DraftFile
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speculation import AUTO
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.questions import EngineStatus
from llmrun.runner.launch import EngineHandle
from llmrun.server.app import AccessRecord, HttpApp
from llmrun.server.exchange import ServerState, Traffic
from llmrun.server.guard import Policy, with_saved_secret
from llmrun.server.listener import RECEIVE_SECONDS, Listener
from llmrun.server.manage_routes import ManageRoutes
from llmrun.server.metrics import ModelMetrics, ServerMetrics
from llmrun.server.model_routes import ModelCatalog
from llmrun.server.page.insights import Explain
from llmrun.server.page.routes import PageRoutes
from llmrun.server.page.tools import PageTools
from llmrun.server.phone import PhoneAccess
from llmrun.server.pool import NO_ADAPTERS, Defaults, Pool, PooledModel, ServedAdapters, no_defaults
from llmrun.server.protocols.stored_responses import ResponseStore
from llmrun.server.registry import ServedDrafts

_END = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)  # of a file's name


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server. Draft model, projector and adapters belong to the first model."""

    names: tuple[str, ...]  # models to load at the start; the first answers requests that name none
    policy: Policy
    preferences: LoadPreferences
    keep_seconds: float = 300.0  # time until an idle model is unloaded; below 0: never
    queue: int = 64  # maximum number of waiting requests
    answer_seconds: float = 3600.0  # maximum time for an answer
    grace_seconds: float = 30.0  # time for running answers at shutdown
    receive_seconds: float = RECEIVE_SECONDS
    verbose: bool = False  # llama.cpp's log goes to stderr
    speculate: int = AUTO  # default for drafted tokens per step, see DraftPolicy.most
    draft: DraftFile | None = None
    projector: str | None = None  # for images and audio; None: the file beside the model, if any
    adapters: tuple[Adapter, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that override the client's
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of models
    any_model: bool = False  # the first model answers requests for all other names
    defaults: Defaults = no_defaults  # of requests and loads
    allow_manage: bool = False  # all clients may pull, copy and delete models
    presets: Callable[[], list[dict[str, Any]]] = list  # reads those of the page, see PageRoutes


def served_files(names: Sequence[str]) -> dict[str, tuple[str, Path]]:
    """Return the names of the models that the command line gives as paths: what it has, and the absolute path.

    A file is called by its stem, without the number of a part; where two have the same, the later one by its path.
    """
    found: dict[str, tuple[str, Path]] = {}
    for given in names:
        path = None
        with suppress(LlmrunError):  # loading it will say why
            path = resolve(given).path
        if path is None or given.partition("/")[0].lower() in PROGRAMS:
            continue
        stem = _END.sub("", path.name)
        found[given if stem in found or stem in names else stem] = (given, path)
    return found


def run_in_event_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, in uvloop's event loop if that is installed: it takes 40 µs less per turn, and joins writes."""
    try:
        import uvloop  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        if sys.platform == "win32":  # whose default event loop does not watch descriptors
            asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
        asyncio.run(main)
    else:
        uvloop.run(main)


class Serving:
    """A server, in the event loop of its constructor.

    Args:
        on_served: called after every request.
        on_loaded: called after every load of a model.
        on_failed: called if a model can't be loaded at the start.
        start: starts an engine process for a model.
        explain: explains an answer of the page.
        tools: that a model may call on the page.
        index: of documents whose passages go along with questions of the page.
    """

    def __init__(
        self,
        options: ServeOptions,
        settings: Settings,
        *,
        explain: Explain,
        tools: PageTools,
        index: FolderIndex | None = None,
        on_served: Callable[[AccessRecord], None] = lambda record: None,
        on_loaded: Callable[[PooledModel], None] = lambda pooled: None,
        on_failed: Callable[[LlmrunError], None] = lambda error: None,
        start: Callable[[Model], EngineHandle] = Model.launch_engine,
    ) -> None:
        self._options, self._settings = options, settings
        self.metrics = ServerMetrics()
        self._on_failed = on_failed
        files = served_files(options.names)
        given = {path: name for name, (path, _) in files.items()}
        self.names = tuple(given.get(name, name) for name in options.names)
        adapters = ServedAdapters(self.names[0], options.adapters) if options.adapters else NO_ADAPTERS
        self._pool = Pool(
            self.names,
            settings,
            self._prepare,
            keep_seconds=options.keep_seconds,
            start=start,
            on_loaded=on_loaded,
            adapters=adapters,
            aliases=options.aliases,
            any_model=options.any_model,
            defaults=options.defaults,
            files={name: path for name, (path, _) in files.items()},
        )
        self._traffic = Traffic(options.preferences.parallel + options.queue, options.answer_seconds)
        state = ServerState(self._pool, self._traffic, self.metrics, options.sampling, ResponseStore())
        catalog = ModelCatalog(settings, {name: path for name, (_, path) in files.items()})
        manage = ManageRoutes(self._pool, settings, is_open=options.allow_manage)
        self.phone = PhoneAccess(self._listener)
        self._page = PageRoutes(state, catalog, settings.state_dir, explain, tools, self.phone, options.presets, index)
        self._http = HttpApp(state, catalog=catalog, page=self._page, manage=manage, on_served=on_served)
        self._ending = asyncio.Event()

    def _prepare(self, located: ModelLocation, path: Path, promised: int) -> Model:
        options = self._options
        is_first = bool(options.names) and locate(options.names[0], self._settings).identity == located.identity
        preferences = options.preferences.completed(options.defaults(located.spec.name))
        window = self._pool.windows.get(located.identity)
        return prepare(
            located.spec,
            path,
            replace(preferences, n_ctx=window) if window else preferences,
            warm_up=True,
            verbose=options.verbose,
            keeps_states=True,
            speculate=options.speculate,
            draft=options.draft if is_first else None,
            adapters=options.adapters if is_first else (),
            promised=promised,
            projector=find_projector(path, options.projector if is_first else None, located.spec.modelfile.projector),
        )

    def _listener(self, policy: Policy, listening: socket.socket) -> Listener:
        return Listener(self._http.app(policy), listening, self._options.receive_seconds)

    async def run(self, listening: socket.socket) -> None:
        """Serve on this socket until end() is called and running answers are finished or their grace period is over."""
        options = self._options
        policy = with_saved_secret(options.policy, self._settings.state_dir)
        listener = self._listener(policy, listening)
        await listener.start()
        warming = [asyncio.ensure_future(self._warm(name)) for name in options.names]
        try:
            await self._ending.wait()
            await self._traffic.drain()
        finally:
            for task in warming:
                task.cancel()
            await self.phone.close()
            await listener.stop()
            await self._pool.close()
            await self._page.close()

    @property
    def loaded(self) -> list[str]:
        """Names of the models in memory."""
        return [pooled.name for pooled in self._pool.models if pooled.is_loaded]

    @property
    def files(self) -> list[str]:
        """Paths of the models in memory, in the order of their names."""
        return [pooled.loaded_model.load.path for pooled in self._pool.models if pooled.is_loaded]

    @property
    def drafts(self) -> tuple[ServedDrafts, ...]:
        """What drafts for the models in memory, and with what success."""
        found: list[ServedDrafts] = []
        for pooled in self._pool.models:
            if not pooled.is_loaded:
                continue
            plan = pooled.loaded_model.plan
            load, draft = plan.load, plan.load.draft
            counts = self.metrics.models.get(pooled.name, ModelMetrics())
            if load.draft_heads or draft is not None:
                source = "heads" if draft is None or draft.draft_heads else "draft model"
                n_drafted, n_accepted = counts.model_drafted, counts.model_accepted
                found.append(ServedDrafts(pooled.name, source, plan.draft_bytes, n_drafted, n_accepted))
            if n_from_text := counts.drafted_tokens - counts.model_drafted:
                n_accepted = counts.accepted_tokens - counts.model_accepted
                found.append(ServedDrafts(pooled.name, "text", 0, n_from_text, n_accepted))
        return tuple(found)

    async def statuses(self) -> dict[str, EngineStatus]:
        """Return the status of the engine of each loaded model."""
        return await self._pool.statuses()

    @property
    def is_busy(self) -> bool:
        return self._traffic.is_busy

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    async def _warm(self, name: str) -> None:
        try:
            await self._pool.warm(name)
        except LlmrunError as error:
            self._on_failed(error)

    def end(self, *, now: bool = False) -> None:
        """Start the shutdown: running answers are finished within the grace period. May be called again.

        Args:
            now: end running answers with an error.
        """
        self._traffic.start_draining(0.0 if now else self._options.grace_seconds)
        self._ending.set()
