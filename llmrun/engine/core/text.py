"""Token bytes -> text that can be shown: whole characters only, stop strings and banned phrases found and held back.

Owns the text side of an answer; must not know tokens or models.
"""

from __future__ import annotations

from bisect import bisect
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence


class TextStream:
    """Grows by the bytes of one token after the other and gives out text as soon as it is safe to show.

    A multi-byte character is kept until its last byte is there; text that may become a stop string or a banned
    phrase is kept until it did or can't any more. Bytes that are not UTF-8 become U+FFFD.

    Args:
        stop: texts that end the answer.
        ban: texts that must not come, whatever their case; after one, step_back() undoes its tokens.
    """

    def __init__(self, stop: Sequence[str] = (), ban: Sequence[str] = ()) -> None:
        self._undecoded = b""  # the beginning of a character
        self._plain = not stop and not ban
        self._held = ""
        self._stop = _Search(stop)
        # Not only in what is held: after a step back, a phrase may begin in the end of what was given out.
        self._ban = _Search(map(_folded, ban))
        self._context = max(map(len, ban), default=1) - 1  # how much of that
        # Of each token that still can be undone: where in _held its text begins, and what was undecoded before it.
        self._undo: list[tuple[int, bytes]] = []
        self._ban_start: int | None = None
        self.stopped_by = ""
        """The stop string that was completed; everything after it is dropped."""
        self.decoded = ""
        """The text that the last token completed, whether or not it was given out."""

    @property
    def banned(self) -> bool:
        """Whether a banned phrase was completed, and step_back() has to be called."""
        return self._ban_start is not None

    def push(self, data: bytes) -> str:
        """The text that a token with these bytes makes safe to show, maybe none."""
        if self._ban.phrases:
            self._undo.append((len(self._held), self._undecoded))
        self.decoded = text = self._decode(data)
        return text if self._plain else self._release(text)

    def finish(self) -> str:
        """The rest, when no more bytes will come."""
        text = self._release(self._decode(b"", final=True))
        if self.stopped_by:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def step_back(self) -> int:
        """Undo the token in which the banned phrase begins and all after it; how many that are."""
        assert self._ban_start is not None
        undone, start = 0, len(self._held)
        before = len(self._ban.text) - start
        while not undone or start > self._ban_start:
            start, self._undecoded = self._undo.pop()
            undone += 1
        self._held, self._ban_start = self._held[:start], None
        self._stop.cut(start)
        self._ban.cut(before + start)
        return undone

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        if not self._undecoded:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass  # not whole characters, or none
        data = self._undecoded + data
        text, used = utf_8_decode(data, "replace", final)
        self._undecoded = data[used:]
        return text

    def _release(self, new: str) -> str:
        if self.stopped_by:
            return ""
        folded = _folded(new) if self._ban.phrases else ""
        if self._stop.is_far_from(new) and self._ban.is_far_from(folded):
            self._undo.clear()
            return new
        before = len(self._ban.text) - len(self._held)
        text = self._held + new
        # The one that is complete first wins, so that the answer does not depend on how tokens split it.
        stop, ban = self._stop.push(new), self._ban.push(folded)
        if stop and (ban is None or stop[0] <= ban[0] - before):
            self.stopped_by, self._held = text[stop[1] : stop[0]], ""
            return text[: stop[1]]
        if ban:
            self._held, self._ban_start = text, max(0, ban[1] - before)
            return ""
        keep = max(self._stop.n_open, self._ban.n_open)
        return self._hold_back(text, keep, before) if keep else self._give_out(text)

    def _hold_back(self, text: str, keep: int, before: int) -> str:
        """Keep at least so much of the end of text, which may still become something else; give out the rest."""
        end = max(0, len(text) - keep)
        if self._ban.phrases:
            # What is shown can't be undone, so it ends where a token ends.
            end = max((start for start, _ in self._undo if start <= end), default=0)
        self._held = text[end:]
        self._undo = [(start - end, undecoded) for start, undecoded in self._undo if start >= end]
        self._stop.forget(end)
        self._ban.forget(before + end - self._context)
        return text[:end]

    def _give_out(self, text: str) -> str:
        """All of it: no phrase has begun."""
        self._held = self._stop.text = self._ban.text = ""
        self._undo.clear()
        return text


class _Search:
    """Phrases that are looked for in a text as it grows.

    What a step costs depends on its own text and on the phrases that have begun, not on how many there are.

    Attributes:
        phrases: sorted; none begins with another one, because then the shorter one is completed first.
        text: what they are looked for in, from where one may have begun.
        n_open: length of the longest end of the text that is a proper beginning of a phrase.
    """

    def __init__(self, phrases: Iterable[str]) -> None:
        self.phrases: list[str] = []
        for phrase in sorted(phrases):
            if not self.phrases or not phrase.startswith(self.phrases[-1]):
                self.phrases.append(phrase)
        self._firsts = {phrase[0] for phrase in self.phrases}
        self.text = ""
        self.n_open = 0
        self._open: list[int] = []  # where in the text a phrase begins that may become complete

    def is_far_from(self, new: str) -> bool:
        """Whether none has begun, nor begins in this text that follows."""
        return not self._open and self._firsts.isdisjoint(new)

    def push(self, new: str) -> tuple[int, int] | None:
        """More text: end and start of the phrase that it completes first; of two with one end the longer."""
        old = len(self.text)
        self.text += new
        firsts = self._firsts
        return self._look(self._open + [old + place for place, character in enumerate(new) if character in firsts])

    def cut(self, length: int) -> None:
        """Less text: only so many first characters."""
        self.text = self.text[:length]
        self._look([place for place, character in enumerate(self.text) if character in self._firsts])

    def forget(self, length: int) -> None:
        """Drop so many first characters, if any, which no open phrase reaches into."""
        if length > 0:
            self.text = self.text[length:]
            self._open = [start - length for start in self._open]

    def _look(self, starts: Sequence[int]) -> tuple[int, int] | None:
        """What a phrase may begin with at each of these places."""
        self._open = []
        found: tuple[int, int] | None = None
        for start in starts:
            rest = self.text[start:]
            # A phrase that the rest begins with comes right before it in the order; one that begins with the rest,
            # right behind it.
            place = bisect(self.phrases, rest)
            if place and rest.startswith(self.phrases[place - 1]):
                complete = start + len(self.phrases[place - 1]), start
                found = min(found or complete, complete)
            elif place < len(self.phrases) and self.phrases[place].startswith(rest):
                self._open.append(start)
        self.n_open = len(self.text) - self._open[0] if self._open else 0
        return found


def _folded(text: str) -> str:
    """Text without upper case, each character in its place, whatever stands beside it."""
    lower = text.lower()
    if len(lower) != len(text):
        lower = "".join(low if len(low := character.lower()) == 1 else character for character in text)
    return lower.replace("ς", "σ")  # lower() makes the one or the other of Σ, as the next character wants it
