"""A conversation with a model: requests, truncation to the context window, and saving.

A turn saves the question, truncates, asks, and saves the answer. However an answer ends, its question and the text
received stay saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmrun.chat.media import MediaCache, MediaFile
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.turns import (
    INTERRUPTED,
    SUMMARY,
    Answer,
    OpenAnswer,
    Question,
    ToolOutput,
    Truncation,
    TurnEntry,
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
    truncation_line,
)
from llmrun.errors import ContextOverflowError, LlmrunError, OutOfMemoryError, ResourceError, UsageError
from llmrun.model.chat_model import ChatModel, with_seeds
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    MediaAccepted,
    Message,
    Stats,
    ToolCall,
    values_with,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import TokenCount

_MARKER_BYTES = 32  # upper bound of a template's text around a message

Overflow = Literal["ask", "stop", "roll", "middle", "summarize"]
Answering = Callable[[AnswerRequest], Iterable[Event]]


@dataclass(slots=True)
class ChatSettings:
    """The request settings of a chat, which may change between turns."""

    flags: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters of the command line
    session: dict[str, Any] = field(default_factory=dict)  # sampling parameters set in the chat, which override flags
    request: AnswerRequest = field(default_factory=AnswerRequest)  # of each answer, without messages and sampling
    overflow: Overflow = "stop"  # policy for a conversation that is longer than the context window
    keep: int = 0  # number of first turns that are never dropped


@dataclass(slots=True)
class _OpenTurn:
    """A question that is being answered, in several rounds if the model calls tools."""

    question: Question
    sampling: SamplingParams
    before: list[WindowTurn]  # turns in the context window
    departures: list[Truncation] = field(default_factory=list)  # turns dropped before them
    answer: OpenAnswer = field(default_factory=OpenAnswer)
    begins: Answer | None = None  # an answer that is continued
    arrived: float = field(default_factory=time.perf_counter)  # see AnswerRequest


class Conversation:
    """The turns of one saved chat with one model.

    Args:
        on_note: called with each line that the user has to know, such as the turns that were dropped.
        on_overflow: called for a policy when the conversation is too long and settings.overflow is "ask".
    """

    def __init__(
        self,
        model: ChatModel,
        chat: SavedChat,
        settings: ChatSettings,
        *,
        on_note: Callable[[str], None],
        on_overflow: Callable[[DoesNotFit], Policy],
    ) -> None:
        self.model = model  # may be replaced between turns
        self.chat = chat  # replaced by a copy in memory if the disk refuses
        self.settings = settings
        self.last: Finished | None = None  # end of the last answer, if the engine can still explain it
        self.calls: tuple[ToolCall, ...] = ()  # at the end of the last answer: next is go_on() or end_turn()
        self._turn: _OpenTurn | None = None
        self._versions: list[tuple[TurnEntry, Finished | None]] = []  # of the last answer
        self.is_removed = False  # the last question: it failed, and is not saved
        self._was_read = False  # the model has prefilled the last question
        self._answered_under: str | None = None  # the system prompt of the last answer in this run
        self._media = MediaCache(on_note)
        self._on_note = on_note
        self._on_overflow = on_overflow

    def ask(self, question: Question) -> Generator[Event, None, None]:
        """Save a question, answer it, and save the answer, also a partial one; yield the events of Model.chat().

        Raises:
            ContextOverflowError: the conversation does not fit, and the policy drops nothing.
            LlmrunError: the answer failed; retry() asks again, unless `is_removed`.
        """
        self._note(self._save(lambda chat: chat.add_question(question)))
        try:
            yield from self._answer()
        except LlmrunError:
            if question.media and not self._was_read:
                self.chat.undo()
                self.is_removed = True
                self._note("The question and its files were removed.")
            raise

    def retry(self, answer: Answering | None = None) -> Generator[Event, None, None]:
        """Answer the last question again, with another seed if it has an answer; all answers stay saved.

        Args:
            answer: used instead of the model's own answer().

        Raises:
            UsageError: there is no question yet; else as ask().
        """
        last = self.chat.last_answer if self.chat.is_answered else None
        return self._answer(answer, any_seed=last is not None and last.finish != INTERRUPTED)

    def resume(self) -> Generator[Event, None, None]:
        """Continue the last answer where it ended; both the old one and the longer one stay saved.

        Raises:
            UsageError: there is no answer yet, or it has calls; else as ask().
        """
        last = self.chat.last_answer
        if last is None or not self.chat.is_answered:
            raise UsageError("there is no answer to continue", hint="ask something; /retry answers the last question")
        if last.rounds:
            raise UsageError("an answer with calls of tools can't be continued", hint="/retry answers again")
        self._turn = self._new_turn(any_seed=False)
        self._turn.begins = last
        yield from self._round(self._turn)

    def retry_n(self, seeds: Sequence[int]) -> Generator[Event, None, None]:
        """Answer the last question with several seeds at once; keep() chooses one of the saved answers.

        Without memory for all of them, a note says so, and they are decoded one by one.

        Raises:
            UsageError: the model has tools; else as retry().
        """
        if self.settings.request.tools:
            raise UsageError("/retry with a number can't be used with tools", hint="/retry without a number")
        self._last_question()
        try:
            self.model.decode_together(len(seeds))
        except OutOfMemoryError as error:
            self._note(f"The answers are decoded one by one: {error}")
        return self._n_answers(seeds)

    def _n_answers(self, seeds: Sequence[int]) -> Generator[Event, None, None]:
        """Yield the events of several answers, and save each, however it ends."""
        self._turn = turn = self._new_turn(any_seed=True)
        responses: dict[int, ResponseAccumulator] = {}
        self._versions, self.last, self.calls = [], None, ()
        try:
            for event in self.model.answer(*with_seeds(self._request(turn), seeds)):
                if isinstance(event, MediaAccepted):
                    continue  # reported with the question
                responses.setdefault(event.request, ResponseAccumulator()).take(event)
                yield event
        finally:
            for _, response in sorted(responses.items()):
                self._save_version(turn, response)

    def _save_version(self, turn: _OpenTurn, response: ResponseAccumulator) -> None:
        """Save one of several answers; each has its own reasoning and seed."""
        seed = response.started.seed if response.started else None
        version = replace(turn, answer=OpenAnswer(), sampling=replace(turn.sampling, seed=seed))
        before = self.chat.entries[-1]
        self._note(self._end_round(version, response))
        if self.chat.entries[-1] is not before:  # an empty answer is not saved
            self._versions.append((self.chat.entries[-1], response.finished))

    @property
    def n_versions(self) -> int:
        """Number of answers of retry_n() that keep() can choose from."""
        return len(self._versions)

    def keep(self, place: int) -> None:
        """Continue with one of the answers of retry_n(), counted from 0."""
        entry, finished = self._versions[place]
        self.chat.take_answer(entry)
        self.last = finished if place == self.n_versions - 1 else None  # the engine can explain only the last one

    def edit(self, question: Question) -> Generator[Event, None, None]:
        """Replace the last question; the old one stays saved. Raises as retry()."""
        self._last_question()
        self._note(self._save(lambda chat: chat.add_question(question, beside=chat.last_question)))
        yield from self._answer()

    def sampling(self) -> tuple[SamplingParams, dict[str, str]]:
        """Return the sampling parameters of the next answer, and the origin of each."""
        return self.model.sampling(self.settings.flags, self.settings.session)

    def count(self) -> TokenCount:
        """Count the tokens in the context window.

        After an answer: the tokens of its statistics (Stats.context_used), with its reasoning. If the next prompt will
        have others, the tokens of the next prompt.
        """
        count = self._count(self.messages())
        answer = self.chat.last_answer
        if answer is None or not answer.stats.context_used:
            return count
        if (answer.model, self._answered_under) != (self.model.used, self.chat.system):
            return count
        each = (*count.each[:-1], answer.stats.completion_tokens)
        return count._replace(each=each, total=answer.stats.context_used)

    def messages(self) -> list[Message]:
        """Return the messages that precede the next question in a request."""
        return [*self._beginning(), *self._messages_of(self.chat.window())]

    def _beginning(self) -> list[Message]:
        """Return what stands before the first turn: the system prompt, and example turns of the model."""
        return [*([Message("system", self.chat.system)] if self.chat.system else ()), *self.model.examples]

    def _messages_of(self, turns: Sequence[WindowTurn]) -> Iterator[Message]:
        """Yield the messages of turns, with their images and audio."""
        for turn in turns:
            yield self._with_media(turn.messages[0], turn.media)
            yield from self._media.show_results(turn.messages[1:], self.model)

    def _results_of(self, turn: _OpenTurn) -> Iterator[Message]:
        """Yield the calls of a turn and their results."""
        return self._media.show_results(round_messages(turn.answer.rounds), self.model)

    def _with_media(self, message: Message, files: Sequence[MediaFile]) -> Message:
        return self._media.show(message, files, self.model)

    def save_state(self) -> None:
        """Save the KV cache, so that the chat can be resumed without prefill. Errors are ignored."""
        try:
            if self.last is not None:
                self.model.save_state()
        except LlmrunError:
            pass  # only a cache

    def _last_question(self) -> Question:
        entry = self.chat.last_question
        if entry is None or not isinstance(entry.part, Question):
            raise UsageError("there is no question yet", hint="ask something first")
        return entry.part

    def _answer(self, answer: Answering | None = None, *, any_seed: bool = False) -> Generator[Event, None, None]:
        self._turn = self._new_turn(any_seed=any_seed)
        yield from self._round(self._turn, answer)

    def _new_turn(self, *, any_seed: bool) -> _OpenTurn:
        question = self._last_question()
        sampling, _ = self.sampling()
        if any_seed:
            sampling = replace(sampling, seed=None)
        return _OpenTurn(question, sampling, self.chat.window_before_question())

    def _request(self, turn: _OpenTurn) -> AnswerRequest:
        """Return the request of a turn, truncated to the context window."""
        n_departures = len(turn.departures)
        messages = self._make_room(turn)
        request = self.settings.request
        begins = (turn.begins.content, turn.begins.reasoning) if turn.begins else (request.begins, "")
        begins = ("", "") if turn.answer.rounds else begins
        return replace(
            request,
            messages=tuple(messages),
            begins=begins[0],
            begins_reasoning=begins[1],
            sampling=turn.sampling,
            moves=len(turn.departures) > n_departures,
            speculation=self.model.speculation(),
            arrived=0.0 if turn.answer.rounds else turn.arrived,
        )

    def _round(self, turn: _OpenTurn, answer: Answering | None = None) -> Generator[Event, None, None]:
        """Yield the events of one answer of the model; without calls it ends the turn."""
        request = self._request(turn)
        response, self.last, self.calls = ResponseAccumulator(), None, ()
        self._was_read = self.is_removed = False
        n_known = sum(len(message.media) for message in request.messages)  # files of earlier questions
        n_known -= 0 if turn.answer.rounds else len(turn.question.media)
        try:
            for event in self._events(turn, request, answer or self.model.answer):
                if isinstance(event, MediaAccepted):
                    n_known -= 1
                    if n_known >= 0:
                        continue  # reported with its own question
                response.take(event)
                self._was_read = response.started is not None
                # Saved before the caller sees the end.
                note = self._end_round(turn, response) if response.finished else ""
                yield event
                self._note(note)
            self.last = response.finished
        finally:
            if response.finished is None:
                self._note(self._end_round(turn, response))

    def _events(self, turn: _OpenTurn, request: AnswerRequest, answer: Answering) -> Iterator[Event]:
        """Yield the events of a request; repeat it once if a server refused it and thereby told its window."""
        n_ctx = self.model.n_ctx
        try:
            yield from answer(request)
        except ContextOverflowError:
            if self.model.n_ctx == n_ctx:
                raise
            yield from answer(self._request(turn))

    def _end_round(self, turn: _OpenTurn, response: ResponseAccumulator) -> str:
        """Store the calls of the model, or save the answer; return a note as _save()."""
        turn.answer.end_round(response)
        self.calls = turn.answer.calls
        return "" if self.calls else self._save_answer(turn, response)

    def go_on(self, results: Sequence[ToolOutput]) -> Generator[Event, None, None]:
        """Give the model the results of its `calls`, and let it continue. Raises as ask()."""
        assert self._turn is not None
        self._turn.answer.go_on(results)
        yield from self._round(self._turn)

    def end_turn(self) -> None:
        """Save the turn as it is; the last `calls` get no result."""
        if self.calls and self._turn is not None:
            self.calls = ()
            empty = ResponseAccumulator()
            empty.take(Finished(0, "cancelled", Stats()))
            self._note(self._save_answer(self._turn, empty))

    def _save_answer(self, turn: _OpenTurn, response: ResponseAccumulator) -> str:
        """Save the answer; return a note as _save(). An empty answer is saved only if the model ended it."""
        self._answered_under = self.chat.system
        reason = response.finished.reason if response.finished else INTERRUPTED
        answer = turn.answer.to_save(
            reason,
            has_text=response.has_text or bool(turn.answer.text),
            model=self.model.used,
            sampling=turn.sampling,
            limits=self.settings.request.limits,
            stats=response.stats,
            departures=tuple(turn.departures),
            adapters=self.model.adapters,
        )
        return "" if answer is None else self._save(lambda chat: chat.add_answer(answer))

    def _save(self, step: Callable[[SavedChat], None]) -> str:
        """Save a step. If the disk refuses, continue in memory and return a note for the user, else ""."""
        try:
            step(self.chat)
        except ResourceError as error:
            self.chat.release()
            self.chat = self.chat.in_memory()
            step(self.chat)
            return f"This chat is no longer saved: {error}. /export FILE writes it elsewhere."
        return ""

    def _note(self, note: str) -> None:
        if note:
            self._on_note(note)

    def _make_room(self, turn: _OpenTurn) -> list[Message]:
        """Return the messages to send, after truncation, which is stored in the turn."""
        messages = self._to_send(turn)
        window = self._window()
        if not window.tokens or self._certainly_fits(messages, window):
            return messages
        total = self._count(messages).total
        for _ in range(len(turn.before) + 1):
            if total <= window.tokens - window.reserve:
                break
            dropped, policy = self._choose(messages, window)
            gone = [turn.before[index] for index in dropped]
            summary = self._summary(gone, turn.sampling) if policy == "summarize" else ""
            turn.before = [window_turn for index, window_turn in enumerate(turn.before) if index not in dropped]
            if summary:
                turn.before.insert(dropped[0], WindowTurn(SUMMARY, 0, summary_turn(summary)))
            messages = self._to_send(turn)
            before, total = total, self._count(messages).total
            questions = tuple(window_turn.question for window_turn in gone)
            turn.departures.append(Truncation(policy, questions, before - total, summary))
            texts = [(window_turn.number, window_turn.messages[0].content) for window_turn in gone]
            self._on_note(truncation_line(texts, before - total, policy))
            self._note(summary)
        return messages

    def _certainly_fits(self, messages: Sequence[Message], window: Window) -> bool:
        """Return whether the messages fit without counting: a token has at least a byte.

        The size of tools, images and audio is unknown.
        """
        if self.settings.request.tools or any(message.role == "tool" or message.media for message in messages):
            return False
        texts = (f"{message.content}{message.reasoning}" for message in messages)
        return sum(len(text.encode()) + _MARKER_BYTES for text in texts) <= window.room

    def _choose(self, messages: Sequence[Message], window: Window) -> tuple[tuple[int, ...], Policy]:
        """Return the indices of the turns to drop, and the policy."""
        count = self._count(messages)
        sizes = _sizes(messages, self._count(messages, with_tools=False))
        n_first = len(self._beginning())
        if n_first:  # no turn of the chat: it stays, as a system prompt does
            sizes = [MessageSize("system", sum(message.tokens for message in sizes[:n_first])), *sizes[n_first:]]
        window = replace(window, overhead=max(0, count.total - sum(message.tokens for message in sizes)))
        policy: Policy = "stop" if self.settings.overflow == "ask" else self.settings.overflow
        dropped = fit(sizes, window, policy)
        if isinstance(dropped, DoesNotFit) and self.settings.overflow == "ask":
            policy = self._on_overflow(dropped)
            dropped = fit(sizes, window, policy)
        if isinstance(dropped, DoesNotFit):
            raise ContextOverflowError(
                "the conversation does not fit into the context window", why=dropped.why, hint=dropped.hint
            )
        return dropped, policy

    def _summary(self, turns: Sequence[WindowTurn], sampling: SamplingParams) -> str:
        """Let the model condense the dropped turns, in batches if all at once are too long."""
        sizes = [self._tokens_of(turn) for turn in turns]
        steps = condense([turn.messages for turn in turns], sizes, self.model.n_ctx)
        messages = next(steps)
        while True:
            try:
                messages = steps.send(self._plain_answer(messages, sampling))
            except StopIteration as end:
                return str(end.value)

    def _tokens_of(self, turn: WindowTurn) -> int:
        ends_with_question = turn.messages[-1].role == "user"  # as some templates require
        messages = turn.messages if ends_with_question else [*turn.messages, Message("user", "")]
        count = self._count(messages, with_tools=False)
        return sum(message.tokens for message in _sizes(turn.messages, count))

    def _plain_answer(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        request = AnswerRequest(
            tuple(messages),
            sampling=sampling,
            limits=Limits(SUMMARY_TOKENS),
            template=self.settings.request.template,
            thinking=False,
            stops_repeats=True,
            speculation=self.model.speculation(),
        )
        response = ResponseAccumulator()
        for event in self.model.answer(request):
            response.take(event)
        return response.text

    def _to_send(self, turn: _OpenTurn) -> list[Message]:
        question = self._with_media(Message("user", turn.question.content), turn.question.media)
        return [*self._beginning(), *self._messages_of(turn.before), question, *self._results_of(turn)]

    def _window(self) -> Window:
        return Window.of(self.model.n_ctx, self.settings.request.limits.max_tokens, keep=self.settings.keep)

    def _count(self, messages: Sequence[Message], *, with_tools: bool = True) -> TokenCount:
        options = values_with(self.settings.request, in_prompt=True)
        return self.model.count(messages, **(options if with_tools else {**options, "tools": ()}))


def _sizes(messages: Sequence[Message], count: TokenCount) -> list[MessageSize]:
    """Return each message's size, with an equal share of the template's own tokens."""
    markers = max(0, count.total - sum(count.each)) // (len(count.each) + 1)
    return [MessageSize(message.role, tokens + markers) for message, tokens in zip(messages, count.each, strict=False)]
