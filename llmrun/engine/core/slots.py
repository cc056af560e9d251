"""The slots of the KV cache: their contents, and the choice of a slot for each prompt.

Owns every change of the KV cache except decode(), so that its record of cached tokens is always true. Idle slots hold
the parked prefixes. Must not know the waiting requests.

A parked prefix that has to leave the cache is copied to host memory, the oldest copies making room, so that the request
of a sub-agent or for a title does not cost the main conversation its prefill. Copies take what the plan has for them,
and what it has for cells that were never used: a conversation that fills the cache leaves nothing of that. To the disk,
a state goes without a copy.

While sequences run, they would wait for a copy: it is made in pieces between their steps, before the prompt that needs
the room is admitted. From a device nothing is copied then, because a copy saves it little: a prefix that is evicted is
forgotten, unless it was copied before, while the engine rested. Within the cache, what is copied for a new sequence
takes far less time than the prefill that it saves.

Prefixes also leave the cache where sequences share cells and a processor computes: every row of a batch reads every
used cell, if only to mask it, so parked conversations slow all answers down (16 of 300 tokens each slow 8 answers down
by half).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from llmrun.engine.core.cell_budget import CellBudget
from llmrun.engine.core.checkpoints import Checkpoints, bytes_of, first_end, most_useful, turn_end
from llmrun.engine.core.metrics import PrefillRate
from llmrun.engine.core.policy import POLICY, Policy
from llmrun.engine.core.prefix import Prefix, Salt, common_prefix, gap_after, longest, reusable
from llmrun.engine.llama.base import Context, all_of
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import PromptDifference

if TYPE_CHECKING:
    from llmrun.engine.core.states import KVStore, StateSource

_SHOWN = 12  # tokens of a difference


class Slots:
    """The slots of a context, and copies of parked prefixes in host memory.

    Attributes:
        slots: in order of their numbers.
        saver: writes shared and evicted prefixes to disk; None without a store.
    """

    def __init__(
        self,
        context: Context,
        states: KVStore | None = None,
        rate: PrefillRate | None = None,
        prefixes: Sequence[Prefix] | None = None,
        policy: Policy = POLICY,
        *,
        copy_bytes: int = sys.maxsize,
        cell_bytes: int = 0,
    ) -> None:
        """Start with empty slots.

        Args:
            prefixes: from prefixes() of another context with the same weights.
            copy_bytes, cell_bytes: as in Load.
        """
        self._rate = rate or PrefillRate()
        self._context, self._policy = context, policy
        self._states = states
        self.saver = states.background_saver(policy.min_saved) if states is not None else None
        self.slots = [Prefix(slot=number) for number in range(context.n_seq_max + context.n_parked)]
        self._copies = [*(prefixes or ())]  # the oldest first
        self.budget = CellBudget(context.n_cells, shares_cells=context.shares_cells)
        self._copy_bytes, self._cell_bytes = copy_bytes, cell_bytes
        self._piece_bytes = 0 if context.on_device else policy.piece_bytes
        # What copies a parked slot, a piece at each step of others; the slot, its last use and length.
        self._copying: tuple[Iterator[object], Prefix, int, int] | None = None
        self.checkpoints = Checkpoints(context, self.slots, policy)
        self._n_releases = 0
        self._n_split_steps = 0  # consecutive steps with gaps between the slots of running sequences

    @property
    def cached(self) -> dict[int, Sequence[int]]:
        """Slot -> the tokens whose keys and values it holds."""
        return {slot.slot: slot.tokens for slot in self.slots}

    def length(self, slot: int) -> int:
        """Return the number of tokens that a slot holds."""
        return len(self.slots[slot].tokens)

    @property
    def _idle(self) -> list[Prefix]:
        return [slot for slot in self.slots if not slot.is_running]

    def _everywhere(self) -> list[Prefix]:
        """Return all prefixes in memory; for any thread."""
        return [*self.slots, *self._copies]

    # ---- search --------------------------------------------------------------------------------------------

    def _longest(self, tokens: Sequence[int], salt: Salt, prefixes: Iterable[Prefix]) -> tuple[Prefix, int]:
        """Return the prefix of which a prompt can reuse most, and how many tokens; an empty one if there are none."""
        return longest(prefixes, tokens, salt, self._reach if self._context.has_checkpoints else None)

    def _reach(self, prefix: Prefix, length: int) -> int:
        """Return to how many of its first `length` tokens a prefix can be cut."""
        cuts = self._context.can_forget(prefix.slot, length) if prefix.slot >= 0 else not self._context.has_checkpoints
        return prefix.reach(length, cuts=cuts)

    def cached_prefix(self, tokens: list[int], salt: Salt) -> int:
        """Return the number of first tokens that need no prefill: an estimate, without those on disk."""
        slots = self.slots if self._context.can_copy else self._idle
        return self._longest(tokens, salt, (*slots, *self._copies))[1]

    def difference(self, tokens: list[int], salt: Salt) -> PromptDifference | None:
        """Return the first difference of a prompt from the most similar cached one, for a server's figures."""
        if not self._context.can_copy:
            return None
        found, length = longest(self._everywhere(), tokens, salt)
        if length < self._policy.min_reused or self._is_next_turn(found, tokens):
            return None
        return PromptDifference(
            length, *(self._text(each, length) for each in (found.tokens[: found.n_prompt], tokens))
        )

    def _text(self, tokens: Sequence[int], start: int) -> str:
        ids = (token for token in tokens[start : start + _SHOWN] if token >= 0)  # images and audio have others
        return b"".join(map(self._context.vocabulary.piece, ids)).decode(errors="replace")

    def _is_next_turn(self, prefix: Prefix, tokens: list[int]) -> bool:
        """Return whether a prompt repeats or continues a cached prompt, whose answer it may have changed."""
        same = common_prefix(prefix.tokens, tokens)
        return same > 0 and same >= min(len(tokens) - 1, self._turn_end(prefix.tokens[: prefix.n_prompt]))

    def _turn_end(self, prompt: Sequence[int]) -> int:
        return turn_end(prompt, self._context.vocabulary.is_end)

    def _has_unique_prefix(self, slot: Prefix, length: int = 0) -> bool:
        """Return whether a slot holds tokens that are cached nowhere else, and whose prefill would be noticed.

        Args:
            length: the first tokens that it keeps.
        """
        others = [prefix for prefix in self._everywhere() if prefix is not slot]
        shared = max(length, self._longest(slot.tokens, slot.salt, others)[1])
        unnoticed = self._rate.tokens_within(self._policy.pause_seconds)
        return len(slot.tokens) - shared >= max(self._policy.min_reused, unnoticed)

    # ---- room ----------------------------------------------------------------------------------------------

    def admits(self, tokens: list[int], salt: Salt, pending: int) -> bool:
        """Return whether the cells can hold these tokens beside the running sequences.

        Args:
            pending: tokens that running sequences still have to prefill.
        """
        if not self._context.can_copy:
            return True
        source, shared = self._longest(tokens, salt, self.slots)
        if source.is_running and not self._context.shares_cells:
            shared = 0  # it is copied
        lengths = {} if source.is_running else {source.slot: shared}
        used = self.budget.count({source.slot, *(slot.slot for slot in self.slots if slot.is_running)}, lengths)
        return used + pending + len(tokens) - shared + self._spare <= self.budget.n_cells

    @property
    def _spare(self) -> int:
        """Cells that stay free at an admission."""
        return self.budget.n_cells // self._policy.spare_part

    def prepare(self, tokens: list[int], salt: Salt) -> bool:
        """Copy what a prompt will evict, in pieces while sequences run; return whether nothing is left to copy.

        While the engine rests, take() copies it at once.
        """
        if self._is_resting or not self._piece_bytes:
            return True
        slot, source, shared = self._choose(tokens, salt)
        length = self._reusable(slot, tokens, salt)
        if source is not slot or slot.salt != salt or not self._is_next_turn(slot, tokens):
            self._keep(slot, length if source is slot else 0, in_pieces=True)
        if self._context.shares_cells:
            self.make_room(len(tokens) - max(length, shared) + self._spare, (slot, source), in_pieces=True)
        return not self.is_copying

    def prepare_growth(self) -> None:
        """Copy the next piece of a parked prefix that will be evicted: some prompt, or running sequences, need room."""
        if self.is_copying:
            self._copy_piece()
        elif self._context.shares_cells and self._piece_bytes:
            self.make_room(self._spare // 2, in_pieces=True)

    def make_room(self, n_tokens: int, kept: Collection[Prefix] = (), *, in_pieces: bool = False) -> bool:
        """Evict idle slots, least recently used first, until n_tokens more fit; return whether they fit.

        Args:
            kept: slots that stay.
            in_pieces: stop where the next one has to be copied first.
        """
        while not self.budget.admits(n_tokens):
            if not self.evict(kept, in_pieces=in_pieces):
                return False
        return True

    def evict(self, kept: Collection[Prefix] = (), *, in_pieces: bool = False) -> bool:
        """Empty the least recently used idle slot; return False if there is none, or while it is being copied."""
        parked = [slot for slot in self._parked() if slot not in kept]
        if not parked or not self._keep(parked[0], in_pieces=in_pieces):
            return False
        self._cut(parked[0], 0)
        return True

    def _parked(self) -> list[Prefix]:
        """Return idle slots that are not empty, least recently used first."""
        return sorted((slot for slot in self._idle if slot.tokens), key=attrgetter("last_used"))

    @property
    def _is_resting(self) -> bool:
        """No sequence runs."""
        return not any(slot.is_running for slot in self.slots)

    # ---- copies in host memory, and on disk ----------------------------------------------------------------

    def save_parked(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Queue what later prompts may continue for the disk: the last parked conversations, and shared prefixes.

        What is mostly there already is left out.

        Args:
            is_interrupted: checked between two copies, each of which delays a request that comes meanwhile.
        """
        for prefix in reversed([*self._copies, *self._parked()]):
            if (prefix.is_multi_turn or prefix.is_shared) and self._is_resting and not is_interrupted():
                self._save_soon(prefix, self._policy.most_saved)
        if self._states is not None:
            self._states.forget_ahead()

    def _save_soon(self, prefix: Prefix, most_saved: float = 1.0) -> None:
        """Write a prefix to the disk if that is worthwhile and the file will be kept."""
        if self.saver is None or prefix.salt.private:
            return
        kept = most_useful(prefix.checkpoints, self._policy.saved_checkpoints)
        n_bytes = self._state_bytes(prefix) + sum(len(checkpoint.state) for checkpoint in kept)
        if self.saver.accepts(prefix, n_bytes, most_saved):
            with suppress(LlmrunError, MemoryError):
                if self.saver.save(prefix.tokens, self._source(prefix), kept, owner=prefix.salt.owner):
                    prefix.n_saved = len(prefix.tokens)

    def _state_bytes(self, prefix: Prefix) -> int:
        return len(prefix.state) or self._context.state_bytes(prefix.slot)

    def _n_bytes(self, prefix: Prefix) -> int:
        """Return the bytes of a copy in host memory, with its checkpoints."""
        return self._state_bytes(prefix) + bytes_of([prefix.checkpoints])

    def _source(self, prefix: Prefix) -> StateSource:
        return prefix.state or partial(self._context.write_state, prefix.slot)

    def offload(self) -> bool:
        """Copy one parked prefix to host memory if that will help, and the engine rests; return whether it did.

        Where the processor shares cells, prefixes leave the cache until the remaining ones no longer slow running
        sequences down; the last one stays, because its next turn may follow. Else those are copied that the next
        prompts will evict, perhaps while others run. Where a device shares cells, nothing is copied before it has to
        leave: they lie scattered, and each is a transfer of its own.
        """
        context = self._context
        if not self._is_resting or not context.can_copy or (context.shares_cells and context.on_device):
            return False
        if self.is_copying:
            self._copy_piece()
            return True
        if context.shares_cells and self.budget.used > self._policy.cheap_cells:
            for slot in self._parked()[:-1]:
                freed = self.budget.used - self.budget.count(each.slot for each in self.slots if each is not slot)
                # Otherwise most of its cells are shared: they would stay.
                if 2 * freed > len(slot.tokens) and all_of(self._offload_copy(slot)):
                    self._cut(slot, 0)
                    return True
        if not all(slot.tokens for slot in self.slots):
            return False
        for slot in self._parked():
            if slot.copied_at != slot.last_used:  # once: copies may push one another out
                slot.copied_at = slot.last_used
                if self._has_unique_prefix(slot) and all_of(self._offload_copy(slot)):
                    return True
        return False

    def _give_up(self, slot: Prefix, length: int) -> int:
        """Cut as _cut() does, for another conversation; what would be lost is copied."""
        self._keep(slot, length)
        return self._cut(slot, length)

    def _keep(self, slot: Prefix, length: int = 0, *, in_pieces: bool = False) -> bool:
        """Copy a slot that will be cut to its first tokens, if anything is lost; return whether that is done.

        Args:
            in_pieces: copy only the next piece, while sequences run.
        """
        can_copy = self._is_resting or self._piece_bytes > 0
        if len(slot.tokens) <= length or not can_copy or not self._has_unique_prefix(slot, length):
            return True
        if not in_pieces:
            all_of(self._offload_copy(slot))
            return True
        if not self.is_copying:
            pieces = self._offload_copy(slot, self._piece_bytes)
            self._copying = pieces, slot, slot.last_used, len(slot.tokens)
            self._copy_piece()
        return not self.is_copying

    @property
    def is_copying(self) -> bool:
        """Whether a parked prefix is being copied in pieces."""
        return self._copying is not None

    def _copy_piece(self) -> None:
        """Copy the next piece, unless the slot has changed since the last one."""
        if self._copying is not None:
            pieces, slot, *before = self._copying
            has_changed = slot.is_running or before != [slot.last_used, len(slot.tokens)]
            if has_changed or next(pieces, True):
                self._copying = None

    def _offload_copy(self, slot: Prefix, piece_bytes: int = sys.maxsize) -> Generator[None, None, bool]:
        """Copy a parked slot's prefix to host memory, and discard the oldest ones there to make room.

        Args:
            piece_bytes: copied before each yield.

        Returns:
            Whether it was copied.
        """
        n_bytes = self._n_bytes(slot)
        if len(slot.tokens) < self._policy.min_reused or n_bytes > self._copy_limit():
            return False
        self._discard_copies(n_bytes)
        copy = yield from self._copy(slot, piece_bytes)
        if copy is None:
            return False
        for beginning in [each for each in self._copies if each.begins(copy)]:
            self._copies.remove(beginning)
            copy.is_multi_turn |= beginning.is_multi_turn
        self._copies.append(copy)
        self._discard_copies()
        return True

    def _discard_copies(self, n_bytes: int = 0) -> None:
        """Discard the oldest copies until `n_bytes` more fit; while the engine rests, save them to the disk."""
        limit = self._copy_limit() - n_bytes
        while self._copies and self.copied_bytes > limit:
            oldest = self._copies.pop(0)
            if oldest.is_multi_turn and self._is_resting:
                self._save_soon(oldest)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies in host memory, with their checkpoints."""
        return sum(len(copy.state) for copy in self._copies) + bytes_of(copy.checkpoints for copy in self._copies)

    def _copy(self, slot: Prefix, piece_bytes: int = sys.maxsize) -> Generator[None, None, Prefix | None]:
        """Copy a parked slot's prefix, yielding after each piece; return None if llama.cpp can't export it."""
        with suppress(LlmrunError, MemoryError):
            if state := (yield from self._context.state_in_pieces(slot.slot, piece_bytes)):
                tokens, checkpoints = [*slot.tokens], [*slot.checkpoints]
                return replace(slot, slot=-1, state=state, tokens=tokens, checkpoints=checkpoints, planned=set())
        return None

    def _copy_limit(self) -> int:
        """Return how many bytes copies in host memory may take: what the plan has for them, and for unused cells."""
        scattered = self._policy.scattered_batches * self._context.n_batch if self._context.shares_cells else 0
        unused = self.budget.n_cells - self.budget.touched - scattered
        return self._copy_bytes + self._cell_bytes * max(unused, 0)

    def prefixes(self) -> list[Prefix]:
        """Return copies of the parked prefixes, for another context with the same weights.

        The last used ones come first. Without memory for a copy, a prefix goes to the disk.
        """
        copies: list[Prefix] = []
        n_bytes = self.copied_bytes
        for slot in reversed(self._parked()):
            size = self._n_bytes(slot)
            if n_bytes + size > self._copy_limit():
                self._save_soon(slot, self._policy.most_saved)
            elif (copy := all_of(self._copy(slot))) is not None:
                copies.append(copy)
                n_bytes += size
        return [*self._copies, *reversed(copies)]

    # ---- the way of a slot ---------------------------------------------------------------------------------

    def take(self, tokens: list[int], n_prompt: int, salt: Salt, *, moves: bool) -> tuple[int, int]:
        """Assign an idle slot to a sequence, with as long a prefix of it as is cached anywhere.

        Args:
            salt: of its request; nothing with another salt is reused.
            moves: the conversation may have been truncated; what is cached after the gap may be moved.

        Returns:
            The slot, and the number of tokens that it holds.
        """
        shared = longest(self.slots, tokens, salt)[1] if self._context.has_checkpoints else 0
        if moves:
            any(self._close_gap(slot, tokens) for slot in self._idle if slot.salt == salt)
        slot, source, n_copied = self._choose(tokens, salt)
        if source is slot:
            if n_copied:
                self._give_up(slot, n_copied)
        elif not self._copy_prefix(source, slot, n_copied):
            slot, n_copied = self._longest(tokens, salt, self._idle)[0], 0
        is_copied = n_copied > 0
        is_elsewhere = self._restore(slot, tokens, salt)
        length = self._reusable(slot, tokens, salt)
        continues = slot.salt == salt and self._is_next_turn(slot, tokens)
        length = self._cut(slot, length) if is_elsewhere or continues else self._give_up(slot, length)
        slot.is_multi_turn = continues and not is_copied and n_prompt > slot.n_prompt
        slot.is_shared = is_copied or (continues and slot.is_shared)
        if self._context.shares_cells and self._is_resting:  # what has to go for this prompt can still be copied
            self.make_room(len(tokens) - length + self._spare, (slot,))
        slot.is_running, slot.n_prompt, slot.salt = True, n_prompt, salt
        if self._context.has_checkpoints:
            is_end, end = self._context.vocabulary.is_end, self._turn_end(tokens[:n_prompt])
            self.checkpoints.plan(slot, {first_end(tokens[:end], is_end), min(shared, end), end}, length)
        return slot.slot, length

    def release(self, slot: int) -> None:
        """Mark a slot as idle; its tokens stay, as a prefix for later prompts."""
        self._n_releases += 1
        self.slots[slot].is_running, self.slots[slot].last_used = False, self._n_releases

    def append(self, slot: int, tokens: list[int]) -> None:
        """Record that a batch has computed tokens, and make a checkpoint where one is due."""
        self._extend(self.slots[slot], tokens)
        self.checkpoints.record(self.slots[slot])

    def _extend(self, slot: Prefix, tokens: Sequence[int]) -> None:
        slot.tokens += tokens
        self._use_cells(slot, len(tokens))

    def _use_cells(self, slot: Prefix, n_tokens: int) -> None:
        touched = self.budget.touched
        self.budget.append(slot.slot, n_tokens)
        if self.budget.touched > touched:  # it has taken memory, perhaps that of the oldest copies
            self._discard_copies()

    def truncate(self, slot: int, length: int) -> int:
        """Cut a slot to its first tokens, to a checkpoint within them, or to none; return the number left."""
        return self._cut(self.slots[slot], length)

    def _cut(self, slot: Prefix, length: int) -> int:
        if not self._context.forget(slot.slot, length):
            length = self.checkpoints.go_back(slot, length)
        slot.cut(length)
        self.budget.cut(slot.slot, length)
        return length

    def plan_checkpoint(self, slot: int, length: int) -> None:
        """Plan a checkpoint in a prompt that is being prefilled, where a waiting prompt differs from it."""
        if self._context.has_checkpoints:
            self.slots[slot].planned.add(length)

    def until_checkpoint(self, slot: int, n_cached: int, n_tokens: int) -> int:
        """Return how many of n_tokens to decode next, so that a batch ends where a checkpoint is planned."""
        planned = self.slots[slot].planned
        if not planned:
            return n_tokens
        return min([n_tokens, *(length - n_cached for length in planned if length > n_cached)])

    def _set(self, slot: Prefix, copy: Prefix) -> bool:
        """Replace an empty slot by a state; return False, and leave it empty, if that fails."""
        with suppress(LlmrunError, MemoryError):  # it is only a cache
            if self._context.set_state(slot.slot, copy.state, len(copy.tokens)):
                self._extend(slot, copy.tokens)
                self.checkpoints.put(slot, copy.checkpoints)
                return True
        self._cut(slot, 0)  # a part may have been written
        return False

    def _choose(self, tokens: list[int], salt: Salt) -> tuple[Prefix, Prefix, int]:
        """Choose an idle slot for a prompt, and another one whose first tokens are to be copied into it.

        Returns:
            The slot, the one to copy from, or the slot itself, and the number of tokens that others have, too.
        """
        if not self._context.can_copy:
            slot, _ = self._longest(tokens, salt, self._idle)
            return slot, slot, 0
        source, shared = self._longest(tokens, salt, self.slots)
        if shared and not source.is_running and self._is_next_turn(source, tokens):
            return source, source, 0
        others = [slot for slot in self._idle if slot is not source] if shared else []
        slot = min(others or self._idle, key=self._cost)
        if slot is source or not shared:
            return slot, slot, 0
        if not self._context.shares_cells and self._longest(tokens, salt, [slot])[1] == shared:
            return slot, slot, shared
        if self._context.n_copied(source.slot, shared) > self._policy.most_copied * shared:
            return slot, slot, 0
        return slot, source, shared

    def _reusable(self, slot: Prefix, tokens: list[int], salt: Salt) -> int:
        """Return how many first tokens of a prompt a slot has, and can be cut to."""
        return self._reach(slot, reusable(slot.tokens, tokens)) if slot.salt == salt else 0

    def _copy_prefix(self, source: Prefix, slot: Prefix, length: int) -> bool:
        self._give_up(slot, 0)
        found = source.deepest(length)
        checkpoint = found.state if found is not None and found.length == length else None
        is_copied = False
        with suppress(MemoryError):
            is_copied = self._context.copy(source.slot, slot.slot, length, checkpoint)
        if not is_copied:
            return False
        slot.tokens, slot.salt, slot.n_saved = source.tokens[:length], source.salt, source.n_saved
        slot.checkpoints = source.checkpoints
        slot.cut(length)
        if self._context.shares_cells:
            self.budget.share(source.slot, slot.slot, length)
        else:
            self._use_cells(slot, length)
        return True

    def _cost(self, slot: Prefix) -> tuple[bool, int, bool, int]:
        """Return a sort key of idle slots for a new sequence: the fewest gaps, then empty, then least recently used.

        No gap is worth the prefill of a long conversation.
        """
        is_long = len(slot.tokens) > self._policy.most_moved
        busy = [each.slot for each in self.slots if each.is_running or each is slot]
        n_runs = len(_runs(busy)) if self._context.splits_batches and not is_long else 0
        return is_long, n_runs, bool(slot.tokens), slot.last_used

    def compact(self) -> list[tuple[int, int]]:
        """Move a sequence next to the others, after several steps with a gap: llama.cpp splits such batches.

        Return its old and new slot, or nothing.
        """
        busy = [slot.slot for slot in self.slots if slot.is_running]
        can_split = self._context.can_copy and self._context.splits_batches
        self._n_split_steps = self._n_split_steps + 1 if can_split and busy[-1] - busy[0] >= len(busy) else 0
        if self._n_split_steps < self._policy.change_steps:
            return []
        runs, self._n_split_steps = sorted(_runs(busy), key=lambda run: sum(map(self.length, run))), 0
        source = self.slots[runs[0][0]]
        if self._context.n_copied(source.slot, len(source.tokens)) > self._policy.most_moved:
            return []
        beside = (runs[-1][0] - 1, runs[-1][-1] + 1)
        target = min((slot for slot in self._idle if slot.slot in beside), key=self._cost)
        if len(target.tokens) > self._policy.most_moved or not self._keep(target, in_pieces=True):
            return []
        self._cut(target, 0)
        with suppress(LlmrunError, MemoryError):
            if self._context.copy(source.slot, target.slot, len(source.tokens)):
                self._exchange(source, target)
                return [(target.slot, source.slot)]
        return []

    def _exchange(self, source: Prefix, target: Prefix) -> None:
        """Record that a slot's cells were copied to an empty one, and empty it."""
        source.slot, target.slot = target.slot, source.slot
        self.slots[source.slot], self.slots[target.slot] = source, target
        self._use_cells(source, len(source.tokens))
        self._cut(target, 0)
        self.release(target.slot)

    def _close_gap(self, slot: Prefix, tokens: list[int]) -> bool:
        """Drop a slot's cells of turns that a truncated conversation has lost, and move those after them.

        The gap has to lie in the last prompt. A gap in the answer after it is reasoning, and tokens that attended to
        reasoning must not be reused without it.
        """
        shared = common_prefix(slot.tokens, tokens)
        gap = gap_after(slot.tokens, tokens, shared, self._policy.min_gap)
        if not gap or shared + gap > slot.n_prompt or self.budget.is_shared(slot.slot, shared):
            return False
        if not self._context.drop(slot.slot, shared, shared + gap):
            return False
        moved = slot.tokens[shared + gap :]
        slot.cut(shared)
        slot.tokens += moved
        slot.n_prompt -= gap
        self.budget.drop(slot.slot, shared, shared + gap)
        return True

    # ---- what is elsewhere ---------------------------------------------------------------------------------

    def _restore(self, slot: Prefix, tokens: list[int], salt: Salt) -> bool:
        """Load a state from host memory or disk into a slot if that saves enough prefill.

        To a device it is sent only while no sequence runs. Within the machine's memory, it takes less of the others'
        time than the prefill that it saves.

        Returns:
            Whether the state was loaded, and stays where it was, too.
        """
        if self._context.on_device and not self._is_resting:
            return False
        length = self._reusable(slot, tokens, salt)
        found, reach = self._longest(tokens, salt, self._copies)
        saved = self._find_saved(tokens, salt, max(length, reach))
        if saved.tokens:
            found = saved
        elif reach < length + self._policy.min_reused:
            return False
        elif self._is_next_turn(found, tokens):
            self._copies.remove(found)
        self._give_up(slot, 0)
        slot.salt, slot.n_prompt, slot.n_saved = salt, found.n_prompt, found.n_saved
        is_loaded = self.make_room(len(found.tokens)) and self._set(slot, found)
        return is_loaded and (found is saved or found in self._copies)

    def read_ahead(self, tokens: list[int], salt: Salt) -> None:
        """Read the saved state that a prompt will need, unless as much of it is cached; for any thread.

        Other threads change the slots meanwhile, so this is a guess: take() looks again.
        """
        if self._states is None or salt.private:
            return
        cached = (prefix.tokens[:] for prefix in self._everywhere() if prefix.salt == salt)
        length = max((common_prefix(each, tokens) for each in cached), default=0)
        if len(tokens) - length >= self._policy.min_reused:
            cuts = not self._context.has_checkpoints
            with suppress(MemoryError):
                self._states.read_ahead(
                    tokens, longer_than=length + self._policy.min_reused, cuts=cuts, owner=salt.owner
                )

    def _find_saved(self, tokens: list[int], salt: Salt, length: int) -> Prefix:
        """Return the saved prefix that is worth reading; an empty one if there is none."""
        if self._states is not None and not salt.private and len(tokens) - length >= self._policy.min_reused:
            with suppress(LlmrunError, OSError, MemoryError):
                cuts = not self._context.has_checkpoints
                longer_than = length + self._policy.min_reused
                saved = self._states.find(tokens, longer_than=longer_than, cuts=cuts, owner=salt.owner)
                if saved is not None and len(saved.tokens) <= self._context.n_ctx:
                    return saved
        return Prefix()

    def save(self, slot: int) -> tuple[int, int]:
        """Save a slot's KV state; return the numbers of tokens and bytes, zeros if nothing was saved.

        Raises:
            OSError: the file can't be written.
        """
        prefix = self.slots[slot]
        if self._states is None or not prefix.tokens or prefix.salt.private:
            return 0, 0
        if not self._states.fits(self._state_bytes(prefix)):
            return 0, 0
        kept, owner = most_useful(prefix.checkpoints, self._policy.saved_checkpoints), prefix.salt.owner
        n_bytes = self._states.save(prefix.tokens, self._source(prefix), kept, owner=owner)
        return (len(prefix.tokens), n_bytes) if n_bytes else (0, 0)


def _runs(slots: Collection[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs
