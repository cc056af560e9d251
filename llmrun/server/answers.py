"""The answers to one request on their way through an engine: events come in, parts for a protocol go out.

Owns what a request becomes in an engine, and that one which only waited goes on in the next engine when its own dies;
must not know protocols or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Started, TextDelta, TokenLogprob
from llmrun.server.asked import Asked, Begun, Ended, Part, Text
from llmrun.server.connection import EngineConnection
from llmrun.server.metrics import ServerMetrics
from llmrun.server.pool import KeptModel, Pool, prompt_hash
from llmrun.server.toolcalls import PartSplitter

_MOST_ENGINES = 3
"""A request that only waits goes through so many dying engines."""

Heard = tuple[int, Event | LlmrunError | None]
"""Which of the answers, and what came of it."""


class _Choice:
    """One of the answers."""

    def __init__(self) -> None:
        self.connection: EngineConnection | None = None
        self.request = 0
        self.engines = 0
        self.is_started = self.is_finished = False
        self.splitter: PartSplitter | None = None
        self.logprobs: tuple[TokenLogprob, ...] = ()  # whose text the splitter still holds

    def with_logprobs(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The first text among the parts has the log probabilities that came so far."""
        for part in parts:
            if isinstance(part, Text) and self.logprobs:
                part, self.logprobs = part._replace(logprobs=self.logprobs), ()
            yield part


class Answers:
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
        self, pool: Pool, kept: KeptModel, asked: Asked, put: Callable[[Heard], None], metrics: ServerMetrics
    ) -> None:
        self._pool, self._kept, self._asked, self._put = pool, kept, asked, put
        self._choices = [_Choice() for _ in range(asked.n)]
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
        sampling = self._kept.model.sampling(self._asked.sampling)[0]
        if sampling.seed is not None and index:
            sampling = replace(sampling, seed=(sampling.seed + index) % 2**32)
        speculation = self._kept.model.drafting.wanted(self._asked.speculate)
        return replace(self._asked.request, sampling=sampling, speculation=speculation)

    def take(self, heard: Heard) -> list[Part]:
        """What an event means to the client.

        Raises:
            LlmrunError: an answer failed.
        """
        index, event = heard
        choice, clock = self._choices[index], self._clocks[index]
        if isinstance(event, EngineCrashedError):
            self._survive(index, event)
        elif isinstance(event, LlmrunError):
            raise event
        elif isinstance(event, Started):
            choice.is_started = True
            choice.splitter = PartSplitter(index, event, self._asked.request.tools)
            clock.started(event)
            return [Begun(index, event.prompt_tokens, event.reused_tokens)]
        elif isinstance(event, TextDelta):
            clock.delta(event)
            choice.logprobs += event.logprobs
            assert choice.splitter is not None, "text came before its answer was started"
            return list(choice.with_logprobs(choice.splitter.feed(event.text)))
        elif isinstance(event, Finished):
            choice.is_finished = True
            if self._pool.deaths:
                self._pool.deaths.forget(self._prompt)
            clock.finished(event)
            splitter = choice.splitter
            rest = splitter.flush(is_cut_off=event.reason == "length") if splitter is not None else ()
            parts = list(choice.with_logprobs(rest))
            return [*parts, _ended(index, event, has_called=splitter is not None and splitter.has_called)]
        return []

    def _survive(self, index: int, crash: EngineCrashedError) -> None:
        """The engine died: who only waited is asked again.

        Raises:
            EngineCrashedError: the answer had begun, the model can't be loaded, or this happens too often.
        """
        choice = self._choices[index]
        if choice.connection is None:
            raise crash
        if choice.is_started or choice.connection.is_first_waiting():
            self._pool.deaths.add(self._prompt, choice.connection.pid)
        if choice.is_started or choice.engines >= _MOST_ENGINES:
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


def _ended(index: int, event: Finished, *, has_called: bool) -> Ended:
    if event.reason != "stop":
        return Ended(index, event.reason, event.stats)
    reason = "stop_string" if event.detail else "tool_calls" if has_called else "stop"
    return Ended(index, reason, event.stats, event.detail)
