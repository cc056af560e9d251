"""An answer's text as the parts that protocols know: thoughts, text, calls of tools. Pure; must not know protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from llmrun.protocol.messages import Event, Finished, Started, TextDelta, TokenLogprob, Tool
from llmrun.protocol.reasoning import ReasoningKind, ReasoningPart, Splitter
from llmrun.protocol.toolcalls import SYNTAXES, CallKind, CallPart, CallSplitter, new_call_id
from llmrun.server.asked import Begun, CallArguments, CallBegun, Ended, Part, Text, Thought


class PartSplitter:
    """The text of one answer, in pieces.

    Args:
        choice: which answer it is.
        started: how the model tells thoughts and calls from text.
        tools: that may be called.
        new_id: gives a call's id.
    """

    def __init__(
        self,
        choice: int,
        started: Started,
        tools: Sequence[Tool] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._choice, self._new_id = choice, new_id
        self._thoughts = Splitter(started.thinking_tags, inside=started.thinking)
        self._calls = CallSplitter(SYNTAXES.get(started.tool_syntax), tools)
        self._n_begun = 0

    @property
    def has_called(self) -> bool:
        """Whether there was a whole call."""
        return self._calls.n_calls > 0

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are known with this piece."""
        return self._thoughts_or_calls(self._thoughts.feed(text))

    def flush(self, *, is_cut_off: bool = False) -> Iterator[Part]:
        """The rest, when no more text comes. An answer that is cut off may end in the middle of a call."""
        yield from self._thoughts_or_calls(self._thoughts.flush())
        yield from self._text_or_calls(self._calls.flush(is_cut_off=is_cut_off))

    def _thoughts_or_calls(self, pieces: Iterable[ReasoningPart]) -> Iterator[Part]:
        for piece in pieces:
            if piece.kind is ReasoningKind.THOUGHT:
                yield Thought(self._choice, piece.text)
            elif piece.kind is ReasoningKind.ANSWER:
                yield from self._text_or_calls(self._calls.feed(piece.text))

    def _text_or_calls(self, pieces: Iterable[CallPart]) -> Iterator[Part]:
        for piece in pieces:
            if piece.kind is CallKind.TEXT:
                yield Text(self._choice, piece.text)
            elif piece.kind is CallKind.NAME:
                yield CallBegun(self._choice, self._n_begun, self._new_id(), piece.text)
                self._n_begun += 1
            else:
                yield CallArguments(self._choice, self._n_begun - 1, piece.text)


class AnswerReader:
    """An engine's events of one answer as parts.

    Args:
        choice: which answer it is.
        tools: that may be called.
    """

    def __init__(self, choice: int, tools: Sequence[Tool] = ()) -> None:
        self._choice, self._tools = choice, tools
        self._splitter: PartSplitter | None = None
        self._logprobs: tuple[TokenLogprob, ...] = ()  # whose text the splitter still holds

    @property
    def is_started(self) -> bool:
        """Whether it was more than waiting."""
        return self._splitter is not None

    def read(self, event: Event) -> list[Part]:
        """What an event means; nothing where it is not of the answer itself."""
        if isinstance(event, Started):
            self._splitter = PartSplitter(self._choice, event, self._tools)
            return [Begun(self._choice, event.prompt_tokens, event.reused_tokens)]
        if isinstance(event, TextDelta):
            assert self._splitter is not None, "text came before its answer was started"
            self._logprobs += event.logprobs
            return list(self._with_logprobs(self._splitter.feed(event.text)))
        if isinstance(event, Finished):
            rest = self._splitter.flush(is_cut_off=event.reason == "length") if self._splitter is not None else ()
            return [*self._with_logprobs(rest), self._ended(event)]
        return []

    def _with_logprobs(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The first text among the parts has the log probabilities that came so far."""
        for part in parts:
            if isinstance(part, Text) and self._logprobs:
                part, self._logprobs = part._replace(logprobs=self._logprobs), ()
            yield part

    def _ended(self, event: Finished) -> Ended:
        if event.reason != "stop":
            return Ended(self._choice, event.reason, event.stats)
        has_called = self._splitter is not None and self._splitter.has_called
        reason = "stop_string" if event.detail else "tool_calls" if has_called else "stop"
        return Ended(self._choice, reason, event.stats, event.detail)
