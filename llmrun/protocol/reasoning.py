"""What a model thinks before it answers, told from the answer as it comes. Pure; must not know how it is shown.

Thoughts are looked for where an answer begins and nowhere else, so that an answer about the tags stays whole.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from llmrun.protocol.messages import AnswerPart


class _State(enum.Enum):
    BEFORE = enum.auto()  # nothing but blanks has come
    INSIDE = enum.auto()
    BEHIND = enum.auto()  # nothing but blanks has come after the thoughts
    ANSWER = enum.auto()


class ReasoningSplitter:
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

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are known with this piece. Tags and the blanks around the thoughts' end are left out."""
        if self._state is _State.ANSWER:
            return [AnswerPart("text", text)] if text else []
        self._held += text
        parts: list[AnswerPart] = []
        while self._held and (self._inside(parts) if self.inside else self._outside(parts)):
            pass
        return parts

    def flush(self) -> list[AnswerPart]:
        """The rest, when no more text comes."""
        held, self._held = self._held, ""
        if not held or (self._state is _State.BEHIND and not held.strip()):
            return []
        return [AnswerPart("reasoning" if self.inside else "text", held)]

    def _inside(self, parts: list[AnswerPart]) -> bool:
        """Take thoughts; gives whether there may be more to take."""
        end = self._held.find(self._closing)
        if end < 0:
            kept = overlap(self._held, self._closing)
            known = len(self._held) - kept
            if known:
                parts.append(AnswerPart("reasoning", self._held[:known]))
            self._held = self._held[known:]
            return False
        if end:
            parts.append(AnswerPart("reasoning", self._held[:end]))
        parts.append(AnswerPart("reasoning_end"))
        self._held, self._state = self._held[end + len(self._closing) :], _State.BEHIND
        return True

    def _outside(self, parts: list[AnswerPart]) -> bool:
        """Take what comes before the answer, or between two thoughts."""
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._held, self._state = text[len(self._opening) :], _State.INSIDE
            return True
        if self._opening.startswith(text):
            return False
        parts.append(AnswerPart("text", text if self._state is _State.BEHIND else self._held))
        self._held, self._state = "", _State.ANSWER
        return False


def overlap(text: str, tag: str) -> int:
    """How many characters at a text's end could be a tag's beginning."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
