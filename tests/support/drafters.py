"""Drafters for tests of what happens to drafts."""

from __future__ import annotations

from typing import Any


class NoDrafter:
    """A drafter of text that never has a draft, so that all come from elsewhere; a base for drafters that have some."""

    def __init__(self) -> None:
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Any) -> None:
        self._length += len(tokens)

    def rewind(self, length: int) -> None:
        self._length = length

    def draft(self, limit: int) -> tuple[list[int], int]:
        return [], 0
