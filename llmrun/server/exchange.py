"""One HTTP exchange: read the request, ask an engine, and write its answer in the client's protocol.

Owns when headers and keep-alive comments are sent, and what ends an answer early: a client that disconnects or stalls,
a timeout, a server that shuts down. Must not know JSON shapes or how engines are pooled.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn

from llmrun.errors import ContextOverflowError, LlmrunError
from llmrun.protocol.codec import load_json
from llmrun.server import sse
from llmrun.server.answer_parts import CompletionRequest, Envelope, ResponseFinished, ResponseStarted, Writer
from llmrun.server.answers import Heard, ResponseStreams
from llmrun.server.guard import Headers, Receive, Scope, Send
from llmrun.server.http_errors import AnswerTimeoutError, BusyError, DrainingError, MalformedRequestError
from llmrun.server.metrics import ServerMetrics
from llmrun.server.pool import Pool, PooledModel

SILENCE_SECONDS = 5.0
"""Silence after which a stream gets a keep-alive comment."""
STALL_SECONDS = 60.0
"""Time after which a client that reads nothing counts as disconnected."""
_LONG_BODY = 16 * 1024  # bytes; a longer body is parsed in another thread
_RETRY_SECONDS = b"2"
MOST_CONTAINERS = 65_536
"""Maximum number of objects and lists in a body: several times that of the longest real requests."""
_ERROR_SECONDS = 1.0  # for the error events that end open streams at shutdown


class Dialect(NamedTuple):
    """A completion protocol: the functions of one module of protocols/.

    Attributes:
        prefix: of the ids of responses.
        streams_overflow: a prompt that is too long is an error event of the stream, not an HTTP error.
    """

    read: Callable[[Mapping[str, Any]], CompletionRequest]
    writer: Callable[[Mapping[str, Any], Envelope], Writer]
    error_body: Callable[[LlmrunError, int], dict[str, Any]]
    prefix: str
    streams_overflow: bool = False


class _Signal(Enum):
    """What interrupts the wait for the engine's events."""

    DISCONNECTED = auto()
    SILENCE = auto()  # time for a keep-alive
    SHUTDOWN = auto()  # the grace period is over
    TIMEOUT = auto()


class _ClientDisconnected(Exception):  # noqa: N818 - not an error of ours
    pass


class Traffic:
    """Counts the running requests, limits them, and drains them at shutdown.

    Args:
        most: maximum number of running and queued answers.
        answer_seconds: maximum duration of an answer, queueing included.

    Attributes:
        is_draining: new requests are refused.
    """

    def __init__(self, most: int, answer_seconds: float) -> None:
        self.is_draining, self.answer_seconds = False, answer_seconds
        self._most, self._answers, self._drained_at = most, 0, math.inf
        self._exchanges: set[HttpExchange] = set()

    @property
    def is_busy(self) -> bool:
        """True while a request is being answered."""
        return self._answers > 0

    @contextmanager
    def admitted(self, answers: int, exchange: HttpExchange | None = None) -> Iterator[None]:
        """Count a request's answers while the block runs.

        Args:
            exchange: is notified when the grace period is over; a request without one is cancelled then.

        Raises:
            BusyError: the limit is reached.
            DrainingError: the server is shutting down.
        """
        if self.is_draining:
            raise DrainingError("the server is shutting down")
        if self._answers + answers > self._most:
            raise BusyError("too many requests wait already", hint="try again in a moment")
        exchanges = {exchange} if exchange is not None else set()
        self._answers += answers
        self._exchanges |= exchanges
        try:
            yield
        finally:
            self._answers -= answers
            self._exchanges -= exchanges

    def end_within(self, seconds: float) -> None:
        """Refuse new requests and limit the time of running ones; the shortest limit given counts."""
        self.is_draining = True
        self._drained_at = min(self._drained_at, time.monotonic() + seconds)

    async def drain(self) -> None:
        """Wait for running answers, then end the unfinished ones with an error."""
        while self.is_busy and time.monotonic() < self._drained_at:
            await asyncio.sleep(0.05)
        for exchange in list(self._exchanges):
            exchange.put(_Signal.SHUTDOWN)
        ends_at = time.monotonic() + _ERROR_SECONDS
        while self._exchanges and time.monotonic() < ends_at:
            await asyncio.sleep(0.01)


class ServerState(NamedTuple):
    """State that all exchanges of a server share.

    Attributes:
        sampling: fields of SamplingParams that the command line fixes for every client.
    """

    pool: Pool
    traffic: Traffic
    metrics: ServerMetrics
    sampling: Mapping[str, Any]


class HttpExchange:
    """One request and its response."""

    def __init__(self, dialect: Dialect, shared: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._dialect = dialect
        self._pool, self._traffic, self._metrics, self._sampling = shared
        self._log: dict[str, Any] = scope["state"]
        self._receive, self._send = receive, send
        self._inbox: asyncio.Queue[Heard | _Signal] = asyncio.Queue()
        self.put = self._inbox.put_nowait
        self._writer: Writer | None = None
        self._is_stream = False
        self._has_started = False
        self._task = _this_task()
        self._last_sent_at = time.monotonic()
        self._is_sending = False

    async def run(self) -> None:
        """Read the request, answer it, and map every error to the protocol's."""
        try:
            data = await read_body(self._receive)
            body, request = await asyncio.to_thread(self._parse, data) if len(data) > _LONG_BODY else self._parse(data)
            with self._traffic.admitted(request.n, self):
                async with self._pool.lease(request.model, request.keep_seconds) as model:
                    await self._answer(body, request, model)
        except LlmrunError as error:
            await self._fail(error)
        except _ClientDisconnected:
            self._log["reason"] = "left"

    def _parse(self, data: bytes) -> tuple[dict[str, Any], CompletionRequest]:
        body = parse_json(data)
        request = self._dialect.read(body)
        return body, request._replace(sampling={**request.sampling, **self._sampling})

    async def _answer(self, body: Mapping[str, Any], request: CompletionRequest, model: PooledModel) -> None:
        name = request.model or model.name
        self._log["model"] = name
        envelope = Envelope(f"{self._dialect.prefix}{secrets.token_hex(12)}", int(time.time()), name)
        self._writer = writer = self._dialect.writer(body, envelope)
        self._is_stream = request.stream
        if not request.request.messages and request.request.prompt is None:  # only loads or unloads the model
            if request.keep_seconds != 0:
                await self._pool.ready(model)
            await respond(self._send, 200, writer.whole())
            return
        responses = ResponseStreams(self._pool, model, request, self.put, self._metrics)
        watching = [asyncio.ensure_future(self._watch_client()), asyncio.ensure_future(self._watch_clock())]
        try:
            responses.start()
            while not responses.is_done:
                await self._forward(responses, writer)
            if request.stream:
                await self._send_chunk(writer.end(), is_last=True)
            else:
                await respond(self._send, 200, writer.whole())
        finally:
            responses.cancel()
            for task in watching:
                task.cancel()

    async def _forward(self, responses: ResponseStreams, writer: Writer) -> None:
        """Wait for events, and send everything that has arrived as one chunk.

        Raises:
            _ClientDisconnected: the client has left.
            DrainingError, AnswerTimeoutError: the answer ends early.
            LlmrunError: the engine failed.
        """
        chunk = bytearray()
        try:
            for item in await self._next_items():
                if item is _Signal.DISCONNECTED:
                    raise _ClientDisconnected
                if item is _Signal.SHUTDOWN:
                    raise DrainingError("the server is shutting down")
                if item is _Signal.TIMEOUT:
                    raise AnswerTimeoutError(f"the answer takes longer than {self._traffic.answer_seconds:g} seconds")
                if isinstance(item, _Signal):
                    chunk += await self._keep_alive(writer) if self._is_stream else b""
                    continue
                for part in responses.take(item):
                    if isinstance(part, ResponseStarted) and self._is_stream:
                        chunk += await self._start_stream(writer)
                    chunk += writer.feed(part)
                    if isinstance(part, (ResponseStarted, ResponseFinished)):
                        self._log_part(part)
        finally:
            if self._is_stream and chunk:
                await self._send_chunk(bytes(chunk))

    async def _next_items(self) -> list[Heard | _Signal]:
        items = [await self._inbox.get()]
        while not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        return items

    async def _start_stream(self, writer: Writer) -> bytes:
        """Send the headers of a stream if they were not sent yet; return its first bytes."""
        if self._has_started:
            return b""
        self._has_started = True
        head: Headers = [(b"content-type", writer.media_type.encode()), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})
        return writer.begin()

    async def _keep_alive(self, writer: Writer) -> bytes:
        """Return bytes that keep clients and proxies from timing out."""
        if not self._has_started:
            return await self._start_stream(writer)
        return sse.COMMENT if writer.media_type == sse.EVENT_STREAM else b""

    async def _send_chunk(self, data: bytes, *, is_last: bool = False) -> None:
        self._last_sent_at, self._is_sending = time.monotonic(), True
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._last_sent_at, self._is_sending = time.monotonic(), False

    async def _fail(self, error: LlmrunError) -> None:
        """Send an error: as an HTTP status before the first byte, after it as an event of the stream."""
        self._log["reason"] = error.code
        if error.http_status >= 500:
            self._log["error"] = str(error)
        writer, start = self._writer, b""
        if writer and self._is_stream and self._dialect.streams_overflow and isinstance(error, ContextOverflowError):
            start = await self._start_stream(writer)
        if self._has_started and writer is not None:
            await self._send_chunk(start + writer.error(error), is_last=True)
        else:
            await refuse(self._send, error, self._dialect.error_body)

    def _log_part(self, part: ResponseStarted | ResponseFinished) -> None:
        if isinstance(part, ResponseStarted):
            self._log["prompt_tokens"], self._log["cached_tokens"] = part.prompt_tokens, part.cached_tokens
        else:
            self._log["completion_tokens"] = self._log.get("completion_tokens", 0) + part.stats.completion_tokens
            self._log["reason"] = part.reason

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.put(_Signal.DISCONNECTED)

    async def _watch_clock(self) -> None:
        """Signal silence and the timeout; cancel the exchange if the client stalls."""
        ends_at = time.monotonic() + self._traffic.answer_seconds
        while True:
            remaining = ends_at - time.monotonic()
            await asyncio.sleep(max(min(SILENCE_SECONDS, remaining), 0.0))
            silent = time.monotonic() - self._last_sent_at
            if self._is_sending and silent > STALL_SECONDS:
                self._log["reason"] = "left"
                self._task.cancel()
            elif time.monotonic() >= ends_at:
                self.put(_Signal.TIMEOUT)
                ends_at = math.inf
            elif not self._is_sending and silent >= SILENCE_SECONDS:
                self.put(_Signal.SILENCE)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def read_body(receive: Receive) -> bytes:
    """Return a request's whole body.

    Raises:
        BodyTooLargeError: the body exceeds the limit.
        MalformedRequestError: the client disconnected before its end.
    """
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise MalformedRequestError("the body is not complete")
        data += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(data)


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body that has to be a JSON object.

    Raises:
        MalformedRequestError: it is something else, or nested too deep.
    """
    try:
        body = load_json(data, parse_constant=_refuse_constant)
    except ValueError as error:
        raise MalformedRequestError("the body is not JSON", why=str(error)) from None
    if not isinstance(body, dict):
        raise MalformedRequestError("the body must be a JSON object")
    _check_size(body)
    return body


def _check_size(body: dict[str, Any]) -> None:
    """Raise MalformedRequestError if a body has so many objects and lists that reading it takes long."""
    level: list[Any] = [body]
    count = 0
    while level:
        count += len(level)
        if count > MOST_CONTAINERS:
            raise MalformedRequestError("the body is too complex", why=f"{MOST_CONTAINERS:,} objects and lists at most")
        children = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for each in children for child in each if isinstance(child, (dict, list))]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def refuse(send: Send, error: LlmrunError, body: Callable[[LlmrunError, int], dict[str, Any]]) -> None:
    """Send an error response."""
    extra: Headers = [(b"retry-after", _RETRY_SECONDS)] if error.http_status == 503 else []
    if error.http_status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.http_status == 400:
        extra.append((b"connection", b"close"))  # the start of a next request is unknown
    await respond(send, error.http_status, body(error, error.http_status), extra)


async def respond(send: Send, status: int, body: Any, extra: Headers | None = None) -> None:
    """Send a JSON response."""
    data = sse.to_json(body).encode()
    head: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *(extra or ())]})
    await send({"type": "http.response.body", "body": data})
