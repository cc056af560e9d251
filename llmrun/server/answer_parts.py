"""Requests and answers as typed data, the same for every protocol; events of the engine become parts here.

Pure; must not know JSON shapes, HTTP or engine processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from llmrun.errors import LlmrunError
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    PartKind,
    PromptDifference,
    PromptHistory,
    Started,
    Stats,
    TextDelta,
    TokenLogprob,
    ToolCall,
)
from llmrun.protocol.toolcalls import new_call_id


class CompletionRequest(NamedTuple):
    """A client's request for answers to one prompt, or to several."""

    model: str  # its name; "" for the first model of the server
    request: AnswerRequest  # the conversation or text; its sampling is not set yet, see `sampling`
    sampling: Mapping[str, Any]  # fields of SamplingParams that the client set; the model's advised ones fill the rest
    n: int = 1  # number of answers to each prompt; their seeds count up from the first
    stream: bool = False
    keep_seconds: float | None = None  # time that the model stays loaded; None: the server's default, -1: for ever
    speculate: int | None = None  # drafted tokens per step, see planning.speculation.read_speculate(); None: default
    ignored: tuple[str, ...] = ()  # fields that are not honoured, e.g. "tools[8].type=web_search"
    others: tuple[AnswerRequest, ...] = ()  # for further prompts
    scores_prompts: bool = False  # the log-probabilities of the prompts' tokens are wanted too

    @property
    def n_choices(self) -> int:
        """Number of all answers; those to one prompt follow each other."""
        return self.n * (1 + len(self.others))

    def of_choice(self, index: int) -> AnswerRequest:
        """Return the request for the prompt of an answer."""
        return (self.request, *self.others)[index // self.n]


class ResponseStarted(NamedTuple):
    """The prompt is accepted, and prefill begins."""

    choice: int  # index among the answers
    prompt_tokens: int
    cached_tokens: int
    difference: PromptDifference | None = None  # from the most similar cached prompt
    history: PromptHistory | None = None  # as in Started


class ReasoningText(NamedTuple):
    """A piece of the reasoning before the answer."""

    choice: int
    text: str


class AnswerText(NamedTuple):
    """A piece of the answer."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class CallStarted(NamedTuple):
    """The beginning of a tool call."""

    choice: int
    call: int  # index among the calls of the answer
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON text of a call's arguments."""

    choice: int
    call: int
    text: str


class ResponseFinished(NamedTuple):
    """The end of an answer."""

    choice: int
    # "stop" (end token), "stop_string", "length" (also for a cut call), "tool_calls", "cancelled" or "repeats"
    reason: str
    stats: Stats
    stop: str = ""  # the stop string that ended it
    reasoning_tokens: int = 0  # of stats.completion_tokens


Part = ResponseStarted | ReasoningText | AnswerText | CallStarted | CallArguments | ResponseFinished


class AnswerReader:
    """Translates the engine's events of one answer into parts.

    Args:
        choice: index of the answer among those of its request.
        new_id: makes the id of a call that has none of the model's.
    """

    def __init__(self, choice: int, new_id: Callable[[], str] = new_call_id) -> None:
        self._choice, self._new_id = choice, new_id
        self.is_started = False  # the prompt was accepted
        self._n_calls = self._n_complete_calls = 0
        self._n_reasoning = 0  # tokens
        self._logprobs: tuple[TokenLogprob, ...] = ()  # wait for the next text
        self._follows_other = False  # the next text follows reasoning or a call

    def read(self, event: Event) -> list[Part]:
        """Return the parts of an event; none if it is not of the answer itself."""
        if type(event) is TextDelta:
            if event.parts is None and not (event.logprobs or self._logprobs):  # a shortcut for most events
                return [AnswerText(self._choice, event.text)] if event.text else []
            self._logprobs += event.logprobs
            kinds = {part.kind for part in event.answer_parts}
            self._n_reasoning += event.tokens if "reasoning" in kinds else 0
            if kinds and "text" not in kinds:
                self._logprobs, self._follows_other = (), True
            return [part for each in event.answer_parts if (part := self._part(*each)) is not None]
        if isinstance(event, Started):
            self.is_started = True
            n_tokens, n_cached = event.prompt_tokens, event.reused_tokens
            return [ResponseStarted(self._choice, n_tokens, n_cached, event.difference, event.history)]
        return [self._finished(event)] if isinstance(event, Finished) else []

    def _part(self, kind: PartKind, text: str, call_id: str) -> Part | None:
        if kind == "text":
            logprobs = _tokens_of(text, self._logprobs) if self._follows_other else self._logprobs
            self._logprobs, self._follows_other = (), False
            return AnswerText(self._choice, text, logprobs)
        if kind == "reasoning":
            return ReasoningText(self._choice, text)
        if kind == "call":
            self._n_calls += 1
            return CallStarted(self._choice, self._n_calls - 1, call_id or self._new_id(), text)
        if kind == "arguments":
            return CallArguments(self._choice, self._n_calls - 1, text)
        self._n_complete_calls += kind == "call_end"
        return None

    def _finished(self, event: Finished) -> ResponseFinished:
        reason, stop = event.reason, ""
        if self._n_calls > self._n_complete_calls:  # also by a stop text or the loop guard: no client may run it
            reason = "length"
        elif reason == "stop":
            stop = event.detail
            reason = "stop_string" if stop else "tool_calls" if self._n_complete_calls else "stop"
        return ResponseFinished(self._choice, reason, event.stats, stop, self._n_reasoning)


def _tokens_of(text: str, tokens: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
    """Return the last tokens, as many as the text has: those before it are a tag's."""
    excess = sum(len(token.bytes) for token in tokens) - len(text.encode("utf-8", "replace"))
    start = 0
    while excess > 0 and start < len(tokens) - 1:
        excess -= len(tokens[start].bytes)
        start += 1
    return tokens[start:]


class AccumulatedAnswer:
    """The parts of one answer, joined. The last call may be incomplete."""

    def __init__(self) -> None:
        self.started: ResponseStarted | None = None
        self.finished: ResponseFinished | None = None
        self.calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []
        self._reasoning: list[str] = []
        self._text: list[str] = []

    def add(self, part: Part) -> None:
        """Append a part."""
        match part:
            case AnswerText():
                self._text.append(part.text)
                self.logprobs += part.logprobs
            case ReasoningText():
                self._reasoning.append(part.text)
            case ResponseStarted():
                self.started = part
            case CallStarted():
                self.calls.append(ToolCall(part.id, part.name, ""))
            case CallArguments():
                call = self.calls[part.call]
                self.calls[part.call] = call._replace(arguments=call.arguments + part.text)
            case ResponseFinished():
                self.finished = part

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def text(self) -> str:
        """The answer without reasoning and calls."""
        return "".join(self._text)

    @property
    def stats(self) -> Stats:
        """The cost of the answer; zeros before its end."""
        return Stats() if self.finished is None else self.finished.stats


class Envelope(NamedTuple):
    """The fields around an answer."""

    id: str
    created: int  # Unix time
    model: str  # name as the client gets it
    prompts: tuple[tuple[TokenLogprob, ...], ...] = ()  # scored prompts, if that was requested


class Writer(Protocol):
    """Writes the answers to one request in one protocol: parts in, bytes out."""

    media_type: str  # of a stream: "text/event-stream" or "application/x-ndjson"

    def begin(self) -> bytes:
        """Return the bytes to send before prefill."""

    def feed(self, part: Part) -> bytes:
        """Add a part; return its bytes for a stream, b"" for none."""

    def end(self) -> bytes:
        """Return the bytes to send after the last part."""

    def error(self, error: LlmrunError) -> bytes:
        """Return an error for the middle of a stream."""

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
