"""What each slot of the KV cache holds, and which slot a prompt gets.

Owns every change of the KV cache but decode(): a token is only said to be cached when its keys and values really are.
Idle slots are the parked prefixes; what no slot is left for is stowed. Must not know who waits, or for what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from llmrun.engine.core.host_prefix_cache import HostPrefix, HostPrefixCache
from llmrun.engine.core.prefix import common_prefix, gap_after, reusable
from llmrun.engine.core.room import CellBudget
from llmrun.engine.core.state_saver import StateSaver
from llmrun.engine.llama.base import Context
from llmrun.errors import LlmrunError

if TYPE_CHECKING:
    from llmrun.engine.core.states import KVStore, SavedState

_WORTH_READING = 64  # tokens: fewer are prefilled faster than files are looked through
_WORTH_MOVING = 32
_CHEAP_CELLS = 256  # of parked prefixes, that nobody notices: llama.cpp looks at so many at a time
_STOWED_SHARE = 4  # one part in so many of what the cells can hold may be stowed besides
_SPLIT_STEPS = 4  # so long a gap is left to whoever comes next: moving somebody takes as long as a step or two
_SPARE_SHARE = 32  # one part in so many of the cells stays free when somebody is let in: all the others grow


class Slots:
    """The slots of a context.

    Attributes:
        cached: slot -> the tokens whose keys and values it holds.
        idle: slots without a sequence.
        room: cells that are used.
        saver: writes what is shared or evicted to disk; None without a store.
    """

    def __init__(
        self,
        context: Context,
        states: KVStore | None = None,
        *,
        exact: bool = False,
        prefixes: Sequence[HostPrefix] = (),
    ) -> None:
        """All slots are empty.

        Args:
            states: KV states saved on disk, where a prompt's beginning may be found.
            exact: only whole batches of a prompt are reused, because another width of batch rounds otherwise.
            prefixes: of another context over the same weights, see prefixes().
        """
        self._exact = exact
        self._context = context
        self._states = states
        self.saver = StateSaver(states) if states is not None else None
        self.cached: dict[int, list[int]] = {slot: [] for slot in range(context.n_seq_max + context.n_parked)}
        self.idle = set(self.cached)
        self.room = CellBudget(context.n_cells)
        self._stowed = HostPrefixCache(prefixes)
        self._prompts = dict.fromkeys(self.cached, 0)  # how many first tokens were the last request's prompt
        self._salts = dict.fromkeys(self.cached, "")  # of the last request
        self._went_on: set[int] = set()  # slots whose conversation had more than one turn
        self._used: dict[int, int] = dict.fromkeys(self.cached, 0)  # when, in releases
        self._releases = 0
        self._split_steps = 0  # so often, one after the other, sequences that run had gaps between them

    def cached_prefix(self, tokens: list[int], salt: str) -> int:
        """How many first tokens of a sequence need no prefill, as far as that can be told without trying."""
        live = self._longest(tokens, salt, self.cached if self._context.shares else self.idle)[1]
        return max(live, self._stowed.longest(tokens, salt)[1])

    def admits(self, tokens: list[int], salt: str, pending: int) -> bool:
        """Whether the cells can hold these tokens, beside the slots that are not idle and what is to come into those.

        Args:
            pending: how many tokens that is.
        """
        if not self._context.shares:
            return True
        source, shared = self._longest(tokens, salt, self.cached)
        busy = {*self.cached} - self.idle
        if source in busy and not self._context.unified:
            shared = 0  # it is copied
        lengths = {} if source in busy else {source: shared}
        held = self.room.held({*busy, source}, lengths)
        spare = self.room.n_cells // _SPARE_SHARE
        return held + pending + len(tokens) - shared + spare <= self.room.n_cells

    def make_room(self, n_tokens: int) -> bool:
        """Evict idle slots, those not used for longest first, until so many more tokens fit; whether they do."""
        while not self.room.admits(n_tokens):
            if not self.evict():
                return False
        return True

    def evict(self) -> bool:
        """Empty the idle slot that was not used for longest; False if all idle ones are empty."""
        parked = self._parked()
        if parked and not self._offload(parked[0]):
            if parked[0] in self._went_on:
                self._save_soon(parked[0])
            self.truncate(parked[0], 0)
        return bool(parked)

    def _save_soon(self, slot: int) -> None:
        """What a slot holds goes to disk, if that is worth it."""
        self._offer(self.cached[slot], self._salts[slot], lambda: self._context.state(slot))

    def _offer(self, tokens: list[int], salt: str, read: Callable[[], bytearray]) -> None:
        """A prefix goes to disk, if that is worth it; only then its state is read."""
        if self.saver is not None and not salt and self.saver.wants(tokens):
            with suppress(LlmrunError):
                state = read()
                if state:
                    self.saver.save(tokens, state)

    def _parked(self) -> list[int]:
        """Idle slots that hold something, the one not used for longest first."""
        return sorted((slot for slot in self.idle if self.cached[slot]), key=self._used.__getitem__)

    def _offload_parked(self) -> None:
        """Stow parked prefixes until their cells are so few that they make nobody's answer slower."""
        if not self._context.unified or len(self.idle) == len(self.cached):
            return
        held_by_busy = self.room.held({*self.cached} - self.idle)
        for slot in self._parked():
            if self.room.used - held_by_busy <= _CHEAP_CELLS:
                return
            freed = self.room.used - self.room.held({*self.cached} - {slot})
            if 2 * freed > len(self.cached[slot]):  # else most of its cells are others' too, and would be twice there
                self._offload(slot)

    def _offload(self, slot: int) -> bool:
        """Move what a parked slot holds out of the cache, in place of what was stowed longest ago; whether it went."""
        stowed = self._offload_copy(slot)
        if stowed:
            self.truncate(slot, 0)
        return stowed

    def _offload_copy(self, slot: int) -> bool:
        """Stow a copy of what a parked slot holds."""
        tokens, most = self.cached[slot], self.room.n_cells // _STOWED_SHARE
        if not self._context.shares or not _WORTH_READING <= len(tokens) <= most:
            return False
        while self._stowed.n_tokens + len(tokens) > most:
            self._lose(self._stowed.take_oldest())
        copy = self._copy(slot)
        if copy is not None:
            self._stowed.put(copy)
        return copy is not None

    def _copy(self, slot: int) -> HostPrefix | None:
        """Return a copy of a parked slot's prefix; None where it can't be read out."""
        with suppress(LlmrunError):
            state = self._context.state(slot)
            if state:
                prompt, went_on = self._prompts[slot], slot in self._went_on
                return HostPrefix(list(self.cached[slot]), state, self._salts[slot], prompt, went_on)
        return None

    def prefixes(self) -> list[HostPrefix]:
        """Return copies of all parked prefixes, for another context over the same weights."""
        return [*self._stowed.prefixes, *filter(None, map(self._copy, self._parked()))]

    def _lose(self, prefix: HostPrefix) -> None:
        """What is stowed no longer goes to disk, if that is worth it."""
        if prefix.went_on:
            self._offer(prefix.tokens, prefix.salt, lambda: prefix.state)

    def take(self, tokens: list[int], n_prompt: int, salt: str, *, moves: bool) -> tuple[int, int]:
        """Give a sequence an idle slot, holding as many of its first tokens as can be had without prefill.

        Args:
            tokens: the sequence's.
            n_prompt: how many of them are its prompt.
            salt: nothing is reused that was computed for another one.
            moves: the conversation may have lost its oldest turns; what is cached behind them may be moved.

        Returns:
            The slot, and how many tokens it holds.
        """
        self._choose_kv_layout(len(tokens))
        if moves:
            any(self._compact(slot, tokens) for slot in sorted(self.idle) if self._salts[slot] == salt)
        slot, copied = self._choose(tokens, salt)
        keep = reusable(self.cached[slot], tokens) if self._salts[slot] == salt else 0
        if self._exact:
            keep = min(keep, self._prompts[slot]) // self._context.n_batch * self._context.n_batch
        else:
            keep = self._restore(slot, tokens, salt, keep)
        self._went_on.discard(slot)
        if keep > self._prompts[slot] and not copied:  # of the answer, too
            self._went_on.add(slot)
        self.idle.remove(slot)
        self._prompts[slot], self._salts[slot] = n_prompt, salt
        kept = self.truncate(slot, keep)
        self._offload_parked()
        return slot, kept

    def release(self, slot: int) -> None:
        """A slot's sequence has left; what it holds is kept, for prompts that begin alike."""
        self.idle.add(slot)
        self._releases += 1
        self._used[slot] = self._releases
        self._offload_parked()

    def append(self, slot: int, tokens: list[int]) -> None:
        """Tokens went through the model."""
        self.cached[slot] += tokens
        self.room.append(slot, len(tokens))

    def truncate(self, slot: int, length: int) -> int:
        """Cut a slot to its first tokens, or to none where the model can't; how many are left."""
        if not self._context.forget(slot, length):
            length = 0
            self._context.forget(slot, 0)
        del self.cached[slot][length:]
        self.room.cut(slot, length)
        return length

    @contextmanager
    def set_aside(self, slot: int) -> Iterator[bool]:
        """Empty a slot for a while; False, and nothing is done, where what it holds could not be put back."""
        tokens, state = self.cached[slot][:], bytearray()
        if tokens:
            state = self._context.state(slot)
            if not state or self.room.is_shared(slot, 0):
                yield False
                return
            self.truncate(slot, 0)
        try:
            yield True
        finally:
            if tokens and self._context.set_state(slot, state, len(tokens)):
                self.append(slot, tokens)

    def _choose(self, tokens: list[int], salt: str) -> tuple[int, bool]:
        """An idle slot for a prompt, and whether it has what another slot knows of it."""
        if not self._context.shares:
            return self._longest(tokens, salt, self.idle)[0], False
        source, shared = self._longest(tokens, salt, self.cached)
        if shared and source in self.idle and shared in (len(self.cached[source]), len(tokens) - 1, len(tokens)):
            return source, False  # it goes on from there, or is asked again: nothing of use is lost
        others = self.idle - {source} if shared else self.idle
        slot = min(others or self.idle, key=self._inconvenience)
        if self._holds_more(slot):
            self._offload_copy(slot)
        if slot == source or not shared:
            return slot, False
        self.truncate(slot, 0)
        if not self._context.copy(source, slot, shared):
            return self._longest(tokens, salt, self.idle)[0], False
        self.cached[slot], self._salts[slot] = self.cached[source][:shared], salt
        if self._context.unified:
            self.room.share(source, slot, shared)
        else:
            self.room.append(slot, shared)
        self._save_soon(slot)  # two prompts begin so: others will, also after a restart
        return slot, True

    def _holds_more(self, slot: int) -> bool:
        """Whether a slot holds much that no other one does."""
        held, others = self.cached[slot], {*self.cached} - {slot}
        known = self._longest(held, self._salts[slot], others)[1] if others else 0
        return len(held) - known >= _WORTH_READING

    def _inconvenience(self, slot: int) -> tuple[int, bool, int, int]:
        """How badly an idle slot suits a new sequence: whether it makes gaps, and what is lost by it."""
        gaps = 0 if self._context.unified else len(_runs({*self.cached} - self.idle | {slot}))
        return gaps, bool(self.cached[slot]), self._used[slot], slot

    def _choose_kv_layout(self, n_tokens: int) -> None:
        """Choose the KV cache's layout for who runs and one that comes with so many tokens."""
        busy = {*self.cached} - self.idle
        longest = max([n_tokens, *(max(len(self.cached[slot]), self._prompts[slot]) for slot in busy)])
        if self._context.choose_kv_layout(longest):
            for slot in self.cached:
                self.room.cut(slot, 0)
            for slot, tokens in self.cached.items():
                self.room.append(slot, len(tokens))

    def compact(self) -> list[tuple[int, int]]:
        """Move a sequence next to the others, if for some steps it was not: a batch with a gap goes through in parts.

        Returns:
            From which slot to which, if one was moved.
        """
        split = self._context.shares and not self._context.unified
        runs = sorted(_runs({*self.cached} - self.idle), key=len) if split else []
        self._split_steps = self._split_steps + 1 if len(runs) > 1 else 0
        if self._split_steps < _SPLIT_STEPS:
            return []
        self._split_steps = 0
        source = runs[0][0]
        target = min(self.idle & {runs[-1][0] - 1, runs[-1][-1] + 1})
        if not self._offload(target):
            self.truncate(target, 0)
        with suppress(LlmrunError):
            if self._context.copy(source, target, len(self.cached[source])):
                self._move(source, target)
                return [(source, target)]
        return []

    def _move(self, source: int, target: int) -> None:
        """What is said of a slot is true of another one now, and it is empty."""
        self.append(target, self.cached[source])
        self._prompts[target], self._salts[target] = self._prompts[source], self._salts[source]
        self._went_on.discard(target)
        if source in self._went_on:
            self._went_on.add(target)
        self.idle.remove(target)
        self.truncate(source, 0)
        self.release(source)

    def _longest(self, tokens: list[int], salt: str, slots: Collection[int]) -> tuple[int, int]:
        """Which of some slots knows most of a prompt, and how much; of equal ones, the one that loses least by it."""
        best, most, shared = -1, 0, tokens[:0]
        for slot in slots:
            cached, fits = self.cached[slot], self._salts[slot] == salt
            if most and not (fits and cached[:most] == shared):
                continue  # it knows less, as one comparison shows
            known = most + common_prefix(cached[most:], tokens[most:]) if fits else 0
            if best < 0 or (known, -len(cached), -slot) > (most, -len(self.cached[best]), -best):
                best, most, shared = slot, known, tokens[:known]
        return best, most

    def _compact(self, slot: int, tokens: list[int]) -> bool:
        """Where the oldest turns left the prompt, let what the cache holds behind them follow what is in front.

        Turns that are dropped were in the last prompt. What is missing of the answer behind it are thoughts, and what
        was computed with them in view must not be used without them.
        """
        cached = self.cached[slot]
        shared = common_prefix(cached, tokens)
        gap = gap_after(cached, tokens, shared, _WORTH_MOVING)
        if not gap or shared + gap > self._prompts[slot] or self.room.is_shared(slot, shared):
            return False
        if not self._context.drop(slot, shared, shared + gap):
            return False
        del cached[shared : shared + gap]
        self.room.drop(slot, shared, shared + gap)
        self._prompts[slot] -= gap
        return True

    def _restore(self, slot: int, tokens: list[int], salt: str, keep: int) -> int:
        """Read a state in that was stowed or saved where it spares much prefill; how many tokens can be kept now."""
        stowed, known = self._stowed.longest(tokens, salt)
        if stowed is not None and known >= keep + _WORTH_READING:
            self._stowed.take(stowed)
            self._prompts[slot] = stowed.n_prompt
            return self._put_in(slot, stowed.tokens, stowed.state, tokens)
        saved = None if salt else self._saved(tokens, keep)
        if saved is None:
            return keep
        keep = self._put_in(slot, saved.tokens, saved.state, tokens)
        if keep and self.saver is not None:
            self.saver.know(saved.tokens)
        return keep

    def _put_in(self, slot: int, held: list[int], state: bytes | bytearray, tokens: list[int]) -> int:
        """Put the state of the tokens that it held into a slot; how many of a sequence's tokens can be kept of it."""
        self.truncate(slot, 0)
        with suppress(LlmrunError):  # it is only a cache
            if self.make_room(len(held)) and self._context.set_state(slot, state, len(held)):
                self.append(slot, held)
                return reusable(held, tokens)
        return self.truncate(slot, 0)

    def _saved(self, tokens: list[int], keep: int) -> SavedState | None:
        if self._states is not None and len(tokens) - keep >= _WORTH_READING:
            with suppress(LlmrunError, OSError):
                saved = self._states.find(tokens, longer_than=keep + _WORTH_READING)
                return saved if saved is not None and len(saved.tokens) <= self._context.n_ctx else None
        return None

    def save(self, slot: int) -> tuple[int, int]:
        """Save a slot's KV state; how many tokens were saved, in how many bytes.

        Raises:
            OSError: it can't be written.
        """
        tokens = self.cached[slot]
        if self._states is None or not tokens or self._salts[slot]:
            return 0, 0
        state = bytes(self._context.state(slot))
        n_bytes = self._states.save(tokens, state) if state else 0
        return (len(tokens), n_bytes) if n_bytes else (0, 0)


def _runs(slots: Collection[int]) -> list[list[int]]:
    """Slots in rows of neighbours."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs
