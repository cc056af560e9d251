"""The one generation loop: schedule, decode, sample, emit. One user is a batch of one.

Owns sequences and their slots in the KV cache; must not know pipes, templates or llama.cpp.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmrun.engine.core.metrics import Metrics
from llmrun.engine.core.prefix import common_prefix, gap_after, reusable
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.scheduler import schedule
from llmrun.engine.core.sequence import Extras, Sequence
from llmrun.engine.core.text import TextStream
from llmrun.engine.llama.base import Aborted, Context, Entry
from llmrun.errors import BadGrammarError, BadLogitsError, ContextOverflowError, LlmrunError, UsageError
from llmrun.protocol.messages import Event, Explained, Failed, Finished, PrefillProgress, Started
from llmrun.protocol.params import Limits, SamplingParams

if TYPE_CHECKING:
    from llmrun.engine.core.states import KVStore

_WORTH_READING = 64  # tokens: fewer are prefilled faster than files are looked through
_WORTH_MOVING = 32
_PLAIN = Extras()


class Engine:
    """Answers any number of requests at once, as many in parallel as the backend has sequences.

    A slot keeps its KV cache when its request ends: the next prompt that begins alike reuses it.
    """

    def __init__(
        self, backend: Context, clock: Callable[[], float] = time.perf_counter, states: KVStore | None = None
    ) -> None:
        """Begin without requests.

        Args:
            backend: what computes logits.
            clock: seconds, monotonic.
            states: KV states saved on disk, where a prompt's beginning may be found.
        """
        self._backend = backend
        self._clock = clock
        self._states = states
        self._active: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._changed = False  # somebody came, was cancelled or left a slot free
        self._finished: Sequence | None = None  # the answer that ended last
        self._cached: dict[int, list[int]] = {slot: [] for slot in range(backend.n_seq_max)}

    @property
    def busy(self) -> bool:
        """Whether step() has something to do."""
        return bool(self._active or self._waiting)

    def add(
        self,
        request: int,
        prompt: list[int],
        sampling: SamplingParams,
        limits: Limits,
        extras: Extras = _PLAIN,
    ) -> None:
        """Take a request; step() answers it.

        Args:
            request: the caller's number for it; events name it.
            prompt: token ids, at least one.
            sampling: how logits become a token.
            limits: when the answer ends, and what it must not say.
            extras: what else is wanted.

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
        sampler = SequenceSampler(sampling, seed, self._backend.vocabulary, extras.constraint, extras.remember)
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
                text=TextStream(limits.stop, limits.ban),
                limits=limits,
                metrics=Metrics(self._clock()),
                extras=extras,
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
                self._keep(sequence, sequence.n_cached)
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
            self._finished = None  # its slot may be the one that is given away
            sequence = self._waiting.popleft()
            slot = max(free, key=lambda s: (common_prefix(self._cached[s], sequence.tokens), -len(self._cached[s])))
            free.remove(slot)
            sequence.slot = slot
            if sequence.extras.moves:
                self._close_gap(slot, sequence.tokens)
            keep = self._restore(slot, sequence.tokens, reusable(self._cached[slot], sequence.tokens))
            sequence.n_reused = sequence.n_cached = self._truncate(slot, keep)
            self._active.append(sequence)
            inside = sequence.extras.inside_thought
            events.append(Started(sequence.request, sequence.n_prompt, sequence.n_reused, sequence.seed, inside))
        return events

    def _close_gap(self, slot: int, tokens: list[int]) -> None:
        """Where the oldest turns left the prompt, let what the cache holds behind them follow what is in front."""
        cached = self._cached[slot]
        shared = common_prefix(cached, tokens)
        gap = gap_after(cached, tokens, shared, _WORTH_MOVING)
        if gap and self._backend.drop(slot, shared, shared + gap):
            del cached[shared : shared + gap]

    def _restore(self, slot: int, tokens: list[int], keep: int) -> int:
        """Read a saved state in where it spares much prefill; how many tokens can be kept now."""
        if self._states is None or len(tokens) - keep < _WORTH_READING:
            return keep
        saved = self._states.find(tokens, longer_than=keep + _WORTH_READING)
        if saved is None:
            return keep
        restored = self._backend.set_state(slot, saved.state, len(saved.tokens))
        self._cached[slot] = saved.tokens if restored else []
        return reusable(self._cached[slot], tokens)

    def save(self, request: int, *, prompt_only: bool) -> tuple[int, int]:
        """Save the KV state of the answer that ended last, for prompts that begin like it.

        Args:
            request: the answer's.
            prompt_only: leave the answer out, because other questions will follow the prompt's beginning.

        Returns:
            How many tokens were saved, in how many bytes; none without a store, or one that is too small.

        Raises:
            UsageError: another answer came after it.
            OSError: it can't be written.
        """
        sequence = self._last_answer(request)
        if prompt_only:
            self._keep(sequence, sequence.n_prompt)
        tokens = self._cached[sequence.slot]
        if self._states is None or not tokens:
            return 0, 0
        n_bytes = self._states.save(tokens, bytes(self._backend.state(sequence.slot)))
        return (len(tokens), n_bytes) if n_bytes else (0, 0)

    def _last_answer(self, request: int) -> Sequence:
        if self._finished is None or self._finished.request != request:
            raise UsageError("nothing is remembered about that answer")
        return self._finished

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
            return self._draw(sequence, self._backend.logits(row))
        except (BadLogitsError, BadGrammarError) as error:
            return [self._fail(sequence, error)]

    def _draw(self, sequence: Sequence, logits: int) -> list[Event]:
        """Draw the answer's next token, and take those that a grammar forces after it, which need no logits."""
        refused = sequence.refused.get(len(sequence.tokens), ())
        events, goes_on = self._grow(sequence, sequence.sampler.sample(logits, refused))
        for token in self._forced(sequence) if goes_on else ():
            sequence.sampler.follow(token)
            more, goes_on = self._grow(sequence, token)
            events += more
            if not goes_on:
                break
        return events

    def _forced(self, sequence: Sequence) -> list[int]:
        """The tokens that come next without being drawn: the grammar's, or those that end a thought."""
        thinking = sequence.extras.thinking
        if thinking is not None and thinking.used_up:
            return self._backend.vocabulary.tokenize(thinking.closing, special=True)
        return sequence.sampler.forced()

    def _grow(self, sequence: Sequence, token: int) -> tuple[list[Event], bool]:
        """The answer has one more token. What comes of it, and whether another one may follow it."""
        sequence.tokens.append(token)
        sequence.metrics.sampled(self._clock())
        if self._backend.vocabulary.is_end(token):
            return self._finish(sequence, "stop"), False
        vocabulary = self._backend.vocabulary
        data = vocabulary.control_piece(token) if token in sequence.extras.shown else vocabulary.piece(token)
        events: list[Event] = [*sequence.delta(sequence.text.push(data))]
        if sequence.text.banned:
            # The last token that stays goes through the model once more, for the logits behind it.
            self._keep(sequence, sequence.retract(sequence.text.step_back()) - 1)
            return events, False
        reason, detail = self._end_reason(sequence, data.decode("utf-8", "replace"))
        return [*events, *self._finish(sequence, reason, detail)] if reason else events, not reason

    def _end_reason(self, sequence: Sequence, text: str) -> tuple[str, str]:
        """Why the answer ends with its last token, whose text is given, and what there is to say; "" if it does not."""
        if sequence.text.stopped:
            return "stop", ""
        extras = sequence.extras
        if extras.thinking is not None:
            extras.thinking.push(text)
        repeated = extras.guard.push(text) if extras.guard is not None else None
        if repeated is not None:
            return "repeats", repeated
        most = sequence.limits.max_tokens
        full = len(sequence.tokens) > self._backend.n_ctx
        return ("length", "") if full or (most is not None and sequence.n_completion >= most) else ("", "")

    def _finish(self, sequence: Sequence, reason: str, detail: str = "") -> list[Event]:
        self._leave(sequence)
        rest = sequence.delta(sequence.text.finish())
        return [*rest, Finished(sequence.request, reason, sequence.stats(self._backend.n_ctx), detail)]

    def explain(self, request: int, last: int, candidates: int) -> Explained:
        """How the last tokens of the answer that finished last were chosen.

        Args:
            request: the answer's.
            last: how many tokens, at most what add() was told to remember.
            candidates: how many of the likeliest to name for each.

        Raises:
            UsageError: another answer came after it.
        """
        return Explained(request, tuple(self._last_answer(request).sampler.explain(last, candidates)))

    def _leave(self, sequence: Sequence) -> None:
        self._active.remove(sequence)
        self._finished = sequence
        self._changed = True

    def _fail(self, sequence: Sequence, error: LlmrunError) -> Failed:
        self._leave(sequence)
        self._truncate(sequence.slot, 0)
        return Failed.of(error, sequence.request)

    def _keep(self, sequence: Sequence, length: int) -> None:
        """Cut a sequence's KV cache to its first tokens: what came after was taken back, or half written."""
        sequence.n_cached = self._truncate(sequence.slot, length)
        sequence.n_reused = min(sequence.n_reused, sequence.n_cached)

    def _truncate(self, slot: int, length: int) -> int:
        """Cut a slot's KV cache to its first tokens, or to none where the model can't; how many are left."""
        if not self._backend.forget(slot, length):
            length = 0
            self._backend.forget(slot, 0)
        del self._cached[slot][length:]
        return length
