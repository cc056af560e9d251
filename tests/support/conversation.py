"""An engine over the fake context, with shorthands for what tests of the loop ask and look at."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from llmrun.engine.core.draft_source import DraftWeights
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.policy import POLICY, Policy
from llmrun.engine.core.prefix import NO_SALT, Prefix, Salt
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence as Request
from llmrun.engine.core.states import KVStore
from llmrun.engine.core.threads import ThreadChooser
from llmrun.protocol.messages import AnswerRequest, Event, Failed, Finished, Started, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from support.fake_context import FakeContext, Model, tokens_of

GREEDY = SamplingParams(temperature=0)


class Clock:
    """Ticks once each time it is read; with a time per token, only as long as the model computes."""

    def __init__(self, context: FakeContext) -> None:
        self.per_token: float | None = None
        self._context = context
        self._ticks = itertools.count()

    def __call__(self) -> float:
        """Seconds."""
        return next(self._ticks) if self.per_token is None else self._context.n_computed * self.per_token


class Conversation:
    """The events of one engine, and its context."""

    def __init__(
        self,
        model: Model,
        states: KVStore | None = None,
        *,
        draft_model: DraftWeights | None = None,
        adapts: bool = False,
        prefixes: list[Prefix] | None = None,
        threads: ThreadChooser | None = None,
        copy_bytes: int = sys.maxsize,
        cell_bytes: int = 0,
        policy: Policy = POLICY,
        **context: int,
    ) -> None:
        self.context = FakeContext(model, **context)
        self.clock = Clock(self.context)
        self.engine = Engine(
            self.context,
            self.clock,
            states,
            draft_model,
            threads=threads,
            adapts=adapts,
            prefixes=prefixes,
            copy_bytes=copy_bytes,
            cell_bytes=cell_bytes,
            policy=policy,
        )
        self.events: list[Event] = []

    def ask(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        most: int | None = None,
        stop: tuple[str, ...] = (),
        ban: tuple[str, ...] = (),
        request: int = 1,
        constraint: Any = None,
        remember: int = 0,
        logprobs: int | None = None,
        salt: Salt | str = NO_SALT,
        moves: bool = False,
        **more: Any,
    ) -> None:
        """Add a request. A salt that is a text is the client's own."""
        salt = Salt(private=salt) if isinstance(salt, str) else salt
        tokens = tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
        sampler = SequenceSampler(sampling, self.context.vocabulary, tokens, constraint, remember, logprobs)
        asked = AnswerRequest(sampling=sampling, limits=Limits(most, stop, ban), logprobs=logprobs, moves=moves)
        self.engine.add(Request(request, tokens, sampler, asked, salt=salt, **more))

    def run(self) -> None:
        """Step until all is answered, then rest, as the engine's process does."""
        for _ in range(2000):
            if not self.engine.busy:
                self.rest()
                return
            self.events += self.engine.step()
        raise AssertionError("the engine does not come to an end")

    def rest(self) -> None:
        """Copy parked prefixes, as the engine's process does while nothing is to be computed."""
        while self.engine.offload():
            pass

    def answer(self, *args: object, **options: object) -> tuple[str, str]:
        """Text and reason of one request."""
        self.events.clear()
        self.ask(*args, **options)  # type: ignore[arg-type]
        self.run()
        return self.text(), self.finished().reason

    def of(self, request: int) -> list[Event]:
        return [event for event in self.events if getattr(event, "request", None) == request]

    def text(self, request: int = 1) -> str:
        return "".join(event.text for event in self.of(request) if isinstance(event, TextDelta))

    def finished(self, request: int = 1) -> Finished:
        last = self.of(request)[-1]
        assert isinstance(last, Finished), last
        return last

    def failed(self, request: int = 1) -> Failed:
        last = self.of(request)[-1]
        assert isinstance(last, Failed), last
        return last

    def started(self, request: int = 1) -> Started:
        first = self.of(request)[0]
        assert isinstance(first, Started), first
        return first

    def computed(self) -> int:
        """Tokens that went through the model."""
        return sum(map(len, self.context.calls))
