"""A smaller model that guesses how sequences go on, for all of them in one batch.

Owns its context and what that holds of each sequence; must not know what becomes of guesses, nor the model they are
for. Guesses are what is likeliest: deterministic, and as good as sampled ones for an answer that is sampled itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from llmrun._native import BadLogits, Sampler
from llmrun.engine.core.gate import MODEL
from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.llama.base import Aborted, CacheFull, Context, Entry
from llmrun.errors import LlmrunError

_PIECE = 128  # tokens that are prefilled before a step of the other model, which waits for them
_UNSURE = math.log(0.75)  # llama.cpp's p_min
_MULTIPLE = 4  # rows: see gate.py


@dataclass(slots=True, eq=False)
class _Seat:
    """A sequence of the context.

    Attributes:
        number: llama.cpp's sequence id.
        tokens: what its part of the KV cache holds.
        owner: whose tokens these are, while that goes on.
        used: when it was taken last.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    owner: ModelDrafter | None = None
    used: int = 0


class ModelDrafter:
    """A draft model's view of one sequence; a drafts.Drafter.

    Attributes:
        wish: how many tokens DraftModel.work() is to guess; 0 only prefills, None does nothing.
        n_steps: of the draft model, for this sequence.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._tokens: list[int] = []
        self._n_same = 0  # so many first tokens are in the seat's KV cache
        self._seat: _Seat | None = None
        self._guess: list[int] = []
        self._is_unsure = False
        self._can_read = True
        self.wish: int | None = None
        self.n_steps = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """See drafts.Drafter."""
        self._tokens += tokens
        self._can_read = self._can_read and self._model.knows(tokens)

    def rewind(self, length: int) -> None:
        """See drafts.Drafter."""
        del self._tokens[length:]
        self._n_same = min(self._n_same, length)

    def draft(self, most: int) -> tuple[list[int], int]:
        """See drafts.Drafter; what DraftModel.work() guessed."""
        guess, self._guess = self._guess, []
        return guess[:most], MODEL

    def close(self) -> None:
        """The sequence ended; what the KV cache holds of it may serve the next one."""
        if self._seat is not None:
            self._seat.owner = None

    def count_missing(self) -> int | None:
        """How many tokens it would have to read before it can guess; None where it can't."""
        if not self._can_read or self._model.has_failed:
            return None
        if self._seat is None or self._seat.owner is not self:
            self._seat, self._n_same = self._model.take_seat(self, self._tokens), 0
        seat = self._seat
        start = min(self._n_same, len(seat.tokens))
        start += common_prefix(seat.tokens[start:], self._tokens[start : len(seat.tokens)])
        start = min(start, len(self._tokens) - 1)  # its logits are wanted
        self._n_same = self._model.cut(seat, start)
        return len(self._tokens) - self._n_same

    @property
    def seat(self) -> _Seat:
        """Where it is; count_missing() has found it one."""
        assert self._seat is not None
        return self._seat

    def begin(self, most: int) -> tuple[list[int], bool]:
        """Tokens to read now, at most so many, and whether it can guess then."""
        self._guess, self._is_unsure = [], False
        tokens = self._tokens[self._n_same : self._n_same + most]
        self._n_same += len(tokens)
        return tokens, bool(self.wish) and self._n_same == len(self._tokens)

    def take(self, token: int, logprob: float) -> int | None:
        """Take what is likeliest to come next; the token, if another one is to be guessed behind it.

        Nothing is guessed where the first token is unsure already. Where a later one is, the guess ends with as many
        rows as kernels like to compute.
        """
        is_unsure = logprob < _UNSURE
        if is_unsure and not self._guess:
            return None
        self._guess.append(token)
        self._is_unsure |= is_unsure
        n_rows = len(self._guess) + 1
        is_enough = n_rows > (self.wish or 0) or (self._is_unsure and n_rows % _MULTIPLE == 0)
        return None if is_enough else token


class DraftModel:
    """The draft model's context, and who has which sequence of it.

    Args:
        context: with as many sequences as may run, and a window as long as theirs.
        n_vocab: tokens of the model that the guesses are for.

    Attributes:
        context: see Args.
        has_failed: llama.cpp could not compute with it. Answers need no drafts.
    """

    def __init__(self, context: Context, n_vocab: int) -> None:
        self.context = context
        self._n_vocab = min(context.vocabulary.n_tokens, n_vocab)
        self._logits = Sampler(context.vocabulary.n_tokens)
        self._seats = [_Seat(number) for number in range(context.n_seq_max)]
        self._taken = 0
        self.has_failed = False

    @property
    def deepest(self) -> tuple[int, int]:
        """The sequence of which most is cached, and how many tokens that is."""
        seat = max(self._seats, key=lambda each: len(each.tokens))
        return seat.number, len(seat.tokens)

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether all of these tokens are in its vocabulary."""
        return max(tokens, default=0) < self._n_vocab

    def take_seat(self, drafter: ModelDrafter, tokens: list[int]) -> _Seat:
        """A seat for a sequence that begins with these tokens: the one that knows most of them, or is oldest."""
        free = [seat for seat in self._seats if seat.owner is None] or self._seats
        seat = max(free, key=lambda each: (common_prefix(each.tokens, tokens), -each.used))
        self._taken += 1
        seat.owner, seat.used = drafter, self._taken
        return seat

    def cut(self, seat: _Seat, length: int) -> int:
        """Cut what is cached to its first tokens, or to none where the model can't; how many are left."""
        if not self.context.forget(seat.number, length):
            length = 0
            self.context.forget(seat.number, 0)
        del seat.tokens[length:]
        return length

    def work(self, drafters: Sequence[ModelDrafter]) -> None:
        """Let some sequences, each with a seat, have their wishes. Where it can't, nothing is guessed."""
        seated = [drafter for drafter in drafters if drafter.seat.owner is drafter]
        drafters = sorted(seated, key=attrgetter("seat.number"))
        try:
            going = self._read(drafters)
            while going:
                batch = [Entry(token, len(drafter.seat.tokens), drafter.seat.number, True) for drafter, token in going]
                going = self._decode(batch, [(drafter, [token]) for drafter, token in going])
            return
        except CacheFull:
            for seat in self._seats:
                if seat.owner is None:
                    self.cut(seat, 0)
        except Aborted:
            pass
        except (LlmrunError, BadLogits):
            self.has_failed = True
        for drafter in drafters:
            drafter.draft(0)
            self.cut(drafter.seat, len(drafter.seat.tokens))  # what is half written goes

    def _read(self, drafters: Sequence[ModelDrafter]) -> list[tuple[ModelDrafter, int]]:
        """Read what is missing, or a piece of that; who goes on, and with which token."""
        batch: list[Entry] = []
        fed: list[tuple[ModelDrafter, list[int]]] = []
        most = min(_PIECE, self.context.n_batch)
        for drafter in drafters:
            tokens, guesses = drafter.begin(most - len(batch))
            start, number = len(drafter.seat.tokens), drafter.seat.number
            batch += [Entry(token, position, number, False) for position, token in enumerate(tokens, start)]
            if guesses:
                batch[-1] = batch[-1]._replace(wants_logits=True)
            fed.append((drafter, tokens))
        return self._decode(batch, fed) if batch else []

    def _decode(
        self, batch: list[Entry], fed: Sequence[tuple[ModelDrafter, list[int]]]
    ) -> list[tuple[ModelDrafter, int]]:
        """Compute what each was fed; who goes on behind its new guess."""
        self.context.decode(batch)
        going: list[tuple[ModelDrafter, int]] = []
        end = 0
        for drafter, tokens in fed:
            end += len(tokens)
            drafter.seat.tokens += tokens
            drafter.n_steps += bool(tokens)
            if tokens and batch[end - 1].wants_logits:
                address = self.context.logits(end - 1)
                likeliest, logprob = self._logits.log_probabilities(address, 0, 1)[1]
                token = drafter.take(likeliest, logprob) if likeliest < self._n_vocab else None
                going += [(drafter, token)] if token is not None else []
        return going
