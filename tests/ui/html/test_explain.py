"""What an explained answer's page is made of: its script computes what the sampler computes, its markup is inert."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import quickjs
from support.sampler_cases import OFF, native_sampler

from llmrun.protocol.params import SamplingParams
from llmrun.ui.html.explain import HeatCell, Slider, TokenSpan, chips, heads, lens_grid, script, sliders, strip

ORDER = ["top_k", "top_p", "min_p", "temperature"]
HOSTILE = "</script><img src=x onerror=alert(1)>\"'\u2028\x1b[2J"


def recomputed(
    probabilities: list[float], others: tuple[int, float], order: list[str], params: SamplingParams
) -> tuple[list[float], int]:
    """What is left of the candidates, and how many those and the others are."""
    context = quickjs.Context()
    context.eval(script({}).code)
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


def test_the_script_makes_no_markup_of_data() -> None:
    code = script({}).code
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch("):
        assert unsafe not in code


@pytest.mark.parametrize(
    "made",
    [
        chips([TokenSpan(HOSTILE, "prompt")]),
        lens_grid([HOSTILE], [[HeatCell(HOSTILE, 0.5)]]),
        heads([(HOSTILE, [[1.0]])]),
        sliders([Slider("min_p", HOSTILE, 0.1, 1.0, 0.01)]),
    ],
)
def test_texts_are_no_markup(made: object) -> None:
    shown = str(made)
    assert "onerror" in shown
    assert "<img" not in shown
    assert "</script" not in shown
    assert "\x1b" not in shown


def test_attention_is_shaded_by_its_share() -> None:
    shown = heads([("a head", [[1.0], [0.04, 0.96]])]).markup
    full, faint = 'd="M0 0h1v1h-1zM1 1h1v1h-1z" fill-opacity="1"', 'd="M0 1h1v1h-1z" fill-opacity="0.2"'
    assert full in shown
    assert faint in shown


def test_equal_numbers_have_one_colour() -> None:
    shown = strip([[7, 1], [1, 1]], "experts").markup
    assert 'viewBox="0 0 2 2"' in shown
    assert '<path d="M0 0h1v1h-1zM1 0h1v1h-1zM1 1h1v1h-1z" fill="hsl(138 55% 58%)"><title>1<' in shown
    assert '<path d="M0 1h1v1h-1z"' in shown, "the first layer is below"


def test_the_last_layer_is_on_top() -> None:
    shown = lens_grid(["a"], [[HeatCell("early", 0.1)], [HeatCell("late", 0.9)]]).markup
    assert shown.index("late") < shown.index("early")
    assert 'style="--s:0.90" data-layer="1">late<' in shown
