"""An answer that goes on while no window shows it: a reload of the page must not stop it.

Owns its messages so far, and when it is stopped; must not know what they say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from llmrun.server.http import App, Receive, Scope, Send

GRACE_SECONDS = 20.0
"""An answer that no window shows for that long is stopped: a closed page must not keep the machine busy."""
_END_SECONDS = 5.0


class RunningAnswer:
    """An ASGI application that runs in a task of its own, and is shown to any number of clients from its beginning.

    Args:
        scope: of the request that began it.
    """

    def __init__(self, app: App, scope: Scope) -> None:
        self._messages: list[Any] = []
        self._grown = asyncio.Event()  # replaced whenever it was set
        self._stopped = asyncio.Event()
        self._n_shown = 0  # clients
        self._timer: asyncio.TimerHandle | None = None
        # Without extensions: they write to the connection of the request.
        self._task = asyncio.ensure_future(app({**scope, "extensions": {}}, self._receive, self._send))
        scope["state"]["goes_on"] = self._task  # the line in the log waits for its end
        self._task.add_done_callback(self._end)

    @property
    def is_done(self) -> bool:
        return self._task.done()

    def stop(self) -> None:
        """End it as if its client had left."""
        self._stopped.set()

    async def end(self) -> None:
        """Stop it, and wait for its end."""
        self.stop()
        await asyncio.wait((self._task,), timeout=_END_SECONDS)

    def when_done(self, call: Callable[[], object]) -> None:
        """Call a function at its end."""
        self._task.add_done_callback(lambda task: call())

    async def show(self, receive: Receive, send: Send) -> None:
        """Send all messages to a client, until the end or until the client leaves.

        Raises:
            Exception: of the application, if it failed before its first message.
        """
        self._n_shown += 1
        if self._timer is not None:
            self._timer.cancel()
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await self._forward(send, leaving)
        finally:
            leaving.cancel()
            self._n_shown -= 1
            if not self._n_shown and not self.is_done:
                self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self.stop)

    async def _forward(self, send: Send, leaving: asyncio.Future[None]) -> None:
        at, is_open = 0, True
        while is_open:
            for message in self._messages[at:]:
                await send(message)
                is_open = message["type"] == "http.response.start" or message.get("more_body", False)
            at = len(self._messages)
            if self.is_done:
                break
            growing = asyncio.ensure_future(self._grown.wait())
            await asyncio.wait((growing, leaving), return_when=asyncio.FIRST_COMPLETED)
            growing.cancel()
            if leaving.done():
                return
        if not at:
            self._task.result()
            await send({"type": "http.response.start", "status": 204, "headers": []})
        if is_open:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _receive(self) -> Any:
        await self._stopped.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self._messages.append(message)
        self._grow()

    def _end(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled():
            task.exception()  # known to those who show it; else asyncio warns
        if self._timer is not None:
            self._timer.cancel()
        self._grow()

    def _grow(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


async def _left(receive: Receive) -> None:
    """Wait until a client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
