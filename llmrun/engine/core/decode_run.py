"""Decode steps of a single sequence, one directly after the other.

After each decode call, the processor's caches hold weights instead of the interpreter's code and objects: the loop's
work for a token takes 20 times as long as when it is repeated. So a run only decodes and samples, without the
interpreter; the loop handles the texts of all its tokens afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmrun.engine.core.sequence import Sequence
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry, RunLimit
from llmrun.errors import LlmrunError


class RunStep(NamedTuple):
    """A decode step: the token that it decoded, the one sampled then or the reason for none, and when that was."""

    fed: int
    sampled: int | LlmrunError
    decode_seconds: float
    time: float


def decode_run(
    context: Context, sequence: Sequence, limit: RunLimit, clock: Callable[[], float]
) -> tuple[list[RunStep], Aborted | CacheFull | LlmrunError | None]:
    """Decode and sample until an end token, a failure, or the limit.

    Args:
        sequence: its last token is not decoded yet, all others are; Sequence.is_plain.

    Returns:
        The steps, and the failure of the next decode call, if one failed.
    """
    began, sampler = clock(), sequence.sampler
    try:
        run = context.run(Entry(sequence.tokens[-1], sequence.n_cached, sequence.slot, True), sampler.native, limit)
    except (Aborted, CacheFull, LlmrunError) as failure:
        return [], failure
    steps = [RunStep(fed, sampled, seconds, began + elapsed) for fed, sampled, seconds, elapsed in run.steps]
    error = None if run.is_sampled else sampler.failure(context.logits(0))
    sampler.record_run([sampled for _, sampled, *_ in (run.steps if error is None else run.steps[:-1])])
    if error is not None:
        steps[-1] = steps[-1]._replace(sampled=error)
    return steps, run.failure
