"""One answer as typed parts: text, reasoning and tool calls. The engine splits it once; consumers accumulate the parts.

Pure; must not know templates, tokens, or how parts are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from llmrun.protocol.messages import (
    AnswerPart,
    Event,
    Finished,
    Generate,
    Started,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
)
from llmrun.protocol.reasoning import MESSAGE_BEGINS, ReasoningSplitter

if TYPE_CHECKING:
    from llmrun.protocol.toolcalls import CallSplitter, CallSyntax


class AnswerSplitter:
    """Splits the text of one answer, piece by piece.

    Args:
        tags: texts that open and close the reasoning, or all fields of a ReasoningSyntax; none without reasoning.
        inside: the prompt ended with the opening tag, so that the text begins as reasoning.
        syntax: of tool calls; None if the answer can have none.
        tools: tools that may be called.
        taken: ids of earlier calls.
    """

    def __init__(
        self,
        tags: Sequence[str | bool],
        *,
        inside: bool = False,
        syntax: CallSyntax | None = None,
        tools: Sequence[Tool] = (),
        taken: Iterable[str] = (),
    ) -> None:
        begins = [syntax.trigger, *map(str, syntax.late_head[:1])] if syntax is not None and not syntax.at_start else ()
        anywhere = syntax is not None and syntax.begins_anywhere
        self._reasoning = ReasoningSplitter(tags, inside=inside, calls=begins, anywhere=anywhere)
        self._calls: CallSplitter | None = None
        if syntax is not None:
            from llmrun.protocol.toolcalls import CallSplitter  # few answers have calls

            self._calls = CallSplitter(syntax, tools, taken)
        self._n_skipped = 0  # characters of text to come that the answer was given to begin with

    @property
    def in_reasoning(self) -> bool:
        """The text so far ends inside the reasoning."""
        return self._reasoning.inside

    def skip(self, text: str) -> None:
        """Take the text that the answer was given to begin with, which is no part of it."""
        self._n_skipped = len(text)
        self.feed(text)

    def feed(self, text: str) -> tuple[AnswerPart, ...]:
        """Return the parts that are certain with this piece; tags and call syntax are left out."""
        return self._new(self._with_calls(self._reasoning.feed(text)))

    def flush(self, *, is_cut_off: bool = False) -> tuple[AnswerPart, ...]:
        """Return the remaining parts at the end of the answer.

        Args:
            is_cut_off: the model did not end the answer, so that it may end in the middle of a call.
        """
        rest = self._with_calls(self._reasoning.flush(is_cut_off=is_cut_off))
        return self._new(rest if self._calls is None else (*rest, *self._calls.flush(is_cut_off=is_cut_off)))

    def _new(self, parts: tuple[AnswerPart, ...]) -> tuple[AnswerPart, ...]:
        """Return the parts without text that was given."""
        if not self._n_skipped:
            return parts
        new: list[AnswerPart] = []
        for part in parts:
            if part.kind == "text":
                text = part.text[self._n_skipped :]
                self._n_skipped = max(self._n_skipped - len(part.text), 0)
                new += [AnswerPart("text", text)] if text else []
            else:
                self._n_skipped = 0  # the given text began a call
                new.append(part)
        return tuple(new)

    def _with_calls(self, parts: list[AnswerPart]) -> tuple[AnswerPart, ...]:
        if self._calls is None:
            return tuple(part for part in parts if part is not MESSAGE_BEGINS)
        split: list[AnswerPart] = []
        for part in parts:
            if part is MESSAGE_BEGINS:
                split += self._calls.begin_message()
            else:
                split += self._calls.feed(part.text) if part.kind == "text" else [part]
        return tuple(split)


def with_beginnings(commands: Iterable[Generate], events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of answers, each with the text that it was given to begin with as its first piece."""
    given = {command.request: command.asked for command in commands}
    for event in events:
        yield event
        if not isinstance(event, Started):
            continue
        asked = given[event.request]
        reasoning = [AnswerPart("reasoning", asked.begins_reasoning)] if asked.begins_reasoning else []
        text = [AnswerPart("reasoning_end")] * len(reasoning) + [AnswerPart("text", asked.begins)]
        parts = (*reasoning, *(text if asked.begins else ()))
        if parts:
            yield TextDelta(event.request, asked.begins, 0, parts=parts)


class ResponseAccumulator:
    """An answer as received so far.

    Attributes:
        started: None before the answer has started.
        finished: None before the answer has finished.
        logprobs: of all tokens, if they were requested.
        has_text: the model has written something, be it reasoning or calls.
    """

    def __init__(self) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.logprobs: list[TokenLogprob] = []
        self.has_text = False
        self._texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._calls: list[ToolCall] = []
        self._n_complete_calls = 0

    def take(self, event: Event) -> None:
        """Add an event of the answer; events of other kinds are passed over."""
        if isinstance(event, TextDelta):
            self.has_text = self.has_text or bool(event.text)
            self.logprobs += event.logprobs
            for part in event.answer_parts:
                self._add(part)
        elif isinstance(event, Started):
            self.started = event
        elif isinstance(event, Finished):
            self.finished = event

    def _add(self, part: AnswerPart) -> None:
        if part.kind in self._texts:
            self._texts[part.kind].append(part.text)
        elif part.kind == "call":
            from llmrun.protocol.toolcalls import new_call_id  # few answers have calls

            self._calls.append(ToolCall(part.call_id or new_call_id(), part.text, ""))
        elif part.kind == "arguments":
            last = self._calls[-1]
            self._calls[-1] = last._replace(arguments=last.arguments + part.text)
        elif part.kind == "call_end":
            self._n_complete_calls += 1

    @property
    def text(self) -> str:
        """The answer without reasoning and calls."""
        return "".join(self._texts["text"])

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer."""
        return "".join(self._texts["reasoning"]).strip()

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The complete calls, if the model itself ended the answer."""
        if self.finished is None or self.finished.reason != "stop":
            return ()
        return tuple(self._calls[: self._n_complete_calls])
