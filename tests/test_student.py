"""Student's t, as statistical tables have it."""

from __future__ import annotations

import pytest

from llmrun.student import student


@pytest.mark.parametrize(
    ("freedom", "confidence", "expected"),
    [(1, 0.95, 12.7062), (2, 0.95, 4.30265), (4, 0.95, 2.77645), (9, 0.95, 2.26216), (30, 0.95, 2.04227),
     (1000, 0.95, 1.96234), (2.5, 0.95, 3.57465), (4, 0.99, 4.60409)],
)  # fmt: skip
def test_student_is_that_of_the_tables(freedom: float, confidence: float, expected: float) -> None:
    assert student(freedom, confidence) == pytest.approx(expected, rel=1e-5)
