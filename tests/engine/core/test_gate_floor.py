"""Drafts never cost more than 2 % of plain decoding by a machine's table, whatever the text is."""

from __future__ import annotations

import pytest
from support.draft_simulation import MACHINES, TEXTS, Machine, simulate

FLOOR = 0.98
N_TOKENS = 120  # a short answer: the bound of one plain step weighs most there


@pytest.mark.parametrize("heads", [False, True], ids=["text", "heads"])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("kind", TEXTS)
def test_one_answer(kind: str, machine: Machine, *, heads: bool) -> None:
    assert simulate(kind, machine, n_tokens=N_TOKENS, heads=heads).speed >= FLOOR


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("kind", ["code", "traps", "changing", "random"])
def test_eight_answers_at_the_same_time(kind: str, machine: Machine) -> None:
    assert simulate(kind, machine, n_tokens=N_TOKENS, clients=8, heads=True).speed >= FLOOR


def test_what_pays_is_drafted_all_the_same() -> None:
    for machine in MACHINES:
        assert simulate("edit", machine, n_tokens=N_TOKENS).speed > 1.3
        assert simulate("loop", machine, n_tokens=N_TOKENS).speed > 1.6
    assert simulate("JSON", MACHINES[0], n_tokens=N_TOKENS, heads=True).speed > 1.4
    assert simulate("prose", MACHINES[2], n_tokens=N_TOKENS, clients=8, heads=True).speed > 1.1
