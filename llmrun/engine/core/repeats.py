"""Notices when an answer goes round in circles. Pure; must not know tokens, models or terminals.

A loop is the end of the text being one block, written again and again, back to back. Blocks that people do repeat
(rules, empty table rows, zeros, tags, indentation) need to be repeated much longer than sentences before that counts.
"""

from __future__ import annotations

import re

_SEED = 16  # characters that have to come again before a block is looked for
_LONGEST_BLOCK = 4096  # characters
_PROSE_SPAN, _PROSE_TIMES, _LONG_PROSE, _LONG_PROSE_TIMES = 600, 6, 300, 4
_OTHER_SPAN, _OTHER_TIMES = 1500, 8
_PROSE_SHARE, _PROSE_WORDS = 0.8, 5
_WORD = re.compile(r"[^\W\d_]+")
_BEGINNINGS = (re.compile(r"\n+"), re.compile(r"[.!?:;。！？]\s+|[。！？]"), re.compile(r"\s+"))


class RepeatGuard:
    """Reads an answer as it comes; constant work for each character.

    Method: the last 16 characters are looked up among those of every earlier place. Where they stood before, their
    distance is a candidate for the block's length; as long as each new character equals the one a block before it,
    the candidate holds and the repeat grows. Comparing is exact, so nothing is found by accident of a hash.
    """

    def __init__(self) -> None:
        self._text = ""
        # Where each run of _SEED characters ended last: a younger and an older part, so that it stays small.
        self._young: dict[str, int] = {}
        self._old: dict[str, int] = {}
        self._start = 0  # place in the answer of _text's first character
        self._period = 0
        self._matched = 0  # how many last characters equal the one a period before
        self._needed = 0  # that many make a loop
        self._found: str | None = None

    def push(self, text: str) -> str | None:
        """The block that the answer goes on repeating, once that is clear; None before.

        Args:
            text: what was added to the answer.
        """
        if self._found is not None or not text:
            return self._found
        old = len(self._text)
        self._text += text
        end = self._loop_in(old)
        if end is not None:
            self._found = _named(self._text[end - self._period : end])
        if len(self._text) > 4 * _LONGEST_BLOCK:
            cut = len(self._text) - _LONGEST_BLOCK
            self._text, self._start = self._text[cut:], self._start + cut
        return self._found

    def _loop_in(self, old: int) -> int | None:
        """Take in the characters of _text from an index on; behind which of them the text ends in a loop, if any."""
        text = self._text
        for index in range(old, len(text)):
            period = self._period
            if period:
                if text[index] == text[index - period]:
                    self._matched += 1
                else:
                    self._period = self._matched = period = 0
            if index + 1 < _SEED:
                continue
            seed = text[index + 1 - _SEED : index + 1]
            if not period:
                self._look_for(seed, self._start + index, index)
            self._young[seed] = self._start + index
            if period and self._matched >= self._needed and self._is_loop(index):
                return index + 1
        if len(self._young) > _LONGEST_BLOCK:
            self._young, self._old = {}, self._young
        return None

    def _look_for(self, seed: str, place: int, index: int) -> None:
        """Where the same characters stood last; that far away each of the next ones is compared."""
        before = self._young.get(seed)
        if before is None:
            before = self._old.get(seed)
        if before is None:
            return
        period = place - before
        if period <= min(_LONGEST_BLOCK, index):
            self._period, self._matched = period, _SEED
            times = _LONG_PROSE_TIMES if period >= _LONG_PROSE else _PROSE_TIMES
            self._needed = max(_PROSE_SPAN, times * period) - period

    def _is_loop(self, index: int) -> bool:
        """Enough for prose was repeated; anything else has to go on for longer."""
        needed = max(_OTHER_SPAN, _OTHER_TIMES * self._period) - self._period
        if self._needed == needed or _is_prose(self._text[index + 1 - self._period : index + 1]):
            return True
        self._needed = max(needed, self._needed)
        return self._matched >= self._needed


def _is_prose(block: str) -> bool:
    """Whether a block is sentences, not a table, code, data or a drawing."""
    texty = sum(character.isalpha() or character.isspace() for character in block)
    if texty < _PROSE_SHARE * len(block):
        return False
    # Where words are not written apart, each character counts as one.
    words = {piece for word in _WORD.findall(block.casefold()) for piece in ((word,) if word.isascii() else word)}
    return len(words) >= _PROSE_WORDS


def _named(block: str) -> str:
    """The block from where a user would say that it begins: a line, a sentence, a word."""
    if not block.strip():
        return block
    for beginning in _BEGINNINGS:
        found = beginning.search(block)
        if found:
            return (block[found.end() :] + block[: found.end()]).strip()
    return block
