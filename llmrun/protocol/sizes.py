"""Sizes as people read them. Pure; every room may import this, so that each reads the same wherever it is shown."""

from __future__ import annotations

import re


def readable_size(n_bytes: float) -> str:
    """Bytes in decimal units, as the hub and disks count them, e.g. "98.9 MB"."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def rough_size(n_bytes: float) -> str:
    """Return an estimated number of bytes with two digits, e.g. "640 MB", "2.9 GB"."""
    rounded = float(f"{n_bytes:.1e}")
    return re.sub(r"(?<=\d\d)\.\d", "", readable_size(rounded))


def readable_count(parameters: int) -> str:
    """Weights of a model as model names have them, e.g. "135M", "8.03B"."""
    billions = parameters >= 999_500_000
    return f"{parameters / 1e9:.3g}B" if billions else f"{parameters / 1e6:.3g}M"
