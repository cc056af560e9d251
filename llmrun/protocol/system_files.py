"""Small files of the kernel in /proc and /sys. Every room may read these, without special rights."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path, limit: int = -1) -> str:
    """Return up to limit bytes of a file as text, without surrounding blanks; "" if the file can't be read."""
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read(limit) or b"").decode(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> float | None:
    """Return the number in a file, None if there is none."""
    try:
        return float(read_text(path, 64))
    except ValueError:
        return None
