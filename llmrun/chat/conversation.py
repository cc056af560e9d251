"""A conversation with a model: what is sent, what is dropped from the context window, and what is saved of each turn.

Owns the order of a turn: save the question, make room, ask, save the answer. Must not know terminals. However an
answer ends, its question stays, and what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmrun.chat.images import ImageCache, ImageFile
from llmrun.chat.open_turn import OpenTurn
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.turns import (
    INTERRUPTED,
    Answer,
    CallRound,
    Question,
    Truncation,
    TurnEntry,
    WindowTurn,
    round_messages,
)
from llmrun.chat.truncation import (
    DoesNotFit,
    Drop,
    MessageSize,
    Policy,
    Window,
    fit,
    summary_batches,
    summary_request,
    summary_turn,
    truncation_line,
)
from llmrun.errors import ContextOverflowError, LlmrunError, OutOfMemoryError, ResourceError, UsageError
from llmrun.model.chat_model import ChatModel
from llmrun.model.n_answers import with_seeds
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    ImageAccepted,
    Message,
    Stats,
    ToolCall,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import TokenCount

_ANSWER_ROOM = 512  # tokens that are kept free for an answer of no stated length
_SUMMARY_ROOM = 256
_WORDS_PER_TOKEN = 0.6
_BYTES_OF_A_TEMPLATE = 32  # more than any template writes around a message

Overflow = Literal["ask", "stop", "roll", "middle", "summarize"]
Answering = Callable[[AnswerRequest], Iterable[Event]]


@dataclass(slots=True)
class ChatSettings:
    """How answers are asked for; a chat may change it between turns.

    Attributes:
        flags: sampling parameters that were typed on the command line.
        session: those that were set in the chat; they count before the flags.
        asked: of every answer, all but its messages and sampling.
        overflow: what happens when the conversation is longer than the context window.
        keep: how many of the first turns never leave it.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    asked: AnswerRequest = field(default_factory=AnswerRequest)
    overflow: Overflow = "stop"
    keep: int = 0


class Conversation:
    """The turns of one saved chat with one model.

    Attributes:
        model: that answers next; another one may be put in its place between turns.
        chat: where the turns are saved; another one when the disk refuses.
        manner: how answers are asked for.
        last: the end of the last answer, where the engine still knows how it was made.
        calls: those that the last answer ended with: go_on() with their results, or end_turn().

    Args:
        on_note: called with each line that a user has to know, such as which turns left the context window.
        on_overflow: asked what to do when the conversation is too long and manner.overflow is "ask".
    """

    def __init__(
        self,
        model: ChatModel,
        chat: SavedChat,
        manner: ChatSettings,
        *,
        on_note: Callable[[str], None],
        on_overflow: Callable[[DoesNotFit], Policy],
    ) -> None:
        self.model, self.chat, self.manner = model, chat, manner
        self.last: Finished | None = None
        self.calls: tuple[ToolCall, ...] = ()
        self._turn: OpenTurn | None = None
        self._versions: list[tuple[TurnEntry, Finished | None]] = []  # of the last answer
        self._was_read = False  # the model has the last question
        self._answered_under: str | None = None  # the system prompt of the last answer in this run
        self._pictures = ImageCache(on_note)
        self._on_note = on_note
        self._on_overflow = on_overflow

    def ask(self, question: Question) -> Generator[Event, None, None]:
        """Save a question, then answer it; the events of Model.chat(). What came of an answer that fails is saved.

        Raises:
            ContextOverflowError: it does not fit, and by the policy nothing may leave.
            LlmrunError: the answer failed; retry() asks again.
        """
        self._tell(self._save(lambda chat: chat.add_question(question)))
        try:
            yield from self._answer()
        except LlmrunError:
            if question.pictures and not self._was_read:
                self.chat.undo()
                self._tell("The question and its pictures were taken back.")
            raise

    def retry(self, answer: Answering | None = None) -> Generator[Event, None, None]:
        """Answer the last question once more, whatever the seed where it has an answer; every answer stays saved.

        Args:
            answer: gives the events, in place of the model's own answer().

        Raises:
            UsageError: there is no question yet; else as ask().
        """
        last = self.chat.last_answer if self.chat.is_answered else None
        return self._answer(answer, any_seed=last is not None and last.finish != INTERRUPTED)

    def retry_n(self, seeds: Sequence[int]) -> Generator[Event, None, None]:
        """Answer the last question with each of the seeds together; all answers are saved, and keep() goes on with one.

        Where there is no memory for all at once, that is noted, and they come one after the other.

        Raises:
            UsageError: the model may call tools; else as retry().
        """
        if self.manner.asked.tools:
            raise UsageError("there can't be several answers where tools may be called", hint="/retry without a number")
        self._last_question()
        try:
            self.model.decode_together(len(seeds))
        except OutOfMemoryError as error:
            self._tell(f"The answers come one after the other: {error}")
        return self._several(seeds)

    def _several(self, seeds: Sequence[int]) -> Generator[Event, None, None]:
        """Give the events of several answers, and save each, however it ends."""
        self._turn = turn = self._new_turn(any_seed=True)
        heard: dict[int, ResponseAccumulator] = {}
        self._versions, self.last, self.calls = [], None, ()
        try:
            for event in self.model.answer(*with_seeds(self._asked(turn), seeds)):
                if isinstance(event, ImageAccepted):
                    continue  # they were told of when the question was asked
                heard.setdefault(event.request, ResponseAccumulator()).take(event)
                yield event
        finally:
            for _, each in sorted(heard.items()):
                self._save_version(turn, each)

    def _save_version(self, turn: OpenTurn, heard: ResponseAccumulator) -> None:
        """Save one of several answers, of which each has its own thoughts and seed."""
        seed = heard.started.seed if heard.started else None
        version = replace(turn, thoughts=[], sampling=replace(turn.sampling, seed=seed))
        before = self.chat.entries[-1]
        self._tell(self._end_round(version, heard))
        if self.chat.entries[-1] is not before:  # an answer of nothing is not saved
            self._versions.append((self.chat.entries[-1], heard.finished))

    @property
    def n_versions(self) -> int:
        """How many of the answers of retry_several() keep() can choose from."""
        return len(self._versions)

    def keep(self, place: int) -> None:
        """Go on with one of the answers of retry_several(), the first of which is 0."""
        entry, finished = self._versions[place]
        self.chat.take_answer(entry)
        self.last = finished if place == self.n_versions - 1 else None  # the engine remembers the last one

    def edit(self, question: Question) -> Generator[Event, None, None]:
        """Ask something else in place of the last question; both stay saved. Raises as retry()."""
        self._last_question()
        self._tell(self._save(lambda chat: chat.add_question(question, beside=chat.last_question)))
        yield from self._answer()

    def sampling(self) -> tuple[SamplingParams, dict[str, str]]:
        """The sampling parameters of the next answer, and where each comes from."""
        return self.model.sampling(self.manner.flags, self.manner.session)

    def count(self) -> TokenCount:
        """Count the tokens in the context window.

        After an answer they are those of its figures (Stats.context_used), its reasoning included. Where the next
        prompt will have others, they are those of the next prompt.
        """
        counted = self._counted([*self._system(), *self._said(self.chat.window())])
        answer = self.chat.last_answer
        if answer is None or not answer.stats.context_used:
            return counted
        if (answer.model, self._answered_under) != (self.model.used, self.chat.system):
            return counted
        each = (*counted.each[:-1], answer.stats.completion_tokens)
        return counted._replace(each=each, total=answer.stats.context_used)

    def _system(self) -> list[Message]:
        return [Message("system", self.chat.system)] if self.chat.system else []

    def _said(self, turns: Sequence[WindowTurn]) -> Iterator[Message]:
        """The messages of turns, with their pictures."""
        for turn in turns:
            yield self._shown(turn.messages[0], turn.pictures)
            yield from turn.messages[1:]

    def _shown(self, message: Message, files: Sequence[ImageFile]) -> Message:
        """A question with its pictures."""
        return self._pictures.show(message, files, "" if self.model.sees else self.model.name)

    def save_state(self) -> None:
        """Save the KV cache, so that coming back costs no prefill. Nothing is said when it can't be."""
        try:
            if self.last is not None:
                self.model.save_state()
        except LlmrunError:
            pass  # it is only a cache

    def _last_question(self) -> Question:
        entry = self.chat.last_question
        if entry is None or not isinstance(entry.part, Question):
            raise UsageError("there is no question yet", hint="ask something first")
        return entry.part

    def _answer(self, answer: Answering | None = None, *, any_seed: bool = False) -> Generator[Event, None, None]:
        """Answer the last question, and save what comes however it ends."""
        self._turn = self._new_turn(any_seed=any_seed)
        yield from self._round(self._turn, answer)

    def _new_turn(self, *, any_seed: bool) -> OpenTurn:
        """The last question, to be answered."""
        question = self._last_question()
        sampling, _ = self.sampling()
        if any_seed:
            sampling = replace(sampling, seed=None)
        return OpenTurn(question, sampling, self.chat.window_before_question())

    def _asked(self, turn: OpenTurn) -> AnswerRequest:
        """What the model is asked in a turn, in the room that there is."""
        n_departures = len(turn.departures)
        messages = self._make_room(turn)
        return replace(
            self.manner.asked,
            messages=tuple(messages),
            sampling=turn.sampling,
            moves=len(turn.departures) > n_departures,
            speculation=self.model.speculation(),
        )

    def _round(self, turn: OpenTurn, answer: Answering | None = None) -> Generator[Event, None, None]:
        """One answer of the model's, which ends the turn where it has no calls."""
        asked = self._asked(turn)
        heard, self.last, self.calls, self._was_read = ResponseAccumulator(), None, (), False
        n_asked = sum(len(each.pictures) for each in asked.messages)
        n_old = n_asked - (0 if turn.rounds else len(turn.question.pictures))
        try:
            for event in self._events(turn, asked, answer or self.model.answer):
                if isinstance(event, ImageAccepted):
                    n_old -= 1
                    if n_old >= 0:
                        continue  # it was told of when its own question was asked
                heard.take(event)
                self._was_read = heard.started is not None
                # Before the caller sees the end: what was shown as finished is on the disk.
                note = self._end_round(turn, heard) if heard.finished else ""
                yield event
                self._tell(note)
            self.last = heard.finished
        finally:
            if heard.finished is None:
                self._tell(self._end_round(turn, heard))

    def _events(self, turn: OpenTurn, asked: AnswerRequest, answer: Answering) -> Iterator[Event]:
        """What comes of a request. A server may tell its window by refusing one that is too long: it is asked anew."""
        n_ctx = self.model.n_ctx
        try:
            yield from answer(asked)
        except ContextOverflowError:
            if self.model.n_ctx == n_ctx:
                raise
            yield from answer(self._asked(turn))

    def _end_round(self, turn: OpenTurn, heard: ResponseAccumulator) -> str:
        """Note the calls that the model made, or save what was heard, as _save()."""
        turn.said, self.calls = heard.text, heard.calls
        turn.thoughts.append(heard.reasoning)
        return "" if self.calls else self._save_answer(turn, heard)

    def go_on(self, results: Sequence[str]) -> Generator[Event, None, None]:
        """Give the model the results of its `calls`, and let it answer. Raises as ask()."""
        assert self._turn is not None
        self._turn.rounds.append(CallRound(self._turn.said, self.calls, tuple(results)))
        yield from self._round(self._turn)

    def end_turn(self) -> None:
        """Save the turn as it is; the last `calls` get no result."""
        if self.calls and self._turn is not None:
            self.calls = ()
            nothing = ResponseAccumulator()
            nothing.take(Finished(0, "cancelled", Stats()))
            self._tell(self._save_answer(self._turn, nothing))

    def _save_answer(self, turn: OpenTurn, heard: ResponseAccumulator) -> str:
        """Save what was heard, as _save(); an answer of nothing only where the model meant it so."""
        self._answered_under = self.chat.system
        reason = heard.finished.reason if heard.finished else INTERRUPTED
        if not (heard.has_text or turn.rounds or turn.said) and reason in ("cancelled", INTERRUPTED):
            return ""
        answer = Answer(
            turn.said,
            "\n\n".join(filter(None, turn.thoughts)),
            reason,
            self.model.used,
            turn.sampling,
            self.manner.asked.limits,
            heard.finished.stats if heard.finished else Stats(),
            tuple(turn.departures),
            tuple(turn.rounds),
            self.model.adapters,
        )
        return self._save(lambda chat: chat.add_answer(answer))

    def _save(self, step: Callable[[SavedChat], None]) -> str:
        """Save a step. Where the disk refuses, the chat goes on in memory; gives what has to be said then."""
        try:
            step(self.chat)
        except ResourceError as error:
            self.chat.release()
            self.chat = self.chat.in_memory()
            step(self.chat)
            return f"This chat is not saved from here on: {error}. /export FILE writes it somewhere else."
        return ""

    def _tell(self, note: str) -> None:
        if note:
            self._on_note(note)

    def _make_room(self, turn: OpenTurn) -> list[Message]:
        """The messages to send; what has to leave before them is noted in the turn."""
        messages = self._to_send(turn)
        window = self._window()
        if not window.tokens or self._certainly_fits(messages, window):
            return messages
        total = self._counted(messages).total
        for _ in range(len(turn.before) + 1):
            if total <= window.tokens - window.reserve:
                break
            drop, policy = self._choose(messages, window)
            questions = [each.messages[0].content for each in turn.before]
            numbers = [each.number for each in turn.before]
            turn.before, departure = self._drop(turn.before, drop, policy, turn.sampling)
            messages = self._to_send(turn)
            before, total = total, self._counted(messages).total
            drop = replace(drop, tokens=before - total)
            turn.departures.append(replace(departure, tokens=drop.tokens))
            self._on_note(truncation_line(drop, policy, questions, numbers))
            if departure.summary:
                self._on_note(departure.summary)
        return messages

    def _certainly_fits(self, messages: Sequence[Message], window: Window) -> bool:
        """Whether that can be said without counting: a token is a byte at least. Of tools and pictures nobody knows."""
        unknown = any(message.role == "tool" or message.pictures for message in messages)
        unknown = unknown or bool(self.manner.asked.tools)
        return not unknown and sum(len(m.content.encode()) + _BYTES_OF_A_TEMPLATE for m in messages) <= window.room

    def _choose(self, messages: Sequence[Message], window: Window) -> tuple[Drop, Policy]:
        """Which turns leave, and by which policy."""
        counted = self._counted(messages)
        sizes = _sizes(messages, self._counted(messages, with_tools=False))
        window = replace(window, overhead=max(0, counted.total - sum(message.tokens for message in sizes)))
        policy: Policy = "stop" if self.manner.overflow == "ask" else self.manner.overflow
        found = fit(sizes, window, policy)
        if isinstance(found, DoesNotFit) and self.manner.overflow == "ask":
            policy = self._on_overflow(found)
            found = fit(sizes, window, policy)
        if isinstance(found, DoesNotFit):
            raise ContextOverflowError(
                "the conversation does not fit into the context window", why=found.why, hint=found.hint
            )
        return found.drop, policy

    def _drop(
        self, turns: list[WindowTurn], drop: Drop, policy: Policy, sampling: SamplingParams
    ) -> tuple[list[WindowTurn], Truncation]:
        """The turns that stay, a summary in place of the others if that is the policy."""
        gone = [turns[index] for index in drop.turns]
        stay = [turn for index, turn in enumerate(turns) if index not in drop.turns]
        summary = self._summary(gone, sampling) if policy == "summarize" else ""
        if summary:
            stay.insert(drop.turns[0], WindowTurn(0, 0, summary_turn(summary)))
        return stay, Truncation(policy, tuple(turn.question for turn in gone), drop.tokens, summary)

    def _summary(self, turns: Sequence[WindowTurn], sampling: SamplingParams) -> str:
        """What the model makes of turns that leave, a few at a time where all at once are too long."""
        sizes = [self._tokens_of(turn) for turn in turns]
        room = self.model.n_ctx - 2 * _SUMMARY_ROOM
        batches = summary_batches(sizes, room, _SUMMARY_ROOM)
        if batches is None:
            raise ContextOverflowError("a turn is too long to be condensed", hint="--overflow roll drops it")
        summary: tuple[Message, ...] = ()
        text = ""
        for batch in batches:
            messages = [*summary, *(message for index in batch for message in turns[index].messages)]
            request = summary_request(messages, int(_SUMMARY_ROOM * _WORDS_PER_TOKEN))
            text = self._plain_answer(request, sampling).strip()
            summary = summary_turn(text)
        return text

    def _tokens_of(self, turn: WindowTurn) -> int:
        asked = turn.messages[-1].role == "user"  # some templates want a question in the end
        counted = self._counted(turn.messages if asked else [*turn.messages, Message("user", "")], with_tools=False)
        return sum(message.tokens for message in _sizes(turn.messages, counted))

    def _plain_answer(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        asked = AnswerRequest(
            tuple(messages),
            sampling=sampling,
            limits=Limits(_SUMMARY_ROOM),
            template=self.manner.asked.template,
            thinking=False,
            stops_repeats=True,
            speculation=self.model.speculation(),
        )
        received = ResponseAccumulator()
        for event in self.model.answer(asked):
            received.take(event)
        return received.text

    def _to_send(self, turn: OpenTurn) -> list[Message]:
        question = self._shown(Message("user", turn.question.content), turn.question.pictures)
        return [*self._system(), *self._said(turn.before), question, *round_messages(turn.rounds)]

    def _window(self) -> Window:
        n_ctx = self.model.n_ctx
        reserve = min(self.manner.asked.limits.max_tokens or _ANSWER_ROOM, n_ctx // 4)
        summary = min(_SUMMARY_ROOM + 32, n_ctx // 4)
        return Window(n_ctx, reserve=reserve, keep=self.manner.keep, summary=summary)

    def _counted(self, messages: Sequence[Message], *, with_tools: bool = True) -> TokenCount:
        asked = self.manner.asked
        tools = asked.tools if with_tools else ()
        return self.model.count(messages, template=asked.template, thinking=asked.thinking, tools=tools)


def _sizes(messages: Sequence[Message], counted: TokenCount) -> list[MessageSize]:
    """Each message with an equal share of what the template writes around all of them."""
    marks = max(0, counted.total - sum(counted.each)) // (len(counted.each) + 1)
    return [MessageSize(message.role, tokens + marks) for message, tokens in zip(messages, counted.each, strict=False)]
