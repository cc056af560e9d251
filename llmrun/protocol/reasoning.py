"""The reasoning of an answer, split off piece by piece. Pure; must not know terminals.

Tags count only at the beginning of an answer, so that an answer about the tags stays whole.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from llmrun.protocol.messages import AnswerPart


class _State(enum.Enum):
    BEFORE = enum.auto()  # only blanks so far
    INSIDE = enum.auto()
    AFTER = enum.auto()  # only blanks since the reasoning
    ANSWER = enum.auto()


class ReasoningSplitter:
    """Splits the text of one answer.

    Args:
        tags: opening and closing tag of the reasoning; none without reasoning.
        inside: the prompt ended with the opening tag, so that the text begins as reasoning.
    """

    def __init__(self, tags: Sequence[str], *, inside: bool = False) -> None:
        self._opening, self._closing = (tags[0], tags[1]) if len(tags) == 2 else ("", "")
        begin = _State.INSIDE if inside else _State.BEFORE
        self._state = begin if self._opening and self._closing else _State.ANSWER
        self._buffer = ""  # possible beginning of a tag

    @property
    def inside(self) -> bool:
        """Whether the reasoning is open."""
        return self._state is _State.INSIDE

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain with this piece, without tags and the blanks around the closing tag."""
        if self._state is _State.ANSWER:
            return [AnswerPart("text", text)] if text else []
        self._buffer += text
        parts: list[AnswerPart] = []
        while self._buffer and (self._inside(parts) if self.inside else self._outside(parts)):
            pass
        return parts

    def flush(self) -> list[AnswerPart]:
        """Return the remaining parts at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if not rest or (self._state is _State.AFTER and not rest.strip()):
            return []
        return [AnswerPart("reasoning" if self.inside else "text", rest)]

    def _inside(self, parts: list[AnswerPart]) -> bool:
        """Take reasoning; return whether there may be more to take."""
        end = self._buffer.find(self._closing)
        if end < 0:
            n_pending = overlap(self._buffer, self._closing)
            known = len(self._buffer) - n_pending
            if known:
                parts.append(AnswerPart("reasoning", self._buffer[:known]))
            self._buffer = self._buffer[known:]
            return False
        if end:
            parts.append(AnswerPart("reasoning", self._buffer[:end]))
        parts.append(AnswerPart("reasoning_end"))
        self._buffer, self._state = self._buffer[end + len(self._closing) :], _State.AFTER
        return True

    def _outside(self, parts: list[AnswerPart]) -> bool:
        """Take text before the answer, or between two reasoning parts."""
        text = self._buffer.lstrip()
        if text.startswith(self._opening):
            self._buffer, self._state = text[len(self._opening) :], _State.INSIDE
            return True
        if self._opening.startswith(text):
            return False
        parts.append(AnswerPart("text", text if self._state is _State.AFTER else self._buffer))
        self._buffer, self._state = "", _State.ANSWER
        return False


def overlap(text: str, tag: str) -> int:
    """Return the number of characters at a text's end that could begin a tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
