"""Durations in options and requests: seconds, or Go's syntax, e.g. "5m" or "1h30m". Pure."""

from __future__ import annotations

import math
import re

from llmrun.errors import UsageError

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
