"""Speculation: tokens drafted ahead and verified by one decode step; and comparisons of ways to compute.

Named tuples for the reason given in messages.py.
"""

from __future__ import annotations

from typing import NamedTuple

StepDraft = tuple[int, tuple[int, ...]]
"""The number of answer tokens before a step, and the drafted tokens that it verifies."""


class Speculation(NamedTuple):
    """Limits of speculative decoding, which never changes an answer, but for roundings."""

    most: int  # maximum drafted tokens per step
    only_if_it_pays: bool = False  # by the costs of steps and the acceptance rate so far; else always `most`
    draft_cost: float = 0.0  # a step of what drafts, relative to one of the model; 0 without
    recorded: tuple[StepDraft, ...] | None = None  # draft these instead, so that each step is as wide as it was


class AttentionTime(NamedTuple):
    """The seconds of a plain decode step of one sequence with flash attention and without, after `depth` tokens."""

    depth: int
    on: float
    off: float


class VariantTime(NamedTuple):
    """The seconds that a variant of the processor's backend takes for a token, per byte of one type of weights."""

    type: str  # ggml's name, e.g. "Q4_K"
    variant: str  # e.g. "haswell"
    decode: float
    prefill: float


class ComparisonTimes(NamedTuple):
    """The times of settings that an idle engine compared; empty where none were requested, or other work disturbed."""

    attention: tuple[AttentionTime, ...] = ()  # flash attention
    variants: tuple[VariantTime, ...] = ()  # those of the processor; of each type, ggml's choice first
