"""Several answers to one prompt: the same request with different seeds. Must not know engines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from llmrun.errors import UsageError
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import SamplingParams

_SEEDS = 2**32


def seeds_for(sampling: SamplingParams, answers: int) -> list[int]:
    """Return consecutive seeds, from the requested one if any, so that the first answer is the one without the others.

    Raises:
        UsageError: all answers would be the same.
    """
    if not sampling.temperature > 0:
        why = "temperature 0 takes the likeliest token, whatever the seed"
        raise UsageError(f"{answers} answers would all be the same", why=why, hint="a temperature of 0.8, say")
    first = int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed
    return [(first + place) % _SEEDS for place in range(answers)]


def with_seeds(asked: AnswerRequest, seeds: Iterable[int]) -> list[AnswerRequest]:
    """Return the request with each of the seeds."""
    return [replace(asked, sampling=replace(asked.sampling, seed=seed)) for seed in seeds]
