"""Decode steps of sequences that only decode, one directly after the other.

After each decode call, the processor's caches hold weights instead of the interpreter's code and objects: the loop's
work for a token takes 20 times as long as when it is repeated. So a run decodes and samples without the interpreter;
only the text of the tokens is handled meanwhile, whenever it is due. The loop accounts for all steps afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmrun.engine.core.sequence import Sequence, blame
from llmrun.engine.core.slots import Slots
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry, RunLimit, RunRow, RunSteps
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import Event

Emit = Callable[[list[Event]], float]
"""Sends events before a run ends; returns the seconds until the next ones are due."""


class Ending(NamedTuple):
    """The end of an answer: its steps of the run, and the finish reason with its detail, or the error.

    Without a reason, a reasoning has to be closed, and the answer goes on.
    """

    n_steps: int
    reason: str
    detail: str
    error: Exception | None = None


class DecodeRun:
    """A run of some sequences, by slot; the last token of each is not decoded yet, all others are; Sequence.is_plain.

    Args:
        observe: gets the steps before the next ones are decoded.

    Attributes:
        sampled: tokens of each step; a sequence that has ended has those of later steps too.
        decode_seconds: of each step.
        ended: row -> end of its answer.
        events: not emitted yet.
    """

    def __init__(
        self,
        context: Context,
        sequences: list[Sequence],
        window: int,
        clock: Callable[[], float],
        emit: Emit | None,
        observe: Callable[[RunSteps], None],
    ) -> None:
        self._context, self._sequences, self._window, self._clock, self._emit = context, sequences, window, clock, emit
        self._observe = observe
        self._first = [sequence.tokens[-1] for sequence in sequences]
        self._began = 0.0
        self.sampled: list[tuple[int, ...]] = []
        self.decode_seconds: list[float] = []
        self.ended: dict[int, Ending] = {}
        self.events: list[Event] = []

    def decode(self, limit: RunLimit, slots: Slots, *, drafts: bool) -> Aborted | CacheFull | LlmrunError | None:
        """Decode and sample until an answer ends, a failure, the limit, or before a step with drafts.

        Args:
            drafts: a step may have them.

        Returns:
            The reason for the failure of a decode call.
        """
        sequences, self._began = self._sequences, self._clock()
        rows = [_row(sequence, drafts=drafts) for sequence in sequences]
        n_steps, take = self._n_steps(limit, slots), self._take if self._emit is not None else None
        try:
            run = self._context.run(rows, limit._replace(steps=n_steps, take=take))
        except (Aborted, CacheFull, LlmrunError) as failure:
            return failure
        for row in run.failed:
            error = sequences[row].sampler.failure(self._context.logits(row))
            self._fail(row, len(self.sampled) + len(run.steps), error)
        self._add(run.steps)
        for row, sequence in enumerate(sequences):
            n_sampled = len(self.sampled) - (row in run.failed)
            sequence.sampler.record_run([tokens[row] for tokens in self.sampled[:n_sampled]])
        return run.failure

    def _n_steps(self, limit: RunLimit, slots: Slots) -> int:
        """Return the maximum length of the run: no answer gets longer than it may."""
        if limit.seconds <= 0 and self._emit is None:
            return 1
        # A device computes beside the handling of text, and would wait between two runs.
        n_steps = limit.steps if self._context.on_device else max(1, limit.steps // len(self._sequences))
        for sequence in self._sequences:
            n_steps = min(n_steps, self._window - sequence.n_cached)
            if max_tokens := sequence.asked.limits.max_tokens:
                n_steps = min(n_steps, max_tokens - sequence.n_completion)
            if sequence.thinking is not None:
                n_steps = min(n_steps, sequence.thinking.n_left or n_steps)
        return n_steps if slots.make_room(n_steps * len(self._sequences)) else 1

    def account(self, slots: Slots) -> int:
        """Account for the decoded tokens up to the end of each answer, and drop others; return the number of tokens."""
        n_decoded = 0
        for row, sequence in enumerate(self._sequences):
            fed = [self._first[row], *[tokens[row] for tokens in self.sampled[:-1]]]
            slots.append(sequence.slot, fed)
            n_steps = self.ended[row].n_steps if row in self.ended else len(fed)
            sequence.n_cached += n_steps
            sequence.n_steps += n_steps
            sequence.metrics.model_seconds += sum(self.decode_seconds[:n_steps])
            if n_steps < len(fed):
                sequence.sampler.undraw(len(fed) - n_steps, sequence.text_tokens)
            n_decoded += n_steps
        return n_decoded

    def _take(self, steps: RunSteps) -> float:
        self._add(steps)
        if self.ended or self._emit is None:
            return -1.0
        events, self.events = self.events, []
        return self._emit(events)

    def _add(self, steps: RunSteps) -> None:
        """Append the tokens of steps to their answers."""
        self._observe(steps)
        vocabulary, window, ended, events = self._context.vocabulary, self._window, self.ended, self.events
        for tokens, decode_seconds, elapsed in steps:
            self.sampled.append(tokens)
            self.decode_seconds.append(decode_seconds)
            now = self._began + elapsed
            for row, sequence in enumerate(self._sequences):
                if row in ended and len(self.sampled) >= ended[row].n_steps:
                    continue
                try:
                    reason, detail = sequence.append(tokens[row], vocabulary, window, now, events)
                except Exception as error:  # its text or splitter: neighbours go on
                    self._fail(row, len(self.sampled), error)
                    continue
                if reason or sequence.is_closing:
                    ended[row] = Ending(len(self.sampled), reason, detail)

    def _fail(self, row: int, n_steps: int, error: Exception) -> None:
        """End an answer with an error after n_steps of the run."""
        self.ended[row] = Ending(n_steps, "", "", error)


def _row(sequence: Sequence, *, drafts: bool) -> RunRow:
    entry = Entry(sequence.tokens[-1], sequence.n_cached, sequence.slot, True)
    drafting = sequence.drafting
    with blame(sequence):
        lookup = drafting.natively(sequence.tokens) if drafts and drafting is not None else ()
    return RunRow(entry, sequence.sampler.native, *lookup)
