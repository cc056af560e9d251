"""The parts of a saved chat: questions, answers with their settings and statistics, and the tree they form.

Also their JSON form, and the selection of turns for the context window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from llmrun.chat.attachments import Attachments
from llmrun.chat.media import MediaFile
from llmrun.chat.passages import Passage, passages_block
from llmrun.chat.truncation import summary_turn
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.media import Media
from llmrun.protocol.messages import Message, Stats, ToolCall
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.watermark import fingerprint

_NO_MODEL = ModelFingerprint("")
_NO_STATS = Stats()
_PLAIN_DEFAULTS = as_dict(SamplingParams())

INTERRUPTED = "interrupted"
"""Reason of an answer whose engine or command died: the partial answer is saved."""

MAX_ROUNDS = 20
"""Maximum number of rounds of tool calls in one turn."""

SUMMARY = 0
"""Stands for a summary instead of a question's id."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Turns dropped from the context window before an answer. They stay saved, but the model does not see them."""

    policy: str  # see chat/truncation.py
    turns: tuple[int, ...]  # ids of the dropped turns' questions; SUMMARY for a summary
    tokens: int  # of these turns
    summary: str = ""  # text that replaces them; "" for none


@dataclass(frozen=True, slots=True)
class Question:
    """A message of the user."""

    content: str  # as the model gets it
    typed: str = ""  # as the user typed it, if content has more, such as files
    media: tuple[MediaFile, ...] = ()  # they precede it
    passages: tuple[Passage, ...] = ()  # of --docs; content begins with them

    @classmethod
    def of(cls, text: str, attached: Attachments, passages: tuple[Passage, ...] = ()) -> Question:
        """Return a question with files and passages."""
        content = passages_block(passages) + attached.before(text)
        typed = text if passages or attached.block else ""
        return cls(content, typed, tuple(map(MediaFile.of, attached.media)), passages)

    @property
    def shown(self) -> str:
        """The text to show to the user."""
        return self.typed or self.content

    def reworded(self, text: str, passages: tuple[Passage, ...] | None = None) -> Question:
        """Return the question with another text, and the same files.

        Args:
            passages: instead of its own; None keeps them.
        """
        before = self.content.removesuffix(self.typed) if self.typed else ""
        if passages is None:
            passages = self.passages
        else:
            before = passages_block(passages) + before.removeprefix(passages_block(self.passages))
        return replace(self, content=before + text, typed=text if before else "", passages=passages)


class ToolOutput(NamedTuple):
    """The result of a call as the model gets it."""

    text: str
    media: tuple[Media, ...] = ()


class CallRound(NamedTuple):
    """The tool calls of a model before it continued its answer."""

    content: str  # text before the calls
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]  # one for each call
    reasoning: str = ""  # before the text
    media: tuple[tuple[Media, ...], ...] = ()  # of each result; () where no result has any


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, with its settings and statistics."""

    content: str  # without the reasoning
    reasoning: str = ""
    finish: str = "stop"  # reason as in messages.Finished, or INTERRUPTED
    model: ModelFingerprint = _NO_MODEL
    sampling: SamplingParams = SamplingParams()  # as requested
    limits: Limits = Limits()
    stats: Stats = _NO_STATS  # with the seed that was used
    departures: tuple[Truncation, ...] = ()  # turns dropped before it
    rounds: tuple[CallRound, ...] = ()  # tool calls that led to it
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters of the model

    @property
    def last_reasoning(self) -> str:
        """The reasoning after the last round of calls."""
        before = join_reasoning(call_round.reasoning for call_round in self.rounds)
        return self.reasoning.removeprefix(before).lstrip()


def join_reasoning(pieces: Iterable[str]) -> str:
    return "\n\n".join(filter(None, pieces))


def round_messages(rounds: Sequence[CallRound]) -> Iterator[Message]:
    """Yield calls and their results as messages."""
    for content, calls, results, reasoning, media in rounds:
        yield Message("assistant", content, calls, reasoning=reasoning)
        for call, result, files in zip(calls, results, media or ((),) * len(calls), strict=True):
            yield Message("tool", result, tool_call_id=call.id, name=call.name, media=files)


@dataclass(slots=True)
class OpenAnswer:
    """An answer that is being received, in several rounds if the model calls tools."""

    rounds: list[CallRound] = field(default_factory=list)  # with results
    text: str = ""  # of the last round
    calls: tuple[ToolCall, ...] = ()  # that the last round ended with: next is go_on(), or the answer is left so
    _reasoning: list[str] = field(default_factory=list)  # of each round

    def end_round(self, received: ResponseAccumulator, begins: str = "") -> None:
        """Add what was received of a round; `begins` is text that it was given to begin with."""
        self.text, self.calls = begins + received.text, received.calls
        self._reasoning.append(received.reasoning.strip())

    def go_on(self, results: Sequence[ToolOutput]) -> None:
        """Add the results of the calls; the model continues in the next round."""
        texts, media = tuple(result.text for result in results), tuple(result.media for result in results)
        self.rounds.append(CallRound(self.text, self.calls, texts, self._reasoning[-1], media if any(media) else ()))
        self.text, self.calls = "", ()

    def to_save(self, reason: str, *, has_text: bool, **facts: Any) -> Answer | None:
        """Return the answer; None if nothing was received before it was stopped or failed.

        Args:
            has_text: something of the last round is worth it.
            facts: other fields of Answer.
        """
        if not (has_text or self.rounds) and reason in ("cancelled", INTERRUPTED):
            return None
        reasoning = join_reasoning(self._reasoning)
        return Answer(self.text, reasoning, reason, rounds=tuple(self.rounds), **facts)


@dataclass(frozen=True, slots=True)
class TurnEntry:
    """A question or an answer at its place in the tree."""

    id: int  # unique among all saved chats, never used again
    parent: int | None  # id of the entry before; None for a first question. Entries with one parent are alternatives
    created: float  # seconds since 1970
    part: Question | Answer

    @property
    def role(self) -> str:
        return "user" if isinstance(self.part, Question) else "assistant"


@dataclass(frozen=True, slots=True)
class Tree:
    """A whole saved chat, with every branch."""

    name: str
    system: str  # prompt; "" for none
    created: float  # seconds since 1970
    updated: float  # the same
    branch: str  # name of the current one
    branches: Mapping[str, int | None]  # name -> id of the last entry; None before the first turn
    entries: tuple[TurnEntry, ...]  # parents before their children
    documents: str = ""  # folder whose passages go along with questions of the page; "" for none

    @property
    def last_id(self) -> int:
        """Id of the newest entry, by which chats of one store are ordered in time; 0 before the first turn."""
        return max((entry.id for entry in self.entries), default=0)

    @property
    def first_questions(self) -> tuple[str, ...]:
        """All versions of the first question, as they are shown."""
        parts = (entry.part for entry in self.entries if entry.parent is None)
        return tuple(part.shown for part in parts if isinstance(part, Question))

    def path(self, branch: str = "") -> tuple[TurnEntry, ...]:
        """Return the conversation of a branch, by default the current one."""
        return path_to(self.branches[branch or self.branch], {entry.id: entry for entry in self.entries})


@dataclass(frozen=True, slots=True)
class WindowTurn:
    """A turn in the context window."""

    question: int  # id of its question; SUMMARY for a summary
    number: int  # in the whole conversation, from 1 on; 0 for a summary
    messages: tuple[Message, ...]  # as they are sent, without images and audio
    media: tuple[MediaFile, ...] = ()  # of the question, which is the first message


def path_to(end: int | None, entries: Mapping[int, TurnEntry]) -> tuple[TurnEntry, ...]:
    """Return the entries from the first question to an end."""
    path: list[TurnEntry] = []
    while end is not None:
        path.append(entries[end])
        end = entries[end].parent
    return tuple(reversed(path))


def in_window(path: Sequence[TurnEntry]) -> list[WindowTurn]:
    """Return the turns that the model still sees, with a summary in place of the dropped ones."""
    gone: set[int] = set()
    summary = ""
    for entry in path:
        for truncation in entry.part.departures if isinstance(entry.part, Answer) else ():
            gone.update(truncation.turns)
            if truncation.summary or SUMMARY in truncation.turns:
                summary = truncation.summary
    turns: list[WindowTurn] = []
    number, leaving = 0, False
    for entry in path:
        if isinstance(entry.part, Question):
            number += 1
            leaving = entry.id in gone
            if leaving and summary:
                turns.append(WindowTurn(SUMMARY, 0, summary_turn(summary)))
                summary = ""
        reasoning = entry.part.last_reasoning if isinstance(entry.part, Answer) else ""
        message = Message(entry.role, entry.part.content, reasoning=reasoning)
        if not leaving and isinstance(entry.part, Question):
            turns.append(WindowTurn(entry.id, number, (message,), entry.part.media))
        elif not leaving and turns:
            last = turns[-1]
            called = round_messages(entry.part.rounds) if isinstance(entry.part, Answer) else ()
            turns[-1] = replace(last, messages=(*last.messages, *called, message))
    return turns


# ---- plain JSON data -------------------------------------------------------------------------------


def plain_facts(answer: Answer) -> dict[str, Any]:
    """Return the settings and statistics of an answer as JSON data, without its texts and the watermark's key."""
    plain = as_dict(answer)
    del plain["content"], plain["reasoning"]
    if answer.sampling.watermark_key:
        plain["sampling"]["watermark_key"] = fingerprint(answer.sampling.watermark_key)
    # JSON has no infinity.
    biases = answer.sampling.logit_bias
    plain["sampling"]["logit_bias"] = [[token, "-inf" if bias == -float("inf") else bias] for token, bias in biases]
    if answer.model.server:  # the server's own defaults are unknown
        sampling = plain["sampling"].items()
        plain["sampling"] = {name: value for name, value in sampling if value != _PLAIN_DEFAULTS[name]}
    return plain


def answer_of(content: str, reasoning: str, facts: Mapping[str, Any], model: ModelFingerprint | None = None) -> Answer:
    """Return the answer of plain_facts(). Unknown facts are ignored, missing ones get their defaults.

    Args:
        model: used instead of the one in facts.

    Raises:
        ValueError, TypeError, AttributeError, UsageError: the facts are invalid.
    """
    sampling = dict(facts.get("sampling", {}))
    sampling["logit_bias"] = [[token, float(bias)] for token, bias in sampling.get("logit_bias", ())]
    plain = {**facts, "content": content, "reasoning": reasoning, "sampling": sampling}
    answer = from_json(Answer, plain, newer=True)
    if any(len(one.calls) != len(one.results) or len(one.media) not in (0, len(one.calls)) for one in answer.rounds):
        raise ValueError("a round has not one result for each call")
    return replace(answer, model=model) if model else answer
