"""One HTTP request for an answer: the body comes in, what an engine says goes out, in the client's protocol.

Owns when headers are sent, what fills silence, and what ends an answer early: the client left, reads too slowly, or
the server is about to end. Must not know JSON shapes or how engines are kept.
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
"""After so long without a byte a client is told that the server lives."""
STALL_SECONDS = 60.0
"""A client that takes nothing for so long has left."""
_LONG_BODY = 16 * 1024  # bytes: reading it is worth another thread
_RETRY_SECONDS = b"2"
MOST_CONTAINERS = 65_536
"""Objects and lists of a body, several times those of the longest real ones: each is copied some times."""
_LAST_WORDS_SECONDS = 1.0  # for the errors that streams end with


class Dialect(NamedTuple):
    """One way to ask for an answer.

    Attributes:
        read, writer, error_body: as every module of protocols/ has them.
        prefix: of an answer's id.
        streams_overflow: a stream's client is told in the stream that its prompt is too long, not by HTTP.
    """

    read: Callable[[Mapping[str, Any]], CompletionRequest]
    writer: Callable[[Mapping[str, Any], Envelope], Writer]
    error_body: Callable[[LlmrunError, int], dict[str, Any]]
    prefix: str
    streams_overflow: bool = False


class _Signal(Enum):
    """What an exchange hears besides events."""

    GONE = auto()  # the client has left
    TICK = auto()  # nothing was said for a while
    DRAIN = auto()  # the time to end is over
    LATE = auto()  # the answer takes too long


class _ClientDisconnected(Exception):  # noqa: N818 - not an error of ours
    """Nobody is there to be answered."""


class Traffic:
    """The requests that are being answered.

    Args:
        most: answers at the same time, those that wait included.
        answer_seconds: that an answer may take, waiting included.

    Attributes:
        is_draining: no more are taken.
    """

    def __init__(self, most: int, answer_seconds: float) -> None:
        self.is_draining, self.answer_seconds = False, answer_seconds
        self._most, self._answers, self._drained_at = most, 0, math.inf
        self._exchanges: set[HttpExchange] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self._answers > 0

    @contextmanager
    def admitted(self, answers: int, exchange: HttpExchange | None = None) -> Iterator[None]:
        """Count so many answers until the block ends.

        Args:
            exchange: is told when the time to end is over; a request without one is cancelled then.

        Raises:
            BusyError: there are too many.
            DrainingError: the server is about to end.
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
        """Take no more requests, and let running answers go on for some time; a shorter time than before counts."""
        self.is_draining = True
        self._drained_at = min(self._drained_at, time.monotonic() + seconds)

    async def drain(self) -> None:
        """Wait for running answers; those that are not finished in time end with an error."""
        while self.is_busy and time.monotonic() < self._drained_at:
            await asyncio.sleep(0.05)
        for exchange in list(self._exchanges):
            exchange.put(_Signal.DRAIN)
        ends_at = time.monotonic() + _LAST_WORDS_SECONDS
        while self._exchanges and time.monotonic() < ends_at:
            await asyncio.sleep(0.01)


class ServerState(NamedTuple):
    """What all exchanges of a server have in common: the models, who is being answered, what is counted.

    Attributes:
        sampling: fields of SamplingParams that clients can't change.
    """

    pool: Pool
    traffic: Traffic
    metrics: ServerMetrics
    sampling: Mapping[str, Any]


class HttpExchange:
    """One request and its answer.

    Args:
        dialect: the protocol it is in.
        shared: with all others.
    """

    def __init__(self, dialect: Dialect, shared: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._dialect = dialect
        self._pool, self._traffic, self._metrics, self._sampling = shared
        self._log: dict[str, Any] = scope["state"]
        self._receive, self._send = receive, send
        self._heard: asyncio.Queue[Heard | _Signal] = asyncio.Queue()
        self.put = self._heard.put_nowait
        self._writer: Writer | None = None
        self._is_stream = False
        self._has_begun = False
        self._task = _this_task()
        self._spoke_at = time.monotonic()
        self._is_sending = False

    async def run(self) -> None:
        """Answer it."""
        try:
            data = await read_body(self._receive)
            body, asked = await asyncio.to_thread(self._read, data) if len(data) > _LONG_BODY else self._read(data)
            with self._traffic.admitted(asked.n, self):
                async with self._pool.lease(asked.model, asked.keep_seconds) as kept:
                    await self._answer(body, asked, kept)
        except LlmrunError as error:
            await self._fail(error)
        except _ClientDisconnected:
            self._log["reason"] = "left"

    def _read(self, data: bytes) -> tuple[dict[str, Any], CompletionRequest]:
        body = parse_json(data)
        asked = self._dialect.read(body)
        return body, asked._replace(sampling={**asked.sampling, **self._sampling})

    async def _answer(self, body: Mapping[str, Any], asked: CompletionRequest, kept: PooledModel) -> None:
        name = asked.model or kept.name
        self._log["model"] = name
        envelope = Envelope(f"{self._dialect.prefix}{secrets.token_hex(12)}", int(time.time()), name)
        self._writer = writer = self._dialect.writer(body, envelope)
        self._is_stream = asked.stream
        if not asked.request.messages and asked.request.prompt is None:  # it is only to be loaded, or to go
            if asked.keep_seconds != 0:
                await self._pool.ready(kept)
            await respond(self._send, 200, writer.whole())
            return
        answers = ResponseStreams(self._pool, kept, asked, self.put, self._metrics)
        watching = [asyncio.ensure_future(self._watch_client()), asyncio.ensure_future(self._watch_clock())]
        try:
            answers.start()
            while not answers.is_done:
                await self._take(answers, writer, is_stream=asked.stream)
            if asked.stream:
                await self._say(writer.end(), is_last=True)
            else:
                await respond(self._send, 200, writer.whole())
        finally:
            answers.cancel()
            for task in watching:
                task.cancel()

    async def _take(self, answers: ResponseStreams, writer: Writer, *, is_stream: bool) -> None:
        """Wait for what comes, and say all that has come at once."""
        said = bytearray()
        try:
            for heard in await self._all_heard():
                if heard is _Signal.GONE:
                    raise _ClientDisconnected
                if heard is _Signal.DRAIN:
                    raise DrainingError("the server is shutting down")
                if heard is _Signal.LATE:
                    raise AnswerTimeoutError(f"the answer takes longer than {self._traffic.answer_seconds:g} seconds")
                if isinstance(heard, _Signal):
                    said += await self._break_silence(writer) if is_stream else b""
                    continue
                for part in answers.take(heard):
                    if isinstance(part, ResponseStarted) and is_stream:
                        said += await self._begin(writer)
                    said += writer.feed(part)
                    if isinstance(part, (ResponseStarted, ResponseFinished)):
                        self._note(part)
        finally:
            if is_stream and said:
                await self._say(bytes(said))

    async def _all_heard(self) -> list[Heard | _Signal]:
        found = [await self._heard.get()]
        while not self._heard.empty():
            found.append(self._heard.get_nowait())
        return found

    async def _begin(self, writer: Writer) -> bytes:
        """Send the headers of a stream, once; gives what comes first in it."""
        if self._has_begun:
            return b""
        self._has_begun = True
        head: Headers = [(b"content-type", writer.media_type.encode()), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})
        return writer.begin()

    async def _break_silence(self, writer: Writer) -> bytes:
        """What shows a client, and whatever is between, that the server lives."""
        if not self._has_begun:
            return await self._begin(writer)
        return sse.COMMENT if writer.media_type == sse.EVENT_STREAM else b""

    async def _say(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a piece of the stream."""
        self._spoke_at, self._is_sending = time.monotonic(), True
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._spoke_at, self._is_sending = time.monotonic(), False

    async def _fail(self, error: LlmrunError) -> None:
        """End with an error: one of HTTP where nothing was sent yet, else one in the stream."""
        self._log["reason"] = error.code
        if error.http_status >= 500:
            self._log["error"] = str(error)
        writer, begin = self._writer, b""
        if writer and self._is_stream and self._dialect.streams_overflow and isinstance(error, ContextOverflowError):
            begin = await self._begin(writer)
        if self._has_begun and writer is not None:
            await self._say(begin + writer.error(error), is_last=True)
        else:
            await refuse(self._send, error, self._dialect.error_body)

    def _note(self, part: ResponseStarted | ResponseFinished) -> None:
        """For the log."""
        if isinstance(part, ResponseStarted):
            self._log["prompt_tokens"], self._log["cached_tokens"] = part.prompt_tokens, part.cached_tokens
        else:
            self._log["completion_tokens"] = self._log.get("completion_tokens", 0) + part.stats.completion_tokens
            self._log["reason"] = part.reason

    async def _watch_client(self) -> None:
        """Hear that the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.put(_Signal.GONE)

    async def _watch_clock(self) -> None:
        """Break silence, and give up a client that takes nothing."""
        ends_at = time.monotonic() + self._traffic.answer_seconds
        while True:
            left = ends_at - time.monotonic()
            await asyncio.sleep(max(min(SILENCE_SECONDS, left), 0.0))
            silent = time.monotonic() - self._spoke_at
            if self._is_sending and silent > STALL_SECONDS:
                self._log["reason"] = "left"
                self._task.cancel()
            elif time.monotonic() >= ends_at:
                self.put(_Signal.LATE)
                ends_at = math.inf
            elif not self._is_sending and silent >= SILENCE_SECONDS:
                self.put(_Signal.TICK)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def read_body(receive: Receive) -> bytes:
    """A request's whole body.

    Raises:
        BodyTooLargeError: it is.
        MalformedRequestError: the client left before its end.
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
    """A body's JSON object.

    Raises:
        MalformedRequestError: it is none, or nested too deeply.
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
    """Refuse a body that takes long to read.

    Raises:
        MalformedRequestError: it has too many objects and lists.
    """
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
    """Answer with an error."""
    extra: Headers = [(b"retry-after", _RETRY_SECONDS)] if error.http_status == 503 else []
    if error.http_status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.http_status == 400:
        extra.append((b"connection", b"close"))  # of what follows nobody knows where it begins
    await respond(send, error.http_status, body(error, error.http_status), extra)


async def respond(send: Send, status: int, body: Any, extra: Headers | None = None) -> None:
    """Answer with JSON."""
    data = sse.to_json(body).encode()
    head: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *(extra or ())]})
    await send({"type": "http.response.body", "body": data})
