"""Typed access to the fields of a JSON body, with error messages that name the field.

Must not know the meaning of fields. A missing field and a null field are the same. What was read is recorded, so that
the rest can be named to the client.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llmrun.errors import UsageError, require_within

MOST_OBJECTS = 10_000
"""Maximum length of a list of objects. One message costs 0.1 ms even before its chat template is rendered."""
_LARGEST = 1e300
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")  # in a header's list
_LONGEST_WORD = 40  # characters of a name or kind in that list
_NEUTRAL = frozenset({
    "cache_control", "cache_prompt", "client_metadata", "id", "index", "metadata", "object", "prompt_cache_key",
    "safety_identifier", "service_tier", "signature", "status", "user",
})  # fmt: skip
"""Names that ask for nothing: they identify a part, its sender or its state, or prefixes to cache, as all are."""


class _Reading:
    """The objects of a body that were opened, by place, with the keys that were read of each."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[Mapping[str, Any], set[str]]] = {}
        self.ignored: list[str] = []


class Fields:
    """A JSON object in a client's body.

    Args:
        data: the object.
        place: its path in the body, e.g. "messages[2]"; "" for the body itself.

    Every method raises a UsageError that names the field if its value has another type or is out of bounds.
    """

    def __init__(self, data: Any, place: str = "", reading: _Reading | None = None) -> None:
        if not isinstance(data, Mapping):
            raise UsageError(f"{place or 'the body'} must be an object, not {_kind(data)}")
        self.data, self._place = data, place
        self._reading = _Reading() if reading is None else reading
        self._read = self._reading.objects.setdefault(place, (data, set()))[1]

    def name(self, key: str) -> str:
        """Return the path of a field, e.g. "messages[2].role"."""
        return f"{self._place}.{key}" if self._place else key

    def value(self, key: str) -> Any:
        """Return the value of a field as it is."""
        self._read.add(key)
        return self.data.get(key)

    def extended(self, **values: Any) -> Fields:
        """Return the object with more fields."""
        return Fields({**self.data, **values}, self._place, self._reading)

    def ignore(self, key: str) -> None:
        """Record that a field is not honoured, unless it has no value."""
        if self.data.get(key):
            self._reading.ignored.append(self.name(key))

    def ignore_all(self) -> None:
        """Record that nothing of the object is honoured; its type says what it is."""
        self._read.update(self.data)
        kind = self.data.get("type")
        self._reading.ignored.append(f"{self.name('type')}={_word(kind)}" if isinstance(kind, str) else self._place)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The paths of what nobody has read of the whole body, e.g. "tools[8].type=web_search"; one of each kind."""
        found = {_INDEX.sub("[]", path): path for path in reversed([*self._reading.ignored, *self._unread()])}
        return tuple(reversed(found.values()))

    def _unread(self) -> Iterator[str]:
        for place, (data, read) in self._reading.objects.items():
            kind = data.get("type")
            unread = [key for key in data if key not in read and key not in _NEUTRAL and data[key]]
            if unread and read == {"type"} and isinstance(kind, str):  # a block that no reader knows
                yield f"{place}.type={_word(kind)}"
            else:
                yield from (f"{place}.{_word(key)}" if place else _word(key) for key in unread)

    def text(self, key: str) -> str | None:
        found: str | None = self._of(key, str, "a string")
        return found

    def needed_text(self, key: str) -> str:
        """Return a required string."""
        found = self.text(key)
        if found is None:
            raise UsageError(f"{self.name(key)} is missing")
        return found

    def flag(self, key: str) -> bool | None:
        found: bool | None = self._of(key, bool, "true or false")
        return found

    def number(self, key: str, low: float, high: float) -> float | None:
        """Return a number from low to high, both included."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{self.name(key)} must be a number, not {_kind(value)}")
        if not abs(value) <= _LARGEST:  # NaN, or an integer of any length
            raise UsageError(f"{self.name(key)} must be a number of at most {_LARGEST:g}")
        require_within(self.name(key), value, (low, high))
        return value

    def whole(self, key: str, low: int, high: int) -> int | None:
        """Return an integer from low to high, both included; 2.0 is one."""
        value = self.number(key, low, high)
        if value is not None and value != int(value):
            raise UsageError(f"{self.name(key)} must be a whole number, not {value:g}")
        return None if value is None else int(value)

    def choice(self, key: str, *values: str) -> str | None:
        """Return one of these strings."""
        found = self.text(key)
        if found is not None and found not in values:
            raise UsageError(f"{self.name(key)} must be one of {', '.join(values)}, not {found[:80]!r}")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; a single string is a list of one."""
        value = self.value(key)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{self.name(key)} must be a string or a list of strings")
        return tuple(value)

    def wholes(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of integers from low to high, both included."""
        values = self.list(key)
        if not all(type(value) is int and low <= value <= high for value in values):
            raise UsageError(f"{self.name(key)} must be a list of whole numbers from {low:,} to {high:,}")
        return tuple(values)

    def object(self, key: str) -> Fields | None:
        value = self.value(key)
        return None if value is None else Fields(value, self.name(key), self._reading)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """Return an object as a whole, whose keys are the client's own."""
        found: Mapping[str, Any] | None = self._of(key, dict, "an object")
        return found

    def list(self, key: str) -> list[Any]:
        """Return a list; empty if it is missing."""
        return self._of(key, list, "a list") or []

    def objects(self, key: str) -> Iterator[Fields]:
        """Yield the objects of a list of at most MOST_OBJECTS."""
        values = self.list(key)
        if len(values) > MOST_OBJECTS:
            raise UsageError(f"{self.name(key)} has {len(values):,} entries", why=f"the maximum is {MOST_OBJECTS:,}")
        for index, value in enumerate(values):
            yield Fields(value, f"{self.name(key)}[{index}]", self._reading)

    def _of(self, key: str, kind: type[Any], words: str) -> Any:
        value = self.value(key)
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"{self.name(key)} must be {words}, not {_kind(value)}")
        return value


def as_json(value: Any) -> str:
    """Return JSON text for the model to read."""
    return json.dumps(value, ensure_ascii=False)


def header_safe(path: str) -> str:
    """Return a path for a header's list; a key may be empty, and a header must not end with a space."""
    return _UNSAFE.sub("?", path) or "?"


def _word(text: str) -> str:
    return header_safe(text[:_LONGEST_WORD])


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"(-?)(?:(\d+(?:\.\d+)?)|((?:{_PART.pattern})+))", re.ASCII)
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_duration(text: str) -> float | None:
    """Return seconds; None if the text is not a duration."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        return None
    sign, plain, parts = found[1], found[2], found[3]
    seconds = float(plain) if plain else sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(parts))
    return -seconds if sign else seconds


def read_time(label: str, text: str) -> float:
    """Parse a time such as "5m", "1h30m" or "90"; -1 and "forever" are infinite.

    Raises:
        UsageError: the text is none of these; `label` names it.
    """
    if text in {"-1", "forever"}:
        return math.inf
    seconds = read_duration(text)
    if seconds is None or seconds < 0:
        raise UsageError(f"invalid {label} {text}", why="must be a time such as 30s, 5m or 1h, or forever")
    return seconds
