"""Lengths of time as people and clients write them."""

from __future__ import annotations

import pytest

from llmrun.server.protocols.fields import read_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("0", 0), ("-1", -1), ("1.5", 1.5), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("300ms", 0.3),
        ("-5m", -300), (" 2H ", 7200), ("1h0.5s", 3600.5),
    ],
)  # fmt: skip
def test_seconds_and_durations(text: str, seconds: float) -> None:
    assert read_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "5d", "m", "1e3", "nan", "inf", "--1", "5m-", "١"])
def test_what_is_no_duration(text: str) -> None:
    assert read_duration(text) is None
