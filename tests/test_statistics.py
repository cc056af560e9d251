"""Quantiles against the standard library, and Student's t against statistical tables."""

from __future__ import annotations

import statistics

import pytest

from llmrun.statistics import half_width, positive_interval, quantile, student


@pytest.mark.parametrize(
    ("freedom", "confidence", "expected"),
    [(1, 0.95, 12.7062), (2, 0.95, 4.30265), (4, 0.95, 2.77645), (9, 0.95, 2.26216), (30, 0.95, 2.04227),
     (1000, 0.95, 1.96234), (2.5, 0.95, 3.57465), (4, 0.99, 4.60409)],
)  # fmt: skip
def test_student_is_that_of_the_tables(freedom: float, confidence: float, expected: float) -> None:
    assert student(freedom, confidence) == pytest.approx(expected, rel=1e-5)


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
    for percent, expected in enumerate(statistics.quantiles(values, n=100, method="inclusive"), 1):
        assert quantile(values, percent / 100) == pytest.approx(expected)
    assert (quantile(values, 0.0), quantile(values, 1.0)) == (values[0], values[-1])


def test_every_quantile_of_one_value_is_that_value() -> None:
    assert [quantile([7], share) for share in (0.0, 0.5, 0.95, 1.0)] == [7, 7, 7, 7]
