"""Results that somebody handed over as a file: ours, or llama-bench's.

Owns reading and distrusting them: every value has to be of the kind that it should be before anything computes with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from llmrun.bench.results import Result
from llmrun.errors import LlmrunError, UsageError

_MOST = 2**63  # what SQLite and other programs take for a whole number


def read_file(path: Path) -> Result:
    """A result from our json or jsonl, or from llama-bench's `-o json` or `-o jsonl`.

    Raises:
        UsageError: there is no such file, or it is something else.
        LlmrunError: it is of a newer llmrun, or damaged.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{str(path)!r} can't be read", why=why) from None
    try:
        data = _parsed(text)
    except (ValueError, RecursionError):
        raise UsageError(
            f"{str(path)!r} is no bench result",
            why="it is neither JSON nor JSON lines",
            hint="make one with: llmrun bench MODEL -o json > FILE",
        ) from None
    try:
        result = Result.from_json([data] if isinstance(data, dict) else data)
        for row in result.rows:
            _check(row, "a row")
    except LlmrunError as error:
        raise LlmrunError(f"{str(path)!r}: {error.what}", why=error.why, hint=error.hint) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise LlmrunError(f"{str(path)!r} is no bench result", why=str(error)) from None
    return result


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError:  # one row a line
        return [json.loads(line, parse_constant=_refuse) for line in text.splitlines() if line.strip()]


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check(value: Any, what: str) -> None:
    """A dataclass whose fields hold what their annotations say.

    Raises:
        ValueError: names the field that does not.
    """
    hints = get_type_hints(type(value))
    for each in fields(value):
        item = getattr(value, each.name)
        if not _is(item, hints[each.name]):
            raise ValueError(f"{each.name} of {what} is {str(item)[:40]!r}")


def _is(value: Any, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(item, arguments[1]) for item in value.values())
    if arguments:  # of a union with None
        return any(_is(value, one) for one in arguments)
    if kind is NoneType:
        return value is None
    if is_dataclass(kind):
        if isinstance(value, kind):  # type: ignore[arg-type]
            _check(value, kind.__name__.lower())  # type: ignore[union-attr]
            return True
        return False
    if kind in (int, float):
        numbers = (int,) if kind is int else (int, float)
        return (
            isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < _MOST
        )
    return isinstance(value, kind)
