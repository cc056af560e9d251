"""The rules of a converted tokenizer that llama.cpp does not have: normalization, added tokens, spaces in front.

Owns what happens to a text before llama.cpp tokenizes its parts. The order is that of Hugging Face's tokenizers: added
tokens are found in the text, what is left is normalized, further added tokens are found in that, and a space comes in
front of some parts. Must not know llama.cpp. The rules come from an untrusted file: no regular expression is theirs.
"""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmrun.errors import BadModelError
from llmrun.protocol.codec import load_json

SPACE_PREFIXES = {
    "never": "no part",
    "first": "the part that begins the text, unless it begins with a space",
    "always": "each part that does not begin with a space",
    "prepend": "each text between the added tokens that are found first",
}
_SPACES = (" ", "\u2581")  # SentencePiece writes the second one in its tokens
_MOST_CHARSMAP_BYTES = 16 << 20
_WHITE_SPACE = re.compile(r"[^\S\x1c-\x1f]*")  # as in Rust, whose \s does not have these separators
_CIRCLED_LETTERS = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
_ASCII = range(0x20, 0x7F)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """Token that is found in a text as a whole."""

    id: int
    text: str
    is_control: bool
    flags: frozenset[str] = frozenset()  # of ADDED_FLAGS


class TextRules:
    """The rules of one tokenizer.

    Args:
        steps: NORMALIZER of the file.
        space_prefix: a key of SPACE_PREFIXES.
        charsmap: CHARSMAP of the file; "" without.
        added: the tokens to find.
        finds_pieces: user-defined pieces are found before llama.cpp tokenizes; otherwise they are only not normalized.

    Raises:
        BadModelError: the steps or the charsmap can't be read.
    """

    def __init__(
        self, steps: str, space_prefix: str, charsmap: str, added: Sequence[AddedToken], *, finds_pieces: bool
    ) -> None:
        # SentencePiece writes spaces as another character, in pieces and in the text in which it finds them.
        pieces = [
            AddedToken(token.id, token.text.replace(*_SPACES), False, token.flags)
            for token in added
            if "piece" in token.flags
        ]
        self._protected = _Finder(pieces)
        self._charsmap = Charsmap(_unpacked(charsmap)) if charsmap else None
        self._steps = _parsed(steps)
        if space_prefix not in SPACE_PREFIXES:
            raise _damaged(f"its rule for spaces is {space_prefix[:40]!r}")
        self._space_prefix = space_prefix
        later = [
            AddedToken(token.id, self.normalized(token.text), token.is_control, token.flags)
            for token in added
            if "normalized" in token.flags
        ]
        later += pieces if finds_pieces else []
        # In the other case, llama.cpp does not take spaces in the text for a piece.
        self._spaces = (_SPACES if finds_pieces else _SPACES[::-1]) if pieces else None
        first = [token for token in added if not token.flags & {"normalized", "piece"}]
        # With control tokens, and without them.
        self._first = {
            each: _Finder(token for token in first if each or not token.is_control) for each in (True, False)
        }
        self._later = {
            each: _Finder(token for token in later if each or not token.is_control) for each in (True, False)
        }

    def parts(self, text: str, *, special: bool, begins: bool) -> Iterator[int | str]:
        """Yield the added tokens of a text, and the texts between them as llama.cpp is to tokenize them.

        Args:
            special: find control tokens too.
            begins: the text is the beginning of a prompt.
        """
        for section, token, start in self._first[special].split(text):
            if token is not None:
                yield token
                continue
            whole = self.normalized(section)
            if self._space_prefix == "prepend" and whole:
                whole = " " + whole
            whole = whole.replace(*self._spaces) if self._spaces else whole
            for part, later, offset in self._later[special].split(whole):
                if later is not None:
                    yield later
                    continue
                is_first = begins and start == offset == 0
                if self._space_prefix == "always" or (self._space_prefix == "first" and is_first):
                    part = part if part.startswith(_SPACES) else " " + part
                yield part

    def normalized(self, text: str) -> str:
        for step in self._steps:
            text = self._charsmapped(text) if step is None else step(text)
        return text

    def _charsmapped(self, text: str) -> str:
        """Apply the charsmap to all but the user-defined pieces."""
        if self._charsmap is None:
            return text
        charsmap = self._charsmap
        return "".join(
            charsmap.apply(part) if token is None else part for part, token, _ in self._protected.split(text)
        )


class _Finder:
    """A search for added tokens: leftmost, then longest, as that of Hugging Face's tokenizers."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(map(re.escape, self._lengths))
        self._beginning = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterator[tuple[str, int | None, int]]:
        """Yield the parts of a text in order: part, the id of the token that it is, and its index."""
        done = searched = 0
        for match in self._beginning.finditer(text) if self._beginning else ():
            start = match.start()
            token = self._at(text, start) if start >= searched else None
            if token is None:
                continue
            end = searched = start + len(token.text)
            if "single_word" in token.flags and not _is_whole_word(text, start, end):
                continue
            if "lstrip" in token.flags:
                start = max(_end_without_space(text, start), done)
            if "rstrip" in token.flags:
                end = searched = _WHITE_SPACE.match(text, end).end()  # type: ignore[union-attr]
            if start > done:
                yield text[done:start], None, done
            yield text[start:end], token.id, start
            done = end
        if done < len(text):
            yield text[done:], None, done

    def _at(self, text: str, start: int) -> AddedToken | None:
        lengths = self._lengths[text[start]]
        tokens = (self._tokens.get(text[start : start + length]) for length in lengths)
        return next((token for token in tokens if token is not None), None)


def _end_without_space(text: str, end: int) -> int:
    while end and _WHITE_SPACE.fullmatch(text[end - 1]):
        end -= 1
    return end


def _is_whole_word(text: str, start: int, end: int) -> bool:
    beside = text[max(start - 1, 0) : start], text[end : end + 1]
    return not any(map(_belongs_to_word, beside))


def _belongs_to_word(character: str) -> bool:
    """Return whether a character is in Rust's \\w, to which marks, joiners and circled letters belong."""
    if not character:
        return False
    category = unicodedata.category(character)
    if category[0] in "LM" or category in ("Nd", "Nl", "Pc"):
        return True
    return character in "\u200c\u200d" or any(low <= ord(character) <= high for low, high in _CIRCLED_LETTERS)


# ---- normalization

_Step = Callable[[str], str]


def _without_accents(text: str) -> str:
    return "".join(character for character in text if unicodedata.category(character)[0] != "M")


def _without_extra_spaces(text: str) -> str:
    """Remove spaces as SentencePiece does with remove_extra_whitespaces."""
    return re.sub(" {2,}", " ", text).lstrip(" ").rstrip("".join(_SPACES))


def _normal_form(form: Any) -> _Step:
    return lambda text: unicodedata.normalize(form, text)


_STEPS: dict[str, _Step | None] = {
    **{form: _normal_form(form) for form in ("NFC", "NFD", "NFKC", "NFKD")},
    "Lowercase": lambda text: "".join(map(str.lower, text)),  # each by itself: a final sigma is no special case
    "StripAccents": _without_accents,
    "Spaces": lambda text: re.sub(" {2,}", " ", text),
    "ExtraSpaces": _without_extra_spaces,
    "Charsmap": None,
}
STEPS = frozenset(_STEPS)
"""Steps without an argument; the others are ["Replace", text, text], ["Prepend", text] and ["Strip", left, right]."""


def _parsed(steps: str) -> list[_Step | None]:
    """Return the functions of some steps; None is the charsmap."""
    try:
        rows = load_json(steps)
        return [_STEPS[row] if isinstance(row, str) else _step(*row) for row in rows]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(f"its normalization is {steps[:80]!r}") from None


def _step(name: str, *arguments: Any) -> _Step:
    if (
        name == "Replace"
        and len(arguments) == 2
        and all(isinstance(argument, str) for argument in arguments)
        and arguments[0]
    ):
        before, after = arguments
        return lambda text: text.replace(before, after)
    if name == "Prepend" and len(arguments) == 1 and isinstance(arguments[0], str):
        return lambda text: text and arguments[0] + text
    if name == "Strip" and len(arguments) == 2:
        return lambda text: _stripped(text, *arguments)
    raise ValueError(name)


def _stripped(text: str, left: bool, right: bool) -> str:
    start = _WHITE_SPACE.match(text).end() if left else 0  # type: ignore[union-attr]
    return text[start : max(_end_without_space(text, len(text)), start) if right else len(text)]


def _unpacked(charsmap: str) -> bytes:
    try:
        packed = base64.b64decode(charsmap, validate=True)
        return zlib.decompressobj().decompress(packed, _MOST_CHARSMAP_BYTES)
    except (binascii.Error, zlib.error):
        raise _damaged("its normalization rules are cut") from None


class Charsmap:
    """SentencePiece's normalization rules: text -> text, the longest match first.

    A double array as in darts-clone over the bytes of UTF-8, then the replacements, each with a zero at its end. Of a
    unit, bits 10 to 30 are the offset of its children, bit 9 shifts that by 8, bits 0 to 7 and 31 are its label, bit 8
    says that a rule ends here; a unit with bit 31 is the index of a replacement.
    """

    def __init__(self, data: bytes) -> None:
        """Read the bytes. Raises BadModelError if they are cut."""
        size = int.from_bytes(data[:4], "little")
        if size % 4 or not 4 <= size <= len(data) - 4 or not data.endswith(b"\0"):
            raise _damaged("its normalization rules are cut")
        self._units = array("I", data[4 : 4 + size])
        self._replacements = data[4 + size :]

    def apply(self, text: str) -> str:
        data, out, position = text.encode("utf-8", "replace"), bytearray(), 0
        plain = self._plain
        while position < len(data):
            if plain and (match := plain.match(data, position)):
                out += match[0]
                position = match.end()
                continue
            length, replacement = self._longest(data, position)
            if not length:  # a character as it is
                length = _n_bytes(data[position])
                replacement = data[position : position + length]
            out += replacement
            position += length
        return out.decode("utf-8", "replace")

    @cached_property
    def _plain(self) -> re.Pattern[bytes] | None:
        """The pattern of ASCII that no rule changes; None if one might."""
        starts = [self._child(0, byte) for byte in _ASCII]
        if any(node is not None and self._units[node] >> 8 & 1 for node in starts):
            return None
        followed = (self._child(node, byte) for node in starts if node is not None for byte in _ASCII)
        return re.compile(rb"[ -~]+(?![^ -~])") if all(node is None for node in followed) else None

    def _child(self, node: int, byte: int) -> int | None:
        """Return the child of a node by its label."""
        unit = self._units[node]
        child = node ^ ((unit >> 10) << ((unit >> 6) & 8)) ^ byte
        is_child = child < len(self._units) and self._units[child] & 0x800000FF == byte
        return child if is_child else None

    def _longest(self, data: bytes, start: int) -> tuple[int, bytes]:
        """Return the length of the longest rule that begins here, and its replacement; 0 without one."""
        node, longest = 0, (0, b"")
        for position in range(start, len(data)):
            child = self._child(node, data[position]) if data[position] else None
            if child is None:
                break
            node, unit = child, self._units[child]
            if unit >> 8 & 1:
                leaf = node ^ ((unit >> 10) << ((unit >> 6) & 8))
                index = self._units[leaf] & 0x7FFFFFFF if leaf < len(self._units) else len(self._replacements)
                if index >= len(self._replacements):
                    raise _damaged("its normalization rules are cut")
                longest = position + 1 - start, self._replacements[index : self._replacements.index(b"\0", index)]
        return longest


def _n_bytes(first: int) -> int:
    """Return the bytes of a character by its first one."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _damaged(reason: str) -> BadModelError:
    return BadModelError("this model's vocabulary can't be used", why=reason, hint="convert the model again")
