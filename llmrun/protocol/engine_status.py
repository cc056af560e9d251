"""How busy an engine is: the question and its answer.

Records like those of messages.py, which says what all of them have in common.
"""

from __future__ import annotations

from typing import NamedTuple


class GetStatus(NamedTuple):
    """How busy the engine is; answered at once by Condition, whatever runs."""

    request: int


class EngineStatus(NamedTuple):
    """How busy the engine is; what counts tokens counts since it was started.

    Attributes:
        running: answers that are being computed.
        waiting: answers that wait for their turn.
        cells: of the KV cache in all.
        cells_used: of these, that hold something.
        cells_shared: of these, that more than one sequence holds.
        prefix_queries: prompt tokens that came in.
        prefix_hits: of these, found in the KV cache.
        prefilled: prompt tokens that went through the model.
        decoded: answer tokens that were sampled.
    """

    request: int
    running: int = 0
    waiting: int = 0
    cells: int = 0
    cells_used: int = 0
    cells_shared: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefilled: int = 0
    decoded: int = 0
