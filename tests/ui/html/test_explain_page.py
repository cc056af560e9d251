"""The page of an explained answer in a real browser: drawn as a whole, without network, and live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.chromium import PROGRAM, Chromium
from support.explained import FOUND, LAYER, RUN, column

from llmrun.insight.merges import BytePairs
from llmrun.protocol.params import SamplingParams
from llmrun.ui.views.explain import explain_page

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
    browser.ask("Emulation.setDeviceMetricsOverride", width=1000, height=800, deviceScaleFactor=1, mobile=False)
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
    page.ask("Emulation.setDeviceMetricsOverride", width=700, height=1000, deviceScaleFactor=1, mobile=False)
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
