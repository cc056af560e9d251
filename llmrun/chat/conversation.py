"""A conversation with a model: its turns (turn.py) are computed here, in the caller's thread, and saved.

However an answer ends, its question and the text received stay saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmrun.chat.media import MediaCache
from llmrun.chat.notes import system_messages
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.turns import (
    INTERRUPTED,
    Answer,
    OpenAnswer,
    Question,
    ToolOutput,
    Truncation,
    TurnEntry,
    WindowTurn,
)
from llmrun.chat.truncation import DoesNotFit, Policy, truncation_line
from llmrun.chat.turn import Overflow, Step, Steps, Turn, messages_of
from llmrun.errors import ContextOverflowError, LlmrunError, OutOfMemoryError, ResourceError, UsageError
from llmrun.model.chat_model import ChatModel, with_seeds
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    MediaAccepted,
    Message,
    Tool,
    ToolCall,
    values_with,
)
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.questions import TokenCount

Answering = Callable[[AnswerRequest], Iterable[Event]]


@dataclass(slots=True)
class ChatSettings:
    """The request settings of a chat, which may change between turns."""

    flags: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters of the command line
    session: dict[str, Any] = field(default_factory=dict)  # sampling parameters set in the chat, which override flags
    request: AnswerRequest = field(default_factory=AnswerRequest)  # of each answer, without messages and sampling
    overflow: Overflow = "stop"  # policy for a conversation that is longer than the context window
    keep: int = 0  # number of first turns that are never dropped


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
        self._turn: Turn | None = None  # until it is saved
        self._steps: Steps  # of it
        self._versions: list[tuple[TurnEntry, Finished | None]] = []  # of the last answer
        self.is_removed = False  # the last question: it failed, and is not saved
        self._was_read = False  # the model has prefilled the last question
        self._answered_under: Sequence[Message] | None = None  # what stood before the first turn of the last answer
        self._media = MediaCache(on_note)
        self._on_note = on_note
        self._on_overflow = on_overflow

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools at the end of the last answer: next is go_on() or end_turn()."""
        return self._turn.calls if self._turn is not None else ()

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
        yield from self._answer(begins=last)

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
        turn = self._begin(any_seed=True)
        request = self._next_request()
        self._turn = None
        responses: dict[int, ResponseAccumulator] = {}
        self._versions, self.last = [], None
        try:
            for event in self.model.answer(*with_seeds(request, seeds)):
                if isinstance(event, MediaAccepted):
                    continue  # reported with the question
                responses.setdefault(event.request, ResponseAccumulator()).take(event)
                yield event
        finally:
            for _, response in sorted(responses.items()):
                self._save_version(turn, response)

    def _save_version(self, turn: Turn, response: ResponseAccumulator) -> None:
        """Save one of several answers; each has its own reasoning and seed."""
        seed = response.started.seed if response.started else None
        request = replace(turn.request, sampling=replace(turn.request.sampling, seed=seed))
        version = replace(turn, answer=OpenAnswer(), request=request)
        version.answer.end_round(response)
        before = self.chat.entries[-1]
        self._note(self._save_answer(version, response))
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
        count = self._count(self.messages(), tools=self.settings.request.tools)
        answer = self.chat.last_answer
        if answer is None or (answer.model, self._answered_under) != (self.model.used, self._beginning()):
            return count
        return count.after_answer(answer.stats)

    def messages(self) -> list[Message]:
        """Return the messages that precede the next question in a request."""
        return [*self._beginning(), *messages_of(self.chat.window(), self._media, self.model)]

    def _beginning(self) -> list[Message]:
        """Return what stands before the first turn: the system prompt with notes, and example turns of the model."""
        return [*system_messages(self.chat.system), *self.model.examples]

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

    def _answer(
        self, answer: Answering | None = None, *, any_seed: bool = False, begins: Answer | None = None
    ) -> Generator[Event, None, None]:
        """Begin to answer the last question, and yield the events of the first round."""
        turn = self._begin(any_seed=any_seed, begins=begins)
        yield from self._round(turn, answer or self.model.answer)

    def _begin(self, *, any_seed: bool = False, begins: Answer | None = None) -> Turn:
        """Begin to answer the last question; return its turn.

        Args:
            any_seed: with another one than that of the settings.
            begins: an answer that is continued.
        """
        question, settings = self._last_question(), self.settings
        sampling, _ = self.sampling()
        request = replace(
            settings.request,
            sampling=replace(sampling, seed=None) if any_seed else sampling,
            arrived=time.perf_counter(),
            speculation=self.model.speculation(),
        )
        if begins is not None:
            request = replace(request, begins=begins.content, begins_reasoning=begins.reasoning)
        self._turn = turn = Turn(
            self.model,
            question,
            request,
            self.chat.window_before_question(),
            self._media,
            on_note=self._on_note,
            on_departure=self._note_departure,
            on_overflow=self._on_overflow,
            overflow=settings.overflow,
            keep=settings.keep,
            beginning=self._beginning(),
        )
        self._steps = turn.run()
        return turn

    def _note_departure(self, gone: Sequence[WindowTurn], truncation: Truncation) -> None:
        texts = [(turn.number, turn.messages[0].content) for turn in gone]
        self._on_note(truncation_line(texts, truncation.tokens, truncation.policy))
        self._note(truncation.summary)

    def _next_request(self, results: Sequence[ToolOutput] | None = None) -> AnswerRequest:
        """Return the request of the turn's next answer.

        Args:
            results: of the calls before it.
        """
        return self._counted(self._steps.send(results))

    def _counted(self, step: Step) -> AnswerRequest:
        """Return the request of the next answer, after the steps before it, which no user sees."""
        kind, request = step
        while kind != "answer":
            if kind == "count":
                kind, request = self._steps.send(self._count(request.messages, tools=request.tools))
            else:
                response = ResponseAccumulator()
                for event in self.model.answer(request):
                    response.take(event)
                kind, request = self._steps.send(response.text)
        return request

    def _round(
        self, turn: Turn, answer: Answering, results: Sequence[ToolOutput] | None = None
    ) -> Generator[Event, None, None]:
        """Yield the events of one answer of the model; without calls it ends the turn.

        Args:
            results: of the calls before it.
        """
        self.last, self._was_read, self.is_removed = None, False, False
        request = self._next_request(results)
        n_known = sum(len(message.media) for message in request.messages)  # files of earlier questions
        n_known -= 0 if turn.answer.rounds else len(turn.question.media)
        response = ResponseAccumulator()
        try:
            for event in self._events(request, answer):
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
            next(self._steps, None)
        finally:
            if response.finished is None:
                self._note(self._end_round(turn, response))

    def _events(self, request: AnswerRequest, answer: Answering) -> Generator[Event, None, None]:
        """Yield the events of a request; of another one if the turn goes on after its error."""
        try:
            yield from answer(request)
        except ContextOverflowError as error:
            yield from answer(self._counted(self._steps.throw(error)))

    def _end_round(self, turn: Turn, response: ResponseAccumulator) -> str:
        """Store the calls of the model, or save the answer; return a note as _save()."""
        turn.answer.end_round(response)
        return "" if turn.answer.calls else self._save_answer(turn, response)

    def go_on(self, results: Sequence[ToolOutput]) -> Generator[Event, None, None]:
        """Give the model the results of its `calls`, and let it continue. Raises as ask()."""
        assert self._turn is not None
        tools, speculation = self.settings.request.tools, self.model.speculation()
        self._turn.request = replace(self._turn.request, tools=tools, speculation=speculation)
        yield from self._round(self._turn, self.model.answer, results)

    def end_turn(self) -> None:
        """Save the turn as it is, if it is not saved yet; the last `calls` get no result."""
        if self._turn is not None:
            self._note(self._save_answer(self._turn, ResponseAccumulator()))

    def _save_answer(self, turn: Turn, response: ResponseAccumulator) -> str:
        """Save the answer; return a note as _save(). An empty answer is saved only if the model ended it."""
        self._turn = None
        reason = response.finished.reason if response.finished else INTERRUPTED
        answer = turn.to_save(reason, response.stats, has_text=response.has_text or bool(turn.answer.text))
        if answer is None:
            return ""
        self._answered_under = turn.beginning
        return self._save(lambda chat: chat.add_answer(answer))

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

    def _count(self, messages: Sequence[Message], *, tools: tuple[Tool, ...]) -> TokenCount:
        return self.model.count(messages, **{**values_with(self.settings.request, in_prompt=True), "tools": tools})
