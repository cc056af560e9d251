"""The progress of prefill within a batch, for a thread that tells it while another one computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from llmrun.engine.core.batch import BatchPart
from llmrun.engine.core.policy import POLICY, Policy
from llmrun.engine.llama.base import Context
from llmrun.protocol.messages import Event, PrefillProgress


class PrefillWatch:
    """The prompts of the batch that is being computed.

    On a slow processor one batch takes most of a minute, so does the encoding of an image, and the engine's own events
    come between two batches.

    Args:
        context: computes the batches.

    Attributes:
        on_begin: called when a batch with a piece of a prompt begins; must not block.
    """

    def __init__(self, context: Context, clock: Callable[[], float], policy: Policy = POLICY) -> None:
        self.on_begin: Callable[[], None] = lambda: None
        self._context, self._clock, self._policy = context, clock, policy
        self._lock = threading.Lock()  # held while events are sent, so that none comes after the end of its batch
        self._parts: Sequence[BatchPart] = ()
        self._began = 0.0

    def begin(self, parts: Sequence[BatchPart], began: float) -> None:
        """Watch a batch that begins, if it holds a piece of a prompt."""
        pieces = [part for part in parts if _size(part) >= self._policy.few_tokens and not part.sequence.n_completion]
        if pieces:
            self._began, self._parts = began, pieces
            self.on_begin()

    def end(self) -> None:
        """End the batch, whatever became of it."""
        if self._parts:
            with self._lock:
                self._parts = ()

    def tell(self, send: Callable[..., None]) -> bool | None:
        """Send the progress of each prompt that has some; return whether there is any, None if no batch is watched.

        To be called from another thread than the other methods.
        """
        with self._lock:
            if not self._parts:
                return None
            share, seconds = self._context.computed, self._clock() - self._began
            events: list[Event] = []
            for part in self._parts:
                sequence = part.sequence
                n_done = int(share * _size(part))
                n_tokens = sequence.n_cached - sequence.n_reused + n_done
                if n_done and n_tokens > sequence.n_progress:  # a batch may be computed again, after a failure
                    sequence.n_progress = n_tokens
                    took = sequence.metrics.prefill_seconds + seconds
                    events.append(PrefillProgress(sequence.request, n_tokens, took))
            if events:
                send(*events)
            return bool(events)


def _size(part: BatchPart) -> int:
    return part.end - part.sequence.n_cached
