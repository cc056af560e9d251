"""Scales, places of labels, and the charts and pages that templates make of untrusted names."""

from __future__ import annotations

import base64
import hashlib
import html
import math
import random
import re
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import llmrun.lab.html.render
from llmrun.lab.html.render import Bar, Box, Dot, digits, drawable_bars, is_drawable, place_labels, render, scatter

HOSTILE = '</text><script>alert("1")</script>&\x1b[31m\x00\u202e\ud800\'"`'
ODD = (0.0, -1.0, 1.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 1e-9, 123456789.0)
SIZE, SPEED = ("size", "MB"), ("decode", "t/s")
FOLDER = Path(llmrun.lab.html.render.__file__).parent


def whole_page(name: str, bars: list[Bar], dots: list[Dot]) -> str:
    """The report's page, which has every part, with this text wherever a text can be."""
    cells = [("1", 1.0, 0.5), (name, None, None)]
    return render(
        "report",
        title=name,
        lead=name,
        best=[(name, name)],
        plot=scatter(name, dots, (name, name), (name, name)),
        has_beaten=True,
        is_complete=False,
        columns={name: "n"},
        rows=[{"type": name, "cells": cells, "verdict": name, "is_marked": True}],
        legend=[(name, name)],
        charts=[(name, drawn)] if (drawn := drawable_bars(bars)) else [],
        method=[name],
        place=[(name, name)],
        notes=[name],
    )


class Reader(HTMLParser):
    """A page's tags, with their attributes, and the tags that are open at the end."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def every_dot(name: str, values: tuple[float, ...]) -> list[Dot]:
    pairs = zip(values, reversed(values), strict=True)
    return [Dot(name, a, b, name, a, "front", name, joined=True) for a, b in pairs]


def every_bar(name: str, values: tuple[float, ...]) -> list[Bar]:
    return [Bar(name, a, b, a, (a, b), b, note=name) for a, b in zip(values, reversed(values), strict=True)]


# ---- scales and labels


@pytest.mark.parametrize(
    ("values", "ticks"),
    [((0.0014, 0.072, 0.0), ["0", "0.002", "0.005", "0.01", "0.02", "0.05"]), ((91, 271), ["100", "150", "200"])],
)
def test_ticks_are_round(values: tuple[float, ...], ticks: list[str]) -> None:
    plot = scatter("t", [Dot("a", 1.0, value) for value in values], SIZE, SPEED)
    assert [label for _, label in plot["ticks"][1]] == ticks


def test_zero_has_its_own_place_on_a_logarithmic_scale() -> None:
    plot = scatter("t", [Dot("a", 1.0, value) for value in (0.0, 1.0, 10.0)], SIZE, SPEED)
    zero, one, ten = (point[1] for _, point, *_ in plot["dots"])
    assert zero - one > 20
    assert one - ten > 20


def test_dots_keep_order_and_bounds_whatever_comes() -> None:
    draw = random.Random(7)
    for _ in range(300):
        values = [
            draw.choice(ODD) if draw.random() < 0.2 else draw.lognormvariate(0, 5) for _ in range(draw.randrange(9))
        ]
        plot = scatter("t", [Dot("a", value, 1.0) for value in sorted(filter(is_drawable, values))], SIZE, SPEED)
        places = [point[0] for _, point, *_ in plot["dots"]]
        assert all(60 <= place <= 720 for place in places)
        assert all(a <= b for a, b in pairwise(places))
        assert 1 <= len(plot["ticks"][0]) <= 30
        assert all(60 <= at <= 720 for at, _ in plot["ticks"][0])


def test_numbers_have_the_digits_that_count() -> None:
    shown = [digits(value) for value in (0, 0.05, 1.5, 12.345, 99.95, 1024, 131072, 2e9, 1e-7, -3, math.nan)]
    assert shown == ["0", "0.05", "1.5", "12.3", "100", "1,024", "131,072", "2e+09", "1e-07", "-3", "?"]


def test_names_of_near_dots_do_not_overlap() -> None:
    points = [(300.0 + 6 * (i % 3), 200.0 + 9 * (i // 3)) for i in range(7)]
    boxes = place_labels(points, [5.0] * 7, [(60.0, 30.0)] * 7)
    assert all(one.overlap(other) < 1 for one, other in combinations(boxes, 2))
    assert all(box.overlap(Box(60, 66, 720, 388)) == pytest.approx(60 * 30, rel=0.01) for box in boxes)


# ---- charts


def test_untrusted_text_never_becomes_markup() -> None:
    hostile = whole_page(HOSTILE, every_bar(HOSTILE, (3.0, 5.0, 8.0)), every_dot(HOSTILE, (3.0, 5.0, 8.0)))
    harmless = whole_page("x", every_bar("x", (3.0, 5.0, 8.0)), every_dot("x", (3.0, 5.0, 8.0)))
    assert [(tag, set(attributes)) for tag, attributes in Reader(hostile).tags] == [
        (tag, set(attributes)) for tag, attributes in Reader(harmless).tags
    ]
    assert not set("\x00\x1b\u202e\ud800") & set(hostile)
    assert html.unescape(hostile).count("alert(") > 20, "but it can be read"


def test_nothing_that_is_no_number_is_drawn() -> None:
    draw = random.Random(5)
    for _ in range(40):
        values = tuple(draw.choice(ODD) for _ in range(draw.randrange(1, 6)))
        page = whole_page("x", every_bar("x", values), every_dot("x", values))
        assert not re.search(r"\b(nan|inf)\b", page), values
        for _, attributes in Reader(page).tags:
            shares = re.findall(r"(?:width|left):([\d.]+)%", attributes.get("style") or "")
            assert all(0 <= float(share) <= 100 for share in shares)


def test_charts_without_data_say_so() -> None:
    assert ">Nothing was measured.</text>" in whole_page("t", [], [])
    assert 'class="bars"' not in whole_page("t", [], [])


def test_a_plot_has_a_description_and_tooltips() -> None:
    page = whole_page("t", [], [Dot("Q4_0", 91.7, 188.0, note="83.8%"), Dot("Q8_0", 144.8, 150.0)])
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == "t. Q4_0: 91.7 t, 188 t; Q8_0: 145 t, 150 t;"
    assert [node.text for node in svg.iter("title")] == ["Q4_0: 91.7 t, 188 t; 83.8%", "Q8_0: 145 t, 150 t"]


def test_bars_are_as_long_as_their_values() -> None:
    page = whole_page("t", [Bar("a", 100.0, 90.0, 110.0, (95.0,), limit=200.0, note="noisy"), Bar("b", 50.0)], [])
    lengths = re.findall('class="bar" style="width:(.*?)"', page)
    assert lengths == ["50.0%", "25.0%"]
    assert ">100 tokens/s, 50% of the limit</span>" in page
    assert 'title="a: 100 tokens/s (90 to 110) noisy"' in page
    assert 'class="interval" style="left:45.0%;width:10.0%"' in page
    assert 'class="sample" style="left:47.5%"' in page
    assert 'class="limit" style="left:100.0%"' in page


# ---- pages


def test_a_page_is_whole_and_fetches_nothing() -> None:
    page = whole_page(HOSTILE, every_bar(HOSTILE, (1.0,)), every_dot(HOSTILE, (1.0,)))
    reader = Reader(page)
    assert reader.open == []
    assert not [attributes for _, attributes in reader.tags if {"src", "href", "srcset", "data"} & set(attributes)]
    for outside in ("url(", "@import", "http://", "https://"):
        assert outside not in page


def test_a_page_allows_its_own_script_alone() -> None:
    page = whole_page("x", [], [])
    (code,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="(.*?)"', page)
    assert policy is not None
    assert html.unescape(policy[1]) == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )


def test_cells_carry_what_they_are_sorted_by() -> None:
    page = whole_page("x", [], [])
    assert '<td class="n share" style="--share:50.0%" data-v="1.0">1</td>' in page
    assert '<td class="n">x</td>' in page
    assert '<tr class="marked">' in page


def test_no_script_makes_markup() -> None:
    for file in FOLDER.glob("*.js"):
        code = file.read_text(encoding="utf-8")
        for unsafe in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "fetch(",
        ):
            assert unsafe not in code


def test_no_template_prints_data_unescaped() -> None:
    """Only the scripts of this folder are printed as they are."""
    lines = [line for file in FOLDER.glob("*.jinja") for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if re.search(r"\|\s*safe", line)] == ["<script>{{ code | safe }}</script>"]
    assert not [line for line in lines if "autoescape" in line]


def test_every_colour_has_a_dark_twin() -> None:
    for name, least in (("page.css", 5), ("explain.css", 3)):
        light, dark = (FOLDER / name).read_text(encoding="utf-8").split("@media screen", 1)
        names: list[Any] = re.findall(r"(--\w[\w-]*):#", light)
        assert len(names) > least
        assert set(names) == set(re.findall(r"(--\w[\w-]*):#", dark))
