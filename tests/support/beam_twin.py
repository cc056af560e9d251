"""Slow, obvious twins of beam search over a table of log-probabilities, as their makers wrote them.

`transformers` keeps its fixed rows of -1e9 where there is nothing yet, as GenerationMixin._beam_search does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmrun.engine.jobs.beams import BeamSearch
from llmrun.protocol.jobs.beams import BeamSettings

NOTHING = -1e9
Table = Callable[[tuple[int, ...]], list[float]]
"""Tokens so far -> the log-probability of each token."""
Found = list[tuple[tuple[int, ...], float]]
"""Tokens and score, the best one first."""


def table(seed: int, n_vocab: int, end: int, end_bias: float) -> Table:
    """Any model: random, and the same for the same tokens."""

    def row(tokens: tuple[int, ...]) -> list[float]:
        values = np.random.default_rng([seed, 7, *tokens]).standard_normal(n_vocab) * 2
        values[end] += end_bias
        return [float(value) for value in values - np.logaddexp.reduce(values)]

    return row


class TableContinuations:
    """beams.Branches of a table."""

    def __init__(self, row: Table, end: int) -> None:
        self.search: BeamSearch
        self._row, self._end = row, end

    def likeliest(self, node: int, count: int) -> Sequence[tuple[int, float]]:
        tokens = tuple(self.search.tree[step].token for step in self.search.path(node))
        return sorted(enumerate(self._row(tokens)), key=lambda pair: -pair[1])[:count]

    def ends(self, node: int, token: int) -> bool:
        return token == self._end


def ours(row: Table, end: int, settings: BeamSettings, longest: int) -> Found:
    """What our search finds."""
    continuations = TableContinuations(row, end)
    continuations.search = search = BeamSearch(settings, longest)
    while not search.over:
        search.step(continuations)
    answers = search.answers()
    return [(tuple(search.tree[node].token for node in search.path(each.node)), each.score) for each in answers]


def transformers(row: Table, end: int, settings: BeamSettings, longest: int) -> Found:
    """What transformers' search finds."""
    size, penalty, early = settings.beams, settings.length_penalty, settings.early_stopping
    running = [((), 0.0)] + [((), NOTHING)] * (size - 1)
    finished: list[tuple[tuple[int, ...], float, bool]] = [((), NOTHING, False)] * size
    for length in range(1, longest + 1):
        every = [
            ((*tokens, token), total + value) for tokens, total in running for token, value in enumerate(row(tokens))
        ]
        top = sorted(every, key=lambda pair: -pair[1])[: 2 * size]
        hits = [tokens[-1] == end or length == longest for tokens, _ in top]
        lowered = [(tokens, total + NOTHING * hit) for (tokens, total), hit in zip(top, hits, strict=True)]
        running = sorted(lowered, key=lambda pair: -pair[1])[:size]
        ended = [hit and rank < size for rank, hit in enumerate(hits)]
        scored = [
            (tokens, total / length**penalty + (0 if done else NOTHING), done)
            for (tokens, total), done in zip(top, ended, strict=True)
        ]
        finished = sorted([*finished, *scored], key=lambda each: -each[1])[:size]
        reach = longest if early == "never" and penalty > 0 else length
        worst = min(score for _, score, _ in finished)
        improves = any(running[0][1] / reach**penalty > (worst if done else NOTHING) for *_, done in finished)
        if not improves or (early == "true" and all(done for *_, done in finished)) or all(hits):
            break
    return [(tokens, score) for tokens, score, done in finished if done]
