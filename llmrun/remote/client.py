"""A client of a remote server, with the interface of runner.client: commands from any thread, and the events of each.

Owns the thread that talks to the server, and the retries if it is busy; must not know the use of answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

import httpx2

from llmrun.errors import LlmrunError, UnavailableError, UsageError
from llmrun.models.download.transfer import RetryPolicy, ignore_note, wait_seconds
from llmrun.protocol.messages import Event, Generate
from llmrun.remote.request_body import body_of
from llmrun.remote.response_decoder import AnswerDecoder, EventReader
from llmrun.remote.server import ServedModel, Server
from llmrun.remote.transport import (
    TROUBLES,
    client_settings,
    media_type,
    not_compatible,
    read_body,
    read_json,
    refuse_errors,
    unreachable,
)
from llmrun.runner.requests import Put

_HINT_SECONDS = 30.0  # without a first token, before the user is told
PATIENT = RetryPolicy(stall_seconds=1800.0, retries=3, backoff_seconds=1.0)
"""A long prompt may take a slow server many minutes, in which most send nothing; users can cancel."""
_BUSY = frozenset({429, 503})  # statuses of a server that has computed nothing yet
_IDLE_SECONDS = 2.0  # before a connection is closed: most servers close theirs after five
_REST_SECONDS = 0.5  # for the end of the stream after the last event
_EVENT_STREAM = "text/event-stream"
_NAMED_FIELD = re.compile(r"\breasoning_content\b|(?<=[`'\"])(?:reasoning|reasoning_text)(?=[`'\"])")
_Value = TypeVar("_Value")


class RemoteClient:
    """One model of one server. Close it, or its thread goes on.

    Args:
        patience: with the server.
        on_note: called in the client's thread when a request is repeated, takes long, or is cut.

    Attributes:
        has_usage: the server counted the tokens of the last answer; None before the first one. Otherwise its pieces of
            text are counted.
        reasoning_name: where the server had the reasoning of its last answer, and gets it back; "" if it refuses it,
            None before any.
    """

    def __init__(
        self,
        server: Server,
        model: ServedModel,
        patience: RetryPolicy = PATIENT,
        on_note: Callable[[str], None] = ignore_note,
    ) -> None:
        self.server, self.model = server, model
        self.has_usage: bool | None = None
        self.reasoning_name: str | None = None
        self.next_request = itertools.count(1).__next__
        self._patience, self._on_note = patience, on_note
        self._has_hinted = False
        try:
            self._http = httpx2.AsyncClient(
                **client_settings(server),
                timeout=httpx2.Timeout(patience.stall_seconds, connect=patience.connect_seconds, pool=None),
                limits=httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
            )
        except TROUBLES as error:
            raise unreachable(server, error) from None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote server", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes another command."""
        return not self._loop.is_closed()

    def listen(self, command: Generate, put: Put, named: Collection[str] | None = None) -> None:
        """Send a request; the client's thread passes the answer's events to `put`, see runner.requests.Put.

        Args:
            command: with a number of next_request().
            named: fields of the sampling parameters set by the user; None is all that differ from the defaults.
        """
        self._loop.call_soon_threadsafe(self._begin, command, put, named)

    def cancel(self, request: int) -> None:
        """Stop a request: its connection is closed, and it ends with Finished. Does nothing if it has ended."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._cancel, request)

    def close(self) -> None:
        """Cancel all requests. May be called again."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- in the client's thread ----------------------------------------------------------------------

    def _begin(self, command: Generate, put: Put, named: Collection[str] | None) -> None:
        decoder = AnswerDecoder(self.server, command, self.model.name)
        task = self._loop.create_task(self._answer(command, decoder, put, named))
        self._tasks[command.request] = task
        task.add_done_callback(partial(self._ended, command.request, decoder, put))

    def _cancel(self, request: int) -> None:
        if request in self._tasks:
            self._tasks[request].cancel()

    async def _end_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def _ended(self, request: int, decoder: AnswerDecoder, put: Put, task: asyncio.Task[None]) -> None:
        """Report the end of a request, whatever the cause."""
        del self._tasks[request]
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            put(decoder.finished("cancelled"))
        elif isinstance(error, LlmrunError):
            put(error)
        elif error is not None:
            put(LlmrunError(f"the client of {self.server.host} failed", why=type(error).__name__))
        put(None)

    async def _answer(self, command: Generate, decoder: AnswerDecoder, put: Put, named: Collection[str] | None) -> None:
        """Receive one answer to its end; repeat the request if the server is busy, or wants its reasoning otherwise."""
        failures, has_changed = 0, False
        while True:
            endpoint, body, _ = body_of(command.asked, self.model, named, self.reasoning_name)
            content = json.dumps(body).encode()
            try:
                seconds = await self._try(endpoint, content, decoder, put, may_wait=failures < self._patience.retries)
            except UsageError as error:
                name = _other_reasoning(error.why, content)
                if has_changed or name is None:
                    raise
                self.reasoning_name, has_changed = name, True
                continue
            if seconds is None:
                return
            seconds = max(seconds, self._patience.backoff_seconds * 2**failures)
            failures += 1
            self._on_note(f"{self.server.host} is busy; trying again in {seconds:g} seconds")
            await asyncio.sleep(seconds)

    async def _try(
        self, endpoint: str, content: bytes, decoder: AnswerDecoder, put: Put, *, may_wait: bool
    ) -> float | None:
        """Send the request once; return the seconds to wait before the next try if the server is busy, None if it
        answered.

        Raises:
            LlmrunError: there is no answer.
        """
        headers = {"Content-Type": "application/json", "Accept": _EVENT_STREAM}
        request = self._http.build_request("POST", f"{self.server.url}{endpoint}", content=content, headers=headers)
        try:
            async with aclosing(await self._in_time(self._send(request))) as response:
                if response.status_code in _BUSY and may_wait:
                    error = UnavailableError(f"{self.server.host} is busy", why=f"it answered {response.status_code}")
                    return wait_seconds(response, error, self._patience)
                body = b"" if response.is_success else await self._in_time(read_body(self.server, response))
                refuse_errors(self.server, response, body, self.model.name)
                await self._read(response, decoder, put)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, asyncio.TimeoutError) as error:
            raise unreachable(self.server, error) from None
        return None

    async def _in_time(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        """Await something within the server's time; httpx2's own timeout starts again with every byte."""
        return await asyncio.wait_for(work, self._patience.stall_seconds)

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, over a new connection if the server has just closed the kept one, as llama-server does."""
        try:
            return await self._http.send(request, stream=True)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            return await self._http.send(request, stream=True)

    async def _read(self, response: httpx2.Response, decoder: AnswerDecoder, put: Put) -> None:
        """Receive the answer, in one piece or as a stream."""
        kind = media_type(response)
        if kind == "application/json":  # it does not stream
            put(decoder.started())
            body = await self._in_time(read_body(self.server, response))
            _each(decoder.take(read_json(self.server, body)), put)
        elif kind == _EVENT_STREAM:
            put(decoder.started())
            pieces = response.aiter_raw()
            await self._read_events(pieces, decoder, put)
        else:
            raise not_compatible(
                self.server, f"it sent {kind[:40] or 'something without a type'}, not a stream of events"
            )
        self.has_usage = decoder.has_usage
        if self.reasoning_name != "":
            self.reasoning_name = decoder.reasoning_name or self.reasoning_name
        if decoder.note:
            self._on_note(f"{self.server.host} {decoder.note}")
        _each(decoder.ended(), put)
        if decoder.is_done:  # a connection can be used again if it was read to its end
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_rest(pieces), _REST_SECONDS)

    async def _read_events(self, pieces: AsyncIterator[bytes], decoder: AnswerDecoder, put: Put) -> None:
        """Read a stream of events to its end. Only progress of the answer counts as a sign of life.

        Raises:
            UnavailableError: there was none for too long, whatever else came.
        """
        seconds, reader = self._patience.stall_seconds, EventReader(self.server)
        hint = self._loop.call_later(_HINT_SECONDS, self._hint)
        progress, ends_at = decoder.progress, self._loop.time() + seconds
        try:
            while piece := await asyncio.wait_for(_next(pieces), ends_at - self._loop.time()):
                for data in reader.feed(piece):
                    _each(decoder.feed(data), put)
                if decoder.is_done or decoder.is_cut:
                    return
                if decoder.progress > progress:
                    hint.cancel()
                    progress, ends_at = decoder.progress, self._loop.time() + seconds
            for data in reader.flush():
                _each(decoder.feed(data), put)
        except asyncio.TimeoutError:
            raise UnavailableError(
                f"{self.server.host} stopped answering",
                why=f"it kept the connection open, but sent nothing of the answer for {seconds:g} seconds",
                hint="try again; the server may be overloaded, or stuck",
            ) from None
        finally:
            hint.cancel()

    def _hint(self) -> None:
        """Report once that the server is slow."""
        if not self._has_hinted:
            self._has_hinted = True
            waiting = f"{self._patience.stall_seconds:g} seconds at most"
            self._on_note(f"{self.server.host} has sent nothing of the answer yet; waiting {waiting}, Ctrl-C ends it")


def _other_reasoning(why: str, sent: bytes) -> str | None:
    """Return the field in which a server that refuses a request wants its reasoning: DeepSeek's insists on it, others
    know no such field ("" then). None if the refusal does not name one.
    """
    found = _NAMED_FIELD.search(why)
    if found is None:
        return None
    return "" if f'"{found[0]}": '.encode() in sent else found[0]


async def _next(pieces: AsyncIterator[bytes]) -> bytes:
    """Return the next piece that is not empty; b"" at the end."""
    async for piece in pieces:
        if piece:
            return piece
    return b""


async def _rest(pieces: AsyncIterator[bytes]) -> None:
    async for _ in pieces:
        pass


def _each(events: Iterator[Event], put: Put) -> None:
    for event in events:
        put(event)
