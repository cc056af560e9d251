"""The page of an explained answer: its sliders compute what the sampler computes, its charts show the figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import quickjs
from support.chromium import PROGRAM, Chromium
from support.explained import FOUND, LAYER, RUN, column
from support.sampler_cases import OFF, native_sampler

from llmrun.lab.insight.merges import BytePairs
from llmrun.lab.views.explain import explain_page
from llmrun.protocol.jobs.explain import HeadAttention, RunCollected
from llmrun.protocol.params import SamplingParams
from llmrun.server.page.files import FOLDER

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


# ---- the page of an explained answer in a real browser: drawn as a whole, without network, and live


pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")

LAST_COLUMN = "[...document.querySelectorAll('[data-view=sampling] tbody tr')].map(row => row.lastChild.textContent)"
CHOSEN = "document.querySelector('[aria-pressed=true]').dataset.at"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    found = Chromium(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def page(browser: Chromium, tmp_path: Path) -> Chromium:
    layers = tuple(replace(LAYER, experts=((0, 1), (5, 3), (2, 2))) for _ in range(2))
    run = replace(RUN, layers=layers, lens=tuple(column(at, 7, 0) for at in range(3)))
    rule = BytePairs([None, b"hi", b"you"], [b"h i"], is_byte_level=False)
    file = tmp_path / "page.html"
    file.write_text(
        explain_page(replace(FOUND, run=run), SamplingParams(temperature=1.0, order=("temperature",)), rule)
    )
    browser.resize(1000, 800)
    browser.ask("Emulation.setEmulatedMedia", media="", features=[])
    browser.open(file)
    return browser


def test_everything_is_drawn_and_nothing_asked_for_or_complained_of(page: Chromium) -> None:
    assert not page.errors
    assert all(address.startswith("file:") for address in page.requests)
    heights = "each => [each.dataset.view ?? each.className.baseVal, each.getBoundingClientRect().height]"
    drawn = page.evaluate(f"[...document.querySelectorAll('[data-view], svg')].map({heights})")
    assert len(drawn) > 12
    assert not [name for name, height in drawn if height < 20]


def test_a_key_chooses_the_next_token_everywhere(page: Chromium) -> None:
    assert page.evaluate(CHOSEN) == "1"
    page.ask("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert page.evaluate(CHOSEN) == "2"
    assert page.evaluate("document.querySelector('[data-view=token] b').textContent") == "'you'"
    assert page.evaluate("document.querySelector('.plane .chosen title').textContent") == "'you'"
    assert page.evaluate("document.querySelector('.strip .column').getAttribute('x')") == "2"
    assert page.evaluate("document.querySelector('.heads .row').getAttribute('y')") == "2"


def test_a_slider_computes_what_the_sampler_would(page: Chromium) -> None:
    assert page.evaluate(LAST_COLUMN)[:2] == ["60.0%", "40.0%"], "as the model gave them"
    page.evaluate("slider = document.querySelector('[name=temperature]'); slider.value = 2; slider.oninput()")
    assert page.evaluate(LAST_COLUMN) == ["55.1%", "44.9%", "", "2"], "square roots of them"
    page.evaluate("slider = document.querySelector('[name=top_k]'); slider.value = 1; slider.oninput()")
    assert page.evaluate(LAST_COLUMN) == ["100.0%", "", "", "1"]
    assert not page.errors


def test_it_fits_a_phone_and_the_dark(page: Chromium) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.evaluate(background) != light
    page.ask("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_the_lens_is_printed_whole(page: Chromium) -> None:
    page.ask("Emulation.setEmulatedMedia", media="print")
    page.resize(700, 1000)
    cut = "[...document.querySelectorAll('.lens td')].filter(each => each.scrollWidth > each.clientWidth).length"
    assert page.evaluate(cut) == 0


def test_a_click_on_a_heading_sorts(page: Chromium) -> None:
    table = "[...document.querySelectorAll('table')].find(each => each.innerText.startsWith('\\ttokens'))"
    column = f"[...{table}.tBodies[0].rows].map(row => row.cells[1].innerText)"
    click = f"{table}.querySelectorAll('thead button')[1].click()"
    page.evaluate(click)
    assert page.evaluate(column) == ["1", "3"]
    page.evaluate(click)
    assert page.evaluate(column) == ["3", "1"]
    assert page.evaluate(f"{table}.querySelector('[aria-sort]:not([aria-sort=none])').innerText") == "tokens"
    assert not page.errors
