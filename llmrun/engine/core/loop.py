"""The one generation loop: schedule, decode, sample, emit. One user is a batch of one.

Owns which sequences run and which wait; must not know pipes, templates or llama.cpp.
"""

from __future__ import annotations

import itertools
import sys
import time
from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from llmrun.engine.core.batch import Batch, BatchCapacity, BatchPart, fill
from llmrun.engine.core.decode_run import DecodeRun, Emit
from llmrun.engine.core.draft_source import DraftWeights
from llmrun.engine.core.metrics import PrefillRate
from llmrun.engine.core.policy import POLICY, Policy
from llmrun.engine.core.prefill_watch import PrefillWatch
from llmrun.engine.core.sampler import sample_rows
from llmrun.engine.core.scheduler import ExclusiveScheduler, level, mixed_tokens, next_admission, schedule
from llmrun.engine.core.sequence import Sequence, SequenceError
from llmrun.engine.core.slots import Slots
from llmrun.engine.core.threads import ThreadChooser
from llmrun.engine.llama.base import MAX_RUN, Aborted, CacheFull, Context, RunLimit, RunSteps
from llmrun.errors import ContextOverflowError, LlmrunError, UsageError, as_llmrun_error
from llmrun.protocol.messages import Event, Failed, Finished, PrefillProgress
from llmrun.protocol.questions import EngineStatus

if TYPE_CHECKING:
    from llmrun.engine.core.prefix import Prefix
    from llmrun.engine.core.states import KVStore

_age, _slot = attrgetter("number"), attrgetter("slot")


class Engine:
    """The generation loop: any number of requests, as many in parallel as the KV cache has slots and cells for.

    An older request never waits for a younger one: when cells run out, the youngest sequence is preempted. It goes back
    to the front of the queue and later continues with the same tokens.

    Args:
        threads: chooses those of decode steps; by default, the context's stay.
        throughput: as in loading.Load.
        adapts: requests may choose adapters.
        copy_bytes, cell_bytes: as in loading.Load.
        prefixes: prefixes() of the previous engine with these weights.
        policy: the numbers by which it and its parts decide.
    """

    def __init__(
        self,
        context: Context,
        clock: Callable[[], float] = time.perf_counter,
        states: KVStore | None = None,
        draft_model: DraftWeights | None = None,
        *,
        threads: ThreadChooser | None = None,
        throughput: bool = False,
        adapts: bool = False,
        copy_bytes: int = sys.maxsize,
        cell_bytes: int = 0,
        prefixes: list[Prefix] | None = None,
        policy: Policy = POLICY,
    ) -> None:
        self.can_draft = context.max_draft > 0  # drafts can be verified with this context
        self._throughput = throughput
        self._policy = policy._replace(candidates=1, piece_bytes=0) if throughput else policy
        self._drafts_requested = self._drafts = False  # by some request; in the next batch, unless the last one failed
        self._context, self._draft_model, self._threads = context, draft_model, threads
        self._contexts = [context, *(draft_model.contexts if draft_model is not None else ())]
        self._exclusive = ExclusiveScheduler(context, self._policy) if adapts else None
        self._vocabulary = context.vocabulary
        self._window, self._clock = min(context.n_ctx, context.n_cells), clock
        self._rate, self._n_batches = PrefillRate(self._policy), 0
        self.watch = PrefillWatch(context, clock, self._policy)
        self._slots = Slots(
            context, states, self._rate, prefixes, self._policy, copy_bytes=copy_bytes, cell_bytes=cell_bytes
        )
        self.prefixes, self.read_ahead = self._slots.prefixes, self._slots.read_ahead
        self.offload, self.save_parked = self._slots.offload, self._slots.save_parked
        self._numbers = itertools.count()
        self._active: list[Sequence] = []  # oldest first
        self._waiting: list[Sequence] = []  # oldest first
        self._suspects: list[Sequence] = []  # of a batch that failed: each runs alone, to find the one that fails
        self._admission_paused = False  # the KV cache was full; resume when a sequence finishes
        self._has_cancelled = False
        self._finished: dict[int, Sequence] = {}  # slot -> the last answer that finished there
        self._explainable: dict[int, Sequence] = {}  # request -> answer; the last ones that remember their choices
        self._sole_request: int | None = None  # the only request in the last batch, or in the loop
        self._has_all_threads = True  # in the last batch
        self._is_ahead = False  # the device may still compute the last batch, and ...
        self._progress: list[PrefillProgress] = []  # ... this is the progress after it
        self._prefix_queries = self._prefix_hits = self._prefilled = self._decoded = 0  # tokens, in total

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting)

    @property
    def is_starting(self) -> bool:
        """Whether requests wait and none is being computed."""
        return bool(self._waiting) and not self._active

    def runs_alone(self, request: int) -> bool:
        """Return whether the running batch, or the next one, holds no other request. Safe from any thread."""
        return self._sole_request == request

    def status(self, waiting: int = 0) -> EngineStatus:
        """Return the load of the engine. Safe from any thread.

        Args:
            waiting: requests that have arrived but were not added yet.
        """
        budget = self._slots.budget
        return EngineStatus(
            running=len(self._active),
            waiting=waiting + len(self._waiting),
            cells=budget.n_cells,
            cells_used=budget.used,
            cells_shared=budget.shared,
            checkpoint_bytes=self._slots.checkpoints.n_bytes,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prefilled=self._prefilled,
            decoded=self._decoded,
            threads=self._threads_in_use,
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a request; step() answers it.

        Raises:
            ContextOverflowError: the prompt alone is longer than the context window.
        """
        if sequence.n_prompt > self._window:
            raise ContextOverflowError.of_prompt(sequence.n_prompt, self._window)
        drafting = sequence.drafting
        if drafting is not None and self.can_draft:
            self._drafts = self._drafts_requested = True
            if drafting.model is not None and self._draft_model is not None:
                self._draft_model.switch_on()
        self._sole_request = None if self.busy else sequence.request
        sequence.number = next(self._numbers)
        sequence.metrics.arrived = sequence.metrics.arrived or self._clock()
        self._waiting.append(sequence)

    def cancel(self, request: int) -> None:
        """Mark a request as cancelled; the next step() finishes it."""
        for sequence in (*self._active, *self._waiting):
            if sequence.request == request:
                sequence.cancelled = self._has_cancelled = True

    def step(self, limit: RunLimit | None = None, emit: Emit | None = None) -> list[Event]:
        """Return the events of admissions and cancels; without any, decode and return the events of that.

        Args:
            limit: of a run, in which sequences that only decode may decode several tokens; None: one batch.
            emit: sends the text of such a run whenever limit.seconds have passed; None: they end the run.
        """
        events = self.admit()
        if events or not self._active:
            return events
        self._slots.prepare_growth()
        if limit is not None and self._can_run() and (run := self._run(limit, emit)) is not None:
            return run
        planned = self._clock() if self._drafts else 0.0
        try:
            parts, batch = self._next_batch()
        except SequenceError as failure:
            return [self._fail(failure.sequence, failure.error)]
        self._n_batches += 1
        self._limit_threads(batch)
        began = self._clock()
        was_ahead, self._is_ahead = self._is_ahead, self._context.on_device and not any(part.rows for part in parts)
        if not self._context.on_device:
            self.watch.begin(parts, began)
        try:
            self._context.decode(batch)
            if not self._is_ahead:
                self._context.synchronize()
        except (Aborted, CacheFull, LlmrunError) as error:
            return self._roll_back(parts, error)
        finally:
            self.watch.end()
        seconds = self._clock() - began
        if isinstance(batch, list) and self._is_ahead == was_ahead:
            # If nothing waits for a batch, decoding the next one does.
            n_decoding = sum(part.sequence.n_completion > 0 for part in parts)
            self._rate.record(len(batch) - n_decoding, seconds, n_decoding)
            if self._threads is not None and not self._has_all_threads and n_decoding == len(parts):
                self._threads.record(len(batch), 1, seconds)
        is_alone = planned and len(parts) == 1
        if is_alone and (sequence := parts[0].sequence).n_waiting == 1 and sequence.drafting is not None:
            sequence.drafting.record(self._clock() - planned)
        return self._advance(parts, seconds)

    # ---- threads -------------------------------------------------------------------------------------------

    def _limit_threads(self, batch: Batch | None = None) -> None:
        """Leave cores to other programs that need them in the next batch, or in a run of decode steps."""
        threads = self._threads
        if threads is None:
            return
        threads.update()
        wide = self._policy.wide_batch
        n_tokens = len(self._active) if batch is None else len(batch) if isinstance(batch, list) else wide
        self._has_all_threads = n_tokens >= wide or (n_tokens == 1 and self._has_to_repeat(self._active[0]))
        for context in self._contexts:
            context.limit_threads(threads.most if self._has_all_threads else threads.n_threads)

    @property
    def _threads_in_use(self) -> tuple[int, int]:
        """The threads of the last decode steps, and those of a quiet machine; zeros if they never change."""
        if self._threads is None:
            return 0, 0
        return self._threads.most if self._has_all_threads else self._threads.chosen, self._threads.most

    def _has_to_repeat(self, sequence: Sequence) -> bool:
        """Return whether an answer would not be the same again if its next steps had other threads."""
        split_from, is_repeatable = self._context.split_from, sequence.asked.sampling.is_repeatable
        return is_repeatable and split_from is not None and len(sequence.tokens) + MAX_RUN > split_from

    def _time_steps(self, steps: RunSteps) -> None:
        """Account for the time of decode steps, before the next ones of a run."""
        if len(self._active) == 1 and (drafting := self._active[0].drafting) is not None:
            drafting.record_plain([seconds for _, seconds, _ in steps])
        if self._threads is not None and not self._has_all_threads:
            self._threads.record(len(self._active), len(steps), sum(seconds for _, seconds, _ in steps))
            self._limit_threads()

    # ---- admission -----------------------------------------------------------------------------------------

    def admit(self) -> list[Event]:
        """Drop cancelled requests, and admit waiting ones; return the events of that."""
        return self._drop_cancelled() + self._admit() if self._has_cancelled or self._waiting else []

    def _drop_cancelled(self) -> list[Event]:
        self._has_cancelled = False
        gone = [sequence for sequence in (*self._active, *self._waiting) if sequence.cancelled]
        return [event for sequence in gone for event in self._finish(sequence, "cancelled")]

    def _admit(self) -> list[Event]:
        events: list[Event] = []
        while (sequence := self._next_admission()) is not None:
            self._waiting.remove(sequence)
            first, tokens, salt = not sequence.admitted, sequence.tokens, sequence.salt
            difference = self._slots.difference(tokens, salt) if first else None
            slot, n_cached = self._slots.take(tokens, sequence.n_prompt, salt, moves=sequence.asked.moves)
            self._finished.pop(slot, None)
            sequence.admit(slot, n_cached, self._clock())
            insort(self._active, sequence, key=_age)
            if first:
                self._prefix_queries += sequence.n_prompt
                self._prefix_hits += n_cached
                events.append(sequence.started(difference))
        return events

    def _next_admission(self) -> Sequence | None:
        if not self._waiting or (self._active and (self._admission_paused or self._suspects)):
            return None
        chosen, pauses = next_admission(self._waiting, self._active, self._slots, self._context, self._policy)
        self._admission_paused |= pauses
        return chosen

    def _preempt(self) -> None:
        """Move the youngest active sequence to the front of the queue and free its KV cells."""
        sequence = self._active.pop()
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        self._slots.truncate(sequence.slot, 0)
        self._slots.release(sequence.slot)
        insort(self._waiting, sequence, key=_age)
        sequence.passed = self._policy.candidates
        self._admission_paused = True

    def _remove(self, sequence: Sequence) -> None:
        sequence.end()
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        if self._slots.length(sequence.slot) > sequence.n_cached:  # a run, or a draft, went on after its end
            self._truncate(sequence, sequence.n_cached)
        self._active.remove(sequence)
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        self._slots.release(sequence.slot)
        self._finished[sequence.slot] = sequence
        if sequence.sampler.remembers:
            self._explainable[sequence.request] = sequence
            if len(self._explainable) > self._context.n_seq_max + 1:
                del self._explainable[next(iter(self._explainable))]
        self._admission_paused = False
        self._sole_request = self._active[0].request if len(self._active) == 1 and not self._waiting else None

    # ---- a batch -------------------------------------------------------------------------------------------

    def _next_batch(self) -> tuple[list[BatchPart], Batch]:
        """Return the parts of the next batch, with cells reserved for all of them, ordered by slot.

        Recurrent models need that order, and adjacent slots are not split into several passes.
        """
        self._compact()
        while True:
            running, n_batch = self._suspects[:1] or self._active, self._n_batch
            if self._exclusive is not None:
                running, n_batch = self._exclusive.next(running, self._active, self._n_mixed)
            waiting = [
                self._slots.until_checkpoint(sequence.slot, sequence.n_cached, sequence.n_ready) for sequence in running
            ]
            n_waiting = sum(waiting)
            all_decode = n_waiting == len(waiting) <= n_batch  # a shortcut
            mixed = 0 if all_decode else self._n_mixed(waiting)
            shares = waiting if all_decode else schedule(waiting, n_batch, mixed, self._n_batches, self._policy)
            if self._context.splits_batches and not all_decode:
                shares = level(shares, waiting, self._policy)
            if self._slots.make_room(sum(shares)) or len(self._active) == 1:
                break
            self._preempt()
        chosen = [(sequence, share) for sequence, share in zip(running, shares, strict=True) if share]
        if len(chosen) > 1:
            chosen.sort(key=lambda pair: pair[0].slot)
        spare = None
        if self._has_drafts(len(chosen)) or self._has_drafts_together:
            spare = BatchCapacity.of(self._context, self._slots.budget, sum(shares), self._window)
        parts, batch = fill(chosen, spare, self._draft_model)
        self._sole_request = parts[0].sequence.request if len(parts) == 1 else None
        return parts, batch

    def _compact(self) -> None:
        for source, target in self._slots.compact():
            next(sequence for sequence in self._active if sequence.slot == source).slot = target
            self._finished.pop(target, None)

    @property
    def _n_batch(self) -> int:
        """The maximum size of a batch: on a device that computes little in it, one that can soon be cancelled."""
        n_batch = self._context.n_batch
        if not self._context.on_device:
            return n_batch
        return min(n_batch, max(self._policy.device_tokens, self._rate.tokens_within(self._policy.device_seconds)))

    def _n_mixed(self, waiting: list[int]) -> int:
        """Return the maximum size of a batch in which some sequences decode and some prefill."""
        if self._throughput:
            return self._context.n_batch
        context, policy = self._context, self._policy
        worthwhile = policy.piece + len(self._active) if context.splits_batches else 0
        return mixed_tokens(self._rate, waiting, worthwhile, on_device=context.on_device, policy=policy)

    def _can_run(self) -> bool:
        """Return whether all sequences decode, past their planned checkpoints, and their last tokens can be cut."""
        context, active = self._context, self._active
        if self._suspects or self._exclusive or not context.cuts or self._slots.is_copying:
            return False
        if self._drafts != self._drafts_requested or len(active) > context.n_batch:
            return False
        if not all(sequence.is_plain for sequence in active):
            return False
        return len(active) == 1 or self._slots.make_room(len(active))

    def _has_drafts(self, n_sequences: int) -> bool:
        """Return whether a batch of `n_sequences` decoding sequences may hold drafts."""
        return self._drafts and not self._suspects and (n_sequences == 1 or not self._context.splits_batches)

    @property
    def _has_drafts_together(self) -> bool:
        """Whether a batch may hold drafts of one length for all sequences, which take one pass."""
        model = self._draft_model
        return self._drafts and not self._suspects and model is not None and model.drafts_together

    def _run(self, limit: RunLimit, emit: Emit | None) -> list[Event] | None:
        """Decode one or several tokens of each sequence, see decode_run.py; return None if the next step has drafts."""
        self._compact()
        running = sorted(self._active, key=_slot)
        self._sole_request = running[0].request if len(running) == 1 else None
        self._limit_threads()
        run = DecodeRun(self._context, running, self._window, self._clock, emit, self._time_steps)
        try:
            failure = run.decode(limit, self._slots, drafts=self._has_drafts(len(running)))
        except SequenceError as blamed:  # before the run
            return [self._fail(blamed.sequence, blamed.error)]
        if failure is None and not run.sampled:
            return None
        self._n_batches += len(run.sampled)
        if run.sampled:
            self._rate.record(0, run.decode_seconds[-1])
            self._decoded += run.account(self._slots)
        for row, ending in run.ended.items():
            sequence, error = running[row], ending.error
            if sequence.is_closing and not ending.reason and error is None:
                self._close_reasoning(sequence, run.events)
                continue
            run.events += [self._fail(sequence, error)] if error else self._finish(sequence, *ending[1:3])
            if failure is not None:  # it may have written a cell
                self._slots.truncate(sequence.slot, self._slots.length(sequence.slot))
        left = [sequence for row, sequence in enumerate(running) if row not in run.ended]
        if failure is not None and left:
            parts = [BatchPart(sequence, sequence.n_cached, range(0)) for sequence in left]
            run.events += self._roll_back(parts, failure)
        return run.events

    def _roll_back(self, parts: list[BatchPart], error: Aborted | CacheFull | LlmrunError) -> list[Event]:
        """Undo a batch that failed: cut the KV cache back, so that its tokens are computed again."""
        drafted = any(part.sequence.draft for part in parts)
        for part in parts:
            part.sequence.draft = []
            self._truncate(part.sequence, part.sequence.n_cached)
        if drafted or isinstance(error, Aborted):
            self._drafts = self._drafts_requested and isinstance(error, Aborted)
            return []
        if isinstance(error, CacheFull):
            return self._relieve_full_cache()
        if len(parts) == 1:
            return [self._fail(parts[0].sequence, error)]
        self._suspects = [part.sequence for part in parts]
        return []

    def _relieve_full_cache(self) -> list[Event]:
        """Free cells before the batch is tried again: the KV cache was full sooner than counted."""
        if self._slots.evict():
            return []
        if len(self._active) > 1:
            self._preempt()
            return []
        return self._end_without_cells(self._active[0])

    def _end_without_cells(self, sequence: Sequence) -> list[Event]:
        if sequence.n_completion:
            return self._finish(sequence, "length")
        what = f"the KV cache has no room for a prompt of {sequence.n_prompt:,} tokens"
        return [self._fail(sequence, ContextOverflowError(what, hint="shorten it"))]

    def _advance(self, parts: list[BatchPart], seconds: float) -> list[Event]:
        """Account for a decoded batch, and sample the next token of each sequence that has logits."""
        progress: list[PrefillProgress] = []
        sampling: list[BatchPart] = []
        for part in parts:
            sequence, end, rows = part
            start, tokens = sequence.n_cached, sequence.tokens[sequence.n_cached : end]
            sequence.n_cached = end
            if sequence.draft:
                tokens += sequence.draft
                sequence.n_fed = end
                sequence.n_drafted += len(sequence.draft)
                sequence.drafts.append((sequence.n_completion, tuple(sequence.draft)))
                sequence.n_model_drafted += len(sequence.draft) * sequence.has_model_draft
            self._slots.append(sequence.slot, tokens)
            sequence.metrics.record_decode(seconds)
            self._prefilled += max(0, min(end, sequence.n_prompt) - start)
            if rows:
                sampling.append(part)
                sequence.n_steps += 1
            if not sequence.n_completion:
                n_tokens = end - sequence.n_reused
                progress.append(PrefillProgress(sequence.request, n_tokens, sequence.metrics.prefill_seconds))
        if self._is_ahead:  # what was computed meanwhile is the batch before
            progress, self._progress = [event for event in self._progress if self._is_active(event.request)], progress
        else:
            self._progress = []  # what is computed now is after it
        events: list[Event] = [*progress]
        self._drafts = self._drafts_requested
        if sampling and self._suspects:
            del self._suspects[0]
        while sampling:  # again, for sequences whose draft was right so far
            sampled = zip(sampling, self._sample(sampling), strict=True)
            sampling = [part for part, token in sampled if self._accept(part.sequence, token, events)]
        return events

    def _is_active(self, request: int) -> bool:
        return any(sequence.request == request for sequence in self._active)

    def _sample(self, parts: list[BatchPart]) -> list[int | Exception]:
        """Return the next token of each sequence, or why it has none."""
        samplers = [part.sequence.sampler for part in parts]
        addresses = [self._context.logits(rows[len(sequence.tokens) - end]) for sequence, end, rows in parts]
        refused = [part.sequence.refused.get(len(part.sequence.tokens), ()) for part in parts]
        self._decoded += len(parts)
        return sample_rows(samplers, addresses, refused)

    def _accept(self, sequence: Sequence, token: int | Exception, events: list[Event]) -> bool:
        """Append a sampled token; return whether the batch holds the next logits too, because it was drafted."""
        if isinstance(token, Exception):
            events.append(self._fail(sequence, token))
            continues = False
        else:
            continues = self._append_with_forced(sequence, token, events)
        if not sequence.draft:
            return False
        if continues:
            sequence.n_cached = sequence.n_fed + sequence.n_verified
            if sequence.n_cached == len(sequence.tokens):
                return True
        sequence.end_draft()
        if self._slots.length(sequence.slot) > sequence.n_cached:
            self._truncate(sequence, sequence.n_cached)
        return False

    # ---- an answer -----------------------------------------------------------------------------------------

    def _append_with_forced(self, sequence: Sequence, token: int | None, events: list[Event]) -> bool:
        """Append a sampled token, if any, and those forced after it; return False if it finished or lost tokens."""
        try:
            if token is not None and not self._append(sequence, token, events):
                return False
            for forced in self._forced(sequence):
                sequence.sampler.follow(forced)
                if not self._append(sequence, forced, events):
                    return False
        except Exception as error:  # its text, constraint or splitter: neighbours go on
            events.append(self._fail(sequence, error))
            return False
        return True

    def _forced(self, sequence: Sequence) -> list[int]:
        """Return the tokens that follow without sampling: the grammar's, or the end of the reasoning."""
        thinking = sequence.thinking
        if sequence.must_close:
            closing = sequence.close_reasoning()
        elif thinking is not None and thinking.is_used_up:
            closing = thinking.closing
        else:
            return sequence.sampler.forced()
        tokens = self._vocabulary.tokenize(closing, special=True, begins=False)
        while tokens and self._vocabulary.is_end(tokens[-1]):  # an empty line ends RWKV's answers
            tokens.pop()
        return tokens

    def _close_reasoning(self, sequence: Sequence, events: list[Event]) -> None:
        """Close the reasoning of a sequence whose run has ended because the reasoning may not go on."""
        if self._slots.length(sequence.slot) > sequence.n_cached:
            self._truncate(sequence, sequence.n_cached)
        if sequence.drafting is not None:
            sequence.drafting.rewind(sequence, len(sequence.tokens))
        self._append_with_forced(sequence, None, events)

    def _append(self, sequence: Sequence, token: int, events: list[Event]) -> bool:
        """Append one token to the answer; return whether another one may follow."""
        reason, detail = sequence.append(token, self._vocabulary, self._window, self._clock(), events)
        if sequence.text.banned:
            # The last remaining token is decoded once more, for the logits after it.
            remaining = sequence.retract(sequence.text.step_back())
            self._truncate(sequence, min(sequence.n_cached, remaining - 1))
            return False
        if reason:
            events += self._finish(sequence, reason, detail)
        return not reason

    def _finish(self, sequence: Sequence, reason: str, detail: str = "") -> list[Event]:
        """Remove a sequence, and return the events of its end."""
        self._remove(sequence)
        try:
            return self._last_events(sequence, reason, detail)
        except Exception as error:
            return [Failed.of(as_llmrun_error(error), sequence.request)]

    def _last_events(self, sequence: Sequence, reason: str, detail: str) -> list[Event]:
        rest: list[Event] = [*sequence.last_deltas(sequence.text.finish(), is_cut_off=reason != "stop")]
        stats = sequence.stats(self._window, self._threads_in_use)
        finished = Finished(sequence.request, reason, stats, detail, tuple(sequence.drafts))
        if sequence.turn is not None and reason == "stop" and not sequence.text.stopped_by:
            sequence.turn.finish(finished, sequence.tokens)
        return [*rest, finished]

    def _fail(self, sequence: Sequence, error: Exception) -> Failed:
        self._slots.truncate(sequence.slot, 0)  # before it is parked
        self._remove(sequence)
        return Failed.of(as_llmrun_error(error), sequence.request)

    def _truncate(self, sequence: Sequence, length: int) -> None:
        """Cut a sequence's KV cache to its first tokens; the rest was retracted or only half written."""
        sequence.n_cached = self._slots.truncate(sequence.slot, length)
        sequence.n_reused = min(sequence.n_reused, sequence.n_cached)

    # ---- finished answers ----------------------------------------------------------------------------------

    def save(self, request: int, *, prompt_only: bool) -> tuple[int, int]:
        """Save the KV state of a finished answer for later prompts with the same prefix.

        Args:
            prompt_only: leave the answer out, because other questions will follow the same prompt.

        Returns:
            The numbers of tokens and bytes saved; zeros without a store, or if the store is too small.

        Raises:
            UsageError: another answer has taken its slot.
            OSError: the file can't be written.
        """
        sequence = self.finished(request)
        if prompt_only:
            self._slots.truncate(sequence.slot, sequence.n_prompt)
        return self._slots.save(sequence.slot)

    def finished(self, request: int) -> Sequence:
        """Return a finished answer whose KV state is still there.

        Raises:
            UsageError: another answer has taken its slot since.
        """
        for sequence in self._finished.values():
            if sequence.request == request:
                return sequence
        raise UsageError("the KV cache of that answer is gone")

    def explainable(self, request: int) -> Sequence:
        """Return a finished answer that can be explained: other answers may have taken its slot since.

        Raises:
            UsageError: several answers that remember their choices have finished since.
        """
        return self._explainable.get(request) or self.finished(request)
