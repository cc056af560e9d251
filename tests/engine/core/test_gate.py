"""Draft lengths by the costs of steps and acceptance, with a bounded loss."""

from __future__ import annotations

import random
from functools import cache
from statistics import geometric_mean

import pytest
from support.draft_simulation import MACHINES, TEXTS, Machine, simulate

from llmrun._native import Gate, StepShape
from llmrun.engine.core.steps import StepCost, cost_of

ALONE = StepShape(rows=1, sampled=1)
CHEAP: tuple[StepCost, ...] = ((1, 1.0), (4, 1.2), (8, 1.4), (16, 1.8))
LINEAR: tuple[StepCost, ...] = tuple((width, float(width)) for width in (1, 4, 8, 16))


def new(most: int = 15, costs: tuple[StepCost, ...] = CHEAP, *, always: bool = False) -> Gate:
    return Gate(most, costs, (), always)


def sure(costs: tuple[StepCost, ...] = CHEAP, most: int = 15) -> Gate:
    """Return a gate whose drafts were all accepted."""
    gate = new(most, costs)
    for _ in range(100):
        gate.learn(1, 30, missed=False)
    return gate


@pytest.mark.parametrize(
    ("most", "rows", "expected"),
    [(15, 1, 15), (14, 1, 11), (7, 1, 7), (6, 1, 3), (3, 1, 3), (2, 1, 2), (1, 1, 1), (7, 3, 5), (4, 3, 1)],
)
def test_what_is_always_drafted_fills_a_batch_as_kernels_like_it(most: int, rows: int, expected: int) -> None:
    gate = new(most, always=True)
    assert gate.choose(1, 100, StepShape(rows, 1)).length == expected
    assert new(100, always=True).choose(1, most, StepShape(rows, 1)).length == expected


def test_the_best_width_is_chosen() -> None:
    assert sure().choose(5, 100, ALONE).length == 15
    assert sure().choose(5, 14, ALONE).length == sure(most=14).choose(5, 100, ALONE).length == 7
    assert sure().choose(5, 2, ALONE).length == 0
    dear = (*CHEAP[:3], (16, 9.0))
    assert sure(dear).choose(5, 100, ALONE).length == 7


def test_nothing_is_drafted_where_rows_cost_as_much_as_steps() -> None:
    assert sure(LINEAR).choose(20, 100, ALONE).length == 0


def test_a_draft_has_to_pay_for_all_who_wait_for_it() -> None:
    crowd = StepShape(rows=4, sampled=4)
    assert sure().choose(5, 100, crowd).length == 4, "a draft may only cost what this answer's tokens would"
    gate = sure()
    gate.record_step(5, ALONE, 3, 3)
    assert gate.choose(5, 100, crowd).length == 12
    dear = (*CHEAP[:3], (16, 9.0))
    assert sure(dear).choose(5, 100, crowd).length == 4
    assert sure().choose(5, 100, StepShape(16, 16)).length == 0


def test_what_would_have_come_true_opens_the_gate_and_what_would_not_closes_it() -> None:
    gate = new()
    for _ in range(30):
        gate.learn(2, 0, missed=True)
    assert gate.choose(2, 15, ALONE).length == 0
    gate.learn(20, 15, missed=False)
    assert gate.choose(20, 15, ALONE).length == 15, "longer matches are another matter"
    for _ in range(30):
        gate.learn(2, 15, missed=False)
    assert gate.choose(2, 15, ALONE).length == 15


@pytest.mark.parametrize("match", [1, 3, 20])
def test_nothing_is_verified_before_it_is_known_how_often_such_drafts_are_right(match: int) -> None:
    gate = new()
    for n_outcomes in range(12):
        is_open = gate.choose(match, 15, ALONE).length > 0
        assert not is_open or n_outcomes >= 8
        gate.learn(match, 1, missed=False)
    assert is_open
    hopeless = new()
    n_drafted = 0
    for _ in range(3000):
        n_drafted += hopeless.plan([7] * 15, match, ALONE, 15).length
        hopeless.compare([8])
    assert n_drafted <= 6, "each could be seen to fail"


def test_what_is_expected_is_the_sum_of_chances() -> None:
    gate = new()
    for _ in range(1000):
        gate.learn(2, 1, missed=False)
    assert gate.expected(2, 1) == pytest.approx(1, abs=1e-3)
    alone = gate.expected(3, 1)
    assert gate.expected(3, 2) == pytest.approx(alone + alone**2)
    assert gate.expected(2, 2) == pytest.approx(1 + alone, abs=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_the_loss_is_bounded_whatever_comes(seed: int) -> None:
    """Chances are learned as if all came true, and what is drafted comes true as seldom as an opponent likes.

    The bound is one plain step and 1 % of the time of plain decoding.
    """
    draws = random.Random(seed)
    gate = sure()
    plain = spent = 0.0
    hostile = draws.random()
    for _ in range(2000):
        drafted = gate.choose(8, 15, ALONE).length
        n_accepted = 0 if draws.random() < hostile else draws.randint(0, drafted)
        gate.record_step(8, ALONE, drafted, n_accepted)
        spent += cost_of(CHEAP, 1 + drafted)
        plain += 1 + n_accepted
        assert spent - plain <= 0.01 * plain + 1 + 1e-9


def test_each_token_of_a_models_draft_has_its_own_rate() -> None:
    """The first one is right most often: a shorter draft pays where a longer one does not."""
    costs = [(width, 1 + width / 10) for width in (1, 2, 3, 4, 8, 16)]
    gate = Gate(15, costs, ((1, 0.05), (2, 0.05)))
    for _ in range(100):
        gate.learn(Gate.MODEL, 1, missed=True)
        gate.learn_sureness(sure=True)
    assert gate.expected(Gate.MODEL, 1) > 0.95
    assert gate.expected(Gate.MODEL, 7) < 1.05
    assert gate.choose(Gate.MODEL, 15, ALONE).length == 1
    for _ in range(100):
        gate.learn(Gate.MODEL, 7, missed=False)
    assert gate.choose(Gate.MODEL, 15, ALONE).length >= 3


def test_a_source_does_not_spend_what_another_one_gains() -> None:
    gate = new()
    for _ in range(50):
        gate.record_step(5, ALONE, 7, 7)
    assert gate.credit(Gate.MODEL, ALONE) < 6 < gate.credit(5, ALONE)
    gate.record_step(Gate.MODEL, ALONE, 15, 0, 10.0)
    assert gate.credit(Gate.MODEL, ALONE) < 0 < gate.credit(5, ALONE)


def test_a_model_that_was_wrong_is_tried_again_after_a_while() -> None:
    gate = Gate(15, CHEAP, ((1, 0.05), (2, 0.05)))
    for _ in range(30):
        gate.learn(Gate.MODEL, 0, missed=True)
    n_steps = 0
    while not gate.choose(Gate.MODEL, 15, ALONE).length:
        gate.plan([], 0, ALONE, 0)
        gate.compare([1])
        n_steps += 1
    assert 50 < n_steps < 1000


# ---- drafts never cost more than 2 % of plain decoding, whatever the text is


FLOOR = 0.98
N_TOKENS = 120  # a short answer: the bound of one plain step weighs most there


@cache
def speeds(name: str, heads: bool, knows: bool) -> list[float]:
    """Return the speed for each kind of text; `knows` begins with the machine's own times."""
    machine = next(each for each in MACHINES if each.name == name)
    begins = machine.measured if knows else None
    return [simulate(kind, machine, n_tokens=N_TOKENS, heads=heads, begins=begins).speed for kind in TEXTS]


@pytest.mark.parametrize("heads", [False, True], ids=["text", "heads"])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_one_answer(machine: Machine, *, heads: bool) -> None:
    assert min(speeds(machine.name, heads, knows=False)) >= FLOOR


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("kind", ["code", "traps", "changing", "random"])
def test_eight_answers_at_the_same_time(kind: str, machine: Machine) -> None:
    assert simulate(kind, machine, n_tokens=N_TOKENS, clients=8, heads=True).speed >= FLOOR


def test_what_pays_is_drafted_all_the_same() -> None:
    for machine in MACHINES:
        assert simulate("edit", machine, n_tokens=N_TOKENS).speed > 1.29
        assert simulate("loop", machine, n_tokens=N_TOKENS).speed > 1.6
    device, *_, memory_bound = MACHINES
    assert simulate("JSON", device, n_tokens=N_TOKENS, heads=True).speed > 1.4
    assert simulate("prose", memory_bound, n_tokens=N_TOKENS, clients=8, heads=True).speed > 1.08


@pytest.mark.parametrize("heads", [False, True], ids=["text", "heads"])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_table_by_kind_of_machine_is_as_good_as_one_measured_on_it(machine: Machine, *, heads: bool) -> None:
    """By the geometric mean of all texts; heads of a processor whose steps cost less than the table's gain less."""
    known, found = (geometric_mean(speeds(machine.name, heads, knows)) for knows in (True, False))
    assert found >= (0.89 if heads else 0.96) * known
