"""Verdicts on few samples: quantiles against tables, tests against counting by hand, errors as rare as promised."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from statistics import quantiles

import pytest

from llmrun import statistics
from llmrun.statistics import (
    Verdict,
    compare,
    drift,
    half_width,
    interval,
    outliers,
    positive_interval,
    quantile,
    student,
)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (30, 2.04227), (1000, 1.96234), (2.5, 3.57465)],
)
def test_student_is_that_of_the_tables(freedom: float, expected: float) -> None:
    assert student(freedom) == pytest.approx(expected, rel=1e-5)


def test_the_interval_of_a_mean_is_that_of_the_textbooks() -> None:
    assert half_width([9.0, 10.0, 11.0, 10.0]) == pytest.approx(3.18245 * 0.81650 / 2, rel=1e-4)


def test_the_interval_of_a_positive_mean_is_positive() -> None:
    low, high = positive_interval(0.25, 0.68)
    assert 0 < low < 0.25 < high
    assert low * high == pytest.approx(0.25**2)
    assert positive_interval(100.0, 0.1) == pytest.approx((99.9, 100.1), rel=1e-6)
    assert positive_interval(0.0, 0.0) == (0.0, 0.0)


@pytest.mark.parametrize("count", [2, 3, 20, 101])
def test_quantiles_are_those_of_the_standard_library(count: int) -> None:
    values = sorted(number * number % 97 / 7 for number in range(count))
    for percent, expected in enumerate(quantiles(values, n=100, method="inclusive"), 1):
        assert quantile(values, percent / 100) == pytest.approx(expected)
    assert (quantile(values, 0.0), quantile(values, 1.0)) == (values[0], values[-1])


def test_every_quantile_of_one_value_is_that_value() -> None:
    assert [quantile([7], share) for share in (0.0, 0.5, 0.95, 1.0)] == [7, 7, 7, 7]


def test_rank_tests_cut_where_the_tables_say() -> None:
    """Critical values of U and of the signed ranks, two-sided 5 %."""
    assert [statistics._mann_whitney_cut(n, n) for n in (4, 5, 6, 7, 8, 10, 20)] == [0, 2, 5, 8, 13, 23, 127]
    assert statistics._mann_whitney_cut(5, 8) == statistics._mann_whitney_cut(8, 5) == 6
    assert [statistics._signed_rank_cut(n) for n in (6, 8, 10, 15)] == [0, 3, 8, 25]


def test_many_samples_are_judged_by_a_normal_approximation_that_joins_the_counted_chances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = (statistics._mann_whitney_cut(50, 50), statistics._signed_rank_cut(50), statistics._least_trend(50))
    for cached in (statistics._mann_whitney_cut, statistics._signed_rank_cut, statistics._least_trend):
        cached.cache_clear()
    monkeypatch.setattr(statistics, "_EXACT", 49)
    near = (statistics._mann_whitney_cut(50, 50), statistics._signed_rank_cut(50), statistics._least_trend(50))
    for cached in (statistics._mann_whitney_cut, statistics._signed_rank_cut, statistics._least_trend):
        cached.cache_clear()
    assert near == pytest.approx(counted, abs=2)
    thousand = [100 + math.sin(7 * i) for i in range(1000)]
    assert compare(thousand, [rate * 0.99 for rate in thousand], between=0).kind == "slower"
    assert compare(thousand, [rate * 0.99 for rate in thousand], paired=True).kind == "slower"


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_a_trend_is_as_rare_as_counting_all_orders_says(n: int) -> None:
    def score(order: tuple[int, ...]) -> int:
        return sum((late > early) - (late < early) for early, late in itertools.combinations(order, 2))

    scores = [abs(score(order)) for order in itertools.permutations(range(n))]
    least = statistics._least_trend(n)
    assert sum(score >= least for score in scores) <= 0.1 * len(scores)
    assert sum(score >= least - 2 for score in scores) > 0.1 * len(scores)


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = random.Random(1)
    found = [interval([generator.gauss(100, 2) for _ in range(5)]) for _ in range(2000)]
    assert 0.935 <= sum(each is not None and each.low <= 100 <= each.high for each in found) / 2000 <= 0.965
    assert interval([7.0]) is None
    same = interval([100.0] * 5)
    assert same is not None
    assert (same.low, same.high, same.half_width) == (100, 100, 0)


def test_an_interval_of_two_rates_that_differ_much_is_positive() -> None:
    found = interval([100.0, 50.0])
    assert found is not None
    assert 0 < found.low < found.mean == 75.0 < found.high
    assert found.half_width == pytest.approx(12.7062 * 25 / 75, rel=1e-4)
    assert found.is_noisy


def test_outliers_and_drift() -> None:
    assert outliers([100, 101, 99, 100, 60, 100.5]) == (4,)
    assert outliers([100, 100, 100, 100.1]) == (), "nearer than anybody cares"
    assert outliers([1, 2, 3]) == ()
    assert drift([100, 98, 96, 94, 92]) == pytest.approx(-0.08, abs=0.002)
    assert drift([100, 98, 101, 99, 100]) == 0
    assert drift([100, 90]) == 0


def test_in_turns_a_drift_drops_out_and_five_percent_are_seen() -> None:
    drifting = [100, 97, 94, 91, 88]
    assert compare(drifting, [rate * 1.001 for rate in drifting], paired=True).kind == "faster", "0.1 %, without noise"
    verdict = compare(drifting, [95.1, 92, 89.5, 86.4, 83.7], paired=True)
    assert verdict.kind == "slower"
    assert verdict.ratio == pytest.approx(0.95, abs=0.002)
    assert verdict.low < verdict.ratio < verdict.high < 1
    assert verdict.paired


def test_apart_two_starts_are_allowed_to_differ_by_a_little() -> None:
    """Each set says "100.0 ± 0.1" of itself: that says nothing about another start of the same program."""
    steady = [100, 100.1, 99.9, 100.05, 99.95]
    assert compare(steady, [rate * 0.985 for rate in steady]).kind == "same"
    assert compare(steady, [rate * 0.985 for rate in steady], between=0).kind == "slower"
    assert compare(steady, [rate * 0.95 for rate in steady]).kind == "slower"
    assert compare(steady, [rate * 0.80 for rate in steady], between=statistics.DISTURBED).kind == "noisy"


def test_apart_a_set_that_is_getting_slower_is_no_evidence() -> None:
    verdict = compare([100, 99, 98, 97, 96], [95, 94, 93, 92, 91], between=0)
    assert not verdict.is_different
    assert verdict.why == "A got 4% slower while it was measured, B got 4% slower while it was measured"


def test_ratios_turn_round_with_the_sides() -> None:
    a, b = [100, 102, 99, 101, 100.5], [90, 93, 91, 92.5, 90.7]
    there, back = compare(a, b), compare(b, a)
    assert (there.kind, back.kind) == ("slower", "faster")
    assert (there.ratio, there.low, there.high) == pytest.approx((1 / back.ratio, 1 / back.high, 1 / back.low))


def test_too_few_samples_say_so_in_words() -> None:
    verdict = compare([100], [50, 51])
    assert (verdict.kind, verdict.low, verdict.high) == ("noisy", 0, math.inf)
    assert verdict.words == "too noisy to tell"
    assert verdict.why == "one sample tells nothing about noise"
    two = compare([100, 130], [90, 60])
    assert two.kind == "noisy"
    assert two.why
    for a, b in (([], [1.0]), ([1.0, 0.0], [1.0, 1.0])):
        with pytest.raises(ValueError, match="above 0"):
            compare(a, b)
    with pytest.raises(ValueError, match="not pairs"):
        compare([1, 2], [1], paired=True)


def test_samples_without_any_spread_are_no_trouble() -> None:
    for n in (2, 3, 5, 9):
        assert compare([100] * n, [100] * n, paired=True).kind == "same"
        assert compare([100] * n, [100] * n).kind == "same"
        assert compare([100] * n, [90] * n, between=0).kind == "slower"


Simulation = Callable[[random.Random, bool], Verdict]


def _in_turns(repetitions: int, spread: float) -> Simulation:
    """Pairs on a machine that drifts by up to 10 % meanwhile, A B B A."""

    def simulate(generator: random.Random, is_slower: bool) -> Verdict:
        slope, slower = generator.uniform(-0.1, 0.1) / (2 * repetitions), 1.05 if is_slower else 1.0
        a, b = [], []
        for pair in range(repetitions):
            first, second = (100 * math.exp(slope * (2 * pair + i) + generator.gauss(0, spread)) for i in (0, 1))
            a.append(second if pair % 2 else first)
            b.append((first if pair % 2 else second) / slower)
        return compare(a, b, paired=True)

    return simulate


def _apart(repetitions: int, spread: float, starts: float) -> Simulation:
    def simulate(generator: random.Random, is_slower: bool) -> Verdict:
        sides = []
        for slower in (1.0, 1.05 if is_slower else 1.0):
            level = 100 * math.exp(generator.gauss(0, starts)) / slower
            sides.append([level * math.exp(generator.gauss(0, spread)) for _ in range(repetitions)])
        return compare(*sides)

    return simulate


@pytest.mark.parametrize(
    ("simulation", "least_found"),
    [
        (_in_turns(5, 0.01), 0.97),
        (_in_turns(5, 0.015), 0.93),
        (_in_turns(10, 0.015), 0.97),
        (_apart(5, 0.01, 0.0), 0.93),
        (_apart(10, 0.01, 0.0), 0.97),
        (_apart(5, 0.01, 0.01), 0.7),
    ],
    ids=["turns 5", "turns 5 noisy", "turns 10", "apart 5", "apart 10", "apart 5, starts differ"],
)
def test_errors_are_as_rare_as_promised(simulation: Simulation, least_found: float) -> None:
    """False alarms in at most 5 % of cases (and what chance adds to 600 of them); a slowdown of 5 % is found."""
    generator = random.Random(2)
    alarms = sum(simulation(generator, False).is_different for _ in range(600)) / 600
    found = sum(simulation(generator, True).kind == "slower" for _ in range(300)) / 300
    assert alarms <= 0.05 + 0.018
    assert found >= least_found
