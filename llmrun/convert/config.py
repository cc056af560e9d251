"""Typed access to the settings in config.json.

Owns defaults and checks of single values; must not know their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from llmrun.errors import BadModelError

MAX_NUMBER = 3.4028234663852886e38  # of float32, GGUF's type for these numbers


class Config:
    """Settings of a model's text part. A null value counts as missing.

    Args:
        values: the object in config.json.
        defaults: the architecture's values of missing settings.

    Raises (all methods):
        BadModelError: the setting has another type, is out of range, or is missing without a default.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._defaults = defaults or {}

    def has(self, name: str) -> bool:
        return name in self._values or name in self._defaults

    def get(self, name: str) -> Any:
        return self._values.get(name, self._defaults.get(name))

    def part(self, name: str) -> dict[str, Any]:
        """Return a setting that is an object; empty if missing."""
        found = self.get(name)
        if found is not None and not isinstance(found, dict):
            self.fail(name, "an object")
        return found or {}

    def count(self, name: str, limit: int) -> int:
        """Return an integer from 1 to `limit`, a bound set by the tensors or by llama.cpp."""
        found = self.get(name)
        if type(found) is not int or not 0 < found <= limit:
            self.fail(name, f"a whole number from 1 to {limit:,}")
        return found

    def flag(self, name: str) -> bool:
        """Return a boolean; False if missing."""
        found = self.get(name)
        if found is not None and not isinstance(found, bool):
            self.fail(name, "true or false")
        return bool(found)

    def text(self, name: str) -> str:
        """Return a string; empty if missing."""
        found = self.get(name)
        if found is not None and not isinstance(found, str):
            self.fail(name, "a string")
        return found or ""

    def number(self, name: str, minimum: float = -MAX_NUMBER, maximum: float = MAX_NUMBER) -> float:
        """Return a finite number from `minimum` to `maximum`."""
        found = self.get(name)
        if isinstance(found, bool) or not isinstance(found, int | float) or not minimum <= found <= maximum:
            is_bounded = (minimum, maximum) != (-MAX_NUMBER, MAX_NUMBER)
            self.fail(name, f"a number from {minimum:g} to {maximum:g}" if is_bounded else "a number")
        return float(found)

    def fail(self, name: str, required: str) -> NoReturn:
        found = self.get(name)
        why = f"{name} is missing" if found is None else f"{name} is {str(found)[:80]!r}; it must be {required}"
        raise BadModelError("config.json does not describe the model", why=why)
