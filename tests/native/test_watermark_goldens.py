"""Watermarks beside what transformers and torch made of the same rows (tests/upstream/watermarks.py)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.watermark_case import CASES, GOLDENS, N_VOCAB, digest, logits_of, our_sampler, our_text

from llmrun import _native
from llmrun.insight.watermark import find_watermark

FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))
GREEN = [name for name, case in CASES.items() if case.watermark.scheme == "green"]


@pytest.mark.parametrize("golden", FOUND["permutations"], ids=lambda golden: f"{golden['seed']}-{golden['size']}")
def test_green_lists_are_torchs(golden: dict[str, Any]) -> None:
    seed, size = golden["seed"], golden["size"]
    assert digest(_native.permuted(seed, size, size // 4)) == golden["digest"]


@pytest.mark.parametrize("name", GREEN)
def test_a_greedy_text_is_that_of_transformers(name: str) -> None:
    text = FOUND["texts"][name]["tokens"]
    assert our_text(CASES[name], len(text)) == text
    assert our_text(CASES[name], len(text), exact=True) == text


@pytest.mark.parametrize("name", CASES)
def test_a_text_of_transformers_is_found(name: str) -> None:
    case, golden = CASES[name], FOUND["texts"][name]
    found = find_watermark(case.watermark, case.key, N_VOCAB, golden["tokens"], repeats=True)
    assert (found.trials, found.hits) == (golden["verdict"]["trials"], golden["verdict"]["hits"])
    assert found.z > 5
    assert found.z == pytest.approx(golden["verdict"].get("z", found.z))


@pytest.mark.parametrize("exact", [False, True])
def test_shares_of_the_tournament_are_those_of_transformers(exact: bool) -> None:
    sampler = our_sampler(CASES["synthid"], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, remember=1, exact=exact)
    for step, golden in enumerate(FOUND["shares"]):
        row = logits_of(step)
        sampler.sample(row.ctypes.data)
        _, steps = sampler.explain(0, N_VOCAB)
        name, _, shares = steps[-1]
        assert name == "synthid"
        ours = np.array([share for _, share in sorted(shares)])
        np.testing.assert_allclose(ours, golden, atol=2e-6)
        sampler.accept(int(np.argmax(golden)))
