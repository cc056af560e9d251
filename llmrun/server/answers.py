"""The answers to one request on their way through an engine: events come in, parts for a protocol go out.

Owns what a request becomes in an engine, and that one which only waited goes on in the next engine when its own dies;
must not know protocols or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.gguf.pooling import refuse_answers
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Started, TextDelta
from llmrun.server.answer_parts import CompletionRequest, Part
from llmrun.server.connection import EngineConnection
from llmrun.server.metrics import ServerMetrics
from llmrun.server.pool import Pool, PooledModel, prompt_hash
from llmrun.server.toolcalls import AnswerReader

_MOST_ENGINES = 3
"""A request that only waits goes through so many dying engines."""

Heard = tuple[int, Event | LlmrunError | None]
"""Which of the answers, and what came of it."""


class _Choice:
    """One of the answers."""

    def __init__(self, reader: AnswerReader) -> None:
        self.connection: EngineConnection | None = None
        self.request = 0
        self.engines = 0
        self.is_finished = False
        self.reader = reader


class ResponseStreams:
    """Asks for all answers to a prompt, and translates what comes.

    Args:
        pool: where the model is.
        kept: the model, leased.
        asked: what for.
        put: called in the event loop with what comes; take() wants it back.
        metrics: are told.

    Attributes:
        is_done: all have ended.
    """

    def __init__(
        self,
        pool: Pool,
        kept: PooledModel,
        asked: CompletionRequest,
        put: Callable[[Heard], None],
        metrics: ServerMetrics,
    ) -> None:
        self._pool, self._kept, self._asked, self._put = pool, kept, asked, put
        self._choices = [_Choice(AnswerReader(index)) for index in range(asked.n)]
        self._clocks = [metrics.request(kept.name) for _ in range(asked.n)]
        self._tasks: set[asyncio.Task[None]] = set()

    @cached_property
    def _prompt(self) -> str:
        return prompt_hash(self._asked.request)

    @property
    def is_done(self) -> bool:
        """Whether all have ended."""
        return all(choice.is_finished for choice in self._choices)

    def start(self) -> None:
        """Ask for them. What can't be asked for, put() is told as an error."""
        for index in range(len(self._choices)):
            self._spawn(index)

    def _spawn(self, index: int) -> None:
        task = asyncio.ensure_future(self._ask(index))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, index: int) -> None:
        """Send one of them to the engine, as soon as that has loaded its model."""
        choice = self._choices[index]
        choice.connection = None
        try:
            if self._pool.deaths:
                self._pool.deaths.check(self._prompt)
            connection = await self._pool.ready(self._kept)
            request = self._request(index)
        except LlmrunError as error:
            self._put((index, error))
            return
        choice.connection, choice.request = connection, connection.next_request()
        choice.engines += 1
        connection.send(Generate(choice.request, request), lambda event: self._put((index, event)))

    def _request(self, index: int) -> AnswerRequest:
        """What an engine is asked, with the model's advised sampling under the client's."""
        assert self._kept.model is not None
        refuse_answers(self._kept.model.header)
        sampling = self._kept.model.sampling(self._asked.sampling)[0]
        if sampling.seed is not None and index:
            sampling = replace(sampling, seed=(sampling.seed + index) % 2**32)
        speculation = self._kept.model.drafting.speculation(self._asked.speculate)
        request = self._pool.adapters.chosen(self._asked.model, self._asked.request)
        return replace(request, sampling=sampling, speculation=speculation)

    def take(self, heard: Heard) -> list[Part]:
        """What an event means to the client.

        Raises:
            LlmrunError: an answer failed.
        """
        index, event = heard
        choice, clock = self._choices[index], self._clocks[index]
        if isinstance(event, EngineCrashedError):
            self._survive(index, event)
            return []
        if isinstance(event, LlmrunError):
            raise event
        if event is None:
            return []
        if isinstance(event, Started):
            clock.started(event)
        elif isinstance(event, TextDelta):
            clock.delta(event)
        elif isinstance(event, Finished):
            choice.is_finished = True
            if self._pool.deaths:
                self._pool.deaths.forget(self._prompt)
            clock.finished(event)
        return choice.reader.read(event)

    def _survive(self, index: int, crash: EngineCrashedError) -> None:
        """The engine died: who only waited is asked again.

        Raises:
            EngineCrashedError: the answer had begun, the model can't be loaded, or this happens too often.
        """
        choice = self._choices[index]
        if choice.connection is None:
            raise crash
        if choice.reader.is_started or choice.connection.is_first_waiting():
            self._pool.deaths.add(self._prompt, choice.connection.pid)
        if choice.reader.is_started or choice.engines >= _MOST_ENGINES:
            raise crash
        self._spawn(index)

    def cancel(self) -> None:
        """Stop all that have not ended. Nobody hears of them any more."""
        for task in self._tasks:
            task.cancel()
        for choice, clock in zip(self._choices, self._clocks, strict=True):
            if not choice.is_finished:
                clock.aborted()
                if choice.connection is not None:
                    choice.connection.cancel(choice.request)
