"""The one generation loop: schedule, decode, sample, emit. One user is a batch of one.

Owns which sequences run and which wait; must not know pipes, templates or llama.cpp.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Callable, Collection
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from llmrun.engine.core.batch import Batch, BatchPart, Spare, fill
from llmrun.engine.core.metrics import Metrics, PrefillRate
from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.core.sampler import SequenceSampler, sample_rows
from llmrun.engine.core.scheduler import PIECE, mixed_tokens, schedule
from llmrun.engine.core.sequence import Extras, Sequence
from llmrun.engine.core.slots import Slots
from llmrun.engine.core.steps import measure_steps
from llmrun.engine.core.text import TextStream
from llmrun.engine.core.turns import Turns
from llmrun.engine.llama.base import Aborted, Context, NoRoom
from llmrun.errors import ContextOverflowError, LlmrunError, UsageError
from llmrun.protocol.condition import Condition
from llmrun.protocol.messages import Event, Failed, Finished, PrefillProgress
from llmrun.protocol.params import Limits
from llmrun.protocol.speculation import StepTables

if TYPE_CHECKING:
    from llmrun.engine.core.draft_model import DraftModel
    from llmrun.engine.core.states import KVStore
    from llmrun.engine.core.stowed import StowedPrefix

_WORTH_WAITING = 64  # tokens of a prompt that another one is about to compute
_CHOICE = 8  # of so many that wait, the one whose prompt is known best gets in (a batch comes in the best order) ...
_MOST_PASSED = 8  # ... but nobody is passed over more often
_PLAIN = Extras()
_age = attrgetter("number")


class Engine:
    """Answers any number of requests at once, as many in parallel as there are slots and cells in the KV cache.

    Whoever came first is never held up by those who came later: where cells run out, the youngest goes back to the
    front of the queue, and answers as if that had never happened.

    Attributes:
        can_draft: whether it ever verifies drafts.
        prefixes: gives copies of what the KV cache holds, see Slots.prefixes().
    """

    def __init__(
        self,
        context: Context,
        clock: Callable[[], float] = time.perf_counter,
        states: KVStore | None = None,
        draft_model: DraftModel | None = None,
        *,
        exact: bool = False,
        throughput: bool = False,
        adapts: bool = False,
        prefixes: list[StowedPrefix] | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            context: what computes logits.
            clock: seconds, monotonic.
            states: KV states saved on disk, where a prompt's beginning may be found.
            draft_model: guesses tokens for those that want it.
            exact: each answer is bit for bit what it would be alone: sequences take turns, and nothing is drafted.
            throughput: as in loading.Load.
            adapts: requests may choose adapters.
            prefixes: prefixes() of the engine that these weights had before.
        """
        self.can_draft, self._throughput = context.cuts and not exact, throughput
        self._drafts_wanted = False  # some request may have drafts
        self._drafts = False  # the next batch may: one that failed is tried again without
        self._context, self._draft_model = context, draft_model
        self._turns = Turns(context, exact=exact) if exact or adapts else None
        self._vocabulary = context.vocabulary
        self._window = min(context.n_ctx, context.n_cells)
        self._clock = clock
        self._slots = Slots(context, states, exact=exact, prefixes=prefixes or ())
        self.prefixes = self._slots.prefixes
        self._numbers = itertools.count()
        self._active: list[Sequence] = []  # in the order in which they came
        self._waiting: list[Sequence] = []  # in that order too
        self._suspects: list[Sequence] = []  # of a batch that failed: each is computed alone, to see whose fault it was
        self._crowded = False  # there were no cells for somebody: nobody gets in before somebody has left
        self._cancelled = False
        self._ended: dict[int, Sequence] = {}  # slot -> the answer that ended there last
        self._alone: int | None = None  # the request that had the last batch for itself
        self._rate = PrefillRate()
        self._n_batches = 0
        self._prefix_queries = self._prefix_hits = self._prefilled = self._decoded = 0  # tokens, since the beginning

    @property
    def busy(self) -> bool:
        """Whether step() has something to do."""
        return bool(self._active or self._waiting)

    def alone(self, request: int) -> bool:
        """Whether a batch that runs now is only this request's. Safe from any thread."""
        return self._alone == request

    def condition(self, request: int, waiting: int = 0) -> Condition:
        """How busy it is. Safe from any thread.

        Args:
            request: that asks for it.
            waiting: how many answers nobody has given to add() yet.
        """
        room = self._slots.room
        return Condition(
            request,
            running=len(self._active),
            waiting=waiting + len(self._waiting),
            cells=room.n_cells,
            cells_used=room.used,
            cells_shared=room.shared,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prefilled=self._prefilled,
            decoded=self._decoded,
        )

    def add(
        self,
        request: int,
        prompt: list[int],
        sampler: SequenceSampler,
        limits: Limits,
        extras: Extras = _PLAIN,
    ) -> None:
        """Take a request; step() answers it.

        Args:
            request: the caller's number for it; events name it.
            prompt: token ids, at least one.
            sampler: chooses its tokens; made for this prompt.
            limits: when the answer ends, and what it must not say.
            extras: what else is wanted.

        Raises:
            ContextOverflowError: the prompt alone is longer than the context window.
        """
        if len(prompt) > self._window:
            raise ContextOverflowError(
                f"the prompt is {len(prompt):,} tokens long, the context window {self._window:,}",
                hint="shorten it, or ask for a larger context window with --ctx",
            )
        if extras.drafting is not None and self.can_draft:
            self._drafts = self._drafts_wanted = True
        text, metrics = TextStream(limits.stop, limits.ban), Metrics(self._clock())
        number = next(self._numbers)
        self._waiting.append(
            Sequence(number, request, list(prompt), len(prompt), sampler, text, limits, metrics, extras)
        )

    def cancel(self, request: int) -> None:
        """Let a request end at the next step(), if it still runs."""
        for sequence in (*self._active, *self._waiting):
            if sequence.request == request:
                sequence.cancelled = self._cancelled = True

    def step(self) -> list[Event]:
        """Say who begins or was cancelled; if nobody, run one batch through the model and say what came of it."""
        events = self._drop_cancelled() + self._admit() if self._cancelled or self._waiting else []
        if events or not self._active:
            return events
        parts, batch = self._next_batch()
        self._n_batches += 1
        began = self._clock()
        try:
            self._context.decode(batch)
        except (Aborted, NoRoom, LlmrunError) as error:
            return self._undo(parts, error)
        seconds = self._clock() - began
        if isinstance(batch, list) and len(batch) >= len(parts) + PrefillRate.LEAST:
            self._rate.computed(len(batch), seconds)
        return self._computed(parts, seconds)

    # ---- who runs ------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> list[Event]:
        self._cancelled = False
        gone = [sequence for sequence in (*self._active, *self._waiting) if sequence.cancelled]
        return [event for sequence in gone for event in self._finish(sequence, "cancelled")]

    def _admit(self) -> list[Event]:
        """Give slots to those who wait, as far as the KV cache has room for their prompts."""
        events: list[Event] = []
        while (sequence := self._next_in()) is not None:
            self._waiting.remove(sequence)
            extras = sequence.extras
            slot, kept = self._slots.take(sequence.tokens, sequence.n_prompt, extras.salt, moves=extras.moves)
            self._ended.pop(slot, None)
            first = not sequence.admitted
            sequence.admit(slot, kept)
            insort(self._active, sequence, key=_age)
            if first:
                self._prefix_queries += sequence.n_prompt
                self._prefix_hits += kept
                events.append(sequence.started())
        return events

    def _next_in(self) -> Sequence | None:
        """Who of those that wait gets in: of the first that may, the one of whose prompt most is known."""
        alone = not self._active
        if not self._waiting or (not alone and (self._crowded or self._suspects)):
            return None
        ready: list[tuple[int, Sequence]] = []
        seats = self._context.n_seq_max - len(self._active)
        for sequence in self._waiting:
            if not seats or len(ready) == (1 if self._throughput else _CHOICE):
                break
            known = self._slots.known(sequence.tokens, sequence.extras.salt)
            sequence.held = self._is_being_computed(sequence, known)
            if sequence.held:
                seats -= 1  # one is kept for it
            else:
                ready.append((known, sequence))
        if not ready:
            return None
        chosen = ready[0][1]
        if chosen.passed < _MOST_PASSED:
            chosen = max(ready, key=itemgetter(0))[1]
        pending = [active.n_waiting for active in self._active]
        if not alone and not self._slots.admits(chosen.tokens, chosen.extras.salt, sum(pending)):
            self._crowded = sum(pending) == len(pending)  # until then, what others prefill may be its beginning too
            return None
        for _, sequence in ready:
            sequence.passed += sequence.number < chosen.number
        return chosen

    def _is_being_computed(self, sequence: Sequence, known: int) -> bool:
        """Whether much more of its prompt than is known is about to be, or all. It waits until that can be shared."""
        least = known + (1 if sequence.held else max(1, min(_WORTH_WAITING, len(sequence.tokens) - known - 1)))
        return self._context.shares and any(
            active.n_waiting > 1
            and active.extras.salt == sequence.extras.salt
            and common_prefix(active.tokens, sequence.tokens) >= least
            for active in self._active
        )

    def _preempt(self) -> None:
        """Send the youngest back to those that wait, with all but its part of the KV cache; it is next."""
        sequence = self._active.pop()
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        self._slots.truncate(sequence.slot, 0)
        self._slots.release(sequence.slot)
        insort(self._waiting, sequence, key=_age)
        sequence.passed = _MOST_PASSED
        self._crowded = True

    def _leave(self, sequence: Sequence) -> None:
        sequence.end()
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        self._active.remove(sequence)
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        self._slots.release(sequence.slot)
        self._ended[sequence.slot] = sequence
        self._crowded = False

    # ---- a batch -------------------------------------------------------------------------------------------

    def _next_batch(self) -> tuple[list[BatchPart], Batch]:
        """Whose tokens are computed next; there are cells for all of them.

        In the order of slots: recurrent models need that, and slots in a row are not split into several passes.
        """
        for source, target in self._slots.close_gap():
            next(each for each in self._active if each.slot == source).slot = target
            self._ended.pop(target, None)
        while True:
            running, n_batch = self._suspects[:1] or self._active, self._context.n_batch
            if self._turns is not None:
                running, n_batch = self._turns.next(running, self._active, self._n_mixed)
            waiting = [sequence.n_ready for sequence in running]
            shares = schedule(waiting, n_batch, self._n_mixed(sum(waiting)), self._n_batches)
            if self._slots.make_room(sum(shares)) or len(self._active) == 1:
                break
            self._preempt()
        chosen = [(sequence, share) for sequence, share in zip(running, shares, strict=True) if share]
        if len(chosen) > 1:
            chosen.sort(key=lambda pair: pair[0].slot)
        spare = None
        if self._drafts and not self._suspects and (len(chosen) == 1 or self._context.unified):
            spare = Spare.of(self._context, self._slots.room, sum(shares), self._window)
        parts, batch = fill(chosen, spare, self._draft_model)
        self._alone = parts[0].sequence.request if len(parts) == 1 else None
        return parts, batch

    def _n_mixed(self, n_waiting: int) -> int:
        """How many tokens a batch may have in which some decode and some prefill."""
        if self._throughput:
            return self._context.n_batch
        return mixed_tokens(self._rate, n_waiting, 0 if self._context.unified else PIECE + len(self._active))

    def _undo(self, parts: list[BatchPart], error: Aborted | NoRoom | LlmrunError) -> list[Event]:
        """A batch did not go through. What was half written goes; its tokens wait again."""
        drafted = any(part.sequence.draft for part in parts)
        for part in parts:
            part.sequence.draft = []
            self._keep(part.sequence, part.sequence.n_cached)
        if drafted or isinstance(error, Aborted):
            self._drafts = self._drafts_wanted and isinstance(error, Aborted)
            return []
        if isinstance(error, NoRoom):
            return self._give_way()
        if len(parts) == 1:
            return [self._fail(parts[0].sequence, error)]
        self._suspects = [part.sequence for part in parts]
        return []

    def _give_way(self) -> list[Event]:
        """The KV cache was full sooner than its cells said: somebody has to go before the batch is tried again."""
        n_cells, room = self._context.n_cells, self._slots.room
        if n_cells < room.n_cells:  # it could not grow as far as it was meant to
            room.n_cells = n_cells
            self._window = min(self._window, n_cells)
            return []
        if self._slots.evict():
            return []
        if len(self._active) > 1:
            self._preempt()
            return []
        sequence = self._active[0]
        if sequence.n_completion:
            return self._finish(sequence, "length")
        what = f"the KV cache has no room for a prompt of {sequence.n_prompt:,} tokens"
        return [self._fail(sequence, ContextOverflowError(what, hint="shorten it"))]

    def _computed(self, parts: list[BatchPart], seconds: float) -> list[Event]:
        """A batch went through the model: draw the next tokens of those who have logits."""
        events: list[Event] = []
        drawing: list[BatchPart] = []
        for part in parts:
            sequence, end, rows = part
            start, tokens = sequence.n_cached, sequence.tokens[sequence.n_cached : end]
            sequence.n_cached = end
            if sequence.draft:
                tokens += sequence.draft
                sequence.n_fed = end
                sequence.n_drafted += len(sequence.draft)
            self._slots.append(sequence.slot, tokens)
            sequence.metrics.computed(seconds)
            self._prefilled += max(0, min(end, sequence.n_prompt) - start)
            if rows:
                drawing.append(part)
                sequence.n_steps += 1
            elif not sequence.n_completion:
                progress = PrefillProgress(sequence.request, end - sequence.n_reused, sequence.metrics.prefill_seconds)
                events.append(progress)
        self._drafts = self._drafts_wanted
        if drawing and self._suspects:
            del self._suspects[0]
        while drawing:
            drawn = zip(drawing, self._draw(drawing), strict=True)
            drawing = [part for part, token in drawn if self._take(part.sequence, token, events)]
        return events

    def _draw(self, parts: list[BatchPart]) -> list[int | LlmrunError]:
        """The next token of each, from the logits behind those that it has."""
        samplers: list[SequenceSampler] = []
        addresses: list[int] = []
        refused: list[Collection[int]] = []
        for sequence, end, rows in parts:
            n_tokens = len(sequence.tokens)
            samplers.append(sequence.sampler)
            addresses.append(self._context.logits(rows[n_tokens - end]))
            refused.append(sequence.refused.get(n_tokens, ()))
        self._decoded += len(parts)
        return sample_rows(samplers, addresses, refused)

    def _take(self, sequence: Sequence, token: int | LlmrunError, events: list[Event]) -> bool:
        """Take what was drawn; whether the batch has logits for the next token too, because this one was drafted."""
        if isinstance(token, LlmrunError):
            events.append(self._fail(sequence, token))
            goes_on = False
        else:
            goes_on = self._follow(sequence, token, events)
        if not sequence.draft:
            return False
        if goes_on:
            sequence.n_cached = sequence.n_fed + sequence.n_verified
            if sequence.n_cached == len(sequence.tokens):
                return True
        sequence.end_draft()
        if len(self._slots.cached[sequence.slot]) > sequence.n_cached:
            self._keep(sequence, sequence.n_cached)
        return False

    # ---- an answer -----------------------------------------------------------------------------------------

    def _follow(self, sequence: Sequence, token: int, events: list[Event]) -> bool:
        """Take the token that was drawn, and those forced behind it, which need no logits; whether others may follow.

        They may not where the answer ended, or some of it was taken back.
        """
        try:
            goes_on = self._grow(sequence, token, events)
            for forced in self._forced(sequence) if goes_on else ():
                sequence.sampler.follow(forced)
                if not self._grow(sequence, forced, events):
                    return False
        except LlmrunError as error:
            events.append(self._fail(sequence, error))
            return False
        return goes_on

    def _forced(self, sequence: Sequence) -> list[int]:
        """The tokens that come next without being drawn: the grammar's, or those that end a thought."""
        thinking = sequence.extras.thinking
        if thinking is not None and thinking.used_up:
            return self._vocabulary.tokenize(thinking.closing, special=True)
        return sequence.sampler.forced()

    def _grow(self, sequence: Sequence, token: int, events: list[Event]) -> bool:
        """The answer has one more token; whether another one may follow it."""
        vocabulary, extras = self._vocabulary, sequence.extras
        sequence.tokens.append(token)
        sequence.metrics.sampled(self._clock())
        if vocabulary.is_end(token):
            events += self._finish(sequence, "stop")
            return False
        stream = sequence.text
        text = stream.push(vocabulary.control_piece(token) if token in extras.shown else vocabulary.piece(token))
        if extras.logprobs is not None and sequence.sampler.logprob is not None:
            extras.logprobs.push(sequence.sampler.logprob, stream.decoded)
        if text:
            events.append(sequence.delta(text))
        if stream.banned:
            # The last token that stays goes through the model once more, for the logits behind it.
            left = sequence.retract(stream.step_back())
            self._keep(sequence, min(sequence.n_cached, left - 1))
            return False
        reason, detail = sequence.end_reason(text, self._window)
        if reason:
            events += self._finish(sequence, reason, detail)
        return not reason

    def _finish(self, sequence: Sequence, reason: str, detail: str = "") -> list[Event]:
        self._leave(sequence)
        rest = sequence.text.finish()
        finished = Finished(sequence.request, reason, sequence.stats(self._window), detail)
        return [sequence.delta(rest), finished] if rest else [finished]

    def _fail(self, sequence: Sequence, error: LlmrunError) -> Failed:
        self._leave(sequence)
        self._slots.truncate(sequence.slot, 0)
        return Failed.of(error, sequence.request)

    def _keep(self, sequence: Sequence, length: int) -> None:
        """Cut a sequence's KV cache to its first tokens: what came after was taken back, or half written."""
        sequence.n_cached = self._slots.truncate(sequence.slot, length)
        sequence.n_reused = min(sequence.n_reused, sequence.n_cached)

    # ---- afterwards ----------------------------------------------------------------------------------------

    def save(self, request: int, *, prompt_only: bool) -> tuple[int, int]:
        """Save the KV state of an answer that ended, for prompts that begin like it.

        Args:
            request: the answer's.
            prompt_only: leave the answer out, because other questions will follow the prompt's beginning.

        Returns:
            How many tokens were saved, in how many bytes; none without a store, or one that is too small.

        Raises:
            UsageError: another answer has taken its slot.
            OSError: it can't be written.
        """
        sequence = self.ended(request)
        if prompt_only:
            self._slots.truncate(sequence.slot, sequence.n_prompt)
        return self._slots.save(sequence.slot)

    def measure_steps(self, interrupted: Callable[[], bool]) -> StepTables:
        """How long decode steps of several widths take; nothing where somebody is answered, or it is interrupted."""
        if self.busy or not self.can_draft:
            return StepTables()
        return measure_steps(self._context, self._slots, self._draft_model, self._clock, interrupted)

    def ended(self, request: int) -> Sequence:
        """An answer that ended; raises UsageError where another one has taken its slot since."""
        for sequence in self._ended.values():
            if sequence.request == request:
                return sequence
        raise UsageError("nothing is remembered about that answer")
