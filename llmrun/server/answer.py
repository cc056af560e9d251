"""Common parts of the protocols of completions: the request, the writer of its answers, and JSON in bodies and streams.

Pure: server-sent events and lines of JSON are bytes here, and nothing is sent.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from llmrun.errors import LlmrunError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import (
    AnswerPart,
    AnswerRequest,
    Event,
    Finished,
    PrefillProgress,
    Started,
    TokenLogprob,
)

_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_json_text = json.encoder.encode_basestring  # that of _COMPACT, without its layers
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
SSE_COMMENT = b":\n\n"
"""Ignored by every reader of server-sent events."""
SSE_DONE = b"data: [DONE]\n\n"
"""OpenAI's last event."""

PLACE = secrets.token_hex(16)
"""Placeholder for the text in a TextEvent; no client can guess it."""


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
    named: str = ""  # the name of the model in the request, which may be an alias; the answer repeats it

    @property
    def n_choices(self) -> int:
        """Number of all answers; those to one prompt follow each other."""
        return self.n * (1 + len(self.others))

    def of_choice(self, index: int) -> AnswerRequest:
        """Return the request for the prompt of an answer."""
        return (self.request, *self.others)[index // self.n]

    def owned_by(self, owner: str) -> CompletionRequest:
        """Return it with requests of this owner, see AnswerRequest."""
        others = tuple(replace(each, owner=owner) for each in self.others)
        return self._replace(request=replace(self.request, owner=owner), others=others)


class Envelope(NamedTuple):
    """The fields around an answer."""

    id: str
    created: int  # Unix time
    model: str  # name as in the request
    prompts: tuple[tuple[TokenLogprob, ...], ...] = ()  # scored prompts, if that was requested


class AnswerWriter(ABC):
    """Writes the answers to one request in one protocol: events of the engine in, bytes out.

    Attributes:
        media_type: of a stream.
        answers: as far as they were received.
        requests: for each answer that has started, as the engine got it, with the sampling that is used.
    """

    media_type = EVENT_STREAM

    def __init__(self, n_answers: int = 1) -> None:
        self.answers = [ResponseAccumulator() for _ in range(n_answers)]
        self.requests: dict[int, AnswerRequest] = {}

    def feed(self, choice: int, event: Event) -> bytes:
        """Add an event of an answer, by its index; return the bytes for a stream, b"" for none."""
        parts = self.answers[choice].take(event)
        if len(parts) == 1:
            return self.part(choice, parts[0])
        if parts:
            return b"".join([self.part(choice, part) for part in parts])
        if type(event) is Started:
            return self.started(choice)
        if type(event) is PrefillProgress:
            return self.progress(choice, event)
        return self.finished(choice) if type(event) is Finished else b""

    def begin(self) -> bytes:
        """Return the bytes to send before prefill."""
        return b""

    def started(self, choice: int) -> bytes:
        """Return the bytes for the start of an answer, when its prompt is accepted."""
        return b""

    def progress(self, choice: int, progress: PrefillProgress) -> bytes:
        """Return the bytes for a computed part of the prompt."""
        return b""

    def part(self, choice: int, part: AnswerPart) -> bytes:
        """Return the bytes for a part, which may not be the last one that the answer has already."""
        return b""

    def finished(self, choice: int) -> bytes:
        """Return the bytes for the end of an answer."""
        return b""

    @abstractmethod
    def end(self) -> bytes:
        """Return the bytes to send after all answers."""

    @abstractmethod
    def error(self, error: LlmrunError) -> bytes:
        """Return an error for the middle of a stream."""

    @abstractmethod
    def whole(self) -> Any:
        """Return the body of answers that are not streamed, as JSON data."""


def sse_event(data: Any, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, to_json(data))


def json_line(data: Any) -> bytes:
    """Return a line of newline-delimited JSON."""
    return to_json(data) + b"\n"


def to_json(data: Any) -> bytes:
    """Return compact JSON. A lone surrogate, which UTF-8 can't express, makes all other than ASCII an escape."""
    try:
        return _COMPACT.encode(data).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


class TextEvent:
    """An event that is sent many times and differs in one text only; the bytes around the text are encoded once.

    Args:
        encoded: the event with PLACE for the text.
    """

    def __init__(self, encoded: bytes) -> None:
        self._before, self._after = encoded.split(f'"{PLACE}"'.encode())

    def with_text(self, text: str) -> bytes:
        try:
            return self._before + _json_text(text).encode() + self._after
        except UnicodeEncodeError:
            return self._before + to_json(text) + self._after
