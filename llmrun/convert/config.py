"""config.json, read with types: what a model says of its own shape.

Owns defaults and checks of single values; must not know what becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from llmrun.errors import BadModelError

MAX_NUMBER = 3.4028234663852886e38  # of float32, in which GGUF has its numbers


class Config:
    """The settings of a model's text part. A value that is null counts as not stated.

    Args:
        values: what config.json says.
        defaults: what its architecture assumes of what is not stated.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._defaults = defaults or {}

    def has(self, name: str) -> bool:
        """Whether the setting is stated or has a default."""
        return name in self._values or name in self._defaults

    def get(self, name: str) -> Any:
        """The value as it is, None when there is none."""
        return self._values.get(name, self._defaults.get(name))

    def part(self, name: str) -> dict[str, Any]:
        """A setting that is an object; empty when it is not stated.

        Raises:
            BadModelError: it is something else.
        """
        found = self.get(name)
        if found is not None and not isinstance(found, dict):
            self.fail(name, "an object")
        return found or {}

    def count(self, name: str, most: int) -> int:
        """A whole number from 1 to `most`: what the tensors, or llama.cpp, can bear.

        Raises:
            BadModelError: it is missing or no such number.
        """
        found = self.get(name)
        if type(found) is not int or not 0 < found <= most:
            self.fail(name, f"a whole number from 1 to {most:,}")
        return found

    def flag(self, name: str) -> bool:
        """A truth value; False when it is not stated.

        Raises:
            BadModelError: it is something else.
        """
        found = self.get(name)
        if found is not None and not isinstance(found, bool):
            self.fail(name, "true or false")
        return bool(found)

    def text(self, name: str) -> str:
        """A text; empty when it is not stated.

        Raises:
            BadModelError: it is something else.
        """
        found = self.get(name)
        if found is not None and not isinstance(found, str):
            self.fail(name, "a text")
        return found or ""

    def number(self, name: str, least: float = -MAX_NUMBER, most: float = MAX_NUMBER) -> float:
        """A finite number from `least` to `most`.

        Raises:
            BadModelError: it is missing or no such number.
        """
        found = self.get(name)
        if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= most:
            bounded = (least, most) != (-MAX_NUMBER, MAX_NUMBER)
            self.fail(name, f"a number from {least:g} to {most:g}" if bounded else "a number")
        return float(found)

    def fail(self, name: str, wanted: str) -> NoReturn:
        """Refuse the value of a setting."""
        found = self.get(name)
        why = f"{name} is missing" if found is None else f"{name} is {str(found)[:80]!r}; it has to be {wanted}"
        raise BadModelError("config.json does not describe the model", why=why)
