"""What a model thinks before it answers, told from the answer as it comes. Pure; must not know how it is shown.

Thoughts are looked for where an answer begins and nowhere else, so that an answer about the tags stays whole.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class ReasoningKind(enum.Enum):
    """What a part of the text is. END has no text: the thoughts are complete."""

    THOUGHT = enum.auto()
    END = enum.auto()
    ANSWER = enum.auto()


class ReasoningPart(NamedTuple):
    """A piece of the text, of one kind."""

    kind: ReasoningKind
    text: str


class _State(enum.Enum):
    BEFORE = enum.auto()  # nothing but blanks has come
    INSIDE = enum.auto()
    BEHIND = enum.auto()  # nothing but blanks has come after the thoughts
    ANSWER = enum.auto()


class Splitter:
    """One answer's text, in pieces.

    Args:
        tags: the texts that open and close the thoughts; none when the model has none.
        inside: the prompt ended with the opening tag, so that the text begins inside.
    """

    def __init__(self, tags: Sequence[str], *, inside: bool = False) -> None:
        self._opening, self._closing = (tags[0], tags[1]) if len(tags) == 2 else ("", "")
        begin = _State.INSIDE if inside else _State.BEFORE
        self._state = begin if self._opening and self._closing else _State.ANSWER
        self._held = ""  # it may be the first part of a tag

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside the thoughts."""
        return self._state is _State.INSIDE

    def feed(self, text: str) -> list[ReasoningPart]:
        """The parts that are known with this piece. Tags and the blanks around the thoughts' end are left out."""
        if self._state is _State.ANSWER:
            return [ReasoningPart(ReasoningKind.ANSWER, text)] if text else []
        self._held += text
        parts: list[ReasoningPart] = []
        while self._held and (self._inside(parts) if self.inside else self._outside(parts)):
            pass
        return parts

    def flush(self) -> list[ReasoningPart]:
        """The rest, when no more text comes."""
        held, self._held = self._held, ""
        if not held or (self._state is _State.BEHIND and not held.strip()):
            return []
        return [ReasoningPart(ReasoningKind.THOUGHT if self.inside else ReasoningKind.ANSWER, held)]

    def _inside(self, parts: list[ReasoningPart]) -> bool:
        """Take thoughts; gives whether there may be more to take."""
        end = self._held.find(self._closing)
        if end < 0:
            kept = overlap(self._held, self._closing)
            known = len(self._held) - kept
            if known:
                parts.append(ReasoningPart(ReasoningKind.THOUGHT, self._held[:known]))
            self._held = self._held[known:]
            return False
        if end:
            parts.append(ReasoningPart(ReasoningKind.THOUGHT, self._held[:end]))
        parts.append(ReasoningPart(ReasoningKind.END, ""))
        self._held, self._state = self._held[end + len(self._closing) :], _State.BEHIND
        return True

    def _outside(self, parts: list[ReasoningPart]) -> bool:
        """Take what comes before the answer, or between two thoughts."""
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._held, self._state = text[len(self._opening) :], _State.INSIDE
            return True
        if self._opening.startswith(text):
            return False
        parts.append(ReasoningPart(ReasoningKind.ANSWER, text if self._state is _State.BEHIND else self._held))
        self._held, self._state = "", _State.ANSWER
        return False


def split(text: str, tags: Sequence[str], *, inside: bool = False) -> tuple[str, str]:
    """A whole text as (thoughts, answer)."""
    splitter = Splitter(tags, inside=inside)
    parts = [*splitter.feed(text), *splitter.flush()]
    thoughts = "".join(part.text for part in parts if part.kind is ReasoningKind.THOUGHT)
    return thoughts.strip(), "".join(part.text for part in parts if part.kind is ReasoningKind.ANSWER)


def overlap(text: str, tag: str) -> int:
    """How many characters at a text's end could be a tag's beginning."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
