"""The engine client in the event loop: commands go out without blocking, events come in as calls in the loop.

The loop itself reads the pipe: a thread between them would cost a fifth of the processor time of a streamed token.

Must not know requests, models or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.loading import Load, Loaded
from llmrun.protocol.messages import AnswerRequest, Command, Event, Finished, Generate, Job, JobDone
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import EngineHandle
from llmrun.runner.requests import Put, read_job

_TICK_SECONDS = 0.1  # between two checks of the deadlines
_Answer = TypeVar("_Answer", bound=Event)
_Command = TypeVar("_Command")
_Result = TypeVar("_Result")


class EngineConnection:
    """One engine process. All methods are called in the event loop in which it was created."""

    def __init__(self, launched: EngineHandle) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = EngineClient(launched)
        self.next_request, self.pid = self._client.next_request, self._client.pid
        self._sender = ThreadPoolExecutor(1, "engine sender")  # a full pipe blocks it, instead of the event loop
        self._is_closed = self._has_waiting = False
        self._descriptor = self._client.descriptor
        self._loop.add_reader(self._descriptor, self._read)
        self._tick = self._loop.call_later(_TICK_SECONDS, self._check)

    @property
    def alive(self) -> bool:
        """Whether the engine can take another command."""
        return not self._is_closed and self._client.alive

    def send(self, command: Command, put: Put) -> None:
        """Send a command; `put` is called with its events, see EngineClient.listen()."""
        try:
            if self._is_closed:
                raise EngineCrashedError("the engine was closed")
            self._client.listen(command, put, self._sender.submit)
        except LlmrunError as error:
            put(error)
            put(None)

    def _read(self, *, is_tick: bool = False) -> None:
        if not self._client.read_ready(is_tick=is_tick):
            self._stop_reading()

    def _check(self) -> None:
        self._tick = self._loop.call_later(_TICK_SECONDS, self._check)
        self._read(is_tick=True)

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._tick.cancel()

    def is_first_waiting(self) -> bool:
        """Return True for the first call. The engine's death is reported in the order of the commands; it was
        preparing the first one that had not started."""
        is_first, self._has_waiting = not self._has_waiting, True
        return is_first

    def cancel(self, request: int) -> None:
        """Ask a request to stop: it ends soon, whatever the engine does."""
        if not self._is_closed:
            self._client.cancel(request, self._sender.submit)

    async def load(self, load: Load) -> Loaded:
        """Load a model.

        Raises:
            LlmrunError: loading failed; the engine has ended.
        """
        try:
            return await self._last(load, Loaded)
        except BaseException:
            await self.close()
            raise

    async def do(self, kind: JobKind[_Command, Any, _Result], command: _Command) -> _Result:
        """Run a job of the loaded model, and return its result; its updates are dropped.

        Raises:
            LlmrunError: the job failed.
        """
        done = await self._last(Job(self.next_request(), kind.name, command), JobDone)
        return read_job(kind, kind.result, done.result)

    async def answer(self, request: AnswerRequest) -> int:
        """Answer a request, and return its number; its text is dropped.

        Raises:
            LlmrunError: the request failed.
        """
        command = Generate(self.next_request(), request)
        await self._last(command, Finished)
        return command.request

    async def write(self, request: AnswerRequest) -> str:
        """Answer a request, and return its text. Raises as answer()."""
        received = ResponseAccumulator()
        await self._last(Generate(self.next_request(), request), Finished, received.take)
        return received.text

    async def _last(
        self, command: Command, kind: type[_Answer], on_event: Callable[[Event], object] = lambda event: None
    ) -> _Answer:
        """Send a command, and return its last event."""
        answered: asyncio.Future[_Answer] = self._loop.create_future()

        def put(event: Event | LlmrunError | None) -> None:
            if answered.done():
                return
            if isinstance(event, LlmrunError):
                answered.set_exception(event)
                return
            if event is not None:
                on_event(event)
            if isinstance(event, kind):
                answered.set_result(event)

        self.send(command, put)
        try:
            return await answered
        except asyncio.CancelledError:
            self.cancel(command.request)
            raise

    async def close(self) -> None:
        """End the engine and all requests. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._stop_reading()
            self._client.end_requests()  # here: their callers expect events in this thread
            await asyncio.to_thread(self._client.close)
            self._sender.shutdown(wait=False)
