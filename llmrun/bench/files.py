"""Result files, of llmrun or llama-bench.

Owns reading untrusted files: numbers have to be finite and of a size to compute with.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from llmrun.bench.results import Result
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.codec import as_dict, load_json

_MOST = 2**63  # what SQLite and other programs take for a whole number


def read_file(path: Path) -> Result:
    """Read a result from our json or jsonl, or from llama-bench's `-o json` or `-o jsonl`.

    Raises:
        UsageError: the file is missing, or is not a result.
        LlmrunError: the file is from a newer llmrun, or damaged.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{str(path)!r} can't be read", why=why) from None
    try:
        data = _parsed(text)
    except ValueError:
        raise UsageError(
            f"{str(path)!r} is not a bench result",
            why="it is neither JSON nor JSON lines",
            hint="make one with: llmrun bench MODEL -o json > FILE",
        ) from None
    try:
        result = Result.from_json(data)
        for row in result.rows:
            _check(as_dict(row), "a row")
    except LlmrunError as error:
        raise LlmrunError(f"{str(path)!r}: {error.what}", why=error.why, hint=error.hint) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise LlmrunError(f"{str(path)!r} is not a bench result", why=str(error)) from None
    return result


def _parsed(text: str) -> Any:
    try:
        return load_json(text, parse_constant=_refuse)
    except json.JSONDecodeError:  # one row a line
        return [load_json(line, parse_constant=_refuse) for line in text.splitlines() if line.strip()]


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check(value: Any, what: str) -> None:
    """Check that all numbers can be computed with, and written again.

    Raises:
        ValueError: naming the first other number.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _check(item, name)
    elif isinstance(value, list):
        for item in value:
            _check(item, what)
    elif isinstance(value, (int, float)) and not (math.isfinite(value) and abs(value) < _MOST):
        raise ValueError(f"{what} is {str(value)[:40]}")
