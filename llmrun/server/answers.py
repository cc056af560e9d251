"""The answers to one request: engine events in, parts for a protocol out.

Owns the engine's view of a request, and resends a request that had not started when its engine died; must not know
protocols or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.gguf.pooling import refuse_answers
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Rewriting, Started, TextDelta
from llmrun.server.answer_parts import AnswerReader, CompletionRequest, Part
from llmrun.server.connection import EngineConnection
from llmrun.server.metrics import ServerMetrics
from llmrun.server.pool import Pool, PooledModel, prompt_hash

_MOST_ENGINES = 3
"""Maximum number of engines that a request is sent to."""

AnswerEvent = tuple[int, Event | LlmrunError | None]
"""Index of an answer, and an event, the error that ended it, or None after its last event."""


class _Choice:
    """The state of one answer."""

    def __init__(self, index: int) -> None:
        self.connection: EngineConnection | None = None
        self.request = 0  # its number in that engine
        self.n_engines = 0
        self.is_finished = False
        self.reader = AnswerReader(index)


class ResponseStreams:
    """Requests all answers, and translates their events.

    Args:
        pooled: the model, leased.
        put: called in the event loop with each event, for take().
        arrived: when the server had read the request, see AnswerRequest.

    Attributes:
        rewritten: of the conversation, for the first time with this chat template.
        left_out: of the schemas of tools, because it can't be enforced.
    """

    def __init__(
        self,
        pool: Pool,
        pooled: PooledModel,
        completion: CompletionRequest,
        put: Callable[[AnswerEvent], None],
        metrics: ServerMetrics,
        arrived: float,
    ) -> None:
        self._pool, self._pooled, self._completion, self._put = pool, pooled, completion, put
        self._choices = [_Choice(index) for index in range(completion.n_choices)]
        self._timers = [metrics.request(pooled.name, arrived) for _ in self._choices]
        self._arrived = arrived
        self.rewritten: tuple[Rewriting, ...] = ()
        self.left_out: tuple[str, ...] = ()
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
            self._put((index, error))
            return
        choice.connection, choice.request = connection, connection.next_request()
        choice.n_engines += 1
        connection.send(Generate(choice.request, request), lambda event: self._put((index, event)))

    def _request(self, index: int) -> AnswerRequest:
        """Return the request for the engine, with sampling by the client, else by the preset, else by the model."""
        assert self._pooled.model is not None
        refuse_answers(self._pooled.model.header)
        name = self._completion.model
        sampling = self._pooled.model.sampling(self._pool.sampling(name, self._completion.sampling))[0]
        if sampling.seed is not None and (place := index % self._completion.n):
            sampling = replace(sampling, seed=(sampling.seed + place) % 2**32)
        speculation = self._pooled.model.drafting.speculation(self._completion.speculate)
        request = self._pool.complete(self._pooled, name, self._completion.of_choice(index))
        return replace(request, sampling=sampling, speculation=speculation, arrived=self._arrived)

    def take(self, answer_event: AnswerEvent) -> list[Part]:
        """Return the parts of an event.

        Raises:
            LlmrunError: an answer failed.
        """
        index, event = answer_event
        choice, timer = self._choices[index], self._timers[index]
        if type(event) is TextDelta:
            timer.delta(event)
            return choice.reader.read(event)
        if isinstance(event, EngineCrashedError):
            self._recover(index, event)
            return []
        if isinstance(event, LlmrunError):
            raise event
        if event is None:
            return []
        if isinstance(event, Started):
            self.rewritten += event.rewritten
            self.left_out = event.left_out
            timer.started(event)
        elif isinstance(event, Finished):
            choice.is_finished = True
            if self._pool.crashes:
                self._pool.crashes.forget(self._prompt(index))
            timer.finished(event)
            self._pooled.notice(event.stats)
        return choice.reader.read(event)

    def _recover(self, index: int, crash: EngineCrashedError) -> None:
        """Resend the request after its engine died, if the answer had not started.

        Raises:
            EngineCrashedError: the answer had started, the model can't be loaded, or too many engines died.
        """
        choice = self._choices[index]
        if choice.connection is None:
            raise crash
        if choice.reader.is_started or choice.connection.is_first_waiting():
            self._pool.crashes.add(self._prompt(index), choice.connection.pid)
        if choice.reader.is_started or choice.n_engines >= _MOST_ENGINES:
            raise crash
        self._spawn(index)

    def cancel(self) -> None:
        """Cancel all unfinished answers; their events are no longer delivered to a client."""
        for task in self._tasks:
            task.cancel()
        for choice, timer in zip(self._choices, self._timers, strict=True):
            if not choice.is_finished:
                timer.aborted()
                if choice.connection is not None:
                    choice.connection.cancel(choice.request)
