"""What a client asked for and what it gets, the same for every protocol.

Owns the seam between the protocols and the rest of the server; must not know JSON shapes, HTTP or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from llmrun.errors import LlmrunError
from llmrun.protocol.messages import AnswerRequest, Stats, TokenLogprob


class CompletionRequest(NamedTuple):
    """What a client asked for.

    Attributes:
        model: its name; "" is the model that the server was started with.
        request: the conversation or the text; its sampling is not merged yet, see `sampling`.
        sampling: the fields of SamplingParams that the client named; the model's advised ones fill the rest.
        n: answers to the same prompt; seeds count up from the first's.
        stream: send the answer as it comes.
        keep_seconds: how long the model stays loaded afterwards; None is the server's own, -1 for ever.
        speculate: drafted tokens a step, see planning.speculation.read_speculate(); None is the server's own.
    """

    model: str
    request: AnswerRequest
    sampling: Mapping[str, Any]
    n: int = 1
    stream: bool = False
    keep_seconds: float | None = None
    speculate: int | None = None


class ResponseStarted(NamedTuple):
    """The prompt is accepted, and prefill begins. `choice` counts the answers to a prompt, from 0."""

    choice: int
    prompt_tokens: int
    cached_tokens: int


class ReasoningText(NamedTuple):
    """A piece of what the model thinks before it answers."""

    choice: int
    text: str


class AnswerText(NamedTuple):
    """A piece of the answer."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class CallStarted(NamedTuple):
    """The model begins to call a tool. `call` counts an answer's calls, from 0."""

    choice: int
    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON text of a call's arguments."""

    choice: int
    call: int
    text: str


class ResponseFinished(NamedTuple):
    """An answer ended.

    Attributes:
        reason: "stop" (end token), "stop_string", "length", "tool_calls", "cancelled" or "repeats".
        stop: the stop string that ended it.
    """

    choice: int
    reason: str
    stats: Stats
    stop: str = ""


Part = ResponseStarted | ReasoningText | AnswerText | CallStarted | CallArguments | ResponseFinished


class Envelope(NamedTuple):
    """What surrounds an answer: its id, the Unix time it was made, and the model's name as the client gets it."""

    id: str
    created: int
    model: str


class Writer(Protocol):
    """One HTTP answer in one protocol: parts in, bytes out.

    Attributes:
        media_type: of a stream: "text/event-stream" or "application/x-ndjson".
    """

    media_type: str

    def begin(self) -> bytes:
        """What is sent before prefill."""

    def feed(self, part: Part) -> bytes:
        """What the client gets of a part, b"" for nothing; remembers it for whole()."""

    def end(self) -> bytes:
        """What is sent behind the last part."""

    def error(self, error: LlmrunError) -> bytes:
        """An error in the middle of a stream."""

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed, of all that was fed."""
