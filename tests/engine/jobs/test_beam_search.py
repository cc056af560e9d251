"""The search itself, beside twins that do what its makers wrote, on random tables of log-probabilities."""

from __future__ import annotations

import itertools

import pytest
from support.beam_twin import Found, TableContinuations, ours, table, transformers

from llmrun.engine.jobs.beams import BeamSearch
from llmrun.errors import UsageError
from llmrun.protocol.jobs.beams import ROOT, BeamSettings

END, N_VOCAB, LONGEST = 3, 11, 7


def assert_same(found: Found, wanted: Found) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted])


@pytest.mark.parametrize("stopping", ["true", "false", "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("beams", [2, 3, 4])
def test_finds_what_transformers_finds(beams: int, penalty: float, stopping: str) -> None:
    settings = BeamSettings(beams, penalty, stopping)
    for seed, bias in itertools.product(range(6), (-3.0, 1.0, 3.0)):
        row = table(seed, N_VOCAB, END, bias)
        assert_same(ours(row, END, settings, LONGEST), transformers(row, END, settings, LONGEST))


def test_as_many_beams_as_there_are_answers_find_the_very_best() -> None:
    """Without pruning, the search has to find the best of all answers."""
    n_vocab, end, longest = 3, 0, 3
    row = table(4, n_vocab, end, 0.0)
    found = ours(row, end, BeamSettings(27, 0.0, "never"), longest)
    every: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(n_vocab), repeat=longest):
        answer = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        every[answer] = sum(row(answer[:place])[token] for place, token in enumerate(answer))
    assert found[0][0] == max(every, key=lambda answer: every[answer])


def test_a_cut_search_gives_what_it_has() -> None:
    row = table(2, N_VOCAB, END, -9.0)
    continuations = TableContinuations(row, END)
    continuations.search = search = BeamSearch(BeamSettings(2), LONGEST)
    search.step(continuations)
    search.cut()
    assert search.over
    assert [len(search.path(answer.node)) for answer in search.answers()] == [1, 1]
    assert search.tree[search.answers()[0].node].parent == ROOT


def test_whole_answers_go_before_cut_ones() -> None:
    firsts = set()
    for seed, whole in itertools.product(range(20), (False, True)):
        continuations = TableContinuations(table(seed, N_VOCAB, END, 0.0), END)
        continuations.search = search = BeamSearch(BeamSettings(2, 0.0, "never"), 3, whole=whole)
        while not search.over:
            search.step(continuations)
        ended = [search.tree[answer.node].ended for answer in search.answers()]
        if any(ended) and not all(ended):
            firsts.add((whole, ended[0]))
    assert firsts >= {(False, False), (True, True)}
    assert (True, False) not in firsts


@pytest.mark.parametrize(
    "wrong",
    [
        {"beams": 1},
        {"beams": 65},
        {"length_penalty": float("nan")},
        {"early_stopping": "maybe"},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        BeamSettings(**wrong)  # type: ignore[arg-type]
