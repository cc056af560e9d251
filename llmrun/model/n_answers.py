"""Several answers to one prompt: the same request, each with a seed of its own. Must not know engines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from llmrun.errors import UsageError
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import SamplingParams

_SEEDS = 2**32


def seeds_for(sampling: SamplingParams, answers: int) -> list[int]:
    """Seeds in a row, from the one that was asked for, if any: what that gives alone, the first answer has.

    Raises:
        UsageError: all answers would be the same.
    """
    if not sampling.temperature > 0:
        why = "temperature 0 takes the likeliest token, whatever the seed"
        raise UsageError(f"{answers} answers would all be the same", why=why, hint="a temperature of 0.8, say")
    first = int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed
    return [(first + place) % _SEEDS for place in range(answers)]


def with_seeds(asked: AnswerRequest, seeds: Iterable[int]) -> list[AnswerRequest]:
    """The request with each of the seeds."""
    return [replace(asked, sampling=replace(asked.sampling, seed=seed)) for seed in seeds]
