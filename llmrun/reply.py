"""Arguments and results of the Python API: messages and schemas as plain values, and Reply, to which events come in."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from llmrun.errors import CutOffError, EngineCrashedError, UsageError, brief, require
from llmrun.grammar import Grammar, read_json_schema
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.arguments import KINDS, refuse_unknown
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import UNSET, Event, Finished, Message, Stats, TextDelta, TokenLogprob, fields_with
from llmrun.protocol.params import PARAMETERS, Limits, SamplingParams

_Value = TypeVar("_Value")
_Function = TypeVar("_Function", bound=Callable[..., Any])


FOR_TEXTS = fields_with(in_python=True, needs_template=False)
"""Fields of AnswerRequest that may be given to Model.generate()."""
FOR_CHATS = fields_with(in_python=True)
"""Fields that may be given to Model.chat()."""


class SchemaClass(Protocol):
    """A class with a JSON schema, such as a Pydantic model."""

    def model_json_schema(self) -> dict[str, Any]:
        """Return the schema."""

    def model_validate_json(self, text: str) -> Any:
        """Return an instance."""


Said = str | Message | Mapping[str, str]
"""A message; a text is the user's, a mapping has "role" and "content"."""


class Stream(Iterator[_Value]):
    """Values that come with time, for `for` and `async for`; each goes to one of the threads that iterate."""

    def __init__(self, values: Iterator[_Value], cancel: Callable[[], None]) -> None:
        self._values, self._taking = values, threading.Lock()
        self.cancel = cancel

    def __next__(self) -> _Value:
        with self._taking:  # a generator refuses a second thread, such as the one a cancelled task left waiting
            return next(self._values)

    def __aiter__(self) -> AsyncIterator[_Value]:
        return _waiting_elsewhere(self, self.cancel)


class Reply(Stream[str]):
    """An answer, consumed as needed: all of it, its text piece by piece, or event by event.

        print(model.chat("Why is the sky blue?").text)

        for piece in model.chat("Tell me a story"):     # text without reasoning; async for in asyncio
            print(piece, end="", flush=True)

        for event in model.chat("Hi").events():         # Started, PrefillProgress, TextDelta ..., Finished
            print(event)

        async def ask():
            reply = await model.chat("Hi")              # without blocking the event loop
            return reply.text

    The request is sent when the first event is requested. A reply dropped halfway is cancelled.

    Args:
        events: of the answer, the last one Finished.
        cancel: ends the answer soon; safe from any thread.
        schema: of the text, see `parsed`.
    """

    def __init__(
        self, events: Iterator[Event], cancel: Callable[[], None], schema: SchemaClass | Mapping[str, Any] | None = None
    ) -> None:
        self._received, self._schema, stopped = ResponseAccumulator(), schema, threading.Event()

        def stop() -> None:
            stopped.set()
            cancel()

        self._events = Stream(_recorded(events, self._received, stopped, cancel), stop)
        super().__init__(_texts(self._events), stop)

    def pieces(self) -> Reply:
        """Return the reply: its text as it comes."""
        return self

    def events(self) -> Stream[Event]:
        """Return the answer's events as they come; for `for` and `async for`."""
        return self._events

    @property
    def text(self) -> str:
        """The whole answer, without reasoning; waits for its end.

        Raises:
            LlmrunError: the answer failed, see Model.answer().
        """
        self._end()
        return self._received.text

    @property
    def thoughts(self) -> str:
        """The reasoning before the answer; "" without reasoning. Waits for the end."""
        self._end()
        return self._received.reasoning.strip()

    @property
    def parsed(self) -> Any:
        """The answer to a request with a schema: an instance of its class, else plain JSON data.

        Raises:
            UsageError: the request had no schema.
            CutOffError: the answer is incomplete; see `reason`.
        """
        if self._schema is None:
            raise UsageError("there is nothing to parse", why="the request had no schema", hint="chat(..., schema=...)")
        self._require_whole()
        if isinstance(self._schema, Mapping):
            return load_json(self.text)
        return self._schema.model_validate_json(self.text)

    def _require_whole(self) -> None:
        if self.reason == "stop":
            return
        stats = self.stats
        if self.reason != "length":
            why, hint = {"cancelled": "it was cancelled", "repeats": "it repeats itself"}[self.reason], ""
        elif stats.is_full:
            why = f"the context window of {stats.n_ctx:,} tokens is full"
            hint = "a larger n_ctx in load(), or a shorter prompt"
        else:
            why, hint = f"max_tokens={stats.completion_tokens}", "a larger max_tokens, or none"
        raise CutOffError("the answer is cut off and incomplete", why=why, hint=hint)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of all tokens, reasoning included; none if not requested. Waits for the end."""
        self._end()
        return self._received.logprobs

    @property
    def reason(self) -> str:
        """Reason of the end: "stop", "length", "cancelled" or "repeats", see messages.Finished. Waits for the end."""
        return self._end().reason

    @property
    def stats(self) -> Stats:
        """Token counts, times and the seed. Waits for the end."""
        return self._end().stats

    def __str__(self) -> str:
        return self.text

    def __await__(self) -> Generator[Any, None, Reply]:
        return self._whole().__await__()

    async def _whole(self) -> Reply:
        async for _ in self.events():
            pass
        return self

    def _end(self) -> Finished:
        for _ in self._events:
            pass
        if self._received.finished is None:  # the iterator failed before
            raise EngineCrashedError("this answer failed", hint="ask again")
        return self._received.finished


def _recorded(
    events: Iterable[Event], received: ResponseAccumulator, stopped: threading.Event, cancel: Callable[[], None]
) -> Iterator[Event]:
    """Yield the events, and collect them. No method of Reply: it would refer to itself in a circle."""
    for event in events:
        if stopped.is_set():  # perhaps before the request was sent: the engine did not know it yet
            cancel()
        received.take(event)
        yield event


def _texts(events: Iterable[Event]) -> Iterator[str]:
    """Yield the text of events without reasoning."""
    for event in events:
        if isinstance(event, TextDelta):
            yield from (part.text for part in event.answer_parts if part.kind == "text")


async def _waiting_elsewhere(values: Iterator[_Value], cancel: Callable[[], None]) -> AsyncIterator[_Value]:
    """Yield the values of an iterator that blocks, from another thread; a cancelled task cancels the answer."""
    import asyncio

    try:
        while (value := await asyncio.to_thread(next, values, None)) is not None:
            yield value
    except asyncio.CancelledError:
        cancel()
        raise


def as_messages(messages: Said | Iterable[Message | Mapping[str, str]]) -> tuple[Message, ...]:
    """Return a conversation from a text, one message, or a list of messages.

    Raises:
        UsageError: it is something else, or a role does not exist.
    """
    if isinstance(messages, str):
        return (Message("user", messages),)
    if isinstance(messages, (Message, Mapping)):
        return (_message(messages),)
    require("messages", messages, KINDS["messages"])
    return tuple(map(_message, messages))


def _message(message: Any) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        why = 'must be a Message, or a dict with "role" and "content"'
        raise UsageError(f"invalid message {brief(message)}", why=why)
    return Message(message["role"], message["content"])


def as_grammar(schema: SchemaClass | Mapping[str, Any]) -> Grammar:
    """Return the grammar of a JSON schema, or of a class that has one.

    Raises:
        UsageError: it is something else.
        BadGrammarError: the schema is broken, or uses features that can't be enforced.
    """
    require("schema", schema, KINDS["schema"])
    if not isinstance(schema, Mapping):
        schema = schema.model_json_schema()
    try:
        return read_json_schema(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:  # of a dict that is not JSON
        raise UsageError(f"invalid schema {brief(schema)}", why=str(error)) from error


def sort_options(options: Mapping[str, Any], others: Collection[str]) -> tuple[dict[str, Any], ...]:
    """Split keyword arguments into fields of SamplingParams, fields of Limits, and others.

    A single stop string may be given alone, and lists or dicts instead of tuples.

    Raises:
        UsageError: there is no such argument; names a near one.
    """
    sampling = {field.name for field in fields(SamplingParams)}
    limits = {field.name for field in fields(Limits)}
    refuse_unknown(options, {*sampling, *limits, *others})
    given = {name: _frozen(name, value) for name, value in options.items()}
    groups = sampling, limits, others
    return tuple({name: value for name, value in given.items() if name in group} for group in groups)


def with_request_fields(**facts: Any) -> Callable[[_Function], _Function]:
    """Give a method, in place of its **options, the parameters that are fields of AnswerRequest with these facts."""

    def decorate(function: _Function) -> _Function:
        signature, keyword = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        stated = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [inspect.Parameter(name, keyword, default=getattr(UNSET, name)) for name in fields_with(**facts)]
        vars(function)["__signature__"] = signature.replace(parameters=[*stated, *added])
        return function

    return decorate


def _frozen(name: str, value: Any) -> Any:
    """Return a value as the dataclasses have it."""
    if name in ("stop", "ban") and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple(value.items())
    is_list = name in KINDS or (name in PARAMETERS and PARAMETERS[name].values is not None)
    return tuple(value) if is_list and isinstance(value, list) else value
