"""Detection of answers that repeat themselves. Pure; must not know tokens, models or terminals.

A text loops if it ends in copies of one block, back to back. Blocks that good texts do repeat (rules, empty table rows,
zeros, tags, indentation) need many more copies than sentences.
"""

from __future__ import annotations

import re

_SEED = 16  # characters that have to recur before a block is searched
_LONGEST_BLOCK = 4096  # characters
_PROSE_SPAN, _PROSE_TIMES, _LONG_PROSE, _LONG_PROSE_TIMES = 600, 6, 300, 4  # spans and lengths in characters
_OTHER_SPAN, _OTHER_TIMES = 1500, 8
_PROSE_SHARE, _PROSE_WORDS = 0.8, 5
_WORD = re.compile(r"[^\W\d_]+")
_BEGINNINGS = (re.compile(r"\n+"), re.compile(r"[.!?:;。！？]\s+|[。！？]"), re.compile(r"\s+"))


class RepeatGuard:
    """An incremental detector with constant work per character.

    The last 16 characters are looked up among all earlier ones. The distance to their last occurrence is a candidate
    for the block's length, and stays one while each new character equals the one a block before it. The comparison is
    exact, without a rolling hash.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the text."""
        self._text = ""
        # The last end of each run of _SEED characters, in two generations to bound memory.
        self._young: dict[str, int] = {}
        self._old: dict[str, int] = {}
        self._start = 0  # index in the answer of _text's first character
        self._period = 0
        self._n_matched = 0  # last characters that equal the one a period before
        self._n_required = 0  # of these, to make a loop
        self._block: str | None = None

    def push(self, text: str) -> str | None:
        """Add text of the answer; return the repeated block as soon as a loop is certain."""
        if self._block is not None or not text:
            return self._block
        old = len(self._text)
        self._text += text
        end = self._find_loop(old)
        if end is not None:
            self._block = _rotate(self._text[end - self._period : end])
        if len(self._text) > 4 * _LONGEST_BLOCK:
            cut = len(self._text) - _LONGEST_BLOCK
            self._text, self._start = self._text[cut:], self._start + cut
        return self._block

    def _find_loop(self, old: int) -> int | None:
        """Read the characters of _text from index old on; return the index after the first one that ends in a loop."""
        text = self._text
        for index in range(old, len(text)):
            period = self._period
            if period:
                if text[index] == text[index - period]:
                    self._n_matched += 1
                else:
                    self._period = self._n_matched = period = 0
            if index + 1 < _SEED:
                continue
            seed = text[index + 1 - _SEED : index + 1]
            if not period:
                self._find_period(seed, index)
            self._young[seed] = self._start + index
            if period and self._n_matched >= self._n_required and self._is_loop(index):
                return index + 1
        if len(self._young) > _LONGEST_BLOCK:
            self._young, self._old = {}, self._young
        return None

    def _find_period(self, seed: str, index: int) -> None:
        """Start comparing with the last occurrence of the same characters."""
        previous = self._young.get(seed)
        if previous is None:
            previous = self._old.get(seed)
        if previous is None:
            return
        period = self._start + index - previous
        if period <= min(_LONGEST_BLOCK, index):
            self._period, self._n_matched = period, _SEED
            times = _LONG_PROSE_TIMES if period >= _LONG_PROSE else _PROSE_TIMES
            self._n_required = max(_PROSE_SPAN, times * period) - period

    def _is_loop(self, index: int) -> bool:
        """Return whether the copies suffice; they do for prose, other blocks need more."""
        n_required = max(_OTHER_SPAN, _OTHER_TIMES * self._period) - self._period
        if self._n_required == n_required or _is_prose(self._text[index + 1 - self._period : index + 1]):
            return True
        self._n_required = max(n_required, self._n_required)
        return self._n_matched >= self._n_required


def _is_prose(block: str) -> bool:
    """Return whether a block consists of sentences, not of a table, code, data or a drawing."""
    n_letters = sum(character.isalpha() or character.isspace() for character in block)
    if n_letters < _PROSE_SHARE * len(block):
        return False
    # In scripts without spaces between words, each character counts as a word.
    words = {piece for word in _WORD.findall(block.casefold()) for piece in ((word,) if word.isascii() else word)}
    return len(words) >= _PROSE_WORDS


def _rotate(block: str) -> str:
    """Return the block rotated to begin at a line, else at a sentence, else at a word."""
    if not block.strip():
        return block
    for beginning in _BEGINNINGS:
        match = beginning.search(block)
        if match:
            return (block[match.end() :] + block[: match.end()]).strip()
    return block
