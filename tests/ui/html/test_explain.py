"""The page of an explained answer: its sliders compute what the sampler computes, its charts show the figures."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import quickjs
from support.explained import FOUND, LAYER, RUN, column
from support.sampler_cases import OFF, native_sampler

from llmrun.protocol.jobs.explain import HeadAttention, RunCollected
from llmrun.protocol.params import SamplingParams
from llmrun.server.page.files import FOLDER
from llmrun.ui.views.explain import explain_page

ORDER = ["top_k", "top_p", "min_p", "temperature"]


def recomputed(
    probabilities: list[float], others: tuple[int, float], order: list[str], params: SamplingParams
) -> tuple[list[float], int]:
    """What is left of the candidates, and how many those and the others are."""
    context = quickjs.Context()
    context.eval((FOLDER / "sampler.js").read_text(encoding="utf-8"))
    values = {name: getattr(params, name) for name in ORDER}
    arguments = ",".join(map(json.dumps, (probabilities, others, order, values)))
    found = json.loads(context.eval(f"JSON.stringify(recompute({arguments}))"))
    return found["shares"], found["left"]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.7},
        {"temperature": 0.0},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 0.6},
        {"top_p": 0.0, "min_p": 1.0},
    ],
)
@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]])
@pytest.mark.parametrize("n_known", [20, 12])
def test_the_sliders_compute_what_the_sampler_does(changed: dict[str, float], order: list[str], n_known: int) -> None:
    params = replace(OFF, **changed, order=tuple(order))
    row = np.sort(np.random.default_rng(7).normal(size=20).astype(np.float32) * 2)[::-1].copy()
    row[n_known:] = row[-1]  # the others are alike
    sampler = native_sampler(len(row), params, 1, remember=1)
    sampler.sample(row.ctypes.data)
    steps = sampler.explain(0, len(row))[1]
    model, last = ([share for _, share in steps[at][2]] for at in (0, -1))
    shares, left = recomputed(model[:n_known], (20 - n_known, model[-1]), order, params)
    assert shares == pytest.approx(last[:n_known], abs=1e-5)
    assert left == steps[-1][1]


def page_of(run: RunCollected) -> str:
    return explain_page(replace(FOUND, run=run), SamplingParams(), None)


def test_attention_is_shaded_by_its_share() -> None:
    page = page_of(replace(RUN, pictures=(HeadAttention("first", 0, 0, ((1.0,), (0.04, 0.96), (0.0, 1.0, 0.0))),)))
    full, faint = 'd="M0 0h1v1h-1zM1 1h1v1h-1zM1 2h1v1h-1z" fill-opacity="1.0"', 'd="M0 1h1v1h-1z" fill-opacity="0.2"'
    assert full in page
    assert faint in page


def test_equal_experts_have_one_colour() -> None:
    upper, lower = replace(LAYER, experts=((7,), (1,), (1,))), replace(LAYER, experts=((1,), (1,), (1,)))
    page = page_of(replace(RUN, layers=(lower, upper)))
    assert 'viewBox="0 0 3 2"' in page
    assert 'd="M1 0h1v1h-1zM2 0h1v1h-1zM0 1h1v1h-1zM1 1h1v1h-1zM2 1h1v1h-1z" fill="hsl(138 55% 58%)"><title>1<' in page
    assert '<path d="M0 0h1v1h-1z" fill="hsl(242 55% 58%)"><title>7<' in page, "the last layer is on top"


def test_the_last_layer_is_on_top() -> None:
    page = page_of(replace(RUN, lens=tuple(column(at, 7, 0) for at in range(3))))
    rows = re.findall(r'<th scope="row">(\d)</th><td style="--s:0.75" data-layer="(\d)">', page)
    assert rows == [("2", "1"), ("1", "0")]
