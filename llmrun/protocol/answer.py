"""One answer as typed parts: text, reasoning and calls. The engine splits it once, ResponseAccumulator joins it again.

Pure; must not know templates, tokens, or how parts are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmrun.protocol.messages import (
    AnswerPart,
    Event,
    Finished,
    Generate,
    Started,
    Stats,
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

    def mask(self, text: str, *, final: bool = False) -> tuple[str, int]:
        """Mask the reasoning, its tags and headers in text that feed() gets later; as ReasoningSplitter.mask()."""
        return self._reasoning.mask(text, final=final)

    def flush(self, *, is_cut_off: bool = False, stop: Sequence[str] = ()) -> tuple[AnswerPart, ...]:
        """Return the remaining parts at the end of the answer.

        Args:
            is_cut_off: the model did not end the answer, so that it may end in the middle of a call.
            stop: texts that end an answer which was taken for reasoning.
        """
        rest = self._with_calls(self._reasoning.flush(is_cut_off=is_cut_off, stop=stop))
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
    """An answer as received so far: the events of one request become text, reasoning, calls and the reason of the end.

    Attributes:
        started: None before the answer has started.
        finished: None before the answer has finished.
        logprobs: of all tokens, if they were requested.
        ids: of all tokens, if they were requested.
        text_logprobs: of the tokens of the text.
        all_calls: the last one may be incomplete.
        has_text: the model has written something, be it reasoning or calls.
        reasoning_tokens: number of tokens of the reasoning.
    """

    def __init__(self) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.logprobs: list[TokenLogprob] = []
        self.ids: list[int] = []
        self.text_logprobs: list[TokenLogprob] = []
        self.all_calls: list[ToolCall] = []
        self.has_text = False
        self.reasoning_tokens = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._n_complete_calls = 0
        self._waiting: tuple[TokenLogprob, ...] = ()  # for the next text
        self._follows_other = False  # the next text follows reasoning or a call

    def take(self, event: Event) -> Sequence[AnswerPart]:
        """Add an event of the answer; return its parts. Each call has an id, and text its log-probabilities.

        Events of other kinds are passed over.
        """
        if type(event) is TextDelta:
            self.has_text = self.has_text or bool(event.text)
            self.ids += event.ids
            if event.parts is None and not (event.logprobs or self._waiting):  # a shortcut for most events
                self._text.append(event.text)
                return (AnswerPart("text", event.text),) if event.text else ()
            return self._take_parts(event)
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Finished):
            self.finished = event
        return ()

    def _take_parts(self, event: TextDelta) -> list[AnswerPart]:
        parts = event.answer_parts
        kinds = {part.kind for part in parts}
        self.logprobs += event.logprobs
        self._waiting += event.logprobs
        self.reasoning_tokens += event.tokens if "reasoning" in kinds else 0
        if kinds and "text" not in kinds:
            self._waiting, self._follows_other = (), True
        return [self._completed(part) for part in parts]

    def _completed(self, part: AnswerPart) -> AnswerPart:
        """Add a part; return it with what the engine left out."""
        if part.kind == "text":
            tokens = _tokens_of(part.text, self._waiting) if self._follows_other else self._waiting
            self._waiting, self._follows_other = (), False
            self._text.append(part.text)
            self.text_logprobs += tokens
            return part._replace(logprobs=tokens) if tokens else part
        if part.kind == "reasoning":
            self._reasoning.append(part.text)
        elif part.kind == "call":
            from llmrun.protocol.toolcalls import new_call_id  # few answers have calls

            part = part if part.call_id else part._replace(call_id=new_call_id())
            self.all_calls.append(ToolCall(part.call_id, part.text, ""))
        elif part.kind == "arguments":
            call = self.all_calls[-1]
            self.all_calls[-1] = call._replace(arguments=call.arguments + part.text)
        elif part.kind == "call_end":
            self._n_complete_calls += 1
        return part

    @property
    def text(self) -> str:
        """The answer without reasoning and calls."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer, with the space around it."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The complete calls, if the model itself ended the answer."""
        if self.finished is None or self.finished.reason != "stop":
            return ()
        return tuple(self.all_calls[: self._n_complete_calls])

    @property
    def stats(self) -> Stats:
        """Token counts and times; zeros before the end."""
        return Stats() if self.finished is None else self.finished.stats

    @property
    def reason(self) -> str:
        """Reason of the end; "" before it.

        "stop" (end token), "stop_string", "tool_calls", "length" (also for a cut call), "cancelled" or "repeats".
        """
        if self.finished is None:
            return ""
        if len(self.all_calls) > self._n_complete_calls:  # also by a stop text or the loop guard: no client may run it
            return "length"
        if self.finished.reason != "stop":
            return self.finished.reason
        return "stop_string" if self.finished.detail else "tool_calls" if self.all_calls else "stop"

    @property
    def stop(self) -> str:
        """The stop text that ended it, if one did."""
        return self.finished.detail if self.finished is not None and self.reason == "stop_string" else ""


def _tokens_of(text: str, tokens: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
    """Return the last tokens, as many as the text has: those before it are a tag's."""
    excess = sum(len(token.bytes) for token in tokens) - len(text.encode("utf-8", "replace"))
    start = 0
    while excess > 0 and start < len(tokens) - 1:
        excess -= len(tokens[start].bytes)
        start += 1
    return tokens[start:]


def logprob_entries(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return one object for each token. Ids are llama-server's; what was drafted in its place is llmrun's own field."""
    return [
        {
            **entry,
            "top_logprobs": top,
            **({"draft": token.draft._asdict()} if token.draft is not None else {}),
        }
        for token in tokens
        for entry, *top in [_entries(token)]
    ]


def _entries(token: TokenLogprob) -> list[dict[str, Any]]:
    """Return the objects of a token, and of the most likely ones in its place."""
    entries = [
        {"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in (token[:3], *token.top)
    ]
    return [{"id": each, **entry} for each, entry in zip(token.ids, entries, strict=True)] if token.ids else entries
