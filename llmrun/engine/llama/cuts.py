"""Places where a long text can be cut: the tokens of its pieces, one after the other, are those of the whole.

Tokenizing takes a hundred times the memory of the text, so a long one is tokenized in pieces. A cut is exact if

- no token spans it: none has the two characters around it next to each other. Then no tokenizer joins them, by merges,
  by the longest match or by the best sum of scores, and both sides are tokenized independently;
- a pre-tokenizer treats both sides as it does in the whole. It scans from left to right without looking back, so the
  right side is scanned alike if a word ends, or nothing is matched, at the cut. In all patterns of llama.cpp that holds
  before a single space, after a single line feed, and before a full stop or comma of Chinese; "/" is excepted since it
  is taken with the line feed before it. What looks ahead there (white space, digits) sees no difference;
- no token that strips white space beside it begins or ends there.

Pure; must not know llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

PIECE_CHARACTERS = 32 * 1024
_SPACE, _LINE_FEED, _CHINESE = " ", "\n", "。，"
# In tokens of SentencePiece, U+2581 is a space.
_BEFORE_SPACE = r"(?<=[^\s\u2581])(?= [^\s\u2581])"
_OTHERS = rf"|(?<=[^\s\u2581]\n)(?=[^\s\u2581/])|(?<=[^\W\d_])(?=[{_CHINESE}])"
_PLAIN = r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])"  # no rule of normalization applies there
_IN_TOKEN = re.compile(rf"(?<=.)[ {_CHINESE}\ufffd]|\n(?=.)", re.DOTALL)
_PARTIAL = "\ufffd"  # bytes of a part of a character


class Cuts:
    """The cuts for one vocabulary.

    Args:
        tokens: the texts of all tokens, with those of control tokens.
        special: the texts of tokens that are found before all others, and may strip white space beside them.
        drops_space: the tokenizer puts a space before each text, so that a piece begins behind the space of its cut.
        is_plain: the tokenizer normalizes: cut only between letters or digits of ASCII.
    """

    def __init__(
        self, tokens: Iterable[bytes], special: Iterable[str], *, drops_space: bool, is_plain: bool = False
    ) -> None:
        self._spanned: set[str] = set()
        for token in tokens:
            text = token.decode("utf-8", "replace")
            for match in _IN_TOKEN.finditer(text):
                start = match.start() - (match[0] != _LINE_FEED)
                self._spanned.add(text[start : start + 2])
        texts = [*filter(None, special)]
        self._special_starts, self._special_ends = {text[0] for text in texts}, {text[-1] for text in texts}
        self._drops_space = drops_space
        self._places = re.compile(_PLAIN if is_plain else _BEFORE_SPACE if drops_space else _BEFORE_SPACE + _OTHERS)

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces; one is long if there is no place for a cut."""
        start = 0
        while (end := self._cut(text, start + PIECE_CHARACTERS)) is not None:
            yield text[start:end]
            start = end + self._drops_space
        yield text[start:]

    def _cut(self, text: str, start: int) -> int | None:
        places = self._places.finditer(text, start) if start < len(text) else ()
        return next((place.start() for place in places if self._is_exact(text, place.start())), None)

    def _is_exact(self, text: str, place: int) -> bool:
        before, after = text[place - 1], text[place]
        if after == _SPACE and (before in self._special_ends or text[place + 1] in self._special_starts):
            return False
        if before == _LINE_FEED and after in self._special_starts:
            return False
        parts = (before, before if before.isascii() else _PARTIAL), (after, after if after.isascii() else _PARTIAL)
        return not any(left + right in self._spanned for left in parts[0] for right in parts[1])
