"""An answer on the page: one stream of events, in several rounds if the model calls tools, and what is saved of it.

Owns the order of a turn; must not know how chats are saved or tools run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.chat.media import MediaCache
from llmrun.chat.store.turns import INTERRUPTED, Answer, ToolOutput, Truncation, WindowTurn
from llmrun.chat.tools.source import own_file
from llmrun.chat.tools.toolbox import no_such_tool
from llmrun.chat.truncation import Policy
from llmrun.chat.turn import Step, Steps, Turn
from llmrun.errors import LlmrunError
from llmrun.protocol.answer import logprob_entries
from llmrun.protocol.arguments import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerPart, AnswerRequest, PrefillProgress, Stats, ToolCall
from llmrun.protocol.questions import COUNT_TOKENS
from llmrun.server.answer import AnswerWriter, CompletionRequest, sse_event
from llmrun.server.exchange import Exchange, ServerState
from llmrun.server.http import App, ClientLeftError, Receive, RouteNotFoundError, Scope, Send
from llmrun.server.page.chats import OpenQuestion, PageChats
from llmrun.server.page.requests import needed_id, own, read_fields
from llmrun.server.page.running import RunningAnswer
from llmrun.server.page.tools import PageTools
from llmrun.server.pool import PooledModel
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import error_body
from llmrun.server.protocols.options import read_limits, read_sampling
from llmrun.server.watch import watched

_PACE_SECONDS = 0.1
_Result = TypeVar("_Result")


class PageWriter(AnswerWriter):
    """The writer of one answer for the page, which also keeps it whole. A turn that calls tools has several answers.

    Text within _PACE_SECONDS of the last text sent is held until the next part: the page draws no more often, and each
    chunk wakes three processes of a browser, which shares the processor with the engine.

    Args:
        begins: text that the answer was given to begin with.
        notes: lines for the user; sending removes them.
        arrived: when the request arrived, in seconds of time.perf_counter(); by default now.

    Attributes:
        answer: as far as it was received.
    """

    def __init__(self, begins: str = "", notes: list[str] | None = None, arrived: float = 0.0) -> None:
        super().__init__()
        (self.answer,) = self.answers
        self._begins, self._notes = begins, [] if notes is None else notes
        self._waiting = bytearray()
        self._due = 0.0  # when text is sent again
        self._arrived = arrived or time.perf_counter()
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
            ttft_seconds=self._first - self._arrived if self._n_pieces else 0.0,
            context_used=prompt + self._n_pieces,
        )

    def begin(self) -> bytes:
        events = b"".join(sse_event({"text": note}, "note") for note in self._notes)
        self._notes.clear()
        return events

    def started(self, choice: int) -> bytes:
        started = self.answer.started
        assert started is not None
        return self.begin() + sse_event(
            {"prompt_tokens": started.prompt_tokens, "cached_tokens": started.reused_tokens}, "started"
        )

    def progress(self, choice: int, progress: PrefillProgress) -> bytes:
        return sse_event({"computed_tokens": progress.tokens}, "prefill")

    def part(self, choice: int, part: AnswerPart) -> bytes:
        if part.kind not in ("text", "reasoning"):
            return b""  # calls are sent when they are whole, see PageExchange
        self._last = time.perf_counter()
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
        return waiting + self.begin()

    def error(self, error: LlmrunError) -> bytes:
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
            Route("/ui/servers", own(self._servers), methods=["GET"]),
            Route("/ui/servers/start", own(self._start_server), methods=["POST"]),
        ]

    async def _decide(self, request: Request) -> Response:
        """Decide about a call of a tool: {"call", "decision": "once", "always" or "no"}."""
        fields = await read_fields(request)
        decision: Any = fields.choice("decision", "once", "always", "no")
        self._tools.decide(fields.needed_text("call"), decision or "no")
        return JSONResponse({})

    async def _servers(self, request: Request) -> Response:
        """Return the MCP servers of the user's own file, see PageTools.servers(), and its path."""
        servers = await asyncio.to_thread(self._tools.servers)
        return JSONResponse({"path": str(own_file()), "servers": servers})

    async def _start_server(self, request: Request) -> Response:
        """Start an MCP server of the user's own file, and return its tools: {"server"}."""
        name = (await read_fields(request)).needed_text("server")
        return JSONResponse({"tools": await self._tools.start(name)})

    async def _answer(self, request: Request) -> Response:
        """Answer a question as a stream: {"chat", "question", "together", "model", "candidates", "begins", ...}.

        The tools of "servers" are offered beside those of the server's own options.
        """
        fields = await read_fields(request)
        chat, question = needed_id(fields, "chat"), needed_id(fields, "question")
        is_together = fields.flag("together") is True
        open_question = partial(self._chats.open_question, chat, question, together=is_together)
        overflow: Any = fields.choice("overflow", "roll", "middle", "summarize")
        left_out, servers = (frozenset(fields.texts(name)) for name in ("without_tools", "servers"))
        has_tools = fields.flag("tools") is True
        asked = _PageQuestion(chat, open_question, _completion(fields), overflow, has_tools, left_out, servers)
        app = partial(self._stream, asked)
        return _StreamedResponse(app if is_together else partial(self._run, app, chat))

    async def _stream(self, asked: _PageQuestion, scope: Scope, receive: Receive, send: Send) -> None:
        await PageExchange(asked, self._chats, self._tools, self._state, scope, receive, send).run()

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


class _PageQuestion(NamedTuple):
    """A question to answer on the page."""

    chat: int
    open: Callable[[], OpenQuestion]
    completion: CompletionRequest
    overflow: Policy | None
    has_tools: bool
    left_out: frozenset[str]  # names of tools that the model is not told
    servers: frozenset[str]  # MCP servers that are switched on in the chat


class PageExchange(Exchange):
    """The answer to a question on the page: takes the steps of its turn, sends their events, and saves the answer."""

    def __init__(
        self,
        asked: _PageQuestion,
        chats: PageChats,
        tools: PageTools,
        state: ServerState,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        super().__init__(error_body, state, scope, receive, send)
        self._asked, self._chats, self._tools = asked, chats, tools
        completion = asked.completion.owned_by(self._owner)
        model, sampling = self._pool.true_name(completion.model), {**completion.sampling, **state.sampling}
        self._completion = completion._replace(model=model, sampling=sampling)
        self._notes: list[str] = []
        self._round_writer = PageWriter(completion.request.begins, self._notes)
        self._turn: Turn | None = None  # after the model is loaded

    async def _work(self) -> None:
        self._writer, self._is_stream, self._arrived = self._round_writer, True, time.perf_counter()
        async with self._pool.lease(self._completion.model) as pooled:
            self._show_model(self._completion.model or pooled.name)
            opened = await self._chats.run(self._asked.open)
            has_failed = False
            with self._kept_alive():
                try:
                    await self._take_steps(opened, pooled)
                except Exception as error:
                    has_failed = not isinstance(error, ClientLeftError)
                    raise
                finally:
                    answer = None
                    try:
                        answer = self._to_save(pooled, INTERRUPTED if has_failed else "cancelled")
                    finally:  # whatever fails, the chat is free again
                        close = partial(self._chats.close_question, self._asked.chat, answer)
                        await asyncio.shield(self._chats.run(close))
                await self._send_end(self._round_writer)

    async def _take_steps(self, opened: OpenQuestion, pooled: PooledModel) -> None:
        """Take the steps of the turn; what computes counts as traffic, a decision about a tool does not."""
        async with self._traffic.admitted(1, self._receive) as self._watch:
            await self._wait(self._pool.ready(pooled))
        self._turn = turn = self._new_turn(opened, pooled)
        steps, results = turn.run(), None
        while True:
            offered = self._tools.offered(self._asked.servers) if self._asked.has_tools else ()
            tools = tuple(tool for tool in offered if tool.name not in self._asked.left_out)
            turn.request = replace(turn.request, tools=tools)
            async with self._traffic.admitted(1, self._receive) as self._watch:
                step = await _send(steps, results)
                while step is not None and step[0] != "answer":
                    engine = await self._pool.ready(pooled)
                    work = engine.do(COUNT_TOKENS, step[1]) if step[0] == "count" else engine.write(step[1])
                    step = await _send(steps, await self._wait(work))
                assert step is not None
                await self._round(turn, step[1], pooled)
            if await _send(steps) is None:
                return
            async with watched(self._receive) as self._watch:
                results = await self._wait(self._results(turn.calls, {tool.name for tool in tools}))

    def _new_turn(self, opened: OpenQuestion, pooled: PooledModel) -> Turn:
        model, completion = pooled.loaded_model, self._completion
        sampling = self._pool.sampling(pooled, completion.model, completion.sampling)[0]
        return Turn(
            model,
            opened.question,
            replace(completion.request, sampling=sampling),
            opened.before,
            MediaCache(self._notes.append),
            on_note=self._notes.append,
            on_departure=self._note_departure,
            overflow=self._asked.overflow,
            beginning=opened.beginning,
        )

    def _note_departure(self, gone: Sequence[WindowTurn], truncation: Truncation) -> None:
        turns = f"{len(gone)} earlier turn{'' if len(gone) == 1 else 's'}"
        if truncation.summary:
            self._notes.append(f"the model saw a summary of {turns} instead of them: {truncation.summary}")
        else:
            self._notes.append(f"the model did not see {turns}, which did not fit")

    async def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of work; keep the stream alive meanwhile."""
        working = asyncio.ensure_future(work)
        working.add_done_callback(lambda _: self._wake(None))
        try:
            while not working.done():
                await self._next_items()
                if not working.done():
                    await self._send_chunk(await self._keep_alive(self._round_writer))
            return working.result()
        finally:
            working.cancel()

    async def _round(self, turn: Turn, request: AnswerRequest, pooled: PooledModel) -> None:
        """Send one answer of the model."""
        if turn.answer.rounds:
            self._arrived = time.perf_counter()
        self._round_writer = writer = PageWriter(request.begins, self._notes, self._arrived)
        try:
            await self._answer(self._completion._replace(request=request), pooled, writer)
        finally:
            turn.answer.end_round(writer.answer, request.begins)

    async def _results(self, calls: tuple[ToolCall, ...], offered: Set[str]) -> list[ToolOutput]:
        """Return the results of calls, which the page shows and asks about; a tool that was not offered is not run."""
        chat = self._asked.chat
        shown = [{**call._asdict(), "asks": call.name in offered and self._tools.asks(call, chat)} for call in calls]
        await self._send_chunk(sse_event({"text": self._round_writer.text, "calls": shown}, "calls"))
        results = []
        for call in calls:
            is_offered = call.name in offered
            results.append(await self._tools.result(call, chat) if is_offered else no_such_tool(call).output)
            await self._send_chunk(sse_event({"id": call.id, "text": results[-1].text}, "result"))
        return results

    def _to_save(self, pooled: PooledModel, reason: str) -> Answer | None:
        """Return what to save; None if nothing was received before it was stopped or failed.

        Args:
            reason: of the end, if the model has not ended it.
        """
        last, turn = self._round_writer.answer, self._turn
        if turn is None or (last.started is None and not turn.answer.rounds):
            return None
        n_ctx = turn.model.n_ctx if pooled.is_loaded else 0
        stats = last.finished.stats if last.finished else replace(self._round_writer.stats, n_ctx=n_ctx)
        if last.started is not None and not last.finished:
            self._log_end(stats, reason)
        reason = {"stop_string": "stop", "tool_calls": "cancelled"}.get(last.reason, last.reason or reason)
        return turn.to_save(reason, stats, has_text=last.has_text)


async def _send(steps: Steps, result: Any = None) -> Step | None:
    """Give a turn the result of a step, and return the next one; a thread reads images and audio for it."""

    def send() -> Step | None:
        try:
            return steps.send(result)
        except StopIteration:
            return None

    return await asyncio.to_thread(send)


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
