"""How watermarks are named, what a key stands for, and what is told of it."""

from __future__ import annotations

import pytest

from llmrun.errors import UsageError
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.watermark import Watermark, fingerprint, is_public, read_watermark


def test_defaults_are_those_of_transformers() -> None:
    assert read_watermark("green") == Watermark("green", gamma=0.25, bias=2.0, selfhash=0)
    assert read_watermark("synthid").ngram == 5


def test_parameters() -> None:
    assert read_watermark("green,gamma=0.5, bias=3 ,selfhash=4") == Watermark("green", 0.5, 3.0, 4)
    assert read_watermark("synthid,ngram=3,rounds=9") == Watermark("synthid", ngram=3, rounds=9)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("red", "must be green or synthid"),
        ("", "must be green or synthid"),
        ("green,ngram=5", "green has gamma, bias, selfhash"),
        ("synthid,gamma=0.5", "synthid has ngram, rounds"),
        ("green,bias=1,bias=2", "each once at most"),
        ("green,bias", "must be a number"),
        ("green,selfhash=1.5", "must be a number"),
        ("green,gamma=1", "must be 0.01 to 0.99"),
        ("green,bias=nan", "must be 0.01 to 100.0"),
        ("synthid,ngram=1", "must be 2 to 64"),
    ],
)
def test_what_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_watermark(text, "--watermark")
    assert raised.value.what == f"invalid --watermark {text}"
    assert why in raised.value.why


def test_numbers_are_taken_as_they_are() -> None:
    assert read_watermark("green").native_keys("15485863") == (15485863,)
    assert read_watermark("synthid").native_keys("654, 400,836") == (654, 400, 836)
    for key in ("0", str(2**63)):
        with pytest.raises(UsageError, match="invalid watermark key"):
            read_watermark("green").native_keys(key)


def test_texts_are_hashed() -> None:
    (number,) = read_watermark("green").native_keys("a long secret")
    assert 0 < number < 2**63
    rounds = read_watermark("synthid").native_keys("a long secret")
    assert len({key % 2**16 for key in rounds}) == 30
    assert rounds[:9] == read_watermark("synthid,rounds=9").native_keys("a long secret")
    assert rounds != read_watermark("synthid").native_keys("another one")
    assert len(read_watermark("synthid").native_keys("7")) == 30


def test_a_fingerprint_tells_keys_apart_and_is_no_key() -> None:
    found = fingerprint("a long secret")
    assert found != fingerprint("another one")
    assert "secret" not in found
    assert fingerprint(found) == found
    assert fingerprint("") == ""
    with pytest.raises(UsageError, match="key is needed"):
        read_watermark("green").native_keys(found)


def test_published_keys() -> None:
    assert is_public("15485863")
    assert is_public("654, 400, 836, 123, 340, 443, 597, 160, 57")
    assert not is_public("15485864")


def test_parameters_of_an_answer() -> None:
    marked = SamplingParams(watermark="green,bias=1", watermark_key="secret", temperature=0)
    assert "secret" not in repr(marked)
    with pytest.raises(UsageError, match="needs a key"):
        SamplingParams(watermark="green")
    with pytest.raises(UsageError, match="invalid watermark"):
        SamplingParams(watermark="red", watermark_key="secret")
    with pytest.raises(UsageError, match="mirostat"):
        SamplingParams(watermark="green", watermark_key="secret", mirostat=2)
    with pytest.raises(UsageError, match="greedy"):
        SamplingParams(watermark="synthid", watermark_key="secret", temperature=0)
    assert SamplingParams(watermark="synthid", watermark_key="secret", temperature=0, temperature_range=0.5)
