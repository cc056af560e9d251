"""Sources of drafts: the text so far, a draft model, the model's own prediction heads. One interface: Source.

Must not know batches, samplers, nor which drafts are accepted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmrun._native import BadLogits, Gate, Sampler, SuffixAutomaton
from llmrun.engine.llama.base import Aborted, CacheFull, Context
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import DraftSource

_MULTIPLE = 4  # rows: see gate.cpp


class DraftedSequence(Protocol):
    """The part of a core.sequence.Sequence that sources of drafts read."""

    tokens: list[int]
    slot: int

    @property
    def n_waiting(self) -> int: ...


@dataclass(slots=True, eq=False)
class Draft:
    """Tokens that may follow a sequence.

    Attributes:
        match: length of the match in the text that they follow; Gate.MODEL for those by weights.
        probabilities: of the tokens by the weights that drafted them; none if they are from the text.
        n_steps: that the weights took for it.
    """

    source: DraftSource
    match: int = Gate.MODEL
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    n_steps: int = 0


class Source(Protocol):
    """A source of drafts."""

    def propose(self, asked: Mapping[DraftedSequence, int], /) -> dict[DraftedSequence, Draft]:
        """Return a draft for each sequence; its length is limited to the number of tokens beside the sequence."""


class TextSource:
    """Copies of what followed when the end of a sequence occurred in it before.

    Args:
        lookup: of the sequence, extended with its tokens before each draft.
        n_prompt: first tokens of the sequence; those after them are the answer.
    """

    def __init__(self, lookup: SuffixAutomaton, n_prompt: int) -> None:
        self._lookup, self._n_prompt = lookup, n_prompt

    def propose(self, asked: Mapping[DraftedSequence, int]) -> dict[DraftedSequence, Draft]:
        drafts = {}
        for sequence, limit in asked.items():
            tokens, match = self._lookup.draft(limit)
            source: DraftSource = "prompt" if self._lookup.draft_begin < self._n_prompt else "answer"
            drafts[sequence] = Draft(source, match, tokens)
        return drafts


class DraftWeights(ABC):
    """Weights that draft for several sequences in one batch, the likeliest token at a time.

    Such drafts are deterministic, and as good as sampled ones for an answer that is sampled itself.

    Attributes:
        source: of its drafts.
        drafts_together: several answers get drafts of one length, computed in one batch, or none.
        sure: probability of a token from which on it is sure of it. An unsure first token ends the draft, empty. After
            an unsure later one, the draft ends at the next number of rows that kernels compute well.
        n_most: maximum length of a draft; None without one.
        contexts: llama.cpp's contexts of its own.
        has_failed: llama.cpp could not compute with it; answers continue without drafts.
    """

    source: DraftSource
    drafts_together = False
    sure = 0.0
    n_most: int | None = None
    contexts: Sequence[Context] = ()

    def __init__(self, n_vocab: int, n_known: int) -> None:
        """Draft tokens before n_known of a vocabulary of n_vocab."""
        self._n_known, self._logits = n_known, Sampler(n_vocab)
        self.has_failed = False

    def switch_on(self) -> None:  # noqa: B027  # a draft model reads what it needs before it drafts
        """Follow the answers from now on."""

    @abstractmethod
    def count_missing(self, sequence: DraftedSequence) -> int | None:
        """Return the number of tokens to prefill before drafting; None if drafting is impossible."""

    def propose(self, asked: Mapping[DraftedSequence, int]) -> dict[DraftedSequence, Draft]:
        """Prefill and draft for sequences after count_missing(); with 0 tokens, only prefill. On failure, no tokens."""
        drafts = {sequence: Draft(self.source) for sequence in asked}
        try:
            rows = self._begin(asked)
            while rows:
                newest = {}
                for sequence, address in rows:
                    if self._add_likeliest(drafts[sequence], address, asked[sequence]):
                        newest[sequence] = drafts[sequence].tokens[-1]
                rows = self._go_on(newest) if newest else []
            return drafts
        except (Aborted, CacheFull, LlmrunError, BadLogits) as error:
            self.has_failed |= not isinstance(error, (Aborted, CacheFull))
            self._recover(asked, error)
        finally:
            self._end(asked)
        return {sequence: Draft(self.source, n_steps=draft.n_steps) for sequence, draft in drafts.items()}

    def _add_likeliest(self, draft: Draft, address: int, limit: int) -> bool:
        """Add the likeliest token to a draft, by logits if there are any; return whether another one should follow."""
        draft.n_steps += 1
        if not address:
            return False
        token, logprob = self._logits.log_probabilities(address, 0, 1)[1]
        probability = math.exp(logprob)
        if token >= self._n_known or (probability < self.sure and not draft.tokens):
            return False
        draft.tokens.append(token)
        draft.probabilities.append(probability)
        n_rows = len(draft.tokens) + 1
        is_unsure = min(draft.probabilities) < self.sure
        return n_rows <= limit and not (is_unsure and n_rows % _MULTIPLE == 0)

    @abstractmethod
    def _begin(self, asked: Mapping[DraftedSequence, int]) -> list[tuple[DraftedSequence, int]]:
        """Decode what is missing; return the address of the logits after each sequence, 0 if more is missing."""

    @abstractmethod
    def _go_on(self, newest: Mapping[DraftedSequence, int]) -> list[tuple[DraftedSequence, int]]:
        """Decode the newest token of each draft; return as _begin()."""

    def _recover(self, asked: Collection[DraftedSequence], error: Exception) -> None:  # noqa: B027  # heads forget
        """Drop what a failed batch may have left half written."""

    def _end(self, asked: Collection[DraftedSequence]) -> None:  # noqa: B027  # a draft model keeps what is right
        """Remove what was decoded of the drafts."""

    def rewind(self, sequence: DraftedSequence, length: int) -> None:  # noqa: B027  # heads follow the target
        """Take note of a sequence that was cut to its first tokens."""

    def close(self, sequence: DraftedSequence) -> None:  # noqa: B027  # heads have nothing of their own
        """Release what belongs to the sequence when its answer ends."""
