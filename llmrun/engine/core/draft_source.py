"""Drafts by weights, of a draft model or of prediction heads: their common interface and base class.

Must not know batches, samplers, nor which drafts are accepted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from llmrun._native import Gate
from llmrun.engine.llama.base import Context
from llmrun.protocol.messages import DraftSource


class DraftWeights(Protocol):
    """A draft model, or prediction heads: drafts for several sequences in one batch.

    Attributes:
        n_most: maximum length of a draft; None without one.
        drafts_together: several answers get drafts of one length, computed in one batch, or none.
        contexts: llama.cpp's contexts of its own.
    """

    drafts_together: bool

    @property
    def n_most(self) -> int | None: ...

    @property
    def contexts(self) -> Sequence[Context]: ...

    def switch_on(self) -> None:
        """Follow the answers from now on."""

    def drafter(self) -> WeightsDrafter:
        """Return a drafter for a new sequence."""

    def compute(self, drafters: Sequence[Any], /) -> None:
        """Draft what these drafters of its own request. On failure their drafts stay empty."""


class WeightsDrafter(ABC):
    """A drafts.Drafter for one sequence, whose drafts come from DraftWeights.compute().

    Attributes:
        n_most, drafts_together: as of the weights.
        n_requested: tokens that compute() should draft; 0 only prefills, None does nothing.
        n_steps: draft steps for this sequence.
        probabilities: of the last draft's tokens, by what drafted them.
    """

    source: DraftSource

    def __init__(self, weights: DraftWeights) -> None:
        self.n_most, self.drafts_together = weights.n_most, weights.drafts_together
        self.n_requested: int | None = None
        self.n_steps = 0
        self.probabilities: list[float] = []
        self._tokens: list[int] = []
        self._draft: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def rewind(self, length: int) -> None:
        del self._tokens[length:]

    def draft(self, limit: int) -> tuple[list[int], int]:
        draft, self._draft = self._draft, []
        return draft[:limit], Gate.MODEL

    def place(self, slot: int, n_waiting: int) -> None:  # noqa: B027  # a draft model does not ask
        """Tell where the sequence is in the target's context, before each step."""

    @abstractmethod
    def count_missing(self) -> int | None:
        """Return the number of tokens to prefill before drafting; None if drafting is impossible."""

    def close(self) -> None:  # noqa: B027  # heads have nothing of their own
        """Release what belongs to the sequence when its answer ends."""

    def _add(self, token: int, logprob: float) -> None:
        if not self._draft:
            self.probabilities = []
        self._draft.append(token)
        self.probabilities.append(math.exp(logprob))
