"""A server from its first connection to its last: models, routes and listener put together, and a graceful end.

Owns the order of things; must not know terminals.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from llmrun.config import Settings
from llmrun.models.store.store import everything
from llmrun.server.app import Served, Site
from llmrun.server.exchange import Shared, Traffic
from llmrun.server.guard import Policy
from llmrun.server.listener import Listener
from llmrun.server.loading import Sharing
from llmrun.server.metrics import Metrics
from llmrun.server.pool import Pool


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve.

    Attributes:
        names: of models that are loaded from the start; the first is the one meant where a client names none.
        policy: who may ask.
        sharing: how models are loaded.
        keep_seconds: how long a model stays that nobody asks; less than 0 is for ever.
        queue: requests that may wait.
        grace_seconds: how long running answers may go on after the first signal to end.
    """

    names: tuple[str, ...]
    policy: Policy
    sharing: Sharing
    keep_seconds: float = 300.0
    queue: int = 64
    grace_seconds: float = 30.0


class Serving:
    """A server in the event loop it is made in.

    Args:
        on_served: told of every request.
        on_change: called when a model was loaded or is gone.

    Attributes:
        pool, metrics: what it has and counts, to be looked at.
    """

    def __init__(
        self,
        options: ServeOptions,
        settings: Settings,
        *,
        on_served: Callable[[Served], None] = lambda served: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._options, self._settings = options, settings
        self.metrics = Metrics()
        keep = options.keep_seconds
        self.pool = Pool(options.names, settings, options.sharing.prepare, keep_seconds=keep, on_change=on_change)
        self._traffic = Traffic(options.sharing.parallel + options.queue)
        self._site = Site(
            Shared(self.pool, self._traffic, self.metrics), list_models=self._list_models, on_served=on_served
        )
        self._ending = asyncio.Event()

    def _list_models(self) -> dict[str, int]:
        """Names of the models on this disk, and when each was written."""
        return {each.name: int(each.modified) for each in everything(self._settings)}

    async def run(self, listening: socket.socket) -> None:
        """Serve on this socket until end() is called, and then until all is answered or the grace is over."""
        listener = Listener(self._site.app(self._options.policy), listening)
        await listener.start()
        warming = [asyncio.ensure_future(self.pool.warm(name)) for name in self._options.names]
        try:
            await self._ending.wait()
            await self._traffic.drain(self._options.grace_seconds)
        finally:
            for task in warming:
                task.cancel()
            await listener.stop()
            await self.pool.close()

    def end(self) -> None:
        """Begin to end."""
        self._ending.set()
