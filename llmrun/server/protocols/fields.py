"""Fields of a client's JSON body, each of the type and within the bounds that it has to be.

Owns what is wrong with a field, and its name in the message; must not know what fields mean. A field that is missing
and one that is null are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmrun.errors import UsageError, require_within

MOST_OBJECTS = 10_000
"""Messages of a conversation, for one: each costs a tenth of a millisecond before the chat template's time begins."""
_LARGEST = 1e300


class Fields:
    """A JSON object as a client sent it.

    Args:
        data: the object.
        place: where it stands in the body, e.g. "messages[2]"; "" is the body itself.

    Every method raises a UsageError that names the field where its value is of another type or out of its bounds.
    """

    def __init__(self, data: Any, place: str = "") -> None:
        if not isinstance(data, Mapping):
            raise UsageError(f"{place or 'the body'} must be an object, not {_kind(data)}")
        self.data, self._place = data, place

    def name(self, key: str) -> str:
        """What a field is called in messages, e.g. "messages[2].role"."""
        return f"{self._place}.{key}" if self._place else key

    def text(self, key: str) -> str | None:
        """A string."""
        found: str | None = self._of(key, str, "a string")
        return found

    def needed_text(self, key: str) -> str:
        """A string that has to be there."""
        found = self.text(key)
        if found is None:
            raise UsageError(f"{self.name(key)} is missing")
        return found

    def flag(self, key: str) -> bool | None:
        """true or false."""
        found: bool | None = self._of(key, bool, "true or false")
        return found

    def number(self, key: str, low: float, high: float) -> float | None:
        """A number from low to high, both included."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{self.name(key)} must be a number, not {_kind(value)}")
        if not abs(value) <= _LARGEST:  # NaN is not, either; a whole number of any length can come
            raise UsageError(f"{self.name(key)} must be a number of at most {_LARGEST:g}")
        require_within(self.name(key), value, (low, high))
        return value

    def whole(self, key: str, low: int, high: int) -> int | None:
        """A whole number from low to high, both included."""
        value = self.number(key, low, high)
        if value is not None and value != int(value):
            raise UsageError(f"{self.name(key)} must be a whole number, not {value:g}")
        return None if value is None else int(value)

    def choice(self, key: str, *values: str) -> str | None:
        """One of these strings."""
        found = self.text(key)
        if found is not None and found not in values:
            raise UsageError(f"{self.name(key)} must be one of {', '.join(values)}, not {found[:80]!r}")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; a single one may stand for itself."""
        value = self.data.get(key)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{self.name(key)} must be a string or a list of strings")
        return tuple(value)

    def wholes(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of whole numbers from low to high, both included."""
        values = self.list(key)
        if not all(type(value) is int and low <= value <= high for value in values):
            raise UsageError(f"{self.name(key)} must be a list of whole numbers from {low:,} to {high:,}")
        return tuple(values)

    def object(self, key: str) -> Fields | None:
        """An object."""
        value = self.data.get(key)
        return None if value is None else Fields(value, self.name(key))

    def list(self, key: str) -> list[Any]:
        """A list; empty where there is none."""
        return self._of(key, list, "a list") or []

    def objects(self, key: str) -> Iterator[Fields]:
        """The objects of a list; MOST_OBJECTS at most."""
        values = self.list(key)
        if len(values) > MOST_OBJECTS:
            raise UsageError(
                f"{self.name(key)} has {len(values):,} entries", why=f"there may be {MOST_OBJECTS:,} at most"
            )
        for index, value in enumerate(values):
            yield Fields(value, f"{self.name(key)}[{index}]")

    def _of(self, key: str, kind: type[Any], words: str) -> Any:
        value = self.data.get(key)
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"{self.name(key)} must be {words}, not {_kind(value)}")
        return value


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
