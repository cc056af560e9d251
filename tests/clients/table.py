"""The table of what was tried."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A line of the table."""

    client: str
    version: str
    done: str
    result: str


ROWS: list[Row] = []
