"""Insights into an answer: its explanation, the steps of the sampler for a token, the context window of a chat.

Nothing of it is stored with a chat: the answer, or one token of it, is computed again.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from llmrun.chat.store.turns import Answer
from llmrun.errors import CancelledError, UsageError
from llmrun.model import Model
from llmrun.planning.estimate import predicted_rate
from llmrun.protocol.answer import logprob_entries
from llmrun.protocol.jobs.evaluate import PROMPT_SCORES, ScorePrompt
from llmrun.protocol.jobs.text import TokenizeText
from llmrun.protocol.messages import AnswerRequest, Message
from llmrun.protocol.params import PARAMETERS, Limits, SamplingParams
from llmrun.protocol.questions import (
    APPLY_TEMPLATE,
    COUNT_TOKENS,
    EXPLAIN_CHOICES,
    MOST_CHOICES,
    TOKENIZE_LOADED,
    Choice,
    ExplainChoices,
)
from llmrun.server.answer import NDJSON
from llmrun.server.connection import EngineConnection
from llmrun.server.exchange import ServerState
from llmrun.server.http import Receive, RouteNotFoundError
from llmrun.server.manage_routes import as_ndjson
from llmrun.server.page.chats import PageChats, Said, with_media
from llmrun.server.page.requests import needed_id, own, read_fields
from llmrun.server.pool import PooledModel

EXPLAINED = "/ui/explained/"
"""Path before the name of an explanation. The name is its key: a window of its own sends no other one."""
_MOST_PAGES = 8  # explanations kept, of about a megabyte each
_PAGE_SECONDS = 600  # until an explanation is gone: its address may stay in a history or a log
_TOKEN_CANDIDATES = 10  # of each token of a saved answer
_PAGE_CANDIDATES = 200  # of a token, from which the page computes other settings of the sampler
_ALONE = (  # beside the explanation's own policy, which names its scripts
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageInsights:
    """The routes about single answers.

    Args:
        explain: explains an answer.
    """

    def __init__(self, state: ServerState, chats: PageChats, explain: Explain) -> None:
        self._state, self._chats, self._explain_answer = state, chats, explain
        self._pages: dict[str, str] = {}

    @property
    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            Route("/ui/explain", own(self._explain), methods=["POST"]),
            Route(EXPLAINED + "{name}", own(self._explained), methods=["GET"]),
            Route("/ui/tokens", own(self._tokens), methods=["POST"]),
            Route("/ui/why", own(self._why), methods=["POST"]),
            Route("/ui/speed", own(self._speed), methods=["POST"]),
            Route("/ui/context", own(self._context), methods=["POST"]),
        ]

    async def _explain(self, request: Request) -> Response:
        """Compute an answer again, and explain it: {"chat", "answer", "model"}.

        Return lines of progress, {"doing", "share"}; the last one has the page's address, or an error. The work ends
        when the client disconnects, in the engine too.
        """
        fields = await read_fields(request)
        chat, entry = needed_id(fields, "chat"), needed_id(fields, "answer")
        said, answer = await self._chats.run(partial(self._chats.replayed, chat, entry))
        sampling = replace(answer.sampling, seed=answer.stats.seed)
        again = AnswerRequest(
            sampling=sampling,
            limits=Limits(MOST_CHOICES),
            thinking=fields.flag("thinking"),
            remember=MOST_CHOICES,
        )
        lines = self._explaining(again, said, answer, fields.text("model") or "", request.receive)
        return StreamingResponse(as_ndjson(lines), media_type=NDJSON)

    async def _explaining(
        self, again: AnswerRequest, said: Said, answer: Answer, name: str, receive: Receive
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the lines of an explanation."""
        yield {"doing": "waiting for the model", "share": 0.0}
        async with self._state.engine(name, receive) as (engine, pooled):
            model = _model_of(answer, pooled)
            messages = await _messages(model, said)
            yield {"doing": "answering again", "share": 0.1}
            number = await engine.answer(replace(again, messages=messages))
            yield {"doing": "computing every layer", "share": 0.4}
            jobs = EngineJobs(engine, asyncio.get_running_loop())
            try:
                write = await asyncio.to_thread(self._explain_answer, model, (jobs, number))
            except asyncio.CancelledError:
                jobs.cancel()
                raise
        yield {"doing": "writing the page", "share": 0.9}
        page = await asyncio.to_thread(write, again.sampling)
        address = EXPLAINED + secrets.token_urlsafe(32)
        self._pages[address] = page
        asyncio.get_running_loop().call_later(_PAGE_SECONDS, self._pages.pop, address, None)
        while len(self._pages) > _MOST_PAGES:
            del self._pages[next(iter(self._pages))]
        yield {"address": address}

    async def _explained(self, request: Request) -> Response:
        page = self._pages.get(EXPLAINED + request.path_params["name"])
        if page is None:
            raise RouteNotFoundError("this explanation is gone; the chat can make it again")
        return HTMLResponse(page, headers={"content-security-policy": _ALONE})

    async def _tokens(self, request: Request) -> Response:
        """Return the tokens of a saved answer with their probabilities, by one prefill: {"chat", "answer", "model"}.

        The probabilities are the model's own, before any sampling step. The text is tokenized again.

        Raises:
            UsageError: the answer was given after reasoning, which is not part of its prompt.
        """
        fields = await read_fields(request)
        chat, entry = needed_id(fields, "chat"), needed_id(fields, "answer")
        said, answer = await self._chats.run(partial(self._chats.replayed, chat, entry))
        if answer.reasoning:
            raise UsageError("the tokens of an answer after reasoning were not kept", hint="ask again with Tokens on")
        async with self._state.engine(fields.text("model") or "", request.receive) as (engine, pooled):
            model = _model_of(answer, pooled)
            asked = AnswerRequest(messages=await _messages(model, said), thinking=fields.flag("thinking"))
            rendered, counted = await engine.do(APPLY_TEMPLATE, asked), await engine.do(COUNT_TOKENS, asked)
            prompt = (await engine.do(TOKENIZE_LOADED, TokenizeText("", rendered))).tokens
            begin = model.header.integer("tokenizer.ggml.bos_token_id")
            if begin is not None and counted.total == len(prompt) + 1:  # which is not part of the text
                prompt = (begin, *prompt)
            own_tokens = (await engine.do(TOKENIZE_LOADED, TokenizeText("", answer.content, special=False))).tokens
            scored = await engine.do(PROMPT_SCORES, ScorePrompt("", (*prompt, *own_tokens), _TOKEN_CANDIDATES))
        tokens = list(scored[len(prompt) :])
        if tokens and tokens[0].text.startswith(" ") and not answer.content.startswith(" "):  # SentencePiece adds it
            tokens[0] = tokens[0]._replace(text=tokens[0].text[1:], bytes=tokens[0].bytes[1:])
        return JSONResponse({"tokens": logprob_entries(tokens)})

    async def _why(self, request: Request) -> Response:
        """Return the sampler's steps for the token after the beginning of an answer: {"chat", "answer", "begins"}."""
        fields = await read_fields(request)
        chat, entry = needed_id(fields, "chat"), needed_id(fields, "answer")
        said, answer = await self._chats.run(partial(self._chats.replayed, chat, entry))
        again = AnswerRequest(
            sampling=answer.sampling, limits=Limits(1), remember=1,
            thinking=fields.flag("thinking"), begins=fields.text("begins") or "",
        )  # fmt: skip
        async with self._state.engine(fields.text("model") or "", request.receive) as (engine, pooled):
            model = _model_of(answer, pooled)
            number = await engine.answer(replace(again, messages=await _messages(model, said)))
            choices = (await engine.do(EXPLAIN_CHOICES, ExplainChoices(number, 1, _PAGE_CANDIDATES))).choices
        return JSONResponse(_choice(choices[-1], answer.sampling) if choices else {"steps": []})

    async def _speed(self, request: Request) -> Response:
        """Return the decode rate that `llmrun plan` predicts for a model: {"model", "tokens"}; null if unknown.

        The machine is measured if it never was, unless an answer is running. The tokens are in the context window.
        """
        fields = await read_fields(request)
        depth = fields.whole("tokens", 0, 2**31) or 0
        is_busy, is_left = self._state.traffic.is_busy, threading.Event()

        def check(share: float) -> None:
            if is_left.is_set():
                raise CancelledError("the client disconnected")

        async with self._state.engine(fields.text("model") or "", request.receive) as (_, pooled):
            header = pooled.loaded_model.header
            predict = partial(predicted_rate, header, depth, measures=not is_busy, on_progress=check)
            try:
                rate = await asyncio.to_thread(predict)
            finally:
                is_left.set()
        return JSONResponse({"decode": rate})

    async def _context(self, request: Request) -> Response:
        """Return what fills the context window of a chat: {"chat", "model"}."""
        fields = await read_fields(request)
        said, answer = await self._chats.run(partial(self._chats.said, needed_id(fields, "chat")))
        async with self._state.engine(fields.text("model") or "", request.receive) as (engine, pooled):
            messages = await _messages(pooled.loaded_model, said)
            counted = await engine.do(COUNT_TOKENS, AnswerRequest(messages))
            if answer is not None and answer.model == pooled.loaded_model.used:
                counted = counted.after_answer(answer.stats)
            rows = [
                {"role": message.role, "text": message.content[:80], "tokens": tokens}
                for message, tokens in zip(messages, counted.each, strict=True)
            ]
            return JSONResponse({"messages": rows, "total": counted.total, "n_ctx": pooled.loaded_model.n_ctx})


def _model_of(answer: Answer, pooled: PooledModel) -> Model:
    """Return the loaded model. Raises UsageError if it is not the one that gave an answer."""
    model = pooled.loaded_model
    if model.used.path != answer.model.path or model.used.server != answer.model.server:
        raise UsageError(f"this answer is of {answer.model.name}, not of {pooled.name}", hint="choose that model")
    return model


async def _messages(model: Model, said: Said) -> tuple[Message, ...]:
    """Return messages as a model gets them: files that it can't read are lines of text."""
    messages, _ = await asyncio.to_thread(with_media, said, model)
    return messages


class EngineJobs:
    """An engine's jobs for another thread than the event loop's."""

    def __init__(self, engine: EngineConnection, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._running: Future[Any] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Stop the running job, and refuse further ones."""
        self._is_cancelled = True
        if self._running is not None:
            self._running.cancel()

    def do(self, kind: Any, command: Any, /) -> Any:
        """Run a job of the loaded model, and return its result."""
        if self._is_cancelled:
            raise CancelledError("it was cancelled")
        self._running = asyncio.run_coroutine_threadsafe(self._engine.do(kind, command), self._loop)
        return self._running.result()


Explain = Callable[[Model, tuple[EngineJobs, int]], Callable[[SamplingParams], str]]
"""Explains the answer of a request by jobs of the engine that gave it. The result writes the page for a sampler."""


def _choice(choice: Choice, sampling: SamplingParams) -> dict[str, Any]:
    """Return the steps of one choice, and the settings of the sampler, as JSON data."""
    names = [name for name, row in PARAMETERS.items() if row.slider]
    return {
        "candidates": choice.candidates,
        "steps": [{"name": step.name, "left": step.remaining, "shares": step.probabilities} for step in choice.steps],
        "order": sampling.order,
        "values": {name: getattr(sampling, name) for name in names},
    }
