"""One turn: a question on its way to its answer, truncated to the context window, with rounds of tool calls.

Owns the order of a turn, and what is saved of it. Turn.run() yields what has to be done next and gets the result: the
terminal does it in its thread (conversation.py), the server's page in the event loop (server/page/answering.py). Must
not know engines, displays or stores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from llmrun.chat.media import MediaCache, MediaReader
from llmrun.chat.store.turns import (
    MAX_ROUNDS,
    SUMMARY,
    Answer,
    OpenAnswer,
    Question,
    Truncation,
    WindowTurn,
    round_messages,
)
from llmrun.chat.truncation import (
    SUMMARY_TOKENS,
    DoesNotFit,
    MessageSize,
    Policy,
    Window,
    condense,
    fit,
    summary_turn,
)
from llmrun.errors import ContextOverflowError
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.messages import AnswerRequest, Message, Stats, ToolCall
from llmrun.protocol.params import Limits
from llmrun.protocol.questions import TokenCount

_MARKER_BYTES = 32  # upper bound of a template's text around a message

Overflow = Literal["ask", "stop", "roll", "middle", "summarize"]
Step = tuple[Literal["count", "write", "answer", "call"], AnswerRequest]
"""What a turn needs next: the TokenCount of a request, its text, its answer, or the results of Turn.calls.

An answer is put into Turn.answer by OpenAnswer.end_round(), also one that failed; nothing is sent back.
"""
Steps = Generator[Step, Any, None]


class TurnModel(MediaReader, Protocol):
    """A model, as far as a turn needs it."""

    @property
    def used(self) -> ModelFingerprint: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def adapters(self) -> tuple[Adapter, ...]: ...


@dataclass(slots=True)
class Turn:
    """A question that is being answered, in several rounds if the model calls tools.

    Args:
        request: of each round, without messages.
        before: turns in the context window.
        on_note: called with each line that the user has to know.
        on_departure: called with the turns that were dropped.
        on_overflow: called for a policy when the conversation is too long and `overflow` is "ask".
    """

    model: TurnModel
    question: Question
    request: AnswerRequest
    before: list[WindowTurn]
    media: MediaCache
    on_note: Callable[[str], None]
    on_departure: Callable[[Sequence[WindowTurn], Truncation], None]
    on_overflow: Callable[[DoesNotFit], Policy] | None = None
    overflow: Overflow | None = None  # policy for a conversation that is too long; None: the engine refuses it
    keep: int = 0  # number of first turns that are never dropped
    beginning: Sequence[Message] = ()  # before the first turn: the system prompt, and example turns of the model
    departures: list[Truncation] = field(default_factory=list)  # turns dropped in this turn
    answer: OpenAnswer = field(default_factory=OpenAnswer)

    def run(self) -> Steps:
        """Yield the steps of the turn, until the model calls no tool.

        Raises:
            ContextOverflowError: the conversation does not fit, and the policy drops nothing; a server that refuses a
                request, and thereby tells its window, is asked again.
        """
        while True:
            n_ctx = self.model.n_ctx
            try:
                yield "answer", (yield from self.fitting())
            except ContextOverflowError:
                if self.model.n_ctx == n_ctx:
                    raise
                continue
            if not self.calls:
                break
            self.answer.go_on((yield "call", self.request))
        if self.answer.calls:
            self.on_note(f"Stopped after {MAX_ROUNDS} rounds of tool calls. Ask to continue for more.")

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last answer, if the model may go on with their results."""
        return self.answer.calls if len(self.answer.rounds) < MAX_ROUNDS else ()

    def to_save(self, reason: str, stats: Stats, *, has_text: bool) -> Answer | None:
        """Return the answer to save; see OpenAnswer.to_save()."""
        return self.answer.to_save(
            "cancelled" if self.answer.calls else reason,  # calls without results
            has_text=has_text,
            model=self.model.used,
            sampling=self.request.sampling,
            limits=self.request.limits,
            stats=stats,
            departures=tuple(self.departures),
            adapters=self.model.adapters,
        )

    def fitting(self) -> Generator[Step, Any, AnswerRequest]:
        """Return the request of the next round, truncated to the context window; `departures` grow."""
        n_departures = len(self.departures)
        messages = self._messages()
        window = Window.of(self.model.n_ctx, self.request.limits.max_tokens, keep=self.keep)
        if self.overflow and window.tokens and not self._certainly_fits(messages, window):
            total = (yield self._count(messages)).total
            for _ in range(len(self.before) + 1):
                if total <= window.tokens - window.reserve:
                    break
                total = yield from self._drop_turns(window, total)
            messages = self._messages()
        request = replace(self.request, messages=tuple(messages), moves=len(self.departures) > n_departures)
        return replace(request, begins="", begins_reasoning="", arrived=0.0) if self.answer.rounds else request

    def _messages(self) -> list[Message]:
        question = self.media.show(Message("user", self.question.content), self.question.media, self.model)
        results = self.media.show_results(round_messages(self.answer.rounds), self.model)
        return [*self.beginning, *messages_of(self.before, self.media, self.model), question, *results]

    def _count(self, messages: Sequence[Message], *, with_tools: bool = True) -> Step:
        tools = self.request.tools if with_tools else ()
        return "count", replace(self.request, messages=tuple(messages), tools=tools)

    def _certainly_fits(self, messages: Sequence[Message], window: Window) -> bool:
        """Return whether the messages fit without counting: a token has at least a byte.

        The size of tools, images and audio is unknown.
        """
        if self.request.tools or any(message.role == "tool" or message.media for message in messages):
            return False
        texts = (f"{message.content}{message.reasoning}" for message in messages)
        return sum(len(text.encode()) + _MARKER_BYTES for text in texts) <= window.room

    def _drop_turns(self, window: Window, total: int) -> Generator[Step, Any, int]:
        """Drop turns from `before`, or replace them by a summary; return the tokens of what is left."""
        dropped, policy = yield from self._choose(window)
        gone = [self.before[index] for index in dropped]
        summary = (yield from self._summary(gone)) if policy == "summarize" else ""
        self.before = [turn for index, turn in enumerate(self.before) if index not in dropped]
        if summary:
            self.before.insert(dropped[0], WindowTurn(SUMMARY, 0, summary_turn(summary)))
        left = (yield self._count(self._messages())).total
        truncation = Truncation(policy, tuple(turn.question for turn in gone), total - left, summary)
        self.departures.append(truncation)
        self.on_departure(gone, truncation)
        return int(left)

    def _choose(self, window: Window) -> Generator[Step, Any, tuple[tuple[int, ...], Policy]]:
        """Return the indices of the turns to drop, and the policy."""
        messages = self._messages()
        count: TokenCount = yield self._count(messages)
        sizes = _sizes(messages, (yield self._count(messages, with_tools=False)))
        n_first = len(self.beginning)
        if n_first:  # no turn of the chat: it stays, as a system prompt does
            sizes = [MessageSize("system", sum(message.tokens for message in sizes[:n_first])), *sizes[n_first:]]
        window = replace(window, overhead=max(0, count.total - sum(message.tokens for message in sizes)))
        policy: Policy = "stop" if self.overflow is None or self.overflow == "ask" else self.overflow
        dropped = fit(sizes, window, policy)
        if isinstance(dropped, DoesNotFit) and self.overflow == "ask" and self.on_overflow is not None:
            policy = self.on_overflow(dropped)
            dropped = fit(sizes, window, policy)
        if isinstance(dropped, DoesNotFit):
            raise ContextOverflowError(
                "the conversation does not fit into the context window", why=dropped.why, hint=dropped.hint
            )
        return dropped, policy

    def _summary(self, turns: Sequence[WindowTurn]) -> Generator[Step, Any, str]:
        """Let the model condense the dropped turns, in batches if all at once are too long."""
        sizes = []
        for turn in turns:
            sizes.append((yield from self._tokens_of(turn)))
        steps = condense([turn.messages for turn in turns], sizes, self.model.n_ctx)
        messages = next(steps)
        while True:
            request = AnswerRequest(
                tuple(messages),
                sampling=self.request.sampling,
                limits=Limits(SUMMARY_TOKENS),
                template=self.request.template,
                thinking=False,
                stops_repeats=True,
                speculation=self.request.speculation,
            )
            try:
                messages = steps.send((yield "write", request))
            except StopIteration as end:
                return str(end.value)

    def _tokens_of(self, turn: WindowTurn) -> Generator[Step, Any, int]:
        ends_with_question = turn.messages[-1].role == "user"  # as some templates require
        messages = turn.messages if ends_with_question else [*turn.messages, Message("user", "")]
        count = yield self._count(messages, with_tools=False)
        return sum(message.tokens for message in _sizes(turn.messages, count))


def messages_of(turns: Sequence[WindowTurn], media: MediaCache, model: MediaReader) -> Iterator[Message]:
    """Yield the messages of turns, with their images and audio."""
    for turn in turns:
        yield media.show(turn.messages[0], turn.media, model)
        yield from media.show_results(turn.messages[1:], model)


def _sizes(messages: Sequence[Message], count: TokenCount) -> list[MessageSize]:
    """Return each message's size, with an equal share of the template's own tokens."""
    markers = max(0, count.total - sum(count.each)) // (len(count.each) + 1)
    return [MessageSize(message.role, tokens + markers) for message, tokens in zip(messages, count.each, strict=False)]
