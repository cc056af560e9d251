"""The policy of speculative decoding: the user's preference, and what the model allows."""

from __future__ import annotations

import re

from llmrun.errors import UsageError
from llmrun.gguf.header import Header
from llmrun.protocol.loading import Load
from llmrun.protocol.speculation import Speculation

AUTO, OFF = -1, 0
"""Drafted tokens per step: as many as are expected to pay; none."""
DRAFT_BOUNDS = (3, 15)
"""Bounds of a number of drafted tokens per step: batches of 4 to 16 rows."""


def read_speculate(value: str | int, label: str = "--speculate") -> int:
    """Parse drafted tokens per step: "auto", "off" or a number.

    Args:
        label: the option's name, for the error.

    Raises:
        UsageError: the value is invalid.
    """
    low, high = DRAFT_BOUNDS
    if value in ("auto", "off"):
        return AUTO if value == "auto" else OFF
    if re.fullmatch("[0-9]{1,2}", str(value)) and low <= int(value) <= high:
        return int(value)
    raise UsageError(
        f"invalid {label} {value!s:.40}", why=f"must be auto, off, or a number of tokens from {low} to {high}"
    )


def read_draft_source(value: str | None) -> tuple[str | None, bool | None]:
    """Parse what drafts: "mtp", "off" or a model.

    Returns:
        The model's name, if any, and LoadPreferences.draft_heads.
    """
    if value in ("mtp", "off"):
        return None, value == "mtp"
    return value, None if value is None else False


class DraftPolicy:
    """The policy of drafts for a loaded model.

    Args:
        draft: header of load.draft.

    Attributes:
        most: drafted tokens per step, AUTO or OFF; may be changed between answers.
    """

    def __init__(self, header: Header, load: Load, most: int = AUTO, draft: Header | None = None) -> None:
        self.most = most
        self._limit = min(load.n_rollback, DRAFT_BOUNDS[1]) if header.recurrent_bytes else DRAFT_BOUNDS[1]
        self._draft_cost = 0.0
        if draft is not None and load.draft is not None:
            self._draft_cost = _cost(header, draft, is_of_heads=load.draft.draft_heads)
        elif load.draft_heads:
            self._draft_cost = _cost(header, header, is_of_heads=True)

    def speculation(self, most: int | None = None) -> Speculation | None:
        """Return the speculation of an answer; None without drafts.

        Args:
            most: overrides the attribute for this answer.
        """
        most = self.most if most is None else most
        if not (most and self.can_pay):
            return None
        if most == AUTO:
            return Speculation(self._limit, only_if_it_pays=True, draft_cost=self._draft_cost)
        return Speculation(min(most, self._limit), draft_cost=self._draft_cost)

    @property
    def words(self) -> str:
        """The policy in words, e.g. "none, because they don't pay here"."""
        if self.most > 0:
            return f"up to {self.most} per step"
        if self.most == OFF:
            return "none"
        return "as many as are expected to pay" if self.can_pay else "none, because they don't pay here"

    @property
    def can_pay(self) -> bool:
        """Whether drafts can pay: not if drafted tokens can't be removed."""
        return self._limit > 0


def _cost(header: Header, draft: Header, *, is_of_heads: bool) -> float:
    """Return the cost of a step of what drafts, relative to one of the model: its share of the weights."""
    return _step_bytes(draft, is_of_heads=is_of_heads) / max(_step_bytes(header, is_of_heads=False), 1)


def _step_bytes(header: Header, *, is_of_heads: bool) -> int:
    """Return the bytes of weights that a step reads: of heads, the output matrix too."""
    if not is_of_heads:
        return header.weight_bytes - header.head_bytes
    output = next((tensor.n_bytes for tensor in header.tensors if tensor.name == "output.weight"), 0)
    return header.head_bytes + (output or next((tensor.n_bytes for tensor in header.tensors), 0))
