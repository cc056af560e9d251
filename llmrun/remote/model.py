"""A remote server's model for a conversation: one of the two kinds of llmrun.model.chat_model.

Replaces the engine: it knows the user's own parameters, learns the context window, and measures on this side of the
network. Must not know terminals, or the request format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import PurePath
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from llmrun.errors import ContextOverflowError, LlmrunError
from llmrun.models.download.transfer import RetryPolicy
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.answer import with_beginnings
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Message, Tool
from llmrun.protocol.params import SERVER, SamplingParams, resolve_sampling
from llmrun.protocol.questions import StateSaved, TokenCount
from llmrun.remote.capabilities import TokenCounter, facts_of
from llmrun.remote.client import PATIENT, RemoteClient
from llmrun.remote.request_body import refused_fields, require_told
from llmrun.remote.server import ServedModel, Server

if TYPE_CHECKING:
    from llmrun.protocol.adapters import Adapter

_TICK_SECONDS = 0.1
_MOST_AT_ONCE = 64
_N_CTX = re.compile(r"context (?:length is|size \() ?(\d+)")  # OpenAI's and vLLM's, llama-server's


class RemoteModel:
    """A model of a remote server. Close it, or its thread goes on.

    Args:
        on_note: called when a request is repeated because the server is busy.
        patience: with the server.
        yielding: sampling parameters and fields of requests that come from presets, left out where the server does not
            support them.

    Attributes:
        on_wait: as Model's.
    """

    has_template = thinks = True  # unknown before an answer
    examples: tuple[Message, ...] = ()
    parallel = _MOST_AT_ONCE
    adapters: tuple[Adapter, ...] = ()

    def __init__(
        self,
        server: Server,
        model: ServedModel,
        on_note: Callable[[str], None],
        patience: RetryPolicy = PATIENT,
        *,
        yielding: Collection[str] = (),
    ) -> None:
        facts = facts_of(server, model)
        self.server, self._model = server, model
        self.name = PurePath(model.name).name if PurePath(model.name).is_absolute() else model.name
        self.used = ModelFingerprint(model.name, path=server.url)
        self.n_ctx, self.modalities = facts.n_ctx, facts.modalities
        self.on_wait: Callable[[], None] = lambda: None
        self._counter = TokenCounter(server, model)
        self._client = RemoteClient(server, model, patience, on_note)
        self._yielding = yielding
        self._named: Collection[str] = ()
        self._open: tuple[int, ...] = ()

    def sampling(
        self, flags: Mapping[str, Any] | None = None, session: Mapping[str, Any] | None = None
    ) -> tuple[SamplingParams, dict[str, str]]:
        """Set the user's parameters for later answers; the server chooses the others.

        Raises:
            UsageError: a value is out of its bounds, or the server does not support it.
        """
        flags = {name: value for name, value in (flags or {}).items() if name not in self._yielding or self.takes(name)}
        params, origins = resolve_sampling(("session", session or {}), ("flag", flags))
        self._named = [name for name, origin in origins.items() if origin != "default"]
        self.require(AnswerRequest(sampling=params))
        return params, {name: SERVER if origin == "default" else origin for name, origin in origins.items()}

    def takes(self, parameter: str) -> bool:
        """Return whether the server supports a sampling parameter."""
        return not refused_fields(AnswerRequest(), self._model, [parameter])

    def require(self, asked: AnswerRequest) -> None:
        """Raise UsageError if the server does not support a field of the request; the names are our own."""
        require_told(self.server, self._model, asked, self._named_in(asked), yielding=self._yielding)

    def speculation(self) -> None:
        """Return None: the server decides about drafts."""

    def answer(self, *asked: AnswerRequest) -> Iterator[Event]:
        """Answer requests, all at once, with the events of Model.answer() except prefill progress.

        Raises:
            ContextOverflowError: the prompt is too long; n_ctx is known from then on if the server reports it.
            UsageError: the server does not support a field of the request.
            LlmrunError: the server can't be reached, or its error.
        """
        for each in asked:
            self.require(each)
        events: SimpleQueue[Event | LlmrunError | None] = SimpleQueue()
        commands = {each.request: each for each in (Generate(self._client.next_request(), one) for one in asked)}
        self._open = tuple(commands)
        for command in commands.values():
            self._client.listen(command, events.put, self._named_in(command.asked))
        try:
            yield from with_beginnings(commands.values(), self._heard(events, commands))
        finally:
            self.cancel()
            self._open = ()

    def _heard(
        self, events: SimpleQueue[Event | LlmrunError | None], commands: Mapping[int, Generate]
    ) -> Iterator[Event]:
        """Yield the events of all commands, to the last."""
        left = len(commands)
        while left:
            try:
                event = events.get(timeout=_TICK_SECONDS)
            except Empty:
                self.on_wait()
                continue
            if event is None:
                left -= 1
            elif isinstance(event, LlmrunError):
                raise self._learned(event)
            elif isinstance(event, Finished):
                yield self._seen_locally(event, commands[event.request].asked)
            else:
                yield event

    def _named_in(self, asked: AnswerRequest) -> Collection[str]:
        """Return the sampling parameters to send: the user's, and a seed only if this request has one."""
        named = {*self._named, "seed"}
        return sorted(named if asked.sampling.seed is not None else named - {"seed"})

    def _seen_locally(self, finished: Finished, asked: AnswerRequest) -> Finished:
        self.n_ctx = self.n_ctx or facts_of(self.server, self._model).n_ctx  # it may have been loading
        if finished.stats.prompt_tokens:  # the server counts
            self._counter.learn(asked.messages, finished.stats.prompt_tokens)
        return finished._replace(stats=replace(finished.stats, n_ctx=self.n_ctx, over_network=True))

    def _learned(self, error: LlmrunError) -> LlmrunError:
        found = _N_CTX.search(error.why) if isinstance(error, ContextOverflowError) else None
        if found:
            self.n_ctx = int(found[1])
        return error

    def count(
        self,
        messages: Iterable[Message],
        *,
        tools: tuple[Tool, ...] = (),
        **options: Any,
    ) -> TokenCount:
        """Return the token counts of a conversation, approximately."""
        return self._counter.count(messages, tools)

    def decode_together(self, answers: int) -> None:
        """Do nothing: the server gets all requests at once."""

    def while_idle(self) -> AbstractContextManager[None]:
        """Do nothing in this block."""
        return nullcontext()

    def save_state(self, *, prompt_only: bool = False) -> StateSaved:
        """Save nothing: the KV cache is the server's."""
        return StateSaved(0, 0)

    def cancel(self) -> None:
        """Stop the open answers, which then end with Finished. Safe in a signal handler."""
        for request in self._open if self._client.alive else ():
            self._client.cancel(request)

    def close(self) -> None:
        self._client.close()
