"""The text of an answer: decoding of token bytes, search for stop strings and banned phrases, and log probabilities."""

from __future__ import annotations

from bisect import bisect
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import Protocol

from llmrun.protocol.messages import TokenLogprob


class AnswerMask(Protocol):
    """Masks everything but the answer in the text after the released one; see AnswerSplitter.mask()."""

    def __call__(self, text: str, *, final: bool = False) -> tuple[str, int]: ...


class TextStream:
    """An incremental decoder that returns text as soon as it is safe to show.

    An incomplete UTF-8 character is held back, and so is text that may become a stop string or a banned phrase. Invalid
    bytes become U+FFFD.

    Args:
        stop: texts that end the answer. They count only in text that `mask` leaves as it is.
        ban: texts that must not occur, ignoring case; after one, step_back() undoes its tokens.

    Attributes:
        mask: hides the reasoning; None if all text is the answer.
    """

    def __init__(self, stop: Sequence[str] = (), ban: Sequence[str] = ()) -> None:
        self.mask: AnswerMask | None = None
        self._undecoded = b""  # the beginning of a character
        self._is_plain = not stop and not ban
        self._pending = ""  # decoded, but held back
        self._n_uncertain = 0  # of its characters, the last ones that may become a tag; no stop is searched there yet
        self._stop = _Search(stop)
        # Searches more than _pending: after a step back, a phrase may begin in text that was shown already.
        self._ban = _Search(map(_folded, ban))
        self._n_context = max(map(len, ban), default=1) - 1  # characters of that
        # Of each token that can be undone: the start of its text in _pending, and the undecoded bytes before it.
        self._undo: list[tuple[int, bytes]] = []
        self._ban_start: int | None = None
        self.stopped_by = ""
        """The stop string that was completed; everything after it is dropped."""
        self.decoded = ""
        """The text that the last token completed, shown or held back."""

    @property
    def banned(self) -> bool:
        """A banned phrase was completed, and step_back() has to be called."""
        return self._ban_start is not None

    @property
    def n_undoable(self) -> int:
        """The number of last tokens that step_back() may undo."""
        return len(self._undo)

    def push(self, data: bytes) -> str:
        """Add the bytes of a token; return the text that is safe to show now, maybe none."""
        if self._ban.phrases:
            self._undo.append((len(self._pending), self._undecoded))
        self.decoded = text = self._decode(data)
        return text if self._is_plain else self._release(text)

    def finish(self) -> str:
        """Return the rest of the text."""
        text = self._release(self._decode(b"", final=True), final=True)
        if self.stopped_by:
            return text
        rest, self._pending = self._pending, ""
        return text + rest

    def step_back(self) -> int:
        """Undo the token in which the banned phrase begins and all later ones; return their number."""
        assert self._ban_start is not None
        undone, start = 0, len(self._pending)
        before = len(self._ban.text) - start
        while not undone or start > self._ban_start:
            start, self._undecoded = self._undo.pop()
            undone += 1
        self._pending, self._ban_start = self._pending[:start], None
        self._n_uncertain = start
        self._stop.cut(0)
        self._ban.cut(before + start)
        return undone

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        if not self._undecoded:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass  # an incomplete or invalid character
        data = self._undecoded + data
        text, used = utf_8_decode(data, "replace", final)
        self._undecoded = data[used:]
        return text

    def _release(self, new: str, *, final: bool = False) -> str:
        if self.stopped_by:
            return ""
        folded = _folded(new) if self._ban.phrases else ""
        is_plain = self._stop.cannot_begin_in(new) and self._ban.cannot_begin_in(folded)
        if is_plain and not self._n_uncertain:
            self._undo.clear()
            return new
        before = len(self._ban.text) - len(self._pending)
        text = self._pending + new
        # The phrase that is complete first wins, so that the answer does not depend on its tokenization.
        stop, ban = self._stop.push(self._answer(text, final=final)), self._ban.push(folded)
        if stop and (ban is None or stop[0] <= ban[0] - before):
            self.stopped_by, self._pending = text[stop[1] : stop[0]], ""
            return text[: stop[1]]
        if ban:
            self._pending, self._ban_start = text, max(0, ban[1] - before)
            return ""
        n_open = max(self._stop.n_open + self._n_uncertain, self._ban.n_open)
        if n_open:
            return self._hold_back(text, n_open, before)
        self._pending = self._stop.text = self._ban.text = ""
        self._undo.clear()
        return text

    def _answer(self, text: str, *, final: bool) -> str:
        """Return what to search for stops next, given the text from the first pending character on."""
        done = len(self._stop.text)
        if self.mask is None or not self._stop.phrases:
            self._n_uncertain = 0
            return text[done:]
        masked, n_certain = self.mask(text, final=final)
        self._n_uncertain = len(text) - n_certain
        return masked[done:]

    def _hold_back(self, text: str, n_open: int, before: int) -> str:
        """Hold back at least the last n_open characters, which may begin a phrase; return the rest."""
        end = max(0, len(text) - n_open)
        if self._ban.phrases:
            # Shown text can't be undone, so it ends where a token ends.
            end = max((start for start, _ in self._undo if start <= end), default=0)
        self._pending = text[end:]
        self._undo = [(start - end, undecoded) for start, undecoded in self._undo if start >= end]
        self._stop.forget(end)
        self._ban.forget(before + end - self._n_context)
        return text[:end]


class LogprobStream:
    """A queue of token probabilities: each is released with the text in which the token's own text begins.

    So the tokens of a stop string, whose text is never shown, are not released. A token that holds a part of a
    character belongs to that character.
    """

    def __init__(self) -> None:
        self._tokens: list[tuple[int, TokenLogprob]] = []  # with the index in the answer where their text begins
        self._n_decoded = self._n_shown = 0  # characters
        self._n_released = 0

    def push(self, logprob: TokenLogprob, text: str) -> None:
        self._tokens.append((self._n_decoded, logprob))
        self._n_decoded += len(text)

    def retract(self, n_tokens: int) -> None:
        first = len(self._tokens) - n_tokens
        self._n_decoded = self._tokens[first][0]
        del self._tokens[first:]
        self._n_released = min(self._n_released, first)

    def show(self, text: str) -> tuple[TokenLogprob, ...]:
        """Return the probabilities that belong to text which is shown now."""
        self._n_shown += len(text)
        first = self._n_released
        while self._n_released < len(self._tokens) and self._tokens[self._n_released][0] < self._n_shown:
            self._n_released += 1
        return tuple(logprob for _, logprob in self._tokens[first : self._n_released])


class _Search:
    """An incremental search for phrases in a growing text.

    The cost of a step depends on its text and on the phrases that have begun, not on the number of phrases.

    Attributes:
        phrases: sorted; none is a prefix of another one, because the shorter one is always completed first.
        text: the searched text, from the first place where a phrase may have begun.
        n_open: length of the longest end of the text that is a proper prefix of a phrase.
    """

    def __init__(self, phrases: Iterable[str]) -> None:
        self.phrases: list[str] = []
        for phrase in sorted(phrases):
            if not self.phrases or not phrase.startswith(self.phrases[-1]):
                self.phrases.append(phrase)
        self._firsts = {phrase[0] for phrase in self.phrases}
        self.text = ""
        self.n_open = 0
        self._open: list[int] = []  # starts of prefixes of phrases at the end of the text

    def cannot_begin_in(self, new: str) -> bool:
        """Return whether no phrase has begun or begins in this text; a quick check before push()."""
        return not self._open and self._firsts.isdisjoint(new)

    def push(self, new: str) -> tuple[int, int] | None:
        """Add text; return end and start of the first phrase that it completes; of two with one end the longer."""
        old = len(self.text)
        self.text += new
        firsts = self._firsts
        return self._match(self._open + [old + index for index, character in enumerate(new) if character in firsts])

    def cut(self, length: int) -> None:
        self.text = self.text[:length]
        self._match([index for index, character in enumerate(self.text) if character in self._firsts])

    def forget(self, length: int) -> None:
        """Drop the text's first characters; no open phrase may begin in them."""
        if length > 0:
            self.text = self.text[length:]
            self._open = [start - length for start in self._open]

    def _match(self, starts: Sequence[int]) -> tuple[int, int] | None:
        """Match phrases at each of these indexes; return as push()."""
        self._open = []
        first: tuple[int, int] | None = None
        for start in starts:
            rest = self.text[start:]
            # In sorted order, a phrase that is a prefix of the rest comes right before it; a phrase that the rest is a
            # prefix of comes right after it.
            index = bisect(self.phrases, rest)
            if index and rest.startswith(self.phrases[index - 1]):
                complete = start + len(self.phrases[index - 1]), start
                first = min(first or complete, complete)
            elif index < len(self.phrases) and self.phrases[index].startswith(rest):
                self._open.append(start)
        self.n_open = len(self.text) - self._open[0] if self._open else 0
        return first


def _folded(text: str) -> str:
    """Return the text in lower case, character by character, so that indexes and contexts don't matter."""
    lower = text.lower()
    if len(lower) != len(text):
        lower = "".join(low if len(low := character.lower()) == 1 else character for character in text)
    return lower.replace("ς", "σ")  # lower() turns Σ into either, depending on the next character
