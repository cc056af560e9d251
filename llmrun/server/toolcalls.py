"""The engine's events of one answer as the parts that protocols write. Pure; must not know protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmrun.protocol.messages import AnswerPart, Event, Finished, Started, TextDelta, TokenLogprob
from llmrun.protocol.toolcalls import new_call_id
from llmrun.server.answer_parts import (
    AnswerText,
    CallArguments,
    CallStarted,
    Part,
    ReasoningText,
    ResponseFinished,
    ResponseStarted,
)


class AnswerReader:
    """Translates the events of one answer.

    Args:
        choice: index of the answer among those of its request.
        new_id: makes the id of a call.

    Attributes:
        is_started: the prompt was accepted.
    """

    def __init__(self, choice: int, new_id: Callable[[], str] = new_call_id) -> None:
        self._choice, self._new_id = choice, new_id
        self.is_started = False
        self._n_calls = self._n_complete_calls = 0
        self._logprobs: tuple[TokenLogprob, ...] = ()  # wait for the next text

    def read(self, event: Event) -> list[Part]:
        """Return the parts of an event; none if it is not of the answer itself."""
        if isinstance(event, TextDelta):
            self._logprobs += event.logprobs
            return list(self._parts(event.answer_parts))
        if isinstance(event, Started):
            self.is_started = True
            return [ResponseStarted(self._choice, event.prompt_tokens, event.reused_tokens)]
        return [self._ended(event)] if isinstance(event, Finished) else []

    def _parts(self, parts: tuple[AnswerPart, ...]) -> Iterator[Part]:
        for kind, text in parts:
            if kind == "text":
                logprobs, self._logprobs = self._logprobs, ()
                yield AnswerText(self._choice, text, logprobs)
            elif kind == "reasoning":
                yield ReasoningText(self._choice, text)
            elif kind == "call":
                self._n_calls += 1
                yield CallStarted(self._choice, self._n_calls - 1, self._new_id(), text)
            elif kind == "arguments":
                yield CallArguments(self._choice, self._n_calls - 1, text)
            elif kind == "call_end":
                self._n_complete_calls += 1

    def _ended(self, event: Finished) -> ResponseFinished:
        if event.reason != "stop":
            return ResponseFinished(self._choice, event.reason, event.stats)
        reason = "stop_string" if event.detail else "tool_calls" if self._n_complete_calls else "stop"
        return ResponseFinished(self._choice, reason, event.stats, event.detail)
