"""Typed access to the fields of a JSON body, with error messages that name the field.

Must not know the meaning of fields. A missing field and a null field are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmrun.errors import UsageError, require_within

MOST_OBJECTS = 10_000
"""Maximum length of a list of objects. One message costs 0.1 ms even before its chat template is rendered."""
_LARGEST = 1e300


class Fields:
    """A JSON object in a client's body.

    Args:
        data: the object.
        place: its path in the body, e.g. "messages[2]"; "" for the body itself.

    Every method raises a UsageError that names the field if its value has another type or is out of bounds.
    """

    def __init__(self, data: Any, place: str = "") -> None:
        if not isinstance(data, Mapping):
            raise UsageError(f"{place or 'the body'} must be an object, not {_kind(data)}")
        self.data, self._place = data, place

    def name(self, key: str) -> str:
        """Return the path of a field, e.g. "messages[2].role"."""
        return f"{self._place}.{key}" if self._place else key

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
        value = self.data.get(key)
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
        value = self.data.get(key)
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
        value = self.data.get(key)
        return None if value is None else Fields(value, self.name(key))

    def list(self, key: str) -> list[Any]:
        """Return a list; empty if it is missing."""
        return self._of(key, list, "a list") or []

    def objects(self, key: str) -> Iterator[Fields]:
        """Yield the objects of a list of at most MOST_OBJECTS."""
        values = self.list(key)
        if len(values) > MOST_OBJECTS:
            raise UsageError(f"{self.name(key)} has {len(values):,} entries", why=f"the maximum is {MOST_OBJECTS:,}")
        for index, value in enumerate(values):
            yield Fields(value, f"{self.name(key)}[{index}]")

    def _of(self, key: str, kind: type[Any], words: str) -> Any:
        value = self.data.get(key)
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"{self.name(key)} must be {words}, not {_kind(value)}")
        return value


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
