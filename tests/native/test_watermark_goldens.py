"""Watermarks beside what transformers and torch made of the same rows (tests/upstream/watermarks.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.watermark_case import CASES, GOLDENS, N_VOCAB, digest, our_text

from llmrun import _native
from llmrun.lab.insight.watermark import find_watermark

FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("golden", FOUND["permutations"], ids=lambda golden: f"{golden['seed']}-{golden['size']}")
def test_green_lists_are_torchs(golden: dict[str, Any]) -> None:
    seed, size = golden["seed"], golden["size"]
    assert digest(_native.permuted(seed, size, size // 4)) == golden["digest"]


@pytest.mark.parametrize("name", CASES)
def test_a_greedy_text_is_that_of_transformers(name: str) -> None:
    text = FOUND["texts"][name]["tokens"]
    assert our_text(CASES[name], len(text)) == text
    assert our_text(CASES[name], len(text), exact=True) == text


@pytest.mark.parametrize("name", CASES)
def test_a_text_of_transformers_is_found(name: str) -> None:
    case, golden = CASES[name], FOUND["texts"][name]
    found = find_watermark(case.watermark, case.key, N_VOCAB, golden["tokens"], repeats=True)
    assert (found.judged, found.hits) == (golden["verdict"]["judged"], golden["verdict"]["hits"])
    assert found.z > 5
    assert found.z == pytest.approx(golden["verdict"]["z"])
