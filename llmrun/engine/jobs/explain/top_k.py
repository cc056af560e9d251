"""The highest numbers of rows that never are in memory as a whole. Pure; must not know what the numbers mean."""

from __future__ import annotations

import numpy as np

from llmrun.engine.llama.quants import Array


class TopK:
    """Keeps the highest numbers of each row while the columns pass by.

    Attributes:
        numbers: float32 [rows, up to count], the highest first.
        columns: int64 of the same shape: where they stand.
    """

    def __init__(self, n_rows: int, count: int) -> None:
        self.numbers: Array = np.empty((n_rows, 0), np.float32)
        self.columns: Array = np.empty((n_rows, 0), np.int64)
        self._count = count

    def take(self, start: int, numbers: Array) -> None:
        """The next columns, from this one on: float32 [rows, columns]."""
        count = min(self._count, numbers.shape[1])
        places = np.sort(np.argpartition(-numbers, count - 1, axis=1)[:, :count], axis=1)
        found = np.concatenate([self.numbers, np.take_along_axis(numbers, places, 1)], axis=1)
        columns = np.concatenate([self.columns, places + start], axis=1)
        order = np.argsort(-found, axis=1, kind="stable")[:, : self._count]
        self.numbers, self.columns = (np.take_along_axis(each, order, 1) for each in (found, columns))
