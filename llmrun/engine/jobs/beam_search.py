"""Beam search: choice of branches, finished answers, and the end of the search.

Owns scores, stop rules and groups; must not know models, texts or grammars. The rules are those of transformers'
GenerationMixin._beam_search and HammingDiversityLogitsProcessor, of vLLM's LLM.beam_search, and of TensorRT-LLM's
beam search kernels. Diverse groups are those of https://arxiv.org/abs/1610.02424.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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

    def likeliest(self, beam: Beam, count: int, lowered: Mapping[int, float]) -> Sequence[tuple[int, float]]:
        """Return up to `count` tokens and their log-probabilities, the most likely first.

        Args:
            lowered: token -> penalty on its log-probability.
        """

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
    """

    def __init__(
        self, settings: BeamSettings, n_prompt: int, longest: int, *, n_ends: int = 1, whole: bool = False
    ) -> None:
        """Begin with an empty answer.

        Args:
            whole: rank every finished answer above all truncated ones.
        """
        self.tree: list[Node] = []
        self.length = 0
        self._settings, self._n_prompt, self._longest, self._whole = settings, n_prompt, longest, whole
        # transformers' group search is an older implementation: it compares a group's best candidate, even one that
        # has ended, with its answers, and ignores a group's running beams once it is done, even at the maximum length.
        self._in_groups = settings.groups > 1
        n_ends = n_ends if settings.length_rule == "transformers" else 1
        self._fan = max(2, 1 + n_ends)  # candidates for each beam, so that enough remain if some end
        size = settings.beams // settings.groups
        self._groups = [_Group(size) for _ in range(settings.groups)]

    @property
    def over(self) -> bool:
        return not self.running

    @property
    def running(self) -> list[Beam]:
        return [beam for group in self._groups for beam in group.running]

    def step(self, continuations: Continuations) -> None:
        """Extend every branch by a token."""
        self.length += 1
        is_last = self.length >= self._longest
        chosen = Counter[int]()  # by earlier groups, in this step
        for group in self._groups:
            lowered = {token: count * self._settings.diversity for token, count in chosen.items()}
            self._step(group, continuations, lowered)
            chosen.update(self.tree[beam.node].token for beam in group.running)
            if self._is_done(group) and (self._in_groups or not is_last):
                group.running = []
        if is_last:
            self.cut()

    def cut(self) -> None:
        """End the search: running branches become answers of reason "length"."""
        for group in self._groups:
            for beam in group.running:
                self._finish(group, beam)
            group.running = []

    def answers(self) -> list[Hypothesis]:
        found = [answer for group in self._groups for answer in group.finished]
        return sorted(found, key=self._order)

    def path(self, node: int) -> list[int]:
        """Return the numbers of the nodes from the root to this one."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.tree[node].parent
        return nodes[::-1]

    def _step(self, group: _Group, continuations: Continuations, lowered: Mapping[int, float]) -> None:
        count = self._fan * group.size
        candidates = [
            _Candidate(beam.total + logprob, beam, token, logprob, continuations.ends(beam, token))
            for beam in group.running
            for token, logprob in continuations.likeliest(beam, count, lowered)
        ]
        candidates.sort(key=lambda candidate: -candidate.total)
        group.best = candidates[0].total if candidates else 0.0
        ends_all = self._settings.length_rule == "vllm"
        group.running = []
        for rank, candidate in enumerate(candidates if ends_all else candidates[:count]):
            counts = ends_all or rank < group.size  # one that ends at a lower rank is worse than the running ones
            if candidate.ended and counts:
                self._finish(group, self._add_node(candidate))
            elif not candidate.ended and len(group.running) < group.size:
                group.running.append(self._add_node(candidate))

    def _add_node(self, candidate: _Candidate) -> Beam:
        self.tree.append(
            Node(candidate.beam.node, candidate.token, candidate.logprob, candidate.total, candidate.ended)
        )
        return Beam(len(self.tree) - 1, candidate.total)

    def _finish(self, group: _Group, beam: Beam) -> None:
        ended = self.tree[beam.node].ended
        score = beam.total / self._length(self.length, ended=ended) ** self._settings.length_penalty
        group.finished.append(Hypothesis(beam.node, beam.total, score))
        group.finished.sort(key=self._order)
        del group.finished[group.size :]

    def _order(self, answer: Hypothesis) -> tuple[bool, float]:
        return self._whole and not self.tree[answer.node].ended, -answer.score

    def _length(self, n_tokens: int, *, ended: bool) -> int:
        return self._n_prompt + n_tokens - ended if self._settings.length_rule == "vllm" else n_tokens

    def _is_done(self, group: _Group) -> bool:
        settings = self._settings
        if not group.running or len(group.finished) < group.size or settings.length_rule == "vllm":
            return not group.running
        if settings.early_stopping == "true":
            return True
        grows = settings.early_stopping == "never" and settings.length_penalty > 0  # longer answers may score higher
        length = self._longest if grows else self.length
        best = group.best if self._in_groups else group.running[0].total
        return bool(best / length**settings.length_penalty <= group.finished[-1].score)


class _Group:
    """Beams that compete with one another, at first the empty answer.

    Attributes:
        size: maximum number of beams, and of finished answers.
        best: total of the last step's best candidate.
        running: the best first.
        finished: the best first.
    """

    def __init__(self, size: int) -> None:
        self.size, self.best = size, 0.0
        self.running = [Beam(ROOT, 0.0)]
        self.finished: list[Hypothesis] = []
