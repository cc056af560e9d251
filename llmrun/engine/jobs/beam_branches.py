"""Candidates of each branch of a beam search: log-probabilities after penalties, biases, grammar and bans.

Owns the text and the grammar state of every branch; must not know contexts, or the choice of branches. As in
transformers, penalties act on log-probabilities, which are not normalized again.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmrun import _native
from llmrun.engine.core.sampler import logit_biases
from llmrun.engine.jobs.beam_search import Beam
from llmrun.errors import BadLogitsError
from llmrun.protocol.jobs.beams import ROOT
from llmrun.protocol.params import Limits, SamplingParams

if TYPE_CHECKING:
    from llmrun.engine.constraint.matcher import Matcher
    from llmrun.engine.llama.base import Vocabulary

_SPARE = 64  # additional candidates, because some may be banned


@dataclass
class BeamState:
    """One running branch."""

    sequence_id: int  # in the KV cache
    tokens: list[int] = field(default_factory=list)  # of the answer
    text: bytes = b""
    matcher: Matcher | None = None  # its state in the grammar, None without one
    logits: int = 0  # address of the logits after its last token


class Branches:
    """beam_search.Continuations from a model's logits.

    Attributes:
        by_node: node -> the branch that ends there.
    """

    def __init__(
        self, prompt: Sequence[int], vocabulary: Vocabulary, sampling: SamplingParams, limits: Limits, root: BeamState
    ) -> None:
        self.by_node = {ROOT: root}
        self.end_tokens = frozenset(filter(vocabulary.is_end, range(vocabulary.n_tokens)))
        self._prompt, self._vocabulary, self._sampling = prompt, vocabulary, sampling
        self._native = _native.Sampler(vocabulary.n_tokens, seed=0)
        self._stops = [text.encode() for text in limits.stop]
        self._bans = [text.casefold() for text in limits.ban]
        ends = [(token, -math.inf) for token in self.end_tokens if limits.ignores_end]
        self._biases = [*logit_biases(sampling, vocabulary), *ends]
        penalties = (sampling.repeat_penalty - 1, sampling.frequency_penalty, sampling.presence_penalty)
        self._penalizes = sampling.repeat_last_n > 0 and any(penalties)

    def child(self, branch: BeamState, token: int, sequence_id: int) -> BeamState:
        """Return a copy of the branch with one token more; the branch's own matcher does not change."""
        matcher = branch.matcher.copy() if branch.matcher is not None else None
        if matcher is not None:
            matcher.accept(token)
        return BeamState(sequence_id, [*branch.tokens, token], branch.text + self._vocabulary.piece(token), matcher)

    def ends(self, beam: Beam, token: int) -> bool:
        """Return whether the token is an end token, or completes a stop text."""
        if token in self.end_tokens:
            return True
        return bool(self._stops) and any(stop in self._text(beam, token) for stop in self._stops)

    def without_stop(self, text: bytes) -> str:
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return text[: min(found, default=len(text))].decode("utf-8", "replace")

    def likeliest(self, beam: Beam, count: int) -> Sequence[tuple[int, float]]:
        branch = self.by_node[beam.node]
        limit = count + _SPARE if self._bans else count
        try:
            found = self._native.log_probabilities(branch.logits, 0, limit)[1:]
        except _native.BadLogits as error:
            reason = "its logits are not numbers that can be compared"
            raise BadLogitsError(f"the model produced {error.logit:g} at token {error.token}", why=reason) from None
        if self._penalizes or self._biases or branch.matcher is not None:
            found = self._adjusted(branch, found[0], limit)
        return [pair for pair in found if not (self._bans and self._is_banned(beam, pair[0]))][:count]

    def _adjusted(self, branch: BeamState, likeliest: tuple[int, float], count: int) -> list[tuple[int, float]]:
        """Return the most likely tokens after biases, penalties and grammar, in transformers' order.

        Args:
            likeliest: token and log-probability of one of the model's tokens, for normalization.
        """
        import numpy as np

        token, logprob = likeliest
        memory: Any = (ctypes.c_float * self._vocabulary.n_tokens).from_address(branch.logits)
        row = np.frombuffer(memory, np.float32)
        values = row - (row[token] - np.float32(logprob))
        for token, bias in self._biases:
            values[token] += bias
        if self._penalizes:
            self._penalize(values, branch)
        if branch.matcher is not None:
            words: Any = (ctypes.c_uint8 * -(-len(values) // 8)).from_address(branch.matcher.mask())
            values[np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")[: len(values)] == 0] = -math.inf
        places = np.argpartition(values, -min(count, len(values)))[-count:].tolist()
        found = [(place, float(values[place])) for place in places if values[place] > -math.inf]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def _penalize(self, values: Any, branch: BeamState) -> None:
        """Penalize the tokens among the last repeat_last_n ones, the prompt's included."""
        sampling = self._sampling
        seen = [*self._prompt, *branch.tokens][-sampling.repeat_last_n :]
        for token, count in Counter(seen).items():
            value = values[token]
            value *= sampling.repeat_penalty if value < 0 else 1 / sampling.repeat_penalty
            values[token] = value - count * sampling.frequency_penalty - sampling.presence_penalty

    def _text(self, beam: Beam, token: int) -> bytes:
        return self.by_node[beam.node].text + self._vocabulary.piece(token)

    def _is_banned(self, beam: Beam, token: int) -> bool:
        text = self._text(beam, token).decode("utf-8", "ignore").casefold()
        return any(ban in text for ban in self._bans)
