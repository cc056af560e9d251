"""One HTTP request for completions: read the body, lease the model, ask its engine, send the answers as they come.

ResponseStreams is the engine's side: it requests the answers, again if the engine dies before one has started.
HttpExchange is the client's side: headers, keep-alives and errors. A writer of the client's protocol turns the events
of the one into the bytes of the other; watch.py stops both.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple

from llmrun.errors import (
    CancelledError,
    ContextOverflowError,
    EngineCrashedError,
    LlmrunError,
    UsageError,
    as_llmrun_error,
)
from llmrun.gguf.pooling import refuse_answers
from llmrun.protocol.jobs.evaluate import PROMPT_SCORES, ScorePrompt
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    Generate,
    Rewriting,
    Started,
    Stats,
    TextDelta,
    TokenLogprob,
)
from llmrun.server.answer import EVENT_STREAM, SSE_COMMENT, AnswerWriter, CompletionRequest, Envelope
from llmrun.server.connection import EngineConnection
from llmrun.server.http import (
    LONG_BODY,
    BusyError,
    ClientLeftError,
    DrainingError,
    ErrorBody,
    Headers,
    Receive,
    Scope,
    Send,
    log_internal,
    parse_json,
    read_body,
    send_error,
    send_json,
)
from llmrun.server.listener import CHUNK_WRITER, ChunkWriter
from llmrun.server.metrics import RequestClock, ServerMetrics
from llmrun.server.pool import Pool, PooledAnswer, PooledModel, prompt_hash
from llmrun.server.protocols.attachments import DOCUMENT_THREADS, has_documents
from llmrun.server.protocols.fields import header_safe
from llmrun.server.protocols.models import model_header, shown_name
from llmrun.server.protocols.stored_responses import ResponseStore
from llmrun.server.watch import Watch, watched

KEEP_ALIVE_SECONDS = 5.0
"""A stream without output for this long gets a keep-alive."""
STALL_SECONDS = 60.0
"""A client that reads nothing for this long counts as disconnected."""
_MOST_IGNORED = 1000  # characters of the header that names what is ignored
_PIECE_BYTES = 64 * 1024  # of a stream, sent at once to a client that reads more slowly than the model writes
_GATHER_TURNS = 4
"""Turns of the event loop before a request is sent: requests that arrive with it are read meanwhile, to share a prefill
in the engine."""
_ERROR_SECONDS = 1.0  # to send the errors that end streams at shutdown
_MOST_ENGINES = 3
"""Maximum number of engines that a request is sent to."""

AnswerEvent = Event | LlmrunError | None
"""An event of an answer, the error that ended it, or None after its last event."""


class CompletionApi(NamedTuple):
    """One protocol in which completions are requested."""

    read: Callable[[Mapping[str, Any]], CompletionRequest]
    writer: Callable[[Mapping[str, Any], Envelope], AnswerWriter]
    error_body: ErrorBody
    id_prefix: str
    streams_overflow: bool = False  # a prompt that is too long ends a stream with an error, instead of an HTTP status
    expands: bool = False  # bodies may refer to what is kept in ServerState.responses
    kept: Callable[[Mapping[str, Any]], list[Any] | None] | None = None  # what to keep of a body beside its answer


_Item = tuple[int, AnswerEvent] | Exception | None
"""What a waiting exchange gets: an event and the index of its answer, an error of its own, or None if nothing was sent
for KEEP_ALIVE_SECONDS."""


class _Backlog:
    """The bytes that a client has not read yet: up to a limit in memory, all of them in a file beyond it."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=_PIECE_BYTES)  # noqa: SIM115 - closed by close()
        self._n_read = 0

    def write(self, data: bytes) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(data)

    def read(self) -> bytes:
        """Remove and return the next bytes; b"" if there are none."""
        self._file.seek(self._n_read)
        data = self._file.read(_PIECE_BYTES)
        self._n_read += len(data)
        if not data:
            self._file.truncate(0)
            self._n_read = 0
        return data

    def close(self) -> None:
        self._file.close()


class Traffic:
    """The requests in progress.

    Args:
        limit: maximum number of answers, waiting ones included.
        answer_seconds: maximum time for one answer, waiting included.
    """

    def __init__(self, limit: int, answer_seconds: float) -> None:
        self.is_draining = False
        self._answer_seconds = answer_seconds
        self._limit, self._n_answers, self._drain_deadline = limit, 0, math.inf
        self._watches: set[Watch] = set()

    @property
    def is_busy(self) -> bool:
        return self._n_answers > 0

    @asynccontextmanager
    async def admitted(self, n_answers: int, receive: Receive) -> AsyncIterator[Watch]:
        """Count the answers of a request as in progress until the block ends.

        Args:
            receive: of the request. The block is stopped as watched() says, and when the grace period is over.

        Raises:
            UsageError: these are more answers than may ever be in progress.
            BusyError: too many requests wait.
            DrainingError: the server is shutting down.
        """
        if self.is_draining:
            raise DrainingError("the server is shutting down")
        if n_answers > self._limit:
            hint = "ask for fewer, or start the server with a larger --queue"
            raise UsageError(f"{n_answers} answers are requested; the server gives {self._limit} at once", hint=hint)
        if self._n_answers + n_answers > self._limit:
            raise BusyError("too many requests wait already", hint="try again in a moment")
        async with watched(receive, self._answer_seconds) as watch:
            self._n_answers += n_answers
            self._watches.add(watch)
            try:
                yield watch
            finally:
                self._n_answers -= n_answers
                self._watches.remove(watch)

    def start_draining(self, grace_seconds: float) -> None:
        """Refuse new requests, and set the time for running answers; a shorter time than before replaces it."""
        self.is_draining = True
        self._drain_deadline = min(self._drain_deadline, time.monotonic() + grace_seconds)

    async def drain(self) -> None:
        """Wait for running answers and jobs; end the ones that exceed the grace period with an error."""
        while self.is_busy and time.monotonic() < self._drain_deadline:
            await asyncio.sleep(0.05)
        for watch in list(self._watches):
            watch.end(DrainingError("the server is shutting down"))
        deadline = time.monotonic() + _ERROR_SECONDS
        while self._watches and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


class ServerState(NamedTuple):
    """The objects that all requests of a server share."""

    pool: Pool
    traffic: Traffic
    metrics: ServerMetrics
    sampling: Mapping[str, Any]  # fields of SamplingParams that override the client's
    responses: ResponseStore

    @asynccontextmanager
    async def engine(
        self, model: str, receive: Receive, keep_seconds: float | None = None
    ) -> AsyncIterator[tuple[EngineConnection, PooledModel]]:
        """Lease a model for jobs, which count for the queue's limit too; load it first if necessary.

        Args:
            receive: of the request, see Traffic.admitted().
        """
        async with self.traffic.admitted(1, receive), self.pool.lease(model, keep_seconds) as pooled:
            yield await self.pool.ready(pooled), pooled


class _Choice:
    """One answer, as its engine sees it."""

    def __init__(self, timer: RequestClock) -> None:
        self.connection: EngineConnection | None = None
        self.request = 0  # its number in that engine
        self.n_engines = 0
        self.asked: AnswerRequest | None = None  # as the engine got it
        self.is_started = self.is_finished = False
        self.timer = timer
        self.slot: int | None = None  # in PooledModel.running, while it runs


class ResponseStreams:
    """The answers to one request, requested of the model's engine.

    Args:
        pooled: the model, leased.
        put: called in the event loop with the index of an answer and each of its events, for notice().
        arrived: when the server had read the request, see AnswerRequest.

    Attributes:
        rewritten: of the conversation, for the first time with this chat template.
    """

    def __init__(
        self,
        pool: Pool,
        pooled: PooledModel,
        completion: CompletionRequest,
        put: Callable[[int, AnswerEvent], None],
        metrics: ServerMetrics,
        arrived: float,
    ) -> None:
        self._pool, self._pooled, self._completion, self._put = pool, pooled, completion, put
        self._choices = [_Choice(metrics.request(pooled.name, arrived)) for _ in range(completion.n_choices)]
        self._arrived = arrived
        self.rewritten: tuple[Rewriting, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    def _prompt(self, index: int) -> str:
        return prompt_hash(self._completion.of_choice(index))

    @property
    def is_done(self) -> bool:
        return all(choice.is_finished for choice in self._choices)

    def start(self) -> None:
        """Request all answers; a failure goes to put() as an error."""
        for index in range(len(self._choices)):
            self._spawn(index)

    def _spawn(self, index: int) -> None:
        task = asyncio.ensure_future(self._submit(index))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, index: int) -> None:
        """Send the request for one answer to the engine, after the model is loaded."""
        choice = self._choices[index]
        choice.connection = None
        try:
            if self._pool.crashes:
                self._pool.crashes.check(self._prompt(index))
            connection = await self._pool.ready(self._pooled)
            request = self._request(index)
        except LlmrunError as error:
            self._put(index, error)
            return
        choice.connection, choice.request, choice.asked = connection, connection.next_request(), request
        choice.n_engines += 1
        connection.send(Generate(choice.request, request), partial(self._put, index))

    def _request(self, index: int) -> AnswerRequest:
        """Return the request for the engine, with sampling by the client, else by the preset, else by the model."""
        model = self._pooled.loaded_model
        refuse_answers(model.header)
        name = self._completion.model
        sampling = self._pool.sampling(self._pooled, name, self._completion.sampling)[0]
        if sampling.seed is not None and (place := index % self._completion.n):
            sampling = replace(sampling, seed=(sampling.seed + place) % 2**32)
        speculation = model.drafting.speculation(self._completion.speculate)
        request = self._pool.complete(self._pooled, name, self._completion.of_choice(index))
        return replace(request, sampling=sampling, speculation=speculation, arrived=self._arrived)

    def asked(self, index: int) -> AnswerRequest:
        """Return the request for an answer that has started, as the engine got it."""
        asked = self._choices[index].asked
        assert asked is not None
        return asked

    def notice(self, index: int, event: AnswerEvent) -> None:
        """Follow the events of an answer: count, and request it again if its engine died before it started.

        Raises:
            LlmrunError: the answer failed.
        """
        choice = self._choices[index]
        if type(event) is TextDelta:
            choice.timer.delta(event)
            if choice.slot is not None:
                self._pooled.running[choice.slot].add(event)
        elif isinstance(event, EngineCrashedError):
            self._recover(index, event)
        elif isinstance(event, LlmrunError):
            raise event
        elif isinstance(event, Started):
            choice.is_started = True
            choice.slot = next(slot for slot in count() if slot not in self._pooled.running)
            asked = PooledAnswer(choice.request, self.asked(index), event, self._completion.stream)
            self._pooled.running[choice.slot] = asked
            self.rewritten += event.rewritten
            choice.timer.started(event)
        elif isinstance(event, Finished):
            choice.is_finished = True
            self._release(choice)
            if self._pool.crashes:
                self._pool.crashes.forget(self._prompt(index))
            choice.timer.finished(event)

    def _recover(self, index: int, crash: EngineCrashedError) -> None:
        """Resend the request after its engine died, if the answer had not started.

        Raises:
            EngineCrashedError: the answer had started, the model can't be loaded, or too many engines died.
        """
        choice = self._choices[index]
        if choice.connection is None:
            raise crash
        if choice.is_started or choice.connection.is_first_waiting():
            self._pool.crashes.add(self._prompt(index), choice.connection.pid)
        if choice.is_started or choice.n_engines >= _MOST_ENGINES:
            raise crash
        self._spawn(index)

    def stop(self) -> None:
        """Let the engine end all unfinished answers, with the reason "cancelled"."""
        for index, choice in enumerate(self._choices):
            if choice.connection is None:
                self._put(index, CancelledError("the client cancelled it"))
            elif not choice.is_finished:
                choice.connection.cancel(choice.request)

    def _release(self, choice: _Choice) -> None:
        if choice.slot is not None:
            del self._pooled.running[choice.slot]
            choice.slot = None

    def cancel(self) -> None:
        """Cancel all unfinished answers; their events are no longer delivered to a client."""
        for task in self._tasks:
            task.cancel()
        for choice in self._choices:
            self._release(choice)
            if not choice.is_finished:
                choice.timer.aborted()
                if choice.connection is not None:
                    choice.connection.cancel(choice.request)


class Exchange(ABC):
    """One HTTP request, and its response of answers.

    Args:
        streams_overflow: see CompletionApi.
    """

    def __init__(
        self,
        error_body: ErrorBody,
        state: ServerState,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        streams_overflow: bool = False,
    ) -> None:
        self._error_body, self._streams_overflow = error_body, streams_overflow
        self._pool, self._traffic, self._metrics, self._sampling, self._responses = state
        self._log: dict[str, Any] = scope["state"]
        self._owner: str = scope["owner"]
        self._receive, self._send = receive, send
        self._direct: ChunkWriter | None = scope.get("extensions", {}).get(CHUNK_WRITER)
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue()
        self._unhandled: set[int] = set()  # the answers with events in the inbox
        self._backlog = _Backlog()
        self._is_waiting = False  # for the next event, and everything before it was sent
        self._answers: ResponseStreams | None = None
        self._writer: AnswerWriter | None = None
        self._is_stream = False
        self._has_sent_headers = False
        self._headers: dict[bytes, bytes] = {}  # of our own, beside those of every answer
        self._watch: Watch | None = None
        self._sent_at = time.monotonic()
        self._is_sending = False
        self._arrived = 0.0

    async def run(self) -> None:
        """Answer the request. An error becomes an HTTP error, or the last event of the stream."""
        try:
            await self._work()
        except ClientLeftError as error:
            self._log["reason"] = error.code
        except LlmrunError as error:
            await self._send_error(error)
        except Exception as error:  # a bug, or too little memory
            await self._send_error(as_llmrun_error(error))
        finally:
            self._backlog.close()

    @abstractmethod
    async def _work(self) -> None:
        """Answer the request."""

    def _show_model(self, name: str) -> None:
        """Name the model in the log and in a header."""
        self._log["model"] = name
        self._headers |= model_header(name)

    async def _answer(self, completion: CompletionRequest, pooled: PooledModel, writer: AnswerWriter) -> None:
        """Let the model answer, and send what the writer makes of it but for its end."""
        self._writer, self._is_stream = writer, completion.stream
        self._answers = answers = ResponseStreams(
            self._pool, pooled, completion, self.put, self._metrics, self._arrived
        )
        try:
            for _ in range(_GATHER_TURNS):
                await asyncio.sleep(0)
            answers.start()
            while not answers.is_done:
                await self._forward(answers, writer)
        finally:
            answers.cancel()

    @contextmanager
    def _kept_alive(self) -> Iterator[None]:
        """Watch inside the block that the client reads what is sent, and request keep-alives."""
        clock = asyncio.ensure_future(self._watch_sending())
        try:
            yield
        finally:
            clock.cancel()

    def _stop(self) -> None:
        """Let the model end the answers that are not finished."""
        if self._answers is not None:
            self._answers.stop()

    def _name_ignored(self, paths: tuple[str, ...]) -> None:
        """Name more parts of the request that are not honoured, in the log and in a header if it is not sent yet."""
        if paths:
            self._log["ignored"] = named = (*self._log.get("ignored", ()), *paths)
            listed = ", ".join(map(header_safe, named))[:_MOST_IGNORED].rstrip()
            self._headers[b"x-llmrun-ignored"] = listed.encode()

    async def _forward(self, answers: ResponseStreams, writer: AnswerWriter) -> None:
        """Wait for events, and send everything they add to the stream as one chunk."""
        chunk = bytearray()
        try:
            for item in await self._next_items():
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    chunk += await self._keep_alive(writer)
                    continue
                choice, event = item
                answers.notice(choice, event)
                if event is None or isinstance(event, LlmrunError):
                    continue
                if isinstance(event, Started):
                    writer.requests[choice] = answers.asked(choice)
                    if choice == 0:
                        self._name_ignored(event.left_out)
                        if event.history is not None and event.history.kept_tools:
                            self._headers[b"x-llmrun-kept-tools"] = b"%d" % event.history.kept_tools
                    chunk += await self._start_stream(writer)
                chunk += writer.feed(choice, event)
                if isinstance(event, Started):
                    self._log_start(event, answers.rewritten)
                elif isinstance(event, Finished):
                    self._log_end(event.stats, writer.answers[choice].reason)
        finally:
            self._unhandled.clear()
            if self._is_stream and chunk:
                await self._send_chunk(bytes(chunk))

    def put(self, choice: int, event: AnswerEvent) -> None:
        """Take an event, in the event loop. Text of a running answer is handled at once, without waking the task.

        So is text for a client that is slow: as bytes in a backlog it takes the least memory.
        """
        is_next = (self._is_waiting and self._is_ready()) or (self._is_sending and choice not in self._unhandled)
        if is_next and type(event) is TextDelta:
            try:
                self._write_text(choice, event)
            except Exception as error:  # raised in the task: other requests go on
                self._wake(error)
        else:
            self._unhandled.add(choice)
            self._wake((choice, event))

    def _wake(self, item: _Item) -> None:
        self._is_waiting = False
        self._inbox.put_nowait(item)

    def _is_ready(self) -> bool:
        """Return whether text can be handled without the task: no data waits for a slow client."""
        if not self._is_stream:
            return True
        return self._has_sent_headers and self._direct is not None and self._direct.is_ready

    def _write_text(self, choice: int, delta: TextDelta) -> None:
        assert self._answers is not None
        assert self._writer is not None
        self._answers.notice(choice, delta)
        chunk = self._writer.feed(choice, delta)
        if self._is_stream and chunk and self._is_sending:
            self._backlog.write(chunk)
        elif self._is_stream and chunk:
            assert self._direct is not None
            self._direct.write(chunk)
            self._sent_at = time.monotonic()

    async def _next_items(self) -> list[_Item]:
        """Wait for one item; return all that have arrived by then."""
        self._is_waiting = self._inbox.empty()
        try:
            items = [await self._inbox.get()]
        finally:
            self._is_waiting = False
        while not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        return items

    async def _start_stream(self, writer: AnswerWriter) -> bytes:
        """Send the headers of a stream if they were not sent yet; return the first bytes of its body."""
        if self._has_sent_headers or not self._is_stream:
            return b""
        self._has_sent_headers = True
        headers: Headers = [(b"content-type", writer.media_type.encode()), (b"x-accel-buffering", b"no")]
        headers += self._headers.items()
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        return writer.begin()

    async def _keep_alive(self, writer: AnswerWriter) -> bytes:
        """Return bytes that show the client, and proxies in between, that the server still works on the answer."""
        if not self._has_sent_headers:
            return await self._start_stream(writer)
        return SSE_COMMENT if writer.media_type == EVENT_STREAM else b""

    async def _send_chunk(self, data: bytes, *, is_last: bool = False) -> None:
        """Send bytes of a stream, and the text that comes until they are sent."""
        self._is_sending = True
        while True:
            self._sent_at = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if not (data := self._backlog.read()):
                break
        self._sent_at, self._is_sending = time.monotonic(), False

    async def _send_end(self, writer: AnswerWriter) -> None:
        """Send the end of a stream, or the whole answer; nothing stops it any more but a client that does not read."""
        assert self._watch is not None
        self._watch.answered()
        if self._is_stream:
            await self._send_chunk(writer.end(), is_last=True)
        else:
            await send_json(self._send, 200, writer.whole(), [*self._headers.items()])

    async def _send_error(self, error: LlmrunError) -> None:
        """Send an HTTP error if nothing was sent yet, otherwise an error at the end of the stream."""
        self._log["reason"] = error.code
        log_internal(error)
        if error.http_status >= 500:
            self._log["error"] = str(error)
        writer, start = self._writer, b""
        if writer and self._streams_overflow and isinstance(error, ContextOverflowError):
            start = await self._start_stream(writer)
        if self._has_sent_headers and writer is not None:
            await self._send_chunk(start + writer.error(error), is_last=True)
        else:
            await send_error(self._send, error, self._error_body)

    def _log_start(self, started: Started, rewritten: tuple[Rewriting, ...]) -> None:
        self._log["prompt_tokens"], self._log["cached_tokens"] = started.prompt_tokens, started.reused_tokens
        self._log["difference"] = started.difference
        if rewritten:
            self._log["rewritten"] = rewritten
        if started.history is not None:
            self._log["history"] = started.history._asdict()

    def _log_end(self, stats: Stats, reason: str) -> None:
        self._log["completion_tokens"] = self._log.get("completion_tokens", 0) + stats.completion_tokens
        self._log["reason"], self._log["decode_seconds"] = reason, stats.decode_seconds
        self._log["ttft_seconds"] = round(stats.ttft_seconds, 4)
        self._log["ttft_parts"] = {name: round(value, 4) for name, value in stats.ttft_parts.items()}

    async def _watch_sending(self) -> None:
        """Request keep-alives, and cancel the exchange if the client reads nothing."""
        assert self._watch is not None
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            idle_seconds = time.monotonic() - self._sent_at
            if self._is_sending and idle_seconds > STALL_SECONDS:
                self._log["reason"] = "left"
                self._watch.cancel()
            elif not self._is_sending and idle_seconds >= KEEP_ALIVE_SECONDS:
                self._wake(None)


class HttpExchange(Exchange):
    """A request for completions in one protocol, and its response."""

    def __init__(self, api: CompletionApi, state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(api.error_body, state, scope, receive, send, streams_overflow=api.streams_overflow)
        self._api = api

    async def _work(self) -> None:
        data = await read_body(self._receive)
        self._arrived = time.perf_counter()
        threads = DOCUMENT_THREADS if has_documents(data) else None
        if threads is not None or len(data) > LONG_BODY:
            body, completion = await asyncio.get_running_loop().run_in_executor(threads, self._parse, data)
        else:
            body, completion = self._parse(data)
        async with (
            self._traffic.admitted(completion.n_choices, self._receive) as self._watch,
            self._pool.lease(completion.model, completion.keep_seconds) as pooled,
        ):
            await self._respond(body, completion, pooled)

    def _parse(self, data: bytes) -> tuple[dict[str, Any], CompletionRequest]:
        body = parse_json(data)
        if self._api.expands:
            body = self._responses.expanded(self._owner, body)
        completion = self._api.read(body).owned_by(self._owner)
        model = self._pool.true_name(completion.model)
        sampling = {**completion.sampling, **self._sampling}
        return body, completion._replace(model=model, named=completion.model, sampling=sampling)

    async def _respond(self, body: Mapping[str, Any], completion: CompletionRequest, pooled: PooledModel) -> None:
        name = completion.model or pooled.name
        self._show_model(name)
        self._name_ignored(completion.ignored)
        answer_id = f"{self._api.id_prefix}{secrets.token_hex(12)}"
        prompts = await self._scored_prompts(completion, pooled) if completion.scores_prompts else ()
        envelope = Envelope(answer_id, int(time.time()), shown_name(completion.named, name), prompts)
        writer = self._api.writer(body, envelope)
        if not completion.request.messages and completion.request.prompt is None:  # only load or unload the model
            if completion.keep_seconds != 0:
                await self._pool.ready(pooled)
            await self._send_end(writer)
            return
        with self._kept_alive():
            with self._responses.writing(self._owner, answer_id, self._stop, writer.whole):
                await self._answer(completion, pooled, writer)
                if self._api.kept is not None and (items := self._api.kept(body)) is not None:
                    self._responses.add(self._owner, items, writer.whole())
            await self._send_end(writer)

    async def _scored_prompts(
        self, completion: CompletionRequest, pooled: PooledModel
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        """Return the log-probabilities of the tokens of each prompt."""
        engine, found = await self._pool.ready(pooled), []
        for request in (completion.request, *completion.others):
            command = ScorePrompt(request.prompt or "", request.prompt_tokens, request.logprobs or 0)
            found.append(await engine.do(PROMPT_SCORES, command))
        return tuple(found)
