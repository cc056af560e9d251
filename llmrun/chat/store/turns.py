"""What a saved chat is made of: questions, answers with everything that made them, and the tree they form.

Owns these values, their plain JSON form, and which of them a model still sees; must not know databases or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llmrun.chat.images import ImageFile
from llmrun.chat.truncation import summary_turn
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.messages import Message, Stats, ToolCall
from llmrun.protocol.params import Limits, SamplingParams

_NO_MODEL = ModelFingerprint("")
_NO_STATS = Stats()
_PLAIN_DEFAULTS = as_dict(SamplingParams())

INTERRUPTED = "interrupted"
"""Why an answer ended whose engine or command died: it is kept as far as it came."""

SUMMARY = 0
"""In place of a question's id: the summary of what left before."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """What left the context window before an answer. The saved chat keeps it; the model does not see it any more.

    Attributes:
        policy: by which it was chosen, see llmrun.chat.truncation.
        turns: ids of the questions whose turns left; SUMMARY for the summary that stood there.
        tokens: of these turns.
        summary: what stands in their place from then on; "" for nothing.
    """

    policy: str
    turns: tuple[int, ...]
    tokens: int
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A message of the user's.

    Attributes:
        content: as the model gets it.
        typed: as it was typed, where content holds more than that, such as files.
        pictures: that stand before it.
    """

    content: str
    typed: str = ""
    pictures: tuple[ImageFile, ...] = ()

    @property
    def shown(self) -> str:
        """What a user wants to see of it."""
        return self.typed or self.content

    def reworded(self, text: str) -> Question:
        """Return the question in other words, with the same files and pictures."""
        if not self.typed:
            return replace(self, content=text)
        return replace(self, content=self.content.removesuffix(self.typed) + text, typed=text)


class CallRound(NamedTuple):
    """What a model called before it went on with its answer.

    Attributes:
        content: what it said before the calls.
        calls: of tools.
        results: of each call.
    """

    content: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and all that made it.

    Attributes:
        content: without the reasoning.
        reasoning: what the model thought before, if it is of that kind.
        finish: why it ended, see messages.Finished; or INTERRUPTED.
        model: that answered.
        sampling: every value as it was asked for.
        limits: when it had to end.
        stats: what it cost; the seed that was used is there.
        departures: what left the context window before it.
        rounds: the calls of tools that led to it.
        adapters: LoRA adapters that the model was loaded with.
    """

    content: str
    reasoning: str = ""
    finish: str = "stop"
    model: ModelFingerprint = _NO_MODEL
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    stats: Stats = _NO_STATS
    departures: tuple[Truncation, ...] = ()
    rounds: tuple[CallRound, ...] = ()
    adapters: tuple[Adapter, ...] = ()


def round_messages(rounds: Sequence[CallRound]) -> Iterator[Message]:
    """Calls and their results, as the model gets them."""
    for content, calls, results in rounds:
        yield Message("assistant", content, calls)
        for call, result in zip(calls, results, strict=True):
            yield Message("tool", result, tool_call_id=call.id, name=call.name)


@dataclass(frozen=True, slots=True)
class TurnEntry:
    """A question or an answer at its place in the tree.

    Attributes:
        id: unique among all saved chats, never used again.
        parent: id of the one before; None for a first question. Several with one parent are alternatives.
        created: seconds since 1970.
        part: what was said.
    """

    id: int
    parent: int | None
    created: float
    part: Question | Answer

    @property
    def role(self) -> str:
        """As in messages.Message."""
        return "user" if isinstance(self.part, Question) else "assistant"


@dataclass(frozen=True, slots=True)
class Tree:
    """A whole saved chat, with every branch.

    Attributes:
        name: of the chat.
        system: prompt; "" for none.
        created, updated: seconds since 1970.
        branch: the current one's name.
        branches: name -> id of the entry it ends with; None before the first turn.
        entries: parents before their children.
    """

    name: str
    system: str
    created: float
    updated: float
    branch: str
    branches: Mapping[str, int | None]
    entries: tuple[TurnEntry, ...]

    def path(self, branch: str = "") -> tuple[TurnEntry, ...]:
        """The conversation of a branch, the current one by default, from its first question on."""
        return path_to(self.branches[branch or self.branch], {entry.id: entry for entry in self.entries})


@dataclass(frozen=True, slots=True)
class WindowTurn:
    """A turn that the model still sees.

    Attributes:
        question: id of its question; SUMMARY for a summary.
        number: of the turn in the whole conversation, from 1 on; 0 for a summary.
        messages: as they are sent, the question's pictures left out.
        pictures: of the question, which is the first message.
    """

    question: int
    number: int
    messages: tuple[Message, ...]
    pictures: tuple[ImageFile, ...] = ()


def path_to(end: int | None, entries: Mapping[int, TurnEntry]) -> tuple[TurnEntry, ...]:
    """The entries from the first question to one of them."""
    path: list[TurnEntry] = []
    while end is not None:
        path.append(entries[end])
        end = entries[end].parent
    return tuple(reversed(path))


def in_window(path: Sequence[TurnEntry]) -> list[WindowTurn]:
    """The turns of a conversation that the model still sees: all but those that left, a summary in their place."""
    gone: set[int] = set()
    summary = ""
    for entry in path:
        for departure in entry.part.departures if isinstance(entry.part, Answer) else ():
            gone.update(departure.turns)
            if departure.summary or SUMMARY in departure.turns:
                summary = departure.summary
    turns: list[WindowTurn] = []
    number, leaving = 0, False
    for entry in path:
        if isinstance(entry.part, Question):
            number += 1
            leaving = entry.id in gone
            if leaving and summary:
                turns.append(WindowTurn(SUMMARY, 0, summary_turn(summary)))
                summary = ""
        message = Message(entry.role, entry.part.content)
        if not leaving and isinstance(entry.part, Question):
            turns.append(WindowTurn(entry.id, number, (message,), entry.part.pictures))
        elif not leaving and turns:
            last = turns[-1]
            called = round_messages(entry.part.rounds) if isinstance(entry.part, Answer) else ()
            turns[-1] = replace(last, messages=(*last.messages, *called, message))
    return turns


# ---- plain JSON data -------------------------------------------------------------------------------


def plain_facts(answer: Answer) -> dict[str, Any]:
    """What made an answer, as plain JSON data; its content and reasoning are left out, and so is a watermark's key."""
    plain = as_dict(answer)
    del plain["content"], plain["reasoning"]
    if answer.sampling.watermark_key:
        from llmrun.protocol.watermark import fingerprint

        plain["sampling"]["watermark_key"] = fingerprint(answer.sampling.watermark_key)
    # JSON knows no infinity.
    biases = answer.sampling.logit_bias
    plain["sampling"]["logit_bias"] = [[token, "-inf" if bias == -float("inf") else bias] for token, bias in biases]
    if answer.model.server:  # which has values of its own for what was not set, and nobody knows them
        sampling = plain["sampling"].items()
        plain["sampling"] = {name: value for name, value in sampling if value != _PLAIN_DEFAULTS[name]}
    return plain


def answer_of(content: str, reasoning: str, facts: Mapping[str, Any], model: ModelFingerprint | None = None) -> Answer:
    """The answer again. Facts that this version does not know are left out, missing ones are the defaults.

    Args:
        content, reasoning: of the answer.
        facts: as plain_facts() gives them.
        model: in place of the one in facts.

    Raises:
        ValueError, TypeError, AttributeError, UsageError: they are none of ours.
    """
    sampling = dict(facts.get("sampling", {}))
    sampling["logit_bias"] = [[token, float(bias)] for token, bias in sampling.get("logit_bias", ())]
    plain = {**facts, "content": content, "reasoning": reasoning, "sampling": sampling}
    answer = from_json(Answer, plain, newer=True)
    if any(len(one.calls) != len(one.results) for one in answer.rounds):
        raise ValueError("a round has not one result for each call")
    return replace(answer, model=model) if model else answer
