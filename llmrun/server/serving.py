"""A server from its first connection to its last: models, routes and listener put together, and a graceful end.

Owns the order of things; must not know terminals.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrun.config import Settings
from llmrun.errors import LlmrunError
from llmrun.model import Model
from llmrun.model.load_plan import prepare
from llmrun.models.location import ModelLocation, find_projector, locate
from llmrun.planning.pairs import DraftFile
from llmrun.planning.plan import LoadPreferences
from llmrun.planning.speculation import AUTO
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.engine_status import EngineStatus
from llmrun.runner.launch import EngineHandle
from llmrun.server.adapters import NO_ADAPTERS, ServedAdapters
from llmrun.server.app import AccessRecord, HttpApp
from llmrun.server.catalog import ModelCatalog
from llmrun.server.exchange import ServerState, Traffic
from llmrun.server.guard import Policy
from llmrun.server.listener import RECEIVE_SECONDS, Listener
from llmrun.server.metrics import ServerMetrics
from llmrun.server.page.routes import PageRoutes
from llmrun.server.pool import Pool, PooledModel


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve.

    Attributes:
        names: of models that are loaded from the start; the first is the one meant where a client names none.
        policy: who may ask.
        wishes: how models are loaded, and how many answers there are at the same time.
        answer_seconds: that an answer may take.
        keep_seconds: how long a model stays that nobody asks; less than 0 is for ever.
        queue: requests that may wait.
        grace_seconds: how long running answers may go on after a signal to end.
        receive_seconds: in which a request has to arrive.
        verbose: llama.cpp's log goes to stderr.
        speculate: drafted tokens a step where a client does not say, see DraftPolicy.most.
        draft: the model that drafts for the first of names.
        projector: turns pictures into what the first of names takes; None is the file beside it, if any.
        adapters: LoRA adapters of the first of names, of which requests choose.
        sampling: fields of SamplingParams that clients can't change.
    """

    names: tuple[str, ...]
    policy: Policy
    wishes: LoadPreferences
    keep_seconds: float = 300.0
    queue: int = 64
    answer_seconds: float = 3600.0
    grace_seconds: float = 30.0
    receive_seconds: float = RECEIVE_SECONDS
    verbose: bool = False
    speculate: int = AUTO
    draft: DraftFile | None = None
    projector: str | None = None
    adapters: tuple[Adapter, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


class Serving:
    """A server in the event loop it is made in.

    Args:
        on_served: told of every request.
        on_loaded: told of every model that was loaded.
        on_failed: told why a model could not be loaded at the start.
        start: starts an engine's process for a model; the usual one by default.

    Attributes:
        metrics: what it counts, to be looked at.
    """

    def __init__(
        self,
        options: ServeOptions,
        settings: Settings,
        *,
        on_served: Callable[[AccessRecord], None] = lambda served: None,
        on_loaded: Callable[[PooledModel], None] = lambda kept: None,
        on_failed: Callable[[LlmrunError], None] = lambda error: None,
        start: Callable[[Model], EngineHandle] = Model.launch_engine,
    ) -> None:
        self._options, self._settings = options, settings
        self.metrics = ServerMetrics()
        self._on_failed = on_failed
        keep = options.keep_seconds
        adapters = ServedAdapters(options.names[0], options.adapters) if options.adapters else NO_ADAPTERS
        self._pool = Pool(
            options.names,
            settings,
            self._prepare,
            keep_seconds=keep,
            start=start,
            on_loaded=on_loaded,
            adapters=adapters,
        )
        self._traffic = Traffic(options.wishes.parallel + options.queue, options.answer_seconds)
        shared = ServerState(self._pool, self._traffic, self.metrics, options.sampling)
        shelf = ModelCatalog(settings)
        self._page = PageRoutes(shared, shelf, settings.state_dir)
        self._site = HttpApp(shared, shelf=shelf, page=self._page, on_served=on_served)
        self._ending = asyncio.Event()

    def _prepare(self, located: ModelLocation, path: Path, promised: int) -> Model:
        options = self._options
        is_first = bool(options.names) and locate(options.names[0], self._settings).path == path
        return prepare(
            located.spec,
            path,
            options.wishes,
            warm_up=True,
            verbose=options.verbose,
            keeps_states=True,
            speculate=options.speculate,
            draft=options.draft if is_first else None,
            adapters=options.adapters if is_first else (),
            promised=promised,
            projector=find_projector(path, options.projector if is_first else None),
        )

    async def run(self, listening: socket.socket) -> None:
        """Serve on this socket until end() is called, and then until all is answered or the grace is over."""
        options = self._options
        listener = Listener(self._site.app(options.policy), listening, options.receive_seconds)
        await listener.start()
        warming = [asyncio.ensure_future(self._warm(name)) for name in options.names]
        try:
            await self._ending.wait()
            await self._traffic.drain()
        finally:
            for task in warming:
                task.cancel()
            await listener.stop()
            await self._pool.close()
            await self._page.close()

    @property
    def loaded(self) -> list[str]:
        """Names of the models in memory."""
        return [kept.name for kept in self._pool.kept if kept.is_loaded]

    async def conditions(self) -> dict[str, EngineStatus]:
        """How busy the engine of each model in memory is."""
        return await self._pool.conditions()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self._traffic.is_busy

    @property
    def is_ending(self) -> bool:
        """Whether no more requests are taken."""
        return self._ending.is_set()

    async def _warm(self, name: str) -> None:
        try:
            await self._pool.warm(name)
        except LlmrunError as error:
            self._on_failed(error)

    def end(self, *, now: bool = False) -> None:
        """Begin to end: when running answers are finished, within the grace. May be called again, and changes nothing.

        Args:
            now: end running answers with an error instead.
        """
        self._traffic.end_within(0.0 if now else self._options.grace_seconds)
        self._ending.set()
