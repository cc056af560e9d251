"""Token bytes -> text that can be shown: whole characters only, stop strings found and held back.

Owns the text side of an answer; must not know tokens or models.
"""

from __future__ import annotations

import codecs


class TextStream:
    """Grows by token bytes and gives out text as soon as it is safe to show.

    A multi-byte character is kept until its last byte is there; text that may become a stop string is kept
    until it did or can't any more. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._held = ""
        self.stopped = False
        """Whether a stop string was completed; everything after it is dropped."""

    def push(self, data: bytes) -> str:
        """The text that these bytes make safe to show, maybe none."""
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest, when no more bytes will come."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        if self.stopped or not self._stop:
            return "" if self.stopped else text
        text = self._held + text
        # The stop string that is complete first wins, so that the answer does not depend on how tokens split it.
        found = ((text.find(stop), len(stop)) for stop in self._stop)
        ends = [(start + length, start) for start, length in found if start >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a proper beginning of stop."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
