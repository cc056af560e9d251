"""A JSON parser that records the places of values, with messages of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from llmrun.grammar.place import SCHEMA, broken, place

MAX_DEPTH = 100
_MAX_NUMBER_CHARACTERS = 40

_BLANK = re.compile(r"[ \t\r\n]*")
_BLANKS = frozenset(" \t\r\n")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_STRING_START = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*')
_ESCAPE = re.compile(r'\\(?:u[0-9A-Fa-f]{4}|["\\/bfnrt]|(.))', re.DOTALL)
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_WORDS = {"true": True, "false": False, "null": None}
_MEANT = {"True": "true", "False": "false", "None": "null", "undefined": "null"}


class Places:
    """Offsets of values and keys. Containers are identified by id(), so they must stay alive."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str | int], int] = {}
        self._keys: dict[tuple[int, str], int] = {}
        self._parents: dict[int, tuple[Any, str | int]] = {}

    def note(self, container: Any, key: str | int, value: int, key_offset: int = 0) -> None:
        self._values[id(container), key] = value
        if isinstance(key, str):
            self._keys[id(container), key] = key_offset

    def note_parent(self, container: Any, key: str | int) -> None:
        """Record where a container is that has just been read."""
        self._parents[id(container[key])] = container, key

    def path(self, container: Any, key: str | int | None = None) -> tuple[str | int, ...]:
        """Return the keys and indices from the root to a container, or to a key in it."""
        steps = [] if key is None else [key]
        while id(container) in self._parents:
            container, step = self._parents[id(container)]
            steps.append(step)
        return tuple(reversed(steps))

    def of_value(self, container: Any, key: str | int) -> int:
        """Return the offset of the value under a key, or at an index."""
        return self._values[id(container), key]

    def of_key(self, container: Any, key: str) -> int:
        """Return the offset of a key."""
        return self._keys[id(container), key]


def read_json(text: str) -> tuple[Any, Places]:
    """Return the value of a JSON text and the places in it.

    Raises:
        BadGrammarError: the text is not JSON, or nested too deep.
    """
    reader = _Reader(text)
    value = reader.value(0)
    reader.skip()
    if reader.at < len(text):
        reader.fail(f"after the end of the value there is {reader.next_character()}")
    return value, reader.places


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0
        self.places = Places()

    def value(self, depth: int) -> Any:
        self.skip()
        character = self._text[self.at : self.at + 1]
        if character in ("{", "[") and character:
            if depth >= MAX_DEPTH:
                self.fail(f"brackets are nested more than {MAX_DEPTH} deep")
            return self._object(depth) if character == "{" else self._array(depth)
        if character == '"':
            return self._string()
        return self._number_or_word()

    def _object(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for _ in self._items("}"):
            offset = self.at
            if not self._text.startswith('"', offset):
                self.fail(f"a key in double quotes should be here, not {self.next_character()}")
            key = self._string()
            if key in members:
                self.fail(f"the key {key!r} appears twice", offset)
            self.skip()
            if not self._text.startswith(":", self.at):
                self.fail(f"after the key {key!r} there should be ':', not {self.next_character()}")
            self.at += 1
            self.skip()
            self.places.note(members, key, self.at, offset)
            members[key] = self.value(depth + 1)
            if isinstance(members[key], dict | list):
                self.places.note_parent(members, key)
        return members

    def _array(self, depth: int) -> list[Any]:
        items: list[Any] = []
        for _ in self._items("]"):
            self.places.note(items, len(items), self.at)
            items.append(self.value(depth + 1))
            if isinstance(items[-1], dict | list):
                self.places.note_parent(items, len(items) - 1)
        return items

    def _items(self, close: str) -> Iterator[None]:
        """Stop at the beginning of each item between brackets, then after the closing one."""
        start = self.at
        self.at += 1
        self.skip()
        if not self._text.startswith(close, self.at):
            while True:
                yield
                self.skip()
                if not self._text.startswith(",", self.at):
                    break
                self.at += 1
                self.skip()
                if self._text.startswith(close, self.at):
                    self.fail(f"there is a comma before {close!r}")
        if self.at >= len(self._text):
            self.fail(f"this {self._text[start]} is never closed", start)
        if not self._text.startswith(close, self.at):
            opened = place(self._text, start)
            self.fail(
                f"',' or {close!r} should be here, not {self.next_character()}; the {self._text[start]} is at {opened}"
            )
        self.at += 1

    def _string(self) -> str:
        start = self.at
        match = _STRING.match(self._text, start)
        if match is None:
            end = _STRING_START.match(self._text, start)
            if end and end.end() < len(self._text) and self._text[end.end()] not in "\r\n\\":
                self.fail("a control character in a string has to be escaped", end.end())
            self.fail('this " is never closed', start)
        for escape in _ESCAPE.finditer(match[0]):
            if escape[1]:
                self.fail(f"there is no escape {escape[0]}", start + escape.start())
        self.at = match.end()
        string = str(json.loads(match[0]))
        if _HALF.search(string):
            self.fail("in this string is half a character, which no text can hold", start)
        return string

    def _number_or_word(self) -> Any:
        match = _WORD.match(self._text, self.at)
        if match is None:
            self.fail(f"a value should be here, not {self.next_character()}")
        word = match[0]
        if word in _WORDS:
            self.at = match.end()
            return _WORDS[word]
        if not _NUMBER.fullmatch(word):
            self.fail(f"{word[:40]!r} is not a JSON value", hint=f"write {_MEANT[word]}" if word in _MEANT else "")
        number = json.loads(word) if len(word) <= _MAX_NUMBER_CHARACTERS else None
        if number is None or abs(number) == float("inf"):
            self.fail("this number is too long or too large")
        self.at = match.end()
        return number

    def skip(self) -> None:
        if self._text[self.at : self.at + 1] in _BLANKS:
            match = _BLANK.match(self._text, self.at)
            self.at = match.end() if match else self.at

    def next_character(self) -> str:
        """Return the next character in words."""
        return repr(self._text[self.at]) if self.at < len(self._text) else "the end"

    def fail(self, why: str, offset: int | None = None, hint: str = "") -> NoReturn:
        """Raise the error for the current place or an offset."""
        raise broken(SCHEMA, self._text, self.at if offset is None else offset, why, hint)
