"""The reasoning of an answer, split off piece by piece. Pure; must not know terminals.

Tags count only where a message begins, so that an answer about the tags stays whole.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from llmrun.protocol.messages import AnswerPart, PartKind


class ReasoningSyntax(NamedTuple):
    """The texts around a model's reasoning, and around its answer if that has such."""

    opening: str
    closing: str  # up to the beginning of the next message, if the answer is a message of its own
    lead: str = ""  # before the answer; a model may leave it out
    end: str = ""  # after the answer
    tail: str = ""  # after the answer and its calls
    words: str = ""  # of the reasoning, which stand in the prompt
    is_implied: bool = False  # the model may begin with the reasoning, without the opening

    @property
    def has_headers(self) -> bool:
        """Messages are those of gpt-oss, whose headers name a channel, a receiver and a format in several ways."""
        return self.opening.startswith(_CHANNEL)

    @property
    def has_messages(self) -> bool:
        """The answer is a message after that of the reasoning, and others may follow it."""
        return bool(self.lead) and not self.end

    @property
    def has_word_lead(self) -> bool:
        """The text before the answer is a tag that the reasoning may mention, and that the model may leave out."""
        return re.fullmatch(r"<\w+>", self.lead) is not None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer's text: tags that are words may be mentioned in it, control tokens may not."""
        after = self.closing if self.has_messages else self.end
        tags = (self.opening, self.closing) if self.opening.startswith("<|") else ()
        return tuple(filter(None, (after, self.tail, *tags)))

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the syntax, which may contain control tokens."""
        headers = (_CHANNEL, "<|constrain|>", _MESSAGE) if self.has_headers else ()
        return tuple(filter(None, (self.opening, self.closing, self.lead, self.end, self.tail, *headers)))


_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_UNMISTAKABLE = (("◁think▷", "◁/think▷"), ("<seed:think>", "</seed:think>"), ("<mm:think>", "</mm:think>"))
"""Tags that no other text begins with: a model may write them whatever its template says."""
_MOST_HEADER_CHARACTERS = 400
MESSAGE_BEGINS = AnswerPart("text", "")
"""Stands between two messages of one answer."""
_MASK = "\udc00"  # a lone surrogate, which no decoded text has


class Stage(enum.Enum):
    """A part of an answer."""

    BEFORE = enum.auto()  # only blanks so far
    INSIDE = enum.auto()
    AFTER = enum.auto()  # only blanks since the reasoning, or since the end of an answer
    ANSWER = enum.auto()


class ReasoningSplitter:
    """Splits the text of one answer.

    Args:
        tags: fields of a ReasoningSyntax; none without reasoning.
        inside: the prompt ended with the opening tag, so that the text begins as reasoning.
        calls: beginnings of calls of tools, which end the reasoning.
        anywhere: these are control tokens; else a call only begins at the start of a line.
    """

    def __init__(
        self, tags: Sequence[str | bool], *, inside: bool = False, calls: Sequence[str] = (), anywhere: bool = False
    ) -> None:
        self._syntax = ReasoningSyntax(*tags) if len(tags) >= 2 else ReasoningSyntax("", "")  # type: ignore[arg-type]
        syntax = self._syntax
        may_begin = syntax.closing or syntax.lead
        self._stage = Stage.INSIDE if inside else Stage.BEFORE if may_begin else Stage.ANSWER
        self._implied: list[str] | None = [] if syntax.is_implied and not inside else None  # may be the answer
        self._words = syntax.words if inside else ""
        self._buffer = ""  # possible beginning of a tag
        self._calls = tuple(calls)
        self._lines = self._calls if anywhere else tuple(f"\n{call}" for call in calls)
        self._is_line_start = True  # of the reasoning, where a call may begin
        self._stops = syntax.stops

    @property
    def inside(self) -> bool:
        """Whether the reasoning is open."""
        return self._stage is Stage.INSIDE

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain with this piece, without tags and the blanks around the closing tag."""
        if self._stage is Stage.ANSWER and not self._stops:
            return [AnswerPart("text", text)] if text else []
        self._buffer += text
        parts: list[AnswerPart] = [AnswerPart("reasoning", self._words)] if self._words else []
        self._words = ""
        steps = {Stage.INSIDE: self._inside, Stage.ANSWER: self._answer}
        while self._buffer and steps.get(self._stage, self._outside)(parts):
            pass
        return parts

    def mask(self, text: str, *, final: bool = False) -> tuple[str, int]:
        """Return the next text with everything but the answer masked, and the number of its certain characters.

        The rest may still become a tag. Nothing is taken: feed() gets the text later.

        Args:
            final: the answer ends with it, so that all of it is certain.
        """
        if self._stage is Stage.ANSWER and not self._stops:
            return text, len(text)
        ahead, masked, certain = copy(self), "", 0
        ahead._implied = None if self._implied is None else []

        def add(parts: list[AnswerPart], end: int) -> None:
            nonlocal masked, certain
            end = max(end, certain)  # a tag may have begun before this text
            start = max(end - sum(len(part.text) for part in parts if part.kind == "text"), certain)
            masked += _MASK * (start - certain) + text[start:end]
            certain = end

        for index, character in enumerate(text, 1):
            parts = ahead.feed(character)
            add(parts, index - len(ahead._buffer))
        if final:
            add(ahead.flush(is_cut_off=True), len(text))
        return masked, certain

    def flush(self, *, is_cut_off: bool = False, stop: Sequence[str] = ()) -> list[AnswerPart]:
        """Return the remaining parts at the end of the answer.

        Args:
            is_cut_off: the model did not end the answer, so that reasoning without a closing tag may be reasoning.
            stop: texts that end an answer which was taken for reasoning.
        """
        rest = self._buffer.lstrip() if self._stage is Stage.AFTER else self._buffer
        self._buffer = ""
        is_end = (
            rest.rstrip().endswith(">") and self._syntax.has_messages and self._syntax.closing.startswith(rest.strip())
        )
        parts = [AnswerPart("reasoning" if self.inside else "text", rest)] if rest and not is_end else []
        if self._implied is not None and self.inside and not is_cut_off:
            # Nothing was reasoning, though it was taken for that: else the answer would be lost.
            answer = "".join((*self._implied, rest))
            parts.append(AnswerPart("text", answer[: min(_places(answer, stop), default=len(answer))]))
        return parts

    def _inside(self, parts: list[AnswerPart]) -> bool:
        """Take reasoning; return whether there may be more to take."""
        if self._calls and self._is_line_start:
            text = self._buffer.lstrip()
            if text.startswith(self._calls):
                self._end_reasoning(parts, text, Stage.ANSWER)
                return True
            if any(call.startswith(text) for call in self._calls):
                return False
        lead = "" if self._syntax.has_word_lead else self._syntax.lead
        stops = (self._syntax.closing, *filter(None, (lead,)), *self._lines)
        stop = self._take_until(stops, parts, "reasoning")
        if stop is None:
            return False
        if stop == self._syntax.closing:
            self._end_reasoning(parts, self._buffer, Stage.AFTER)
        else:
            self._end_reasoning(parts, (stop.lstrip() if stop in self._lines else "") + self._buffer, Stage.ANSWER)
        return True

    def _end_reasoning(self, parts: list[AnswerPart], rest: str, stage: Stage) -> None:
        parts.append(AnswerPart("reasoning_end"))
        self._buffer, self._stage, self._implied, self._is_line_start = rest, stage, None, True

    def _answer(self, parts: list[AnswerPart]) -> bool:
        """Take the text of an answer that has an end, or after which another message may come."""
        if not self._stops:
            parts.append(AnswerPart("text", self._buffer))
            self._buffer = ""
            return False
        stop = self._take_until(self._stops, parts, "text")
        if stop is None:
            return False
        parts.append(MESSAGE_BEGINS)
        self._stage = Stage.INSIDE if stop == self._syntax.opening else Stage.AFTER
        return True

    def _take_until(self, stops: Sequence[str], parts: list[AnswerPart], kind: PartKind) -> str | None:
        """Take the text up to the first of these texts, and that too; return the text, None if there is none."""
        text = self._buffer
        found = min(((place, stop) for stop in stops if (place := text.find(stop)) >= 0), default=None)
        place, stop = found or (len(text) - max(overlap(text, stop) for stop in stops), "")
        if place:
            parts.append(AnswerPart(kind, text[:place]))
            self._is_line_start = self._is_line_start and text[:place].isspace()
            if self._implied is not None:
                self._implied.append(text[:place])
        self._buffer = text[place + len(stop) :]
        return stop if found else None

    def _outside(self, parts: list[AnswerPart]) -> bool:
        """Skip text before the answer, or between two messages."""
        syntax, text = self._syntax, self._buffer.lstrip()
        first_tag = re.match(r"<[^<>]*>", syntax.opening)
        marks = (
            (syntax.opening, Stage.INSIDE),
            (first_tag[0] + syntax.opening if first_tag else "", Stage.INSIDE),  # written twice, as Gemma 4 does
            (syntax.lead, Stage.ANSWER),
            (syntax.closing, Stage.AFTER),
            (syntax.tail, Stage.AFTER),
        )
        for mark, stage in marks:
            stripped = mark.lstrip()
            if stripped and text.startswith(stripped):
                self._buffer, self._stage = text[len(stripped) :], stage
                if stage is Stage.INSIDE:
                    self._implied = None
                return True
        if self._stage is Stage.BEFORE and (tags := _other_tags(text)) is not None:
            if not tags:
                return False
            self._syntax = syntax._replace(opening=tags[0], closing=tags[1])
            self._buffer, self._stage, self._implied = text[len(tags[0]) :], Stage.INSIDE, None
            return True
        if syntax.has_headers and (header := self._header(text)) is not None:
            return header
        if any(mark.lstrip().startswith(text) for mark, _ in marks if mark):
            return False
        if self._implied is not None:
            self._stage = Stage.INSIDE
            return True
        self._buffer = text if self._stage is Stage.AFTER else self._buffer
        self._stage = Stage.ANSWER
        return True

    def _header(self, text: str) -> bool | None:
        """Take a message's header; return None if the text does not begin with one."""
        begins = (_CHANNEL, "to=")
        if not any(text.startswith(each) or each.startswith(text) for each in begins):
            return None
        header, found, rest = text.partition(_MESSAGE)
        if not found:
            return None if len(header) > _MOST_HEADER_CHARACTERS else False
        receiver = re.search(r"to=(?!(?:assistant|user)\b)([^\s<]+)", header)
        channels = re.findall(r"<\|channel\|>(\w+)", header)
        self._buffer, self._implied = rest, None
        self._stage = Stage.INSIDE if receiver is None and channels[-1:] == ["analysis"] else Stage.ANSWER
        if receiver is not None and receiver[1].startswith("functions."):
            self._buffer = f"{_CHANNEL}commentary to={receiver[1]} <|constrain|>json{_MESSAGE}{rest}"
        return True


def _other_tags(text: str) -> tuple[str, ...] | None:
    """Return the tags of a family that begin a text though its template names none; () if it may still, else None."""
    if any(text.startswith(tags[0]) for tags in _UNMISTAKABLE):
        return next(tags for tags in _UNMISTAKABLE if text.startswith(tags[0]))
    return () if text and any(tags[0].startswith(text) for tags in _UNMISTAKABLE) else None


def _places(text: str, phrases: Sequence[str]) -> list[int]:
    return [place for phrase in phrases if (place := text.find(phrase)) >= 0]


def overlap(text: str, tag: str) -> int:
    """Return the number of characters at a text's end that could begin a tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
