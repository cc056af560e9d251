"""Requests from messages to answers in one process: preparation and loop, without pipe and server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from llmrun import _native
from llmrun.engine.core.batch import BatchPart
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.states import KVStore
from llmrun.engine.llama.base import Context
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.service import Preparer
from llmrun.errors import LlmrunError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, Generate, Message, Started
from llmrun.protocol.params import Limits, SamplingParams

GREEDY = SamplingParams(temperature=0)


class Answered(NamedTuple):
    """An answer and its costs in tokens."""

    message: Message
    prompt: list[int]
    completion: list[int]
    computed: int  # of the prompt
    reason: str
    started: Started

    @property
    def standing(self) -> list[int]:
        """The tokens that a later prompt can begin with."""
        return [*self.prompt, *self.completion[:-1]]


class _Engine(Engine):
    """One that samples the tokens of a script, while there are any."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.script: list[int] = []

    def _sample(self, parts: list[BatchPart]) -> list[int | LlmrunError]:
        return [self.script.pop(0)] if self.script else super()._sample(parts)


class Answering:
    """An engine and the preparer of its requests."""

    def __init__(self, context: Context, template: str | None, n_ctx: int, states: KVStore | None = None) -> None:
        self.preparer = Preparer(context.vocabulary, template, n_ctx)
        self.engine = _Engine(context, states=states)
        self._numbers, self._vocabulary = itertools.count(1), context.vocabulary

    @property
    def without_blanks(self) -> SamplingParams:
        """Sampling of a model of random weights that would write blanks without end where a grammar allows them."""
        tokens = (token for token in range(self._vocabulary.n_tokens) if not self._vocabulary.is_end(token))
        blanks = ((token, -30.0) for token in tokens if self._vocabulary.piece(token).isspace())
        return replace(GREEDY, logit_bias=tuple(blanks))

    @property
    def end(self) -> int:
        """The token that ends answers."""
        return next(token for token in range(self._vocabulary.n_tokens) if self._vocabulary.is_end(token))

    def ask(
        self,
        messages: Sequence[Message],
        *,
        says: str | None = None,
        thinks: str = "",
        stop_after: int | None = None,
        **request: Any,
    ) -> Answered:
        """Return the answer to a conversation.

        Args:
            says: what the model says, with control tokens; None leaves it to its weights.
            thinks: its reasoning before that, if it reasons.
            stop_after: tokens after which the client cancels.
        """
        settings = {"sampling": GREEDY, "limits": Limits(300), **request}
        number = next(self._numbers)
        prepared = self.preparer.prepare(Generate(number, AnswerRequest(tuple(messages), **settings)), lambda _: None)
        response, extras = ResponseAccumulator(), prepared.extras
        if says is not None:
            inside, tags = extras.starts_in_reasoning, extras.thinking_tags if thinks else ()
            reasoning = f"{'' if inside else tags[0]}{thinks}{tags[1]}" if tags else ""
            self.engine.script = [*self._vocabulary.tokenize(reasoning + says, special=True), self.end]
        self.engine.add(*prepared)
        sequence = self.engine._waiting[-1]
        while self.engine.busy:
            for event in self.engine.step():
                assert not isinstance(event, Failed), event
                response.take(event)
            if stop_after is not None and sequence.n_completion >= stop_after:
                self.engine.cancel(number)
        assert response.started is not None
        assert response.finished is not None
        started, stats = response.started, response.finished.stats
        message = Message("assistant", response.text, response.calls, reasoning=response.reasoning)
        completion = sequence.tokens[sequence.n_prompt :]
        computed = stats.prompt_tokens - stats.reused_tokens
        return Answered(message, prepared.tokens, completion, computed, response.finished.reason, started)


@contextmanager
def real_answering(
    path: Path, template: str | None, *, n_ctx: int = 8192, states: KVStore | None = None, **load: Any
) -> Iterator[Answering]:
    """Yield one with a model file."""
    model = LlamaModel(str(path), 0, _native.CancelFlag())
    context = LlamaContext(model, Load(model.path, n_ctx, n_ctx, n_batch=512, **{"n_cells": n_ctx, **load}))
    try:
        yield Answering(context, template, n_ctx, states)
    finally:
        context.close()
        model.close()


def without_reasoning(message: Message) -> Message:
    return replace(message, reasoning="")


def with_other_json(message: Message) -> Message:
    """Return a message whose arguments a client wrote anew."""
    calls = (call._replace(arguments=json.dumps(json.loads(call.arguments), indent=1)) for call in message.tool_calls)
    return replace(message, tool_calls=tuple(calls))
