"""One engine for many users at a time: commands from any thread, each with its own answer.

Owns the thread that reads; must not know what is asked. A death is told to all whose answer is open, and to whoever
asks later.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

from llmrun.errors import LlmrunError
from llmrun.protocol.messages import Command, Event, Failed
from llmrun.runner.launch import EngineHandle
from llmrun.runner.pipe import EngineExited
from llmrun.runner.requests import EngineRequests, Put


class Client:
    """One engine process, shared. close() ends it, and so does the last reference to this.

    Args:
        launched: a process that launch.launch() made; one is started by default.
    """

    def __init__(self, launched: EngineHandle | None = None) -> None:
        self._exchange = EngineRequests(launched)
        self.next_request = self._exchange.next_request
        # The thread must not know the client, which it would keep alive.
        self._reader = threading.Thread(target=_read, args=(self._exchange,), name="engine reader", daemon=True)
        self._reader.start()
        weakref.finalize(self, self._exchange.pipe.kill)

    @property
    def alive(self) -> bool:
        """Whether the engine can take another command."""
        return self._exchange.pipe.alive

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._exchange.pipe.pid

    def submit(self, command: Command) -> Iterator[Event]:
        """Send a command; gives its events as they come, to the last. Whoever closes the iterator before cancels it.

        Args:
            command: its request is a number of next_request(); a Load's is 0.

        Raises:
            LlmrunError: from the iterator, what the command failed with; the engine's death is an EngineCrashedError.
            UsageError: the command is too long.
        """
        return self._exchange.events(self._exchange.submit(command), pumps=False)

    def listen(self, command: Command, put: Put) -> None:
        """Send a command; its events go to `put` in the reading thread, as they come.

        Args:
            command: as in submit().
            put: takes an event, an error in place of the last one where the command failed, and behind it None. It
                must not wait.

        Raises:
            UsageError: the command is too long.
        """

        exchange = self._exchange

        def explained(event: Event | LlmrunError | None) -> None:
            put(exchange.error(command, event) if isinstance(event, Failed) else event)

        exchange.submit(command, put=explained)

    def cancel(self, request: int) -> None:
        """Ask a request to stop: it ends soon, whatever the engine does. Nothing happens where it has ended."""
        self._exchange.cancel(request)

    def close(self) -> None:
        """End the engine; all whose answer is open are told. May be called again."""
        self._exchange.end_all(EngineExited("it was closed"))
        self._reader.join()
        self._exchange.pipe.close()


def _read(exchange: EngineRequests) -> None:
    """Own thread: everything that comes in, to whom it belongs."""
    try:
        while exchange.pump():
            pass
    finally:  # whatever happens here, nobody is left waiting
        exchange.end_all(EngineExited("nobody hears it any more"))
