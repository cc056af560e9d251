"""Beam search: choice of branches, finished answers, and the end of the search.

The scores and stop rules are those of transformers' GenerationMixin._beam_search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from llmrun.protocol.jobs.beams import ROOT, BeamSettings


class Beam(NamedTuple):
    """A running branch."""

    node: int  # its last one in the tree
    total: float  # sum of its log-probabilities


class Node(NamedTuple):
    """A token of the tree, as in the protocol's TreeNode."""

    parent: int
    token: int
    logprob: float
    total: float
    ended: bool


class Hypothesis(NamedTuple):
    """A finished branch: by an end token or a stop text, as its node says, or by the maximum length."""

    node: int
    total: float
    score: float


class Continuations(Protocol):
    """The candidates of branches."""

    def likeliest(self, beam: Beam, count: int) -> Sequence[tuple[int, float]]:
        """Return up to `count` tokens and their log-probabilities, the most likely first."""

    def ends(self, beam: Beam, token: int) -> bool:
        """Return whether the branch ends with this token."""


class _Candidate(NamedTuple):
    total: float
    beam: Beam
    token: int
    logprob: float
    ended: bool


class BeamSearch:
    """One search, a step at a time.

    Attributes:
        tree: all nodes, in order of creation.
        length: tokens of each running branch.
        running: branches that go on, the best first; at first the empty answer.
    """

    def __init__(self, settings: BeamSettings, longest: int, *, n_ends: int = 1, whole: bool = False) -> None:
        """Begin with an empty answer.

        Args:
            longest: tokens of an answer.
            n_ends: tokens of the vocabulary that end an answer.
            whole: rank every finished answer above all truncated ones.
        """
        self.tree: list[Node] = []
        self.length = 0
        self.running = [Beam(ROOT, 0.0)]
        self._finished: list[Hypothesis] = []  # the best first
        self._settings, self._longest, self._whole = settings, longest, whole
        self._n_candidates = max(2, 1 + n_ends) * settings.beams  # enough remain if some end

    @property
    def over(self) -> bool:
        return not self.running

    def step(self, continuations: Continuations) -> None:
        """Extend every branch by a token."""
        self.length += 1
        candidates = [
            _Candidate(beam.total + logprob, beam, token, logprob, continuations.ends(beam, token))
            for beam in self.running
            for token, logprob in continuations.likeliest(beam, self._n_candidates)
        ]
        candidates.sort(key=lambda candidate: -candidate.total)
        self.running = []
        for rank, candidate in enumerate(candidates[: self._n_candidates]):
            if not candidate.ended and len(self.running) < self._settings.beams:
                self.running.append(self._add_node(candidate))
            elif candidate.ended and rank < self._settings.beams:  # at a lower rank it is worse than the running ones
                self._finish(self._add_node(candidate))
        if self.length >= self._longest:
            self.cut()
        elif self._is_done():
            self.running = []

    def cut(self) -> None:
        """End the search: running branches become answers of reason "length"."""
        for beam in self.running:
            self._finish(beam)
        self.running = []

    def answers(self) -> list[Hypothesis]:
        """Return the finished answers, the best first."""
        return list(self._finished)

    def path(self, node: int) -> list[int]:
        """Return the numbers of the nodes from the root to this one."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.tree[node].parent
        return nodes[::-1]

    def _add_node(self, candidate: _Candidate) -> Beam:
        self.tree.append(
            Node(candidate.beam.node, candidate.token, candidate.logprob, candidate.total, candidate.ended)
        )
        return Beam(len(self.tree) - 1, candidate.total)

    def _finish(self, beam: Beam) -> None:
        self._finished.append(Hypothesis(beam.node, beam.total, self._score(beam.total, self.length)))
        self._finished.sort(key=self._order)
        del self._finished[self._settings.beams :]

    def _order(self, answer: Hypothesis) -> tuple[bool, float]:
        return self._whole and not self.tree[answer.node].ended, -answer.score

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self._settings.length_penalty)

    def _is_done(self) -> bool:
        """Return whether no running branch can become one of the answers, as far as early stopping looks."""
        settings = self._settings
        if not self.running or len(self._finished) < settings.beams:
            return not self.running
        if settings.early_stopping == "true":
            return True
        grows = settings.early_stopping == "never" and settings.length_penalty > 0  # longer answers may score higher
        best = self._score(self.running[0].total, self._longest if grows else self.length)
        return best <= self._finished[-1].score
