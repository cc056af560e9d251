"""How watermarks are named, what a key stands for, and what is told of it."""

from __future__ import annotations

import pytest

from llmrun.errors import UsageError
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.watermark import Watermark, fingerprint, is_public, native_key, read_watermark


def test_defaults_are_those_of_transformers() -> None:
    assert read_watermark("green") == Watermark(gamma=0.25, bias=2.0, selfhash=0)


def test_parameters() -> None:
    assert read_watermark("green,gamma=0.5, bias=3 ,selfhash=4") == Watermark(0.5, 3.0, 4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("red", "must be green"),
        ("", "must be green"),
        ("green,ngram=5", "green has gamma, bias, selfhash"),
        ("green,bias=1,bias=2", "each once at most"),
        ("green,bias", "must be a number"),
        ("green,selfhash=1.5", "must be a number"),
        ("green,gamma=1", "must be 0.01 to 0.99"),
        ("green,bias=nan", "must be 0.01 to 100.0"),
    ],
)
def test_what_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_watermark(text, "--watermark")
    assert raised.value.what == f"invalid --watermark {text}"
    assert why in raised.value.why


def test_numbers_are_taken_as_they_are() -> None:
    assert native_key("15485863") == 15485863
    for key in ("0", str(2**63)):
        with pytest.raises(UsageError, match="invalid watermark key"):
            native_key(key)


def test_texts_are_hashed() -> None:
    assert 0 < native_key("a long secret") < 2**63
    assert native_key("a long secret") != native_key("another one")


def test_a_fingerprint_tells_keys_apart_and_is_no_key() -> None:
    found = fingerprint("a long secret")
    assert found != fingerprint("another one")
    assert "secret" not in found
    assert fingerprint(found) == found
    assert fingerprint("") == ""
    with pytest.raises(UsageError, match="key is needed"):
        native_key(found)


def test_published_keys() -> None:
    assert is_public("15485863")
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
