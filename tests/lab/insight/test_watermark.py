"""The test of a text for a watermark, on texts made so that the outcome can be counted."""

from __future__ import annotations

import math

import pytest

from llmrun.errors import UsageError
from llmrun.lab.insight.watermark import find_watermark
from llmrun.protocol.watermark import read_watermark

KEY = "15485863"
GREEN = read_watermark("green")
# Of a vocabulary of 20 the green ones after 10 (transformers' own test).
GREEN_BEHIND_TEN = (15, 9, 4, 12, 1)


def test_green_tokens_are_counted() -> None:
    hits = sum(find_watermark(GREEN, KEY, 20, [10, token]).hits for token in range(20))
    assert hits == len(GREEN_BEHIND_TEN)
    for token in GREEN_BEHIND_TEN:
        assert find_watermark(GREEN, KEY, 20, [10, token]).hits == 1


def test_z_and_p() -> None:
    found = find_watermark(GREEN, KEY, 20, [10, 12])
    assert (found.tokens, found.judged, found.expected) == (2, 1, 0.25)
    assert found.z == pytest.approx(0.75 / math.sqrt(0.25 * 0.75))
    assert found.p == pytest.approx(math.erfc(found.z / math.sqrt(2)) / 2)


def test_repetition_is_no_evidence() -> None:
    text = [10, 12] * 100
    assert find_watermark(GREEN, KEY, 20, text).judged == 2
    assert find_watermark(GREEN, KEY, 20, text, repeats=True).judged == 199


def test_nothing_to_judge() -> None:
    found = find_watermark(read_watermark("green,selfhash=5"), "secret", 20, [1, 2, 3, 4])
    assert (found.judged, found.z, found.p) == (0, 0.0, 0.5)


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="invalid watermark key"):
        find_watermark(GREEN, "0", 20, [1, 2])
