"""An answer on the page: one stream of events, in several rounds if the model calls tools, and what is saved of it.

Owns the order of a turn; must not know how chats are saved or tools run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.chat.store.turns import INTERRUPTED, MAX_ROUNDS, Answer, OpenAnswer, ToolOutput, round_messages
from llmrun.chat.truncation import (
    SUMMARY_TOKENS,
    DoesNotFit,
    MessageSize,
    Policy,
    Window,
    condense,
    fit,
    summary_turn,
    turns_of,
)
from llmrun.errors import ContextOverflowError, LlmrunError
from llmrun.protocol.answer import logprob_entries
from llmrun.protocol.arguments import MOST_TOP_LOGPROBS
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Message, Stats, ToolCall
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import COUNT_TOKENS
from llmrun.server.answer import SSE_COMMENT, AnswerWriter, CompletionRequest, sse_event
from llmrun.server.connection import EngineConnection
from llmrun.server.exchange import KEEP_ALIVE_SECONDS, CompletionApi, HttpExchange, ServerState
from llmrun.server.http import App, ClientLeftError, Receive, RouteNotFoundError, Scope, Send
from llmrun.server.page.chats import PageChats, Said, with_media
from llmrun.server.page.requests import needed_id, own, read_fields
from llmrun.server.page.running import RunningAnswer
from llmrun.server.page.tools import PageTools
from llmrun.server.pool import PooledModel
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import error_body
from llmrun.server.protocols.options import read_limits, read_sampling

_PACE_SECONDS = 0.1


class PageWriter(AnswerWriter):
    """Writes the events of one answer, and accumulates it.

    Text within _PACE_SECONDS of the last text sent is held until the next part: the page draws no more often, and each
    chunk wakes three processes of a browser, which shares the processor with the engine.

    Args:
        begins: text that the answer was given to begin with.

    Attributes:
        answer: as far as it was received.
        failed: the stream ended with an error.
        notes: lines about files that are left out.
    """

    def __init__(self, begins: str = "") -> None:
        super().__init__()
        (self.answer,) = self.answers
        self.failed = False
        self.notes: list[str] = []
        self._begins = begins
        self._waiting = bytearray()
        self._due = 0.0  # when text is sent again
        self._began = time.monotonic()
        self._first = self._last = 0.0  # times of text
        self._n_pieces = 0  # of text, each a token as a rule

    @property
    def text(self) -> str:
        """The answer without its reasoning."""
        return self._begins + self.answer.text

    @property
    def stats(self) -> Stats:
        """The figures as far as they are known of an answer without an end."""
        started = self.answer.started
        prompt, cached = (started.prompt_tokens, started.reused_tokens) if started is not None else (0, 0)
        return Stats(
            prompt_tokens=prompt,
            reused_tokens=cached,
            completion_tokens=self._n_pieces,
            decode_seconds=self._last - self._first,
            ttft_seconds=self._first - self._began if self._n_pieces else 0.0,
            context_used=prompt + self._n_pieces,
        )

    def begin(self) -> bytes:
        return b"".join(sse_event({"text": note}, "note") for note in self.notes)

    def started(self, choice: int) -> bytes:
        started = self.answer.started
        assert started is not None
        return sse_event({"prompt_tokens": started.prompt_tokens, "cached_tokens": started.reused_tokens}, "started")

    def part(self, choice: int, part: AnswerPart) -> bytes:
        if part.kind not in ("text", "reasoning"):
            return b""  # calls are sent when they are whole, see _rounds()
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._n_pieces += len(part.logprobs) or 1
        tokens = {"tokens": logprob_entries(part.logprobs)} if part.logprobs else {}
        self._waiting += sse_event({"text": part.text, **tokens}, part.kind)
        if self._last < self._due:
            return b""
        self._due = self._last + _PACE_SECONDS
        return self.end()

    def finished(self, choice: int) -> bytes:
        return self.end() + sse_event({"reason": self.answer.reason, **asdict(self.answer.stats)}, "finished")

    def end(self) -> bytes:
        waiting, self._waiting = bytes(self._waiting), bytearray()
        return waiting

    def error(self, error: LlmrunError) -> bytes:
        self.failed = True
        return self.end() + sse_event(error_body(error, error.http_status)["error"], "failed")

    def whole(self) -> dict[str, Any]:
        return {"text": self.text}


class PageAnswers:
    """The routes of answers and of decisions about tools."""

    def __init__(self, state: ServerState, chats: PageChats, tools: PageTools) -> None:
        self._state, self._chats, self._tools = state, chats, tools
        self._running: dict[int, RunningAnswer] = {}  # by chat

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            Route("/ui/answer", own(self._answer), methods=["POST"]),
            Route("/ui/answer/{chat:int}", own(self._attach), methods=["GET"]),
            Route("/ui/stop", own(self._stop), methods=["POST"]),
            Route("/ui/decide", own(self._decide), methods=["POST"]),
        ]

    async def _decide(self, request: Request) -> Response:
        """Decide about a call of a tool: {"call", "decision": "once", "always" or "no"}."""
        fields = await read_fields(request)
        decision: Any = fields.choice("decision", "once", "always", "no")
        self._tools.decide(fields.needed_text("call"), decision or "no")
        return JSONResponse({})

    async def _answer(self, request: Request) -> Response:
        """Answer a question as a stream: {"chat", "question", "together", "model", "candidates", "begins", ...}."""
        fields = await read_fields(request)
        chat, question = needed_id(fields, "chat"), needed_id(fields, "question")
        said = partial(self._chats.open_question, chat, question, together=fields.flag("together") is True)
        asked = _completion(fields)
        overflow: Any = fields.choice("overflow", "roll", "middle", "summarize")
        if fields.flag("tools"):
            asked = asked._replace(request=replace(asked.request, tools=self._tools.offered))
        if fields.flag("together"):
            return _StreamedResponse(partial(self._stream, asked, chat, said, overflow))
        return _StreamedResponse(partial(self._run, partial(self._stream, asked, chat, said, overflow), chat))

    async def close(self) -> None:
        """End all answers."""
        for running in list(self._running.values()):
            await running.end()

    async def _run(self, app: App, chat: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin an answer, and show it."""
        running = RunningAnswer(app, scope)
        before = self._running.setdefault(chat, running)
        try:
            await running.show(receive, send)
        finally:
            if before is running:
                running.when_done(lambda: self._running.pop(chat, None))

    async def _attach(self, request: Request) -> Response:
        """Show an answer that is on its way from its beginning, as after a reload of the page."""
        running = self._running.get(request.path_params["chat"])
        if running is None or running.is_done:
            raise RouteNotFoundError("this chat is not being answered")
        return _StreamedResponse(lambda scope, receive, send: running.show(receive, send))

    async def _stop(self, request: Request) -> Response:
        """Stop the answer of a chat: {"chat"}."""
        running = self._running.get(needed_id(await read_fields(request), "chat"))
        if running is not None:
            running.stop()
        return JSONResponse({})

    async def _stream(
        self,
        asked: CompletionRequest,
        chat: int,
        open_question: Callable[[], Said],
        overflow: Policy | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send an answer, and save what was received of it, however it ends."""
        async with self._state.pool.lease(asked.model) as pooled:
            turn = _Turn(asked)
            said = await self._chats.run(open_question)
            try:
                async with self._state.traffic.admitted(1, receive):
                    messages, turn.writer.notes = await self._with_media(said, pooled)
                    if overflow is not None:
                        messages, notes = await self._fitted(asked, messages, pooled, overflow)
                        turn.writer.notes += notes
                await self._rounds(turn, messages, scope, receive, _OneStream(send))
            except ClientLeftError:
                pass
            finally:
                answer = None
                try:
                    answer = turn.answer(pooled, {**asked.sampling, **self._state.sampling})
                finally:  # whatever fails, the chat is free again
                    await asyncio.shield(self._chats.run(partial(self._chats.close_question, chat, answer)))

    async def _with_media(self, said: Said, pooled: PooledModel) -> tuple[tuple[Message, ...], list[str]]:
        """Return messages with their images and audio; the model has to be loaded to know which it reads."""
        if not any(files for _, files in said):
            return tuple(message for message, _ in said), []
        await self._state.pool.ready(pooled)
        return await asyncio.to_thread(with_media, said, pooled.loaded_model)

    async def _fitted(
        self, asked: CompletionRequest, messages: tuple[Message, ...], pooled: PooledModel, policy: Policy
    ) -> tuple[tuple[Message, ...], list[str]]:
        """Return the messages that fit into the context window, a summary among them, and a note about dropped turns.

        Raises:
            ContextOverflowError: the question alone does not fit.
        """
        request = asked.request
        engine = await self._state.pool.ready(pooled)
        counted = await engine.do(COUNT_TOKENS, replace(request, messages=messages))
        n_ctx = pooled.loaded_model.n_ctx
        overhead = max(counted.total - sum(counted.each), 0)
        window = Window.of(n_ctx, request.limits.max_tokens, overhead=overhead)
        sizes = [MessageSize(each.role, tokens) for each, tokens in zip(messages, counted.each, strict=True)]
        dropped = fit(sizes, window, policy)
        if isinstance(dropped, DoesNotFit):
            raise ContextOverflowError("the question does not fit into the context window", why=dropped.why)
        if not dropped:
            return messages, []
        ranges = [turns_of(sizes)[turn] for turn in dropped]
        stay = [message for index, message in enumerate(messages) if not any(index in indices for indices in ranges)]
        turns = f"{len(dropped)} earlier turn{'' if len(dropped) == 1 else 's'}"
        if policy != "summarize":
            return tuple(stay), [f"the model did not see {turns}, which did not fit"]
        gone = [[messages[index] for index in indices] for indices in ranges]
        n_tokens = [sum(sizes[index].tokens for index in indices) for indices in ranges]
        sampling = pooled.loaded_model.sampling({**asked.sampling, **self._state.sampling})[0]
        text = await self._summary(engine, condense(gone, n_tokens, n_ctx), sampling)
        stay[ranges[0].start : ranges[0].start] = summary_turn(text)
        return tuple(stay), [f"the model saw a summary of {turns} instead of them: {text}"]

    async def _summary(
        self, engine: EngineConnection, steps: Generator[list[Message], str, str], sampling: SamplingParams
    ) -> str:
        """Let the model condense turns."""
        messages = next(steps)
        while True:
            limits = Limits(SUMMARY_TOKENS)
            request = AnswerRequest(
                tuple(messages), sampling=sampling, limits=limits, thinking=False, stops_repeats=True
            )
            try:
                messages = steps.send(await engine.write(request))
            except StopIteration as end:
                return str(end.value)

    async def _rounds(
        self, turn: _Turn, messages: tuple[Message, ...], scope: Scope, receive: Receive, stream: _OneStream
    ) -> None:
        """Let the model answer, run the tools that it calls, and let it go on, until it calls none."""
        while True:
            said = (*messages, *round_messages(turn.received.rounds))
            tools = self._tools.offered if turn.asked.request.tools else ()
            asked = replace(turn.asked.request, messages=said, begins=turn.begins, tools=tools)
            request = turn.asked._replace(request=asked)
            api = CompletionApi(
                lambda body, request=request: request,  # type: ignore[misc]
                lambda body, envelope: turn.writer,
                error_body,
                "ui-",
            )
            try:
                await HttpExchange(api, self._state, scope, _with_empty_body(receive), stream.send).run()
            finally:
                turn.received.end_round(turn.writer.answer, turn.begins)
            calls = turn.received.calls
            if not calls or len(turn.received.rounds) >= MAX_ROUNDS:
                break
            shown = [{**call._asdict(), "asks": self._tools.asks(call)} for call in calls]
            await stream.add(sse_event({"text": turn.writer.text, "calls": shown}, "calls"))
            results = await _unless_disconnected(self._results(calls, stream), receive, stream)
            if results is None:
                return
            turn.go_on(results)
        await stream.close()

    async def _results(self, calls: tuple[ToolCall, ...], stream: _OneStream) -> list[ToolOutput]:
        results = []
        for call in calls:
            results.append(await self._tools.result(call))
            await stream.add(sse_event({"id": call.id, "text": results[-1].text}, "result"))
        return results


class _Turn:
    """An answer on the page: what was received of it, and the writer of the running round."""

    def __init__(self, asked: CompletionRequest) -> None:
        self.asked, self.begins = asked, asked.request.begins
        self.writer = PageWriter(self.begins)
        self.received = OpenAnswer()

    def go_on(self, results: Sequence[ToolOutput]) -> None:
        """Begin the next round, with the results of the calls."""
        self.received.go_on(results)
        self.writer, self.begins = PageWriter(), ""

    def answer(self, pooled: PooledModel, sampling: Mapping[str, Any]) -> Answer | None:
        """Return what to save; None if nothing was received before it was stopped or failed."""
        last = self.writer.answer
        if (last.started is None and not self.received.rounds) or pooled.model is None:
            return None
        reason = last.reason or (INTERRUPTED if self.writer.failed else "cancelled")
        n_ctx = pooled.model.n_ctx if pooled.is_loaded else 0
        return self.received.to_save(
            {"stop_string": "stop", "tool_calls": "cancelled"}.get(reason, reason),  # calls without results
            has_text=last.has_text,
            model=pooled.model.used,
            sampling=pooled.model.sampling(sampling)[0],
            limits=self.asked.request.limits,
            stats=last.finished.stats if last.finished else replace(self.writer.stats, n_ctx=n_ctx),
            adapters=pooled.model.adapters,
        )


class _OneStream:
    """The responses of several exchanges as one stream of events.

    Args:
        send: of the request.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_started = self._is_stream = self._is_error = False

    async def send(self, message: Any) -> None:
        """Pass on a message of an exchange: the headers of the first one only, and no end of the body yet."""
        if message["type"] == "http.response.start":
            self._is_error = message["status"] != 200 and self._has_started
            if not self._has_started:
                self._has_started, self._is_stream = True, message["status"] == 200
                await self._send(message)
        elif self._is_error:  # before the first event of a later exchange
            await self.add(sse_event(load_json(message["body"])["error"], "failed"))
        else:
            await self._send({**message, "more_body": self._is_stream or message.get("more_body", False)})

    async def add(self, data: bytes) -> None:
        """Send events between exchanges."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """Send the end."""
        if self._is_stream:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_disconnected(work: Any, receive: Receive, stream: _OneStream) -> Any:
    """Return the result of a coroutine, None if the client disconnected before; keep the stream alive meanwhile."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        while True:
            done, _ = await asyncio.wait(
                (working, leaving), timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return await working if working in done else None
            await stream.add(SSE_COMMENT)
    finally:
        for each in (working, leaving):
            each.cancel()


class _StreamedResponse(Response):
    """A response that an ASGI application sends."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _completion(fields: Fields) -> CompletionRequest:
    """Return the request for an answer, without the conversation, which is in the store."""
    request = AnswerRequest(
        limits=read_limits(fields, "max_tokens"),
        thinking=fields.flag("thinking"),
        stops_repeats=True,
        logprobs=fields.whole("candidates", 0, MOST_TOP_LOGPROBS),
        begins=fields.text("begins") or "",
    )
    return CompletionRequest(fields.text("model") or "", request, read_sampling(fields), stream=True)


def _with_empty_body(receive: Receive) -> Receive:
    """Return a receive() that begins with an empty JSON object: the body was read before."""
    is_read = False

    async def receiving() -> Any:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": b"{}", "more_body": False}

    return receiving
