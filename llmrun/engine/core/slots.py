"""The slots of the KV cache: their contents, and the choice of a slot for each prompt.

Owns every change of the KV cache except decode(), so that its record of cached tokens is always true. Idle slots hold
the parked prefixes. Must not know the waiting requests.

No KV state is copied out of the cache while a sequence runs, because all of them would wait: a prefix that is evicted
then is forgotten. Prefixes are copied to host memory and written to the disk while the engine rests. Within the cache,
what is copied for a new sequence takes far less time than the prefill that it saves.

Copies in host memory take what the plan has for them, and what it has for cells that were never used: a conversation
that fills the cache leaves nothing of that. To the disk, a state goes without a copy.

They go to host memory because in a unified KV cache on the processor, every row of a batch reads every used cell, if
only to mask it: parked conversations slow all answers down (16 of 300 tokens each slow 8 answers down by half). If each
sequence has a stream of its own, there are no more streams than sequences, and a new conversation takes the place of an
old one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from llmrun.engine.core.cell_budget import CellBudget
from llmrun.engine.core.checkpoints import MAX_BYTES, Checkpoint, Checkpoints, first_end, most_useful, turn_end
from llmrun.engine.core.metrics import PrefillRate
from llmrun.engine.core.prefix import NO_SALT, Salt, common_prefix, gap_after, reusable
from llmrun.engine.llama.base import Context
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import PromptDifference

if TYPE_CHECKING:
    from llmrun.engine.core.states import KVStore, SavedState, StateSource

_MIN_RESTORED = 64  # tokens: fewer are prefilled faster than files are searched
_MIN_MOVED = 32
_CHEAP_CELLS = 256  # of parked prefixes, without effect on speed: llama.cpp reads this many at a time
_UNNOTICED_SECONDS = 0.2  # of prefill: a prefix that needs less is not copied to host memory
_HOST_SHARE = 4  # host memory may hold 1/N of the tokens that the cells can hold
_SHOWN = 12  # tokens of a difference
_MOST_SAVED = 0.75  # of a parked conversation: each save writes all of it
_SPLIT_STEPS = 4  # a gap may be filled by a new sequence meanwhile: moving one takes as long as a step or two ...
_MAX_MOVED_CELLS = 4096  # ... up to this length; beyond, steps are mostly attention, which splitting does not slow down
# Cells copied for each token of a prefix, where all of the source has to be copied: the prefill of a token takes at
# least 40 times as long as copying its cells, from 135M on a slow processor to 8B on a fast one.
_MOST_COPIED = 16
_SCATTERED_BATCHES = 2  # in a pool, llama.cpp may skip this many batches of free cells, and use others
_SPARE_SHARE = 32  # 1/N of the cells stays free at an admission, because running sequences grow


class HostPrefix(NamedTuple):
    """A copy of a slot in host memory."""

    tokens: list[int]  # ids of the tokens with keys and values in the state
    state: bytearray  # from llama.cpp
    salt: Salt  # of the request that they were computed for
    n_prompt: int  # the number of them that were the last request's prompt
    is_multi_turn: bool  # the conversation had more than one turn
    checkpoints: list[Checkpoint]  # within the tokens


class HostPrefixCache:
    """The parked prefixes in host memory, oldest first."""

    def __init__(self, prefixes: Sequence[HostPrefix] = ()) -> None:
        self.prefixes = list(prefixes)
        self.n_tokens = sum(len(prefix.tokens) for prefix in prefixes)
        self.n_bytes = sum(len(prefix.state) for prefix in prefixes)

    def put(self, prefix: HostPrefix) -> None:
        """Add an entry, and remove the entries that are its beginning."""
        for other in self.prefixes:
            if other.salt == prefix.salt and common_prefix(other.tokens, prefix.tokens) == len(other.tokens):
                self.remove(other)
        self.prefixes.append(prefix)
        self.n_tokens += len(prefix.tokens)
        self.n_bytes += len(prefix.state)

    def longest(self, tokens: list[int], salt: Salt) -> tuple[HostPrefix | None, int]:
        """Return the entry that shares the longest prefix with a prompt, and the shared length; None if none does."""
        same = (prefix for prefix in self.prefixes if prefix.salt == salt)
        shared = ((common_prefix(prefix.tokens, tokens), prefix) for prefix in same)
        length, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        return (best, length) if length else (None, 0)

    def remove(self, prefix: HostPrefix) -> None:
        self.prefixes = [other for other in self.prefixes if other is not prefix]
        self.n_tokens -= len(prefix.tokens)
        self.n_bytes -= len(prefix.state)

    def pop_oldest(self) -> HostPrefix:
        prefix = self.prefixes[0]
        self.remove(prefix)
        return prefix


class Slots:
    """The slots of a context.

    Attributes:
        cached: slot -> the tokens whose keys and values it holds.
        saver: writes shared and evicted prefixes to disk; None without a store.
    """

    def __init__(
        self,
        context: Context,
        states: KVStore | None = None,
        rate: PrefillRate | None = None,
        prefixes: Sequence[HostPrefix] | None = None,
        *,
        checkpoint_bytes: int = 0,
        copy_bytes: int = sys.maxsize,
        cell_bytes: int = 0,
    ) -> None:
        """Start with empty slots.

        Args:
            prefixes: from prefixes() of another context with the same weights.
            checkpoint_bytes: limit of all checkpoints; 0 is the default.
            copy_bytes, cell_bytes: as in Load.
        """
        self._rate = rate or PrefillRate()
        self._context = context
        self._states = states
        self.saver = states.background_saver() if states is not None else None
        self.cached: dict[int, list[int]] = {slot: [] for slot in range(context.n_seq_max + context.n_parked)}
        self.idle = set(self.cached)
        self.budget = CellBudget(context.n_cells, has_streams=not context.unified)
        self._copy_bytes, self._cell_bytes = copy_bytes, cell_bytes
        self._host_cache = HostPrefixCache(prefixes or ())
        self.checkpoints = Checkpoints(
            context,
            self.cached,
            offloaded=lambda: (prefix.checkpoints for prefix in self._host_cache.prefixes),
            limit=checkpoint_bytes or MAX_BYTES,
        )
        self._n_prompt = dict.fromkeys(self.cached, 0)  # slot -> first tokens that were the last request's prompt
        self._salts = dict.fromkeys(self.cached, NO_SALT)  # of the last request
        self._multi_turn: set[int] = set()  # slots whose conversation had more than one turn
        self._shared_prefix: set[int] = set()  # slots whose beginning another prompt had, too
        self._last_used: dict[int, int] = dict.fromkeys(self.cached, 0)  # slot -> its last release
        self._n_releases = 0
        self._offloaded: dict[int, int] = {}  # slot -> its release for which offload() has looked at it
        self._n_split_steps = 0  # consecutive steps with gaps between the slots of running sequences

    def cached_prefix(self, tokens: list[int], salt: Salt) -> int:
        """Return the number of first tokens that need no prefill: an estimate, without those on disk."""
        live = self._longest(tokens, salt, self.cached if self._context.shares else self.idle)[1]
        return max(live, self._host_cache.longest(tokens, salt)[1])

    def difference(self, tokens: list[int], salt: Salt) -> PromptDifference | None:
        """Return the first difference of a prompt from the most similar cached one, for a server's figures."""
        if not self._context.shares:
            return None
        prompts = [(self.cached[slot], self._n_prompt[slot]) for slot in self.cached if self._salts[slot] == salt]
        prompts += [(prefix.tokens, prefix.n_prompt) for prefix in self._host_cache.prefixes if prefix.salt == salt]
        shared = [common_prefix(cached, tokens) for cached, _ in prompts]
        length = max(shared, default=0)
        if length < _MIN_RESTORED:
            return None
        cached, n_prompt = prompts[shared.index(length)]
        if self._is_next_turn(cached, n_prompt, tokens):
            return None
        return PromptDifference(length, *(self._text(each, length) for each in (cached[:n_prompt], tokens)))

    def _text(self, tokens: list[int], start: int) -> str:
        ids = (token for token in tokens[start : start + _SHOWN] if token >= 0)  # images and audio have others
        return b"".join(map(self._context.vocabulary.piece, ids)).decode(errors="replace")

    def admits(self, tokens: list[int], salt: Salt, pending: int) -> bool:
        """Return whether the cells can hold these tokens beside the running sequences.

        Args:
            pending: tokens that running sequences still have to prefill.
        """
        if not self._context.shares:
            return True
        source, shared = self._longest(tokens, salt, self.cached)
        busy = {*self.cached} - self.idle
        if source in busy and not self._context.unified:
            shared = 0  # it is copied
        lengths = {} if source in busy else {source: shared}
        used = self.budget.count({*busy, source}, lengths)
        spare = self.budget.n_cells // _SPARE_SHARE
        return used + pending + len(tokens) - shared + spare <= self.budget.n_cells

    def make_room(self, n_tokens: int) -> bool:
        """Evict idle slots, least recently used first, until n_tokens more fit; return whether they fit."""
        while not self.budget.admits(n_tokens):
            if not self.evict():
                return False
        return True

    def evict(self) -> bool:
        """Empty the least recently used idle slot; return False if all idle ones are empty."""
        parked = self._parked()
        if parked:
            self.truncate(parked[0], 0)
        return bool(parked)

    @property
    def _is_resting(self) -> bool:
        """No sequence runs."""
        return len(self.idle) == len(self.cached)

    def save_parked(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Queue what later prompts may continue for the disk: the last parked conversations, and shared prefixes.

        What is mostly there already is left out.

        Args:
            is_interrupted: checked between two copies, each of which delays a request that comes meanwhile.
        """
        for slot in reversed(self._parked()):
            if slot in self._multi_turn | self._shared_prefix and self._is_resting and not is_interrupted():
                self._save_slot_soon(slot, _MOST_SAVED)
        for prefix in reversed(self._host_cache.prefixes):
            self._discard(prefix, _MOST_SAVED)
        if self._states is not None:
            self._states.forget_ahead()

    def _save_slot_soon(self, slot: int, most_saved: float) -> None:
        tokens, n_bytes, write = self.cached[slot], self._context.state_bytes(slot), self._writer(slot)
        self._save_soon(tokens, self._salts[slot], n_bytes, write, self.checkpoints.of(slot), most_saved)

    def _writer(self, slot: int) -> StateSource:
        return partial(self._context.write_state, slot)

    def _save_soon(
        self,
        tokens: list[int],
        salt: Salt,
        n_bytes: int,
        state: StateSource,
        checkpoints: list[Checkpoint],
        most_saved: float,
    ) -> None:
        """Write a prefix to the disk if that is worthwhile and the file will be kept."""
        kept, owner = most_useful(checkpoints), salt.owner
        n_bytes += sum(len(checkpoint) for _, checkpoint in kept)
        if self.saver is None or salt.private or not self.saver.accepts(tokens, n_bytes, most_saved, owner=owner):
            return
        with suppress(LlmrunError, MemoryError):
            self.saver.save(tokens, state, kept, owner=owner)

    def _parked(self) -> list[int]:
        """Return idle slots that are not empty, least recently used first."""
        return sorted((slot for slot in self.idle if self.cached[slot]), key=self._last_used.__getitem__)

    def offload(self) -> bool:
        """Copy one parked prefix to host memory if that will help, and the engine rests; return whether it did.

        In a pool on the processor, prefixes leave the cache until the remaining ones no longer slow running sequences
        down; the last one stays, because its next turn may follow. Else those are copied that the next prompts will
        evict. From a pool on a device, nothing is copied: its cells lie scattered, and each is a transfer of its own.
        """
        context = self._context
        if not self._is_resting or not context.shares or (context.unified and context.on_device):
            return False
        if context.unified and self.budget.used > _CHEAP_CELLS:
            for slot in self._parked()[:-1]:
                freed = self.budget.used - self.budget.count({*self.cached} - {slot})
                # Otherwise most of its cells are shared: they would stay.
                if 2 * freed > len(self.cached[slot]) and self._offload_copy(slot):
                    self.truncate(slot, 0)
                    return True
        if not all(self.cached.values()):
            return False
        for slot in self._parked():
            if self._offloaded.get(slot) != self._last_used[slot]:  # once: copies may push one another out
                self._offloaded[slot] = self._last_used[slot]
                if self._has_unique_prefix(slot) and self._offload_copy(slot):
                    return True
        return False

    def _offload_copy(self, slot: int) -> bool:
        """Copy a parked slot's prefix to host memory, and discard the oldest ones there to make room."""
        tokens, limit = self.cached[slot], self.budget.n_cells // _HOST_SHARE
        n_bytes = self._context.state_bytes(slot)
        if not _MIN_RESTORED <= len(tokens) <= limit or n_bytes > self._copy_limit():
            return False
        while (
            self._host_cache.n_tokens + len(tokens) > limit or self._host_cache.n_bytes + n_bytes > self._copy_limit()
        ):
            self._discard(self._host_cache.pop_oldest())
        copy = self._copy(slot)
        if copy is not None:
            self._host_cache.put(copy)
        return copy is not None

    def _copy(self, slot: int) -> HostPrefix | None:
        """Return a copy of a parked slot's prefix; None if llama.cpp can't export it."""
        with suppress(LlmrunError, MemoryError):
            state = self._context.state(slot)
            if state:
                n_prompt, is_multi_turn = self._n_prompt[slot], slot in self._multi_turn
                tokens, checkpoints = list(self.cached[slot]), self.checkpoints.of(slot)
                return HostPrefix(tokens, state, self._salts[slot], n_prompt, is_multi_turn, checkpoints)
        return None

    def _copy_limit(self) -> int:
        """Return how many bytes copies in host memory may take: what the plan has for them, and for unused cells."""
        scattered = _SCATTERED_BATCHES * self._context.n_batch if self._context.unified else 0
        unused = self.budget.n_cells - self.budget.touched - scattered
        return self._copy_bytes + self._cell_bytes * max(unused, 0)

    def _limit_copies(self) -> None:
        """Discard the oldest copies in host memory where used cells have taken their memory."""
        while self._host_cache.n_bytes > self._copy_limit():
            self._host_cache.pop_oldest()

    def prefixes(self) -> list[HostPrefix]:
        """Return copies of the parked prefixes, for another context with the same weights.

        The last used ones come first. Without memory for a copy, a prefix goes to the disk.
        """
        copies: list[HostPrefix] = []
        n_bytes = self._host_cache.n_bytes
        for slot in reversed(self._parked()):
            size = self._context.state_bytes(slot)
            if n_bytes + size > self._copy_limit():
                self._save_slot_soon(slot, _MOST_SAVED)
            elif (copy := self._copy(slot)) is not None:
                copies.append(copy)
                n_bytes += size
        return [*self._host_cache.prefixes, *reversed(copies)]

    def _discard(self, prefix: HostPrefix, most_saved: float = 1.0) -> None:
        if prefix.is_multi_turn:
            state = prefix.state
            self._save_soon(prefix.tokens, prefix.salt, len(state), state, prefix.checkpoints, most_saved)

    def take(self, tokens: list[int], n_prompt: int, salt: Salt, *, moves: bool) -> tuple[int, int]:
        """Assign an idle slot to a sequence, with as long a prefix of it as is cached anywhere.

        Args:
            salt: of its request; nothing with another salt is reused.
            moves: the conversation may have been truncated; what is cached after the gap may be moved.

        Returns:
            The slot, and the number of tokens that it holds.
        """
        shared = self._shared_anywhere(tokens, salt) if self._context.has_checkpoints else 0
        if moves:
            any(self._close_gap(slot, tokens) for slot in sorted(self.idle) if self._salts[slot] == salt)
        slot, is_copied = self._choose(tokens, salt)
        length = self._reach(slot, reusable(self.cached[slot], tokens)) if self._salts[slot] == salt else 0
        length = self._restore(slot, tokens, salt, length)
        continues = self._is_next_turn(self.cached[slot], self._n_prompt[slot], tokens)
        self._multi_turn.discard(slot)
        if continues and not is_copied and n_prompt > self._n_prompt[slot]:
            self._multi_turn.add(slot)
        if is_copied:
            self._shared_prefix.add(slot)
        elif not continues:
            self._shared_prefix.discard(slot)
        self.idle.remove(slot)
        self._n_prompt[slot], self._salts[slot] = n_prompt, salt
        length = self.truncate(slot, length)
        if self._context.has_checkpoints:
            is_end, end = self._context.vocabulary.is_end, self._turn_end(tokens[:n_prompt])
            self.checkpoints.plan(slot, {first_end(tokens[:end], is_end), min(shared, end), end}, length)
        return slot, length

    def release(self, slot: int) -> None:
        """Mark a slot as idle; its tokens stay, as a prefix for later prompts."""
        self.idle.add(slot)
        self._n_releases += 1
        self._last_used[slot] = self._n_releases

    def append(self, slot: int, tokens: list[int]) -> None:
        self.cached[slot] += tokens
        self.budget.append(slot, len(tokens))
        if self._host_cache.n_bytes:
            self._limit_copies()
        self.checkpoints.record(slot, len(self.cached[slot]), self._n_prompt[slot])

    def truncate(self, slot: int, length: int) -> int:
        """Cut a slot to its first tokens, to a checkpoint within them, or to none; return the number left."""
        if not self._context.forget(slot, length):
            length = self.checkpoints.go_back(slot, length)
        del self.cached[slot][length:]
        self.budget.cut(slot, length)
        self.checkpoints.cut(slot, length)
        return length

    def _reach(self, slot: int, length: int) -> int:
        """Return to how many of its first `length` tokens a slot can be cut."""
        if self._context.can_forget(slot, length):
            return length
        found = self.checkpoints.deepest(slot, length)
        return found.length if found is not None else 0

    def _shared_anywhere(self, tokens: list[int], salt: Salt) -> int:
        """Return the longest prefix that a prompt shares with any slot, whether or not it can be reused."""
        same = (slot for slot in self.cached if self._salts[slot] == salt)
        return max((common_prefix(self.cached[slot], tokens) for slot in same), default=0)

    @contextmanager
    def emptied(self, slot: int) -> Iterator[bool]:
        """Empty a slot until the context ends; yield False, and do nothing, if it can't be copied to be restored."""
        tokens, state, checkpoints = self.cached[slot][:], bytearray(), self.checkpoints.of(slot)
        if tokens:
            has_room = self._host_cache.n_bytes + self._context.state_bytes(slot) <= self._copy_limit()
            with suppress(LlmrunError, MemoryError):
                state = self._context.state(slot) if has_room and not self.budget.is_shared(slot, 0) else state
            if not state:
                yield False
                return
            self.truncate(slot, 0)
        try:
            yield True
        finally:
            is_restored = False
            with suppress(LlmrunError, MemoryError):
                is_restored = bool(tokens) and self._context.set_state(slot, state, len(tokens))
            if is_restored:
                self.append(slot, tokens)
                self.checkpoints.put(slot, checkpoints)
            elif tokens:  # a part may have been written
                self.truncate(slot, 0)

    def _choose(self, tokens: list[int], salt: Salt) -> tuple[int, bool]:
        """Return an idle slot for a prompt, and whether a prefix was copied into it from another slot."""
        if not self._context.shares:
            return self._longest(tokens, salt, self.idle)[0], False
        source, shared = self._longest(tokens, salt, self.cached)
        if shared and source in self.idle and self._is_next_turn(self.cached[source], self._n_prompt[source], tokens):
            return source, False
        others = self.idle - {source} if shared else self.idle
        slot = min(others or self.idle, key=self._cost)
        if slot == source or not shared:
            return slot, False
        if not self._context.unified and self._longest(tokens, salt, [slot])[1] == shared:
            self.truncate(slot, shared)
        elif self._context.n_copied(source, shared) > _MOST_COPIED * shared:
            return slot, False
        elif not self._copy_prefix(source, slot, shared):
            return self._longest(tokens, salt, self.idle)[0], False
        return slot, True

    def _copy_prefix(self, source: int, slot: int, length: int) -> bool:
        self.truncate(slot, 0)
        found = self.checkpoints.deepest(source, length)
        checkpoint = found.state if found is not None and found.length == length else None
        is_copied = False
        with suppress(MemoryError):
            is_copied = self._context.copy(source, slot, length, checkpoint)
        if not is_copied:
            return False
        self.cached[slot], self._salts[slot] = self.cached[source][:length], self._salts[source]
        self.checkpoints.copy(source, slot, length)
        if self._context.unified:
            self.budget.share(source, slot, length)
        else:
            self.budget.append(slot, length)
        return True

    def _is_next_turn(self, cached: list[int], n_prompt: int, tokens: list[int]) -> bool:
        """Return whether a prompt repeats or continues a cached prompt, whose answer it may have changed."""
        same = common_prefix(cached, tokens)
        return same > 0 and same >= min(len(tokens) - 1, self._turn_end(cached[:n_prompt]))

    def _turn_end(self, prompt: list[int]) -> int:
        return turn_end(prompt, self._context.vocabulary.is_end)

    def _has_unique_prefix(self, slot: int) -> bool:
        """Return whether a slot holds tokens that are cached nowhere else, and whose prefill would be noticed."""
        tokens, salt, others = self.cached[slot], self._salts[slot], {*self.cached} - {slot}
        shared = self._longest(tokens, salt, others)[1] if others else 0
        shared = max(shared, self._host_cache.longest(tokens, salt)[1])
        return len(tokens) - shared >= max(_MIN_RESTORED, self._rate.tokens_within(_UNNOTICED_SECONDS))

    def _cost(self, slot: int) -> tuple[int, bool, int, int]:
        """Return a sort key of idle slots for a new sequence: the fewest gaps, then empty, then least recently used."""
        runs = 0 if self._context.unified else len(_runs({*self.cached} - self.idle | {slot}))
        return runs, bool(self.cached[slot]), self._last_used[slot], slot

    def compact(self) -> list[tuple[int, int]]:
        """Move a sequence next to the others, after several steps with a gap: llama.cpp splits such batches.

        Return its old and new slot, or nothing.
        """
        busy = self.cached.keys() - self.idle
        has_streams = self._context.shares and not self._context.unified
        self._n_split_steps = self._n_split_steps + 1 if has_streams and max(busy) - min(busy) >= len(busy) else 0
        if self._n_split_steps < _SPLIT_STEPS:
            return []
        runs, self._n_split_steps = sorted(_runs(busy), key=self._n_cached), 0
        source = runs[0][0]
        if self._context.n_copied(source, len(self.cached[source])) > _MAX_MOVED_CELLS:
            return []
        target = min(self.idle & {runs[-1][0] - 1, runs[-1][-1] + 1}, key=self._cost)
        self.truncate(target, 0)
        with suppress(LlmrunError, MemoryError):
            if self._context.copy(source, target, len(self.cached[source])):
                self._move(source, target)
                return [(source, target)]
        return []

    def _n_cached(self, slots: Collection[int]) -> int:
        return sum(len(self.cached[slot]) for slot in slots)

    def _move(self, source: int, target: int) -> None:
        """Record that a slot's cells were copied to another one, and empty it."""
        self.append(target, self.cached[source])
        self._n_prompt[target], self._salts[target] = self._n_prompt[source], self._salts[source]
        for slots in (self._multi_turn, self._shared_prefix):
            slots.discard(target)
            if source in slots:
                slots.add(target)
        self.idle.remove(target)
        self.truncate(source, 0)
        self.release(source)

    def _longest(self, tokens: list[int], salt: Salt, slots: Collection[int]) -> tuple[int, int]:
        """Return the slot with the longest prefix of a prompt, and its length; of equal ones, the shortest slot."""
        if self._context.has_checkpoints:
            same = [slot for slot in slots if self._salts[slot] == salt]
            reach = dict.fromkeys(slots, 0) | {
                slot: self._reach(slot, common_prefix(self.cached[slot], tokens)) for slot in same
            }
            best = max(reach, key=lambda slot: (reach[slot], -len(self.cached[slot]), -slot))
            return best, reach[best]
        best, longest, shared = -1, 0, tokens[:0]
        for slot in slots:
            cached, is_same_salt = self.cached[slot], self._salts[slot] == salt
            if longest and not (is_same_salt and cached[:longest] == shared):
                continue  # its prefix is shorter, as one comparison shows
            length = longest + common_prefix(cached[longest:], tokens[longest:]) if is_same_salt else 0
            if best < 0 or (length, -len(cached), -slot) > (longest, -len(self.cached[best]), -best):
                best, longest, shared = slot, length, tokens[:length]
        return best, longest

    def _close_gap(self, slot: int, tokens: list[int]) -> bool:
        """Drop a slot's cells of turns that a truncated conversation has lost, and move those after them.

        The gap has to lie in the last prompt. A gap in the answer after it is reasoning, and tokens that attended to
        reasoning must not be reused without it.
        """
        cached = self.cached[slot]
        shared = common_prefix(cached, tokens)
        gap = gap_after(cached, tokens, shared, _MIN_MOVED)
        if not gap or shared + gap > self._n_prompt[slot] or self.budget.is_shared(slot, shared):
            return False
        if not self._context.drop(slot, shared, shared + gap):
            return False
        del cached[shared : shared + gap]
        self.budget.drop(slot, shared, shared + gap)
        self.checkpoints.cut(slot, shared)
        self._n_prompt[slot] -= gap
        return True

    def _restore(self, slot: int, tokens: list[int], salt: Salt, length: int) -> int:
        """Load a state from host memory or disk into a slot if that saves enough prefill; return the new length.

        To a device it is sent only while no sequence runs. Within the machine's memory, it takes less of the others'
        time than the prefill that it saves.
        """
        if self._context.on_device and not self._is_resting:
            return length
        prefix, shared = self._host_cache.longest(tokens, salt)
        if prefix is not None and self._context.has_checkpoints and shared < len(prefix.tokens):
            lengths = (checkpoint.length for checkpoint in prefix.checkpoints)
            shared = max((length for length in lengths if length <= shared), default=0)
        if prefix is not None and shared >= length + _MIN_RESTORED:
            if self._is_next_turn(prefix.tokens, prefix.n_prompt, tokens):
                self._host_cache.remove(prefix)
            self._n_prompt[slot] = prefix.n_prompt
            length = self._load_state(slot, prefix.tokens, prefix.state, tokens)
            if length:
                self.checkpoints.put(slot, prefix.checkpoints)
            return self._reach(slot, length)
        saved = self._find_saved(tokens, salt, length)
        if saved is None:
            return length
        length = self._load_state(slot, saved.tokens, saved.state, tokens)
        if length:
            self._n_prompt[slot] = len(saved.tokens)
            self.checkpoints.put(slot, (Checkpoint(length, state, True) for length, state in saved.checkpoints))
            if self.saver is not None:
                self.saver.note_saved(saved.tokens, owner=salt.owner)
        return self._reach(slot, length)

    def _load_state(self, slot: int, cached: list[int], state: bytearray | memoryview, tokens: list[int]) -> int:
        """Replace a slot by a state of the cached tokens; return the number of a sequence's tokens that it holds."""
        self.truncate(slot, 0)
        with suppress(LlmrunError, MemoryError):  # it is only a cache
            if self.make_room(len(cached)) and self._context.set_state(slot, state, len(cached)):
                self.append(slot, cached)
                return reusable(cached, tokens)
        return self.truncate(slot, 0)

    def read_ahead(self, tokens: list[int], salt: Salt) -> None:
        """Read the saved state that a prompt will need, unless as much of it is cached; for any thread.

        Other threads change the slots meanwhile, so this is a guess: take() looks again.
        """
        if self._states is None or salt.private:
            return
        cached = [self.cached[slot] for slot in self.cached if self._salts[slot] == salt]
        cached += [prefix.tokens for prefix in self._host_cache.prefixes if prefix.salt == salt]
        length = max((common_prefix(cached_tokens[:], tokens) for cached_tokens in cached), default=0)
        if len(tokens) - length >= _MIN_RESTORED:
            cuts = not self._context.has_checkpoints
            with suppress(MemoryError):
                self._states.read_ahead(tokens, longer_than=length + _MIN_RESTORED, cuts=cuts, owner=salt.owner)

    def _find_saved(self, tokens: list[int], salt: Salt, length: int) -> SavedState | None:
        if self._states is not None and not salt.private and len(tokens) - length >= _MIN_RESTORED:
            with suppress(LlmrunError, OSError, MemoryError):
                cuts = not self._context.has_checkpoints
                longer_than = length + _MIN_RESTORED
                saved = self._states.find(tokens, longer_than=longer_than, cuts=cuts, owner=salt.owner)
                return saved if saved is not None and len(saved.tokens) <= self._context.n_ctx else None
        return None

    def save(self, slot: int) -> tuple[int, int]:
        """Save a slot's KV state; return the numbers of tokens and bytes, zeros if nothing was saved.

        Raises:
            OSError: the file can't be written.
        """
        tokens, salt = self.cached[slot], self._salts[slot]
        if self._states is None or not tokens or salt.private:
            return 0, 0
        if not self._states.fits(self._context.state_bytes(slot)):
            return 0, 0
        kept = most_useful(self.checkpoints.of(slot))
        n_bytes = self._states.save(tokens, self._writer(slot), kept, owner=salt.owner)
        return (len(tokens), n_bytes) if n_bytes else (0, 0)


def _runs(slots: Collection[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs
