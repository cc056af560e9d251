"""TextStream the slow, obvious way: every phrase is looked for in all of the text, at every token.

The same interface as llmrun.engine.core.text.TextStream, which says what it is for.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class SlowTextStream:
    """See the module."""

    def __init__(self, stop: Sequence[str] = (), ban: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._ban = [_folded(phrase) for phrase in ban]
        self._held = ""
        # The end of what was given out: after a step back, a phrase may begin in it.
        self._shown = ""
        self._longest_ban = max(map(len, self._ban), default=0)
        # Of each token that still can be undone: where in _held its text begins, and the decoder before it.
        self._undo: list[tuple[int, tuple[bytes, int]]] = []
        self._ban_start: int | None = None
        self.stopped_by = ""

    @property
    def banned(self) -> bool:
        return self._ban_start is not None

    def push(self, data: bytes) -> str:
        if self._ban:
            self._undo.append((len(self._held), self._decoder.getstate()))
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped_by:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def step_back(self) -> int:
        assert self._ban_start is not None
        undone, start, state = 0, len(self._held), self._decoder.getstate()
        while not undone or start > self._ban_start:
            start, state = self._undo.pop()
            undone += 1
        self._decoder.setstate(state)
        self._held, self._ban_start = self._held[:start], None
        return undone

    def _release(self, text: str) -> str:
        if self.stopped_by:
            return ""
        if not self._stop and not self._ban:
            return text
        text = self._held + text
        before = len(self._shown)
        # The one that is complete first wins, so that the answer does not depend on how tokens split it.
        stop, ban = _first(text, self._stop), _first(_folded(self._shown + text), self._ban)
        if stop and (ban is None or stop[0] <= ban[0] - before):
            self.stopped_by, self._held = text[stop[1] : stop[0]], ""
            return text[: stop[1]]
        if ban:
            self._held, self._ban_start = text, max(0, ban[1] - before)
            return ""
        return self._hold_back(text)

    def _hold_back(self, text: str) -> str:
        """Keep the end of text that may still become something else; give out the rest."""
        keep = max(_overlap(text, self._stop), _overlap(_folded(self._shown + text), self._ban))
        end = max(0, len(text) - keep)
        if self._ban and keep:
            # What is shown can't be undone, so it ends where a token ends.
            end = max((start for start, _ in self._undo if start <= end), default=0)
        self._held = text[end:]
        self._undo = [(start - end, state) for start, state in self._undo if start >= end and keep]
        if self._longest_ban > 1:
            self._shown = (self._shown + text[:end])[1 - self._longest_ban :]
        return text[:end]


def _folded(text: str) -> str:
    """Each character by itself, without upper case where that is one character too."""
    lower = (character.lower() if len(character.lower()) == 1 else character for character in text)
    return "".join("σ" if character == "ς" else character for character in lower)


def _first(text: str, phrases: Sequence[str]) -> tuple[int, int] | None:
    """End and start of the phrase that is completed first; of two with one end the longer."""
    found = ((text.find(phrase), len(phrase)) for phrase in phrases)
    return min(((start + length, start) for start, length in found if start >= 0), default=None)


def _overlap(text: str, phrases: Sequence[str]) -> int:
    """Length of the longest end of text that is a proper beginning of a phrase."""
    longest = 0
    for phrase in phrases:
        for length in range(min(len(text), len(phrase) - 1), longest, -1):
            if text.endswith(phrase[:length]):
                longest = length
                break
    return longest
