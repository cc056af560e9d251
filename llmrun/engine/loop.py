"""The one generation loop: schedule, decode, sample, emit. One user is a batch of one.

Owns sequences and their slots in the KV cache; must not know pipes, templates or llama.cpp.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from llmrun.engine.backend.base import Aborted, Backend, Entry
from llmrun.engine.metrics import Metrics
from llmrun.engine.prefix import common_prefix, reusable
from llmrun.engine.sampler import SequenceSampler
from llmrun.engine.scheduler import schedule
from llmrun.engine.sequence import Sequence
from llmrun.engine.text import TextStream
from llmrun.errors import BadLogitsError, ContextOverflowError, LlmrunError
from llmrun.messages import Event, Failed, Finished, PrefillProgress, Started
from llmrun.params import Limits, SamplingParams


class Engine:
    """Answers any number of requests at once, as many in parallel as the backend has sequences.

    A slot keeps its KV cache when its request ends: the next prompt that begins alike reuses it.
    """

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.perf_counter) -> None:
        self._backend = backend
        self._clock = clock
        self._active: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._changed = False  # somebody came, was cancelled or left a slot free
        self._cached: dict[int, list[int]] = {slot: [] for slot in range(backend.n_seq_max)}

    @property
    def busy(self) -> bool:
        """Whether step() has something to do."""
        return bool(self._active or self._waiting)

    def add(self, request: int, prompt: list[int], sampling: SamplingParams, limits: Limits) -> None:
        """Take a request; step() answers it.

        Args:
            request: the caller's number for it; events name it.
            prompt: token ids, at least one.

        Raises:
            ContextOverflowError: the prompt alone is longer than the context window.
        """
        n_ctx = self._backend.n_ctx
        if len(prompt) > n_ctx:
            raise ContextOverflowError(
                f"the prompt is {len(prompt):,} tokens long, the context window {n_ctx:,}",
                hint="shorten it, or ask for a larger context window with --ctx",
            )
        seed = int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed
        self._changed = True
        sampler = SequenceSampler(sampling, seed, self._backend)
        sampler.accept_prompt(prompt)
        self._waiting.append(
            Sequence(
                request=request,
                slot=-1,
                tokens=list(prompt),
                n_prompt=len(prompt),
                n_reused=0,
                n_cached=0,
                seed=seed,
                sampler=sampler,
                text=TextStream(limits.stop),
                limits=limits,
                metrics=Metrics(self._clock()),
            )
        )

    def cancel(self, request: int) -> None:
        """Let a request end at the next step(), if it still runs."""
        for sequence in (*self._active, *self._waiting):
            if sequence.request == request:
                sequence.cancelled = self._changed = True

    def step(self) -> list[Event]:
        """Say who begins or was cancelled; if nobody, run one batch through the model and say what came of it."""
        events = self._drop_cancelled() + self._admit() if self._changed else []
        self._changed = False
        if events or not self._active:
            return events
        batch, shares, rows = self._next_batch()
        began = self._clock()
        try:
            self._backend.decode(batch)
        except Aborted:
            for sequence in self._active:
                self._cut(sequence)
            return events
        except LlmrunError as error:
            return events + [self._fail(sequence, error) for sequence in list(self._active)]
        seconds = self._clock() - began
        for sequence, share in zip(list(self._active), shares, strict=True):
            if share:
                events += self._computed(sequence, share, seconds, rows.get(sequence.request))
        return events

    def _drop_cancelled(self) -> list[Event]:
        events: list[Event] = []
        for sequence in [s for s in self._active if s.cancelled]:
            events += self._finish(sequence, "cancelled")
        for sequence in [s for s in self._waiting if s.cancelled]:
            self._waiting.remove(sequence)
            events.append(Finished(sequence.request, "cancelled", sequence.stats(self._backend.n_ctx)))
        return events

    def _admit(self) -> list[Event]:
        """Give waiting requests the free slots that know most of their prompts."""
        events: list[Event] = []
        free = set(self._cached) - {sequence.slot for sequence in self._active}
        while self._waiting and free:
            sequence = self._waiting.popleft()
            slot = max(free, key=lambda s: (common_prefix(self._cached[s], sequence.tokens), -len(self._cached[s])))
            free.remove(slot)
            sequence.slot = slot
            keep = reusable(self._cached[slot], sequence.tokens)
            sequence.n_reused = sequence.n_cached = self._truncate(slot, keep)
            self._active.append(sequence)
            events.append(Started(sequence.request, sequence.n_prompt, sequence.n_reused, sequence.seed))
        return events

    def _next_batch(self) -> tuple[list[Entry], list[int], dict[int, int]]:
        """The batch, each sequence's share of it, and for which request which row of logits is wanted."""
        shares = schedule([sequence.n_waiting for sequence in self._active], self._backend.n_batch)
        batch: list[Entry] = []
        rows: dict[int, int] = {}
        for sequence, share in zip(self._active, shares, strict=True):
            start, end = sequence.n_cached, sequence.n_cached + share
            last = len(sequence.tokens) - 1
            for position in range(start, end):
                batch.append(Entry(sequence.tokens[position], position, sequence.slot, position == last))
            if share and end > last:
                rows[sequence.request] = len(batch) - 1
        return batch, shares, rows

    def _computed(self, sequence: Sequence, share: int, seconds: float, row: int | None) -> list[Event]:
        """A sequence's share went through the model; with a row of logits, draw its next token."""
        self._cached[sequence.slot] += sequence.tokens[sequence.n_cached : sequence.n_cached + share]
        sequence.n_cached += share
        sequence.metrics.computed(seconds)
        if row is None:
            done = sequence.n_cached - sequence.n_reused
            return [PrefillProgress(sequence.request, done, sequence.metrics.prefill_seconds)]
        try:
            token = sequence.sampler.sample(self._backend.logits(row))
        except BadLogitsError as error:
            return [self._fail(sequence, error)]
        sequence.tokens.append(token)
        sequence.metrics.sampled(self._clock())
        if self._backend.is_end(token):
            return self._finish(sequence, "stop")
        events = sequence.delta(sequence.text.push(self._backend.token_bytes(token)))
        reason = self._end_reason(sequence)
        return [*events, *self._finish(sequence, reason)] if reason else [*events]

    def _end_reason(self, sequence: Sequence) -> str | None:
        if sequence.text.stopped:
            return "stop"
        most = sequence.limits.max_tokens
        if most is not None and sequence.n_completion >= most:
            return "length"
        return "length" if len(sequence.tokens) > self._backend.n_ctx else None

    def _finish(self, sequence: Sequence, reason: str) -> list[Event]:
        self._leave(sequence)
        rest = sequence.delta(sequence.text.finish())
        return [*rest, Finished(sequence.request, reason, sequence.stats(self._backend.n_ctx))]

    def _leave(self, sequence: Sequence) -> None:
        self._active.remove(sequence)
        self._changed = True

    def _fail(self, sequence: Sequence, error: LlmrunError) -> Failed:
        self._leave(sequence)
        self._truncate(sequence.slot, 0)
        return Failed.of(error, sequence.request)

    def _cut(self, sequence: Sequence) -> None:
        """Take back what an aborted batch may have written."""
        sequence.n_cached = self._truncate(sequence.slot, sequence.n_cached)
        sequence.n_reused = min(sequence.n_reused, sequence.n_cached)

    def _truncate(self, slot: int, length: int) -> int:
        """Cut a slot's KV cache to its first tokens, or to none where the model can't; how many are left."""
        if not self._backend.forget(slot, length):
            length = 0
            self._backend.forget(slot, 0)
        del self._cached[slot][length:]
        return length
