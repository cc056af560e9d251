"""One engine process as the event loop sees it: commands go out without waiting, events come in as calls.

Owns the border between the threads of runner.Client and the event loop; must not know requests, models or HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.protocol.loading import Load, Loaded
from llmrun.protocol.messages import Command, Event
from llmrun.runner.client import Client
from llmrun.runner.launch import EngineHandle
from llmrun.runner.requests import Put

_Answer = TypeVar("_Answer", bound=Event)


class EngineConnection:
    """One engine process. Everything but the constructor's work happens in the event loop it was made in.

    Attributes:
        next_request: gives a number for a command.
        pid: the engine's process id.
    """

    def __init__(self, launched: EngineHandle) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = Client(launched)
        self.next_request, self.pid = self._client.next_request, self._client.pid
        # A pipe that is full holds up whoever writes: that must not be the event loop.
        self._sender = ThreadPoolExecutor(1, "engine sender")
        self._inbox: deque[tuple[Put, Event | LlmrunError | None]] = deque()
        self._is_woken = False
        self._is_closed = self._has_waiting = False

    @property
    def alive(self) -> bool:
        """Whether the engine can take another command."""
        return not self._is_closed and self._client.alive

    def send(self, command: Command, put: Put) -> None:
        """Send a command; `put` is called with its events, see Client.listen()."""

        def hear(event: Event | LlmrunError | None) -> None:
            self._inbox.append((put, event))
            if not self._is_woken:  # one call for all that come until it is made
                self._is_woken = True
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._deliver)

        def submit() -> None:
            try:
                self._client.listen(command, hear)
            except LlmrunError as error:
                hear(error)
                hear(None)

        if self._is_closed:
            put(EngineCrashedError("the engine was closed"))
            put(None)
        else:
            self._sender.submit(submit)

    def is_first_waiting(self) -> bool:
        """Whether this is asked for the first time. The engine's death is told in the order of the commands: of those
        that had not started, it was preparing the first."""
        is_first, self._has_waiting = not self._has_waiting, True
        return is_first

    def _deliver(self) -> None:
        self._is_woken = False
        while self._inbox:
            put, event = self._inbox.popleft()
            put(event)

    def cancel(self, request: int) -> None:
        """Ask a request to stop: it ends soon, whatever the engine does."""
        if not self._is_closed:
            self._sender.submit(self._client.cancel, request)

    async def ask(self, command: Command, kind: type[_Answer]) -> _Answer:
        """Send a command that is answered by one event of this kind.

        Raises:
            LlmrunError: what it failed with.
        """
        answered: asyncio.Future[_Answer] = self._loop.create_future()

        def put(event: Event | LlmrunError | None) -> None:
            if answered.done():
                return
            if isinstance(event, LlmrunError):
                answered.set_exception(event)
            elif isinstance(event, kind):
                answered.set_result(event)

        self.send(command, put)
        try:
            return await answered
        except asyncio.CancelledError:
            self.cancel(command.request)
            raise

    async def load(self, load: Load) -> Loaded:
        """Load a model.

        Raises:
            LlmrunError: it can't be loaded; the engine has ended.
        """
        try:
            return await self.ask(load, Loaded)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the engine; all whose answer is open are told. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._client.close)
            self._sender.shutdown(wait=False)


Launch = Callable[[], EngineHandle]
"""Starts an engine's process."""
