"""Lists of what a program has, one thing a line, in a file beside their test: a change is read as a diff."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def check(file: Path, found: Iterable[str], test: str) -> None:
    """The lines are those of the file.

    Args:
        test: path of the test; run as a program, it writes the file.
    """
    now, before = set(found), set(file.read_text(encoding="utf-8").splitlines())
    lost, new = sorted(before - now), sorted(now - before)
    assert now == before, f"if this is meant: python {test}; lost: {lost}; new: {new}"


def write(file: Path, found: Iterable[str]) -> None:
    """Make them the file's lines."""
    file.write_text("".join(f"{line}\n" for line in sorted(set(found))), encoding="utf-8")
