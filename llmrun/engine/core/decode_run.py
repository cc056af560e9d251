"""Decode steps of a single sequence, one directly after the other.

After each decode call, the processor's caches hold weights instead of the interpreter's code and objects: the loop's
work for a token takes 20 times as long as when it is repeated. So a run only decodes and samples; the loop handles the
texts of all its tokens afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmrun.engine.core.sequence import Sequence
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry
from llmrun.errors import LlmrunError

MAX_STEPS = 64


class RunStep(NamedTuple):
    """A decode step: the token that it decoded, the one sampled then or the reason for none, and when that was."""

    fed: int
    sampled: int | LlmrunError
    decode_seconds: float
    time: float


def decode_run(
    context: Context, sequence: Sequence, most: int, continues: Callable[[float], bool], clock: Callable[[], float]
) -> tuple[list[RunStep], Aborted | CacheFull | LlmrunError | None]:
    """Decode and sample until an end token, a failure, or the caller's end.

    Args:
        sequence: its last token is not decoded yet, all others are; Sequence.is_plain.
        most: maximum number of steps.
        continues: takes the time after a step; returns whether to take another one.

    Returns:
        The steps, and the failure of the next decode call, if one failed.
    """
    steps: list[RunStep] = []
    decode, logits, sample, is_end = context.decode, context.logits, sequence.sampler.sample, context.vocabulary.is_end
    token, position, slot = sequence.tokens[-1], sequence.n_cached, sequence.slot
    now = clock()
    while True:
        began = now
        try:
            decode([Entry(token, position, slot, True)])
        except (Aborted, CacheFull, LlmrunError) as failure:
            return steps, failure
        decoded = clock()
        sampled: int | LlmrunError
        try:
            sampled = sample(logits(0))
        except LlmrunError as error:
            sampled = error
        now = clock()
        steps.append(RunStep(token, sampled, decoded - began, now))
        if isinstance(sampled, LlmrunError) or len(steps) >= most or is_end(sampled) or not continues(now):
            return steps, None
        token, position = sampled, position + 1
