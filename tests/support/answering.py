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
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.loaded import LoadedModel
from llmrun.errors import LlmrunError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, Generate, Message, Started
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import SaveState

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


class Answering:
    """A loaded model and a chat template."""

    def __init__(self, loaded: LoadedModel, template: str | None) -> None:
        self.loaded, self.template = loaded, template
        self._numbers, self._vocabulary = itertools.count(1), loaded.weights.vocabulary
        self._script: list[int] = []
        self._last = 0
        self._sample, loaded.engine._sample = loaded.engine._sample, self._scripted  # type: ignore[method-assign]

    def _scripted(self, parts: list[BatchPart]) -> list[int | LlmrunError]:
        """Return the next token of the script, while there are any."""
        return [self._script.pop(0)] if self._script else self._sample(parts)

    def prompt(self, messages: Sequence[Message], **request: Any) -> list[int]:
        """Return the tokens of a conversation's prompt."""
        asked = AnswerRequest(tuple(messages), **{"template": self.template, **request})
        return self.loaded.preparer.prompts.prompt(Generate(next(self._numbers), asked)).tokens

    def save(self) -> None:
        """Save the KV state of the last answer."""
        self.loaded.save(SaveState(self._last))

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._vocabulary.control_piece, tokens)).decode()

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
        settings = {"sampling": GREEDY, "limits": Limits(300), "template": self.template, **request}
        number, engine = next(self._numbers), self.loaded.engine
        self._last = number
        generate = Generate(number, AnswerRequest(tuple(messages), **settings))
        sequence = self.loaded.preparer.prepare(generate, lambda _: None)
        response, started = ResponseAccumulator(), sequence.announcement
        if says is not None:
            inside, tags = started.thinking, started.thinking_tags if thinks else ()
            reasoning = f"{'' if inside else tags[0]}{thinks}{tags[1]}" if tags else ""
            self._script = [*self._vocabulary.tokenize(reasoning + says, special=True), self.end]
        engine.add(sequence)
        while engine.busy:
            for event in engine.step():
                assert not isinstance(event, Failed), event
                response.take(event)
            if stop_after is not None and sequence.n_completion >= stop_after:
                engine.cancel(number)
        assert response.started is not None
        assert response.finished is not None
        started, stats = response.started, response.finished.stats
        message = Message("assistant", response.text, response.calls, reasoning=response.reasoning.strip())
        completion = sequence.tokens[sequence.n_prompt :]
        computed = stats.prompt_tokens - stats.reused_tokens
        return Answered(
            message, sequence.tokens[: sequence.n_prompt], completion, computed, response.finished.reason, started
        )


@contextmanager
def answering(path: Path, template: str | None, *, n_ctx: int = 8192, **load: Any) -> Iterator[Answering]:
    """Yield a model file, loaded."""
    weights = LlamaModel(str(path), 0, _native.CancelFlag())
    loading = Load(weights.path, n_ctx, n_batch=512, **{"n_cells": n_ctx, **load})
    context = LlamaContext(weights, loading)
    try:
        yield Answering(LoadedModel(weights, context, loading), template)
    finally:
        context.close()
        weights.close()


def without_reasoning(message: Message) -> Message:
    return replace(message, reasoning="")


def with_other_json(message: Message) -> Message:
    """Return a message whose arguments a client wrote anew."""
    calls = (call._replace(arguments=json.dumps(json.loads(call.arguments), indent=1)) for call in message.tool_calls)
    return replace(message, tool_calls=tuple(calls))
