"""A server from its first connection to its last: models, routes and listener put together, and a graceful end.

Owns the order of things; must not know terminals.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from llmrun.config import Settings
from llmrun.model import Model
from llmrun.models.store.store import everything
from llmrun.runner.launch import Launched
from llmrun.server.app import Served, Site
from llmrun.server.exchange import Shared, Traffic
from llmrun.server.guard import Policy
from llmrun.server.listener import RECEIVE_SECONDS, Listener
from llmrun.server.metrics import Metrics
from llmrun.server.pool import Pool, Prepare, engine_of


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve.

    Attributes:
        names: of models that are loaded from the start; the first is the one meant where a client names none.
        policy: who may ask.
        prepare: reads a model's header and plans how it is loaded.
        parallel: answers at the same time.
        keep_seconds: how long a model stays that nobody asks; less than 0 is for ever.
        queue: requests that may wait.
        grace_seconds: how long running answers may go on after the first signal to end.
        receive_seconds: in which a request has to arrive.
    """

    names: tuple[str, ...]
    policy: Policy
    prepare: Prepare
    parallel: int = 8
    keep_seconds: float = 300.0
    queue: int = 64
    grace_seconds: float = 30.0
    receive_seconds: float = RECEIVE_SECONDS


class Serving:
    """A server in the event loop it is made in.

    Args:
        on_served: told of every request.
        start: starts an engine's process for a model; the usual one by default.

    Attributes:
        metrics: what it counts, to be looked at.
    """

    def __init__(
        self,
        options: ServeOptions,
        settings: Settings,
        *,
        on_served: Callable[[Served], None] = lambda served: None,
        start: Callable[[Model], Launched] = engine_of,
    ) -> None:
        self._options, self._settings = options, settings
        self.metrics = Metrics()
        self._pool = Pool(options.names, settings, options.prepare, keep_seconds=options.keep_seconds, start=start)
        self._traffic = Traffic(options.parallel + options.queue)
        shared = Shared(self._pool, self._traffic, self.metrics)
        self._site = Site(shared, list_models=self._list_models, on_served=on_served)
        self._ending = asyncio.Event()

    def _list_models(self) -> dict[str, int]:
        """Names of the models on this disk, and when each was written."""
        return {each.name: int(each.modified) for each in everything(self._settings)}

    async def run(self, listening: socket.socket) -> None:
        """Serve on this socket until end() is called, and then until all is answered or the grace is over."""
        options = self._options
        listener = Listener(self._site.app(options.policy), listening, options.receive_seconds)
        await listener.start()
        warming = [asyncio.ensure_future(self._pool.warm(name)) for name in options.names]
        try:
            await self._ending.wait()
            await self._traffic.drain(options.grace_seconds)
        finally:
            for task in warming:
                task.cancel()
            await listener.stop()
            await self._pool.close()

    @property
    def loaded(self) -> list[str]:
        """Names of the models in memory."""
        return [kept.name for kept in self._pool.kept if kept.is_loaded]

    @property
    def is_busy(self) -> bool:
        """Whether anybody is being answered."""
        return self._traffic.is_busy

    def end(self) -> None:
        """Begin to end."""
        self._ending.set()
