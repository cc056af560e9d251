"""A Context without a model: deterministic logits, and a KV cache that shows what the model saw.

Tokens 0 to 255 are bytes, a few control tokens follow. The logits lie in real memory, so that the native sampler
reads them by address as it reads llama.cpp's; like there, they are gone after the next decode call. A batch that
llama.cpp would refuse fails an assertion here. Where the cache is unified, its cells are counted one by one.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llmrun import _native
from llmrun.engine.llama.base import Aborted, CacheFull, DecodeError, Entry, Run, RunLimit, RunRow, RunSteps
from llmrun.protocol.adapters import AdapterScale

BEGIN, END, TURN, HEART = 256, 257, 258, 259
N_VOCAB = 260
CONTROL = {BEGIN: "<s>", END: "</s>", TURN: "<turn>"}
_BYTES = {HEART: b"\xe2\x9d"}  # the first two bytes of a heart: no text alone
_GONE = (ctypes.c_float * N_VOCAB)(*[math.nan] * N_VOCAB)  # logits after the next decode call
_FAVOURITE = 20.0  # logit; the others stay under 1

Model = Callable[[Sequence[int]], Sequence[float]]
"""All tokens of a sequence -> the logits of the next one."""


def tokens_of(text: str) -> list[int]:
    """Token ids of plain text."""
    return list(text.encode())


def favouring(token: int) -> list[float]:
    """Logits with one clear winner."""
    logits = [0.0] * N_VOCAB
    logits[token] = _FAVOURITE
    return logits


def scripted(answers: Mapping[str, str | Sequence[int]]) -> Model:
    """A model that knows what to say to each prompt, then ends; anything else it only ends."""
    scripts = {tuple(tokens_of(prompt)): _script(answer) for prompt, answer in answers.items()}

    def logits(tokens: Sequence[int]) -> Sequence[float]:
        seen = tuple(tokens)
        for prompt, answer in scripts.items():
            done = len(seen) - len(prompt)
            if 0 <= done < len(answer) and seen == prompt + answer[:done]:
                return favouring(answer[done])
        return favouring(END)

    return logits


def _script(answer: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(tokens_of(answer) if isinstance(answer, str) else answer)


def endless(tokens: Sequence[int]) -> Sequence[float]:
    """A model that goes through the alphabet and never ends."""
    return favouring(ord("a") + len(tokens) % 26)


def hashed(tokens: Sequence[int]) -> Sequence[float]:
    """A model whose every next letter depends on all tokens before it, in their order; never ends."""
    seen = zlib.crc32(bytes(token % 256 for token in tokens), len(tokens))
    logits = [-math.inf] * N_VOCAB
    for letter in range(ord("a"), ord("z") + 1):
        logits[letter] = zlib.crc32(bytes([letter]), seen) / 2**31
    return logits


class FakeVocabulary:
    """See llmrun.engine.llama.base.Vocabulary."""

    def __init__(self) -> None:
        self.n_tokens = N_VOCAB
        self.fill_in: tuple[int, int, int] | None = None
        self.suppressed: tuple[int, ...] = ()
        self.control_texts = tuple(CONTROL.values())
        self.shown_control_texts: tuple[str, ...] = ()
        self.bos_text, self.eos_text = CONTROL[BEGIN], CONTROL[END]

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        """Bytes; with special, control texts become their tokens."""
        for token, control in CONTROL.items() if special else ():
            if control in text:
                before, after = text.split(control, 1)
                return [*self.tokenize(before, special=True), token, *self.tokenize(after, special=True)]
        return tokens_of(text)

    def token_pieces(self, text: str, *, special: bool, begins: bool = True) -> Iterator[list[int]]:
        """See base.Vocabulary."""
        yield self.tokenize(text, special=special, begins=begins)

    def with_bos(self, tokens: list[int]) -> list[int]:
        """As a model that wants none."""
        return tokens

    def piece(self, token: int) -> bytes:
        """See base.Vocabulary."""
        return bytes([token]) if token < 256 else _BYTES.get(token, b"")

    def control_piece(self, token: int) -> bytes:
        """See base.Vocabulary."""
        return CONTROL[token].encode() if token in CONTROL else self.piece(token)

    @property
    def ends(self) -> tuple[int, ...]:
        """See base.Vocabulary."""
        return (END,)

    def is_end(self, token: int) -> bool:
        """See base.Vocabulary."""
        return token in self.ends


class Cell(NamedTuple):
    """One of the KV cache: a number of its own, the token whose keys and values it holds, and what computed them."""

    number: int
    token: int
    adapters: tuple[AdapterScale, ...] = ()


class FakeContext:
    """See llmrun.engine.llama.base.Context for the attributes and methods that the loop uses.

    With adapters, logits are those behind a few more tokens. Cells of others than the batch's fail an assertion.

    Args:
        model: what computes the logits.
        cuts: whether forget() can drop a part of a sequence; recurrent models can't.
        n_rollback: without cuts, last tokens of a batch that forget() can drop once after it, but not the first one;
            only if all sequences of the batch have equally many.
        has_checkpoints: as in base.Context.
        window: of a sliding window in some layers; a batch overwrites all cells that its first token does not look at.
        unified: whether sequences share anything; by default, where there is more than one.
        streams: each sequence has a stream of its own, and prefixes are copied.
        on_device: as in base.Context.
        n_cells: as many as all sequences' windows have, by default.
        n_outputs: as in base.Context.

    Attributes:
        calls: every batch that was decoded, or tried.
        most_threads: limits that were set, in order.
        faults: number of a decode call, from 0 -> what it raises, after having written half of its batch.
        before_decode: called at the beginning of each decode call, with its number.
        step_seconds: returns the seconds of a step of a run, by its rows.
        poison: a token; no batch in which it stands can be decoded.
        set_state_error: what set_state() raises.
        copies_whole: whether copy() copies all of a stream, whatever the length.
        hidden_cells: how many cells are in use by something that nobody knows of.
        n_pieces: how many pieces of states were copied, with others to follow.
        computed: the share of the running decode call, as far as a test says so.
        n_computed: tokens that are computed; with is_asynchronous those of the last batch only after a wait for them.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 64,
        n_batch: int = 16,
        n_seq_max: int = 1,
        n_parked: int = 0,
        cuts: bool = True,
        n_rollback: int = 0,
        has_checkpoints: bool = False,
        window: int = 0,
        unified: bool | None = None,
        streams: bool = False,
        on_device: bool = False,
        n_cells: int | None = None,
        n_outputs: int = 16,
    ) -> None:
        self.vocabulary = FakeVocabulary()
        self.predicts = True
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.n_seq_max, self.n_parked = n_seq_max, n_parked
        self.n_cells = n_ctx * n_seq_max if n_cells is None else n_cells
        self.can_copy = n_seq_max > 1 if unified is None else unified
        self.shares_cells, self.on_device = self.can_copy and not streams, on_device
        self.splits_batches = not self.shares_cells
        self.adapters: tuple[AdapterScale, ...] = ()
        self.calls: list[list[Entry]] = []
        self.most_threads: list[int] = []
        self.split_from: int | None = None
        self.faults: dict[int, Exception] = {}
        self.before_decode: Callable[[int], None] = lambda call: None
        self.step_seconds: Callable[[int], float] = lambda rows: 0.0
        self.poison: int | None = None
        self.set_state_error: Exception | None = None
        self.hidden_cells = self.n_computed = self.n_pieces = 0
        self.computed = 0.0
        self.is_asynchronous = self.copies_whole = False
        self._model = model
        self.n_outputs = max(n_outputs, n_seq_max)
        self.cuts, self.has_checkpoints = cuts, has_checkpoints
        self.max_draft = self.n_outputs - 1 if cuts else n_rollback
        self._droppable: dict[int, int] = {}  # without cuts, sequence -> its last tokens that can be dropped
        self._unknown: set[int] = set()  # without cuts, sequences whose state a failed batch has changed
        self._window = window
        self._first = dict.fromkeys(range(n_seq_max + n_parked), 0)  # position that the window has not passed
        self._numbers = itertools.count()
        self._cells: dict[int, list[Cell]] = {sequence: [] for sequence in range(n_seq_max + n_parked)}
        self._rows: dict[int, ctypes.Array[ctypes.c_float]] = {}

    @property
    def n_used(self) -> int:
        """Cells that hold something; shared ones count once."""
        return self.hidden_cells + len(set(itertools.chain.from_iterable(self._cells.values())))

    def cached(self, sequence_id: int = 0) -> list[int]:
        """The tokens that the model has seen in a sequence, in order."""
        return [cell.token for cell in self._cells[sequence_id]]

    def adapt(self, adapters: tuple[AdapterScale, ...]) -> None:
        """See base.Context."""
        self.adapters = adapters

    def limit_threads(self, most: int) -> None:
        """See base.Context."""
        self.most_threads.append(most)

    def decode(self, batch: Sequence[Entry]) -> None:
        """See base.Context."""
        number = len(self.calls)
        self.calls.append(list(batch))
        self._check(batch)
        for row in self._rows.values():
            ctypes.memmove(row, _GONE, ctypes.sizeof(row))
        self._rows = {}
        self.before_decode(number)
        if self.n_used + len(batch) > self.n_cells:
            raise CacheFull
        fault, passed = self.faults.get(number), dict[int, int]()
        if self.poison in [entry.token for entry in batch]:
            fault = DecodeError("llama.cpp could not decode it")
        for index, entry in enumerate(batch[: len(batch) // 2] if fault else batch):
            cells = self._cells[entry.sequence_id]
            assert entry.position == len(cells), "a position is missing, or written twice"
            assert self._has_window(entry.sequence_id, len(cells)), "cells of the window are gone"
            cells.append(Cell(next(self._numbers), entry.token, self.adapters))
            assert {cell.adapters for cell in cells} == {self.adapters}, "computed with other adapters"
            if entry.wants_logits:
                seen = [*self.cached(entry.sequence_id), *(number + int(8 * scale) for number, scale in self.adapters)]
                self._rows[index] = (ctypes.c_float * N_VOCAB)(*self._model(seen))
        rows = Counter(entry.sequence_id for entry in batch)
        for entry in reversed(batch) if self._window else ():  # last of all, the first token of each sequence
            passed[entry.sequence_id] = entry.position - self._window + 1
        for sequence_id, first in passed.items():
            self._first[sequence_id] = max(self._first[sequence_id], first)
        if fault:
            self._unknown |= set() if self.cuts else {*rows}
            raise fault
        assert self._unknown.isdisjoint(rows), "continued from a state that a failed batch has changed"
        are_equal = len({*rows.values()}) == 1
        self._droppable = {each: min(self.max_draft, count - 1) for each, count in rows.items() if are_equal}
        if not self.is_asynchronous:
            self.synchronize()

    def run(self, rows: Sequence[RunRow], limit: RunLimit) -> Run:
        """See base.Context; one step after the other, in the plainest way."""
        assert limit.steps > 0
        steps: RunSteps = []
        entries = [row.entry for row in rows]
        submitted = is_last = False
        failure: Exception | None = None

        def plans() -> bool:
            return any(_plan(row, len(rows)) for row in rows)

        for number in range(limit.steps):
            if not submitted and plans():
                return Run(steps)
            if not submitted:
                failure = self._try(entries)
            submitted = False
            if isinstance(failure, CacheFull):
                if not number:
                    raise failure
                return Run(steps)
            if isinstance(failure, Aborted | DecodeError):
                return Run(steps, failure=failure)
            tokens, failed = list[int](), list[int]()
            for index, row in enumerate(rows):
                try:
                    tokens.append(row.sampler.sample(self.logits(index), None, (), True))
                except _native.BadLogits as error:
                    tokens.append(error.token)
                    failed.append(index)
                if row.lookup is not None and row.gate is not None:
                    row.lookup.extend(tokens[-1:])
                    row.gate.compare(tokens[-1:])
            steps.append(((*tokens,), self.step_seconds(len(entries)), 0.0))
            if failed or any(map(self.vocabulary.is_end, tokens)) or limit.interrupted.is_set:
                return Run(steps, failed)
            if is_last or number == limit.steps - 1 or (limit.seconds <= 0 and limit.take is None):
                return Run(steps)
            entries = [
                Entry(token, entry.position + 1, entry.sequence_id, True)
                for token, entry in zip(tokens, entries, strict=True)
            ]
            if limit.seconds <= 0 and limit.take is not None:
                if self.on_device and not plans():
                    submitted, failure = True, self._try(entries)
                is_last = limit.take(steps) < 0
                if is_last and not submitted:
                    return Run([])
                steps = []
        return Run(steps)

    def _try(self, batch: Sequence[Entry]) -> Exception | None:
        """Decode a batch; return what it raises."""
        try:
            self.decode(batch)
        except (Aborted, CacheFull, DecodeError) as error:
            return error
        return None

    def synchronize(self) -> None:
        """See base.Context."""
        self.n_computed = sum(map(len, self.calls))

    def _check(self, batch: Sequence[Entry]) -> None:
        assert 0 < len(batch) <= self.n_batch
        slots = [entry.sequence_id for entry in batch]
        assert slots == sorted(slots), "recurrent models need ascending slots"
        assert len(set(slots)) <= self.n_seq_max
        assert sum(entry.wants_logits for entry in batch) <= self.n_outputs
        for entry in batch:
            assert 0 <= entry.token < N_VOCAB
            assert entry.position < self.n_ctx, "written behind the context window"

    def logits(self, index: int) -> int:
        """See base.Context."""
        self.synchronize()
        return ctypes.addressof(self._rows[index])

    def can_forget(self, sequence_id: int, start: int) -> bool:
        """See base.Context."""
        if start == 0:
            return True
        if self.cuts:
            return start >= len(self._cells[sequence_id]) or self._has_window(sequence_id, start)
        n_dropped = len(self._cells[sequence_id]) - start
        return sequence_id not in self._unknown and n_dropped <= self._droppable.get(sequence_id, 0)

    def _has_window(self, sequence_id: int, position: int) -> bool:
        """Return whether all tokens that this position looks at in a window are cached."""
        return not self._window or self._first[sequence_id] <= max(0, position - self._window + 1)

    def forget(self, sequence_id: int, start: int) -> bool:
        """See base.Context."""
        found = self.can_forget(sequence_id, start)
        if found:
            if start < len(self._cells[sequence_id]):
                self._droppable.pop(sequence_id, None)
            if start == 0:
                self._unknown.discard(sequence_id)
            del self._cells[sequence_id][start:]
            self._first[sequence_id] = self._first[sequence_id] if start else 0
        return found

    def drop(self, sequence_id: int, start: int, end: int) -> bool:
        """See base.Context. Like llama.cpp, it would move a shared cell for everybody."""
        if self._first[sequence_id] > 0:
            return False
        behind = self._cells[sequence_id][start:]
        others = [cells for other, cells in self._cells.items() if other != sequence_id]
        assert set(behind).isdisjoint(itertools.chain.from_iterable(others)), "another sequence's cells are moved"
        if self.cuts:
            del self._cells[sequence_id][start:end]
        return self.cuts

    def copy(self, source: int, target: int, length: int, checkpoint: bytearray | memoryview | None = None) -> bool:
        """See base.Context."""
        assert self.can_copy
        assert not self._cells[target], "the target is not empty"
        assert length <= len(self._cells[source])
        first = self._first[source]
        if (not self.cuts and length < len(self._cells[source])) or not self.can_forget(source, length):
            if checkpoint is None:
                return False
            first, *tokens = json.loads(bytes(checkpoint))
            assert tokens == self.cached(source)[:length], "a checkpoint of something else"
        self._first[target] = first if length else 0
        self._cells[target] = self._cells[source][:length]
        self._droppable.pop(source, None)
        self._droppable.pop(target, None)
        if not self.shares_cells:
            self._divide(target)
        return True

    def n_copied(self, source: int, length: int) -> int:
        """See base.Context."""
        if self.shares_cells or self.on_device:
            return 0
        return len(self._cells[source]) if self.copies_whole else length

    def checkpoint(self, sequence_id: int) -> bytearray:
        """See base.Context."""
        assert self.has_checkpoints
        return bytearray(json.dumps([self._first[sequence_id], *self.cached(sequence_id)]).encode())

    def go_back(self, sequence_id: int, checkpoint: bytearray | memoryview, length: int) -> bool:
        """See base.Context."""
        first, *tokens = json.loads(bytes(checkpoint))
        assert tokens == self.cached(sequence_id)[:length], "a checkpoint of something else"
        del self._cells[sequence_id][length:]
        self._droppable.pop(sequence_id, None)
        self._unknown.discard(sequence_id)
        self._first[sequence_id] = first
        return True

    def _divide(self, sequence_id: int) -> None:
        """Give a sequence cells of its own."""
        self._cells[sequence_id] = [cell._replace(number=next(self._numbers)) for cell in self._cells[sequence_id]]

    def state(self, sequence_id: int) -> bytearray:
        """See base.Context."""
        return self._state(sequence_id)

    def state_in_pieces(self, sequence_id: int, piece_bytes: int) -> Generator[None, None, bytearray | memoryview]:
        """See base.Context."""
        before = self._cells[sequence_id][:]
        for _ in range(self.state_bytes(sequence_id) // piece_bytes):
            self.n_pieces += 1
            yield
            assert self._cells[sequence_id] == before, "it was changed between two pieces"
        return self.state(sequence_id)

    def _state(self, sequence_id: int) -> bytearray:
        cells = self._cells[sequence_id]
        adapters = cells[0].adapters if cells else ()
        window = [self._first[sequence_id]] if self._window else []
        return bytearray(json.dumps([*window, *self.cached(sequence_id), *adapters]).encode())

    def state_bytes(self, sequence_id: int) -> int:
        """See base.Context."""
        return len(self._state(sequence_id))

    def write_state(self, sequence_id: int, path: Path) -> int | None:
        """See base.Context; a few bytes come before the state."""
        path.write_bytes(b"before" + self._state(sequence_id))
        return len(b"before")

    def set_state(self, sequence_id: int, state: bytearray | memoryview, n_tokens: int) -> bool:
        """See base.Context; a state that begins with "bad" is refused."""
        state = bytearray(state)
        self._cells[sequence_id], self._first[sequence_id] = [], 0
        self._droppable.pop(sequence_id, None)
        self._unknown.discard(sequence_id)
        if self.set_state_error is not None:
            raise self.set_state_error
        if n_tokens > self.n_ctx or state.startswith(b"bad") or self.n_used + n_tokens > self.n_cells:
            return False
        found = json.loads(state)
        self._first[sequence_id] = found.pop(0) if self._window else 0
        adapters = tuple(AdapterScale(*each) for each in found[n_tokens:])
        self._cells[sequence_id] = [Cell(next(self._numbers), token, adapters) for token in found[:n_tokens]]
        return True


def _plan(row: RunRow, width: int) -> bool:
    """Plan a draft; return whether it may pay."""
    if row.lookup is None or row.gate is None:
        return False
    drafted, match = row.lookup.draft(row.gate.n_compared)
    return row.gate.plan(drafted, match, _native.StepShape(width, width), 2**31 - 1).length > 0
