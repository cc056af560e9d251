"""Scales, label places, charts as SVG, and the page they are on."""

from __future__ import annotations

import base64
import hashlib
import math
import random
import re
from html.parser import HTMLParser
from itertools import combinations
from xml.etree import ElementTree

import pytest

from llmrun.ui.html.label_places import LabelAnchor, Rectangle, along, place_labels
from llmrun.ui.html.markup import Markup, element, joined, text
from llmrun.ui.html.page import Cell, FactList, Figure, Paragraph, Section, Table, Tiles, page
from llmrun.ui.html.plot_frame import STYLE, WIDTH, Axis, shortened, text_width
from llmrun.ui.html.plots import Bar, Dot, bar_chart, dot_chart
from llmrun.ui.html.scales import is_drawable, number, scale

HOSTILE = '</text><script>alert("1")</script>&\x1b[31m\x00\u202e\ud800\'"`'
AXIS = Axis("depth", "tokens")
SPEED = Axis("decode", "t/s")
ODD = (0.0, -1.0, 1.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 1e-9, 123456789.0)


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def words(svg: str) -> list[str]:
    return [node.text or "" for node in parsed(svg).iter() if node.tag.endswith("}text")]


# ---- scales ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "ticks"),
    [((0.0014, 0.072, 0.0), ["0.002", "0.005", "0.01", "0.02", "0.05"]), ((91, 271), ["100", "150", "200", "300"])],
)
def test_ticks_are_round(values: tuple[float, ...], ticks: list[str]) -> None:
    assert [number(tick) for tick in scale(values, 0, 100).ticks] == ticks


def test_zero_has_its_own_place_on_a_logarithmic_scale() -> None:
    found = scale([0.0, 1.0, 10.0], 0, 100)
    assert [found(0.0), found(1.0), found(10.0)] == [0.0, 10.0, 100.0]


def test_scales_keep_order_and_bounds_whatever_comes() -> None:
    draw = random.Random(7)
    for _ in range(300):
        values = [
            draw.choice(ODD) if draw.random() < 0.2 else draw.lognormvariate(0, 5) for _ in range(draw.randrange(9))
        ]
        found = scale(values, 400, 20)
        places = [found(value) for value in sorted(filter(is_drawable, values))]
        assert all(20 <= place <= 400 for place in places)
        assert places == sorted(places, reverse=True)
        assert 1 <= len(found.ticks) <= 30
        assert all(20 - 1e-6 <= found(tick) <= 400 + 1e-6 for tick in found.ticks)


def test_numbers_have_the_digits_that_count() -> None:
    shown = [number(value) for value in (0, 0.05, 1.5, 12.345, 99.95, 1024, 131072, 2e9, 1e-7, -3, math.nan)]
    assert shown == ["0", "0.05", "1.5", "12.3", "100", "1,024", "131,072", "2e+09", "1e-07", "-3", "?"]


# ---- names -----------------------------------------------------------------------------------------


def test_names_of_near_dots_do_not_overlap() -> None:
    inside = Rectangle(0, 0, 600, 400)
    spots = [LabelAnchor(300 + 6 * (i % 3), 200 + 9 * (i // 3), 5, 60, 30) for i in range(7)]
    boxes = place_labels(spots, inside)
    assert all(one.overlap(other) == 0 for one, other in combinations(boxes, 2))
    assert all(box.overlap(inside) == pytest.approx(box.area) for box in boxes)


def test_names_avoid_lines_where_they_can() -> None:
    line = along([(100, 100), (300, 100)])
    (box,) = place_labels([LabelAnchor(100, 100, 5, 60, 16)], Rectangle(0, 0, 400, 200), line)
    assert sum(box.overlap(each) for each in line) == 0


def test_long_names_lose_their_middle() -> None:
    short = shortened("SmolLM2-135M-Instruct, 2 threads, tg128 @ d4096", 150, 13, bold=True)
    assert "…" in short
    assert short.endswith("d4096")
    assert text_width(short, 13, bold=True) <= 150
    assert shortened("Q4_0", 150) == "Q4_0"
    assert shortened("日本語" * 50, 0) in ("", "…")


# ---- charts ----------------------------------------------------------------------------------------


def all_charts(name: str, values: tuple[float, ...]) -> list[Markup]:
    pairs = list(zip(values, reversed(values), strict=True))
    return [
        bar_chart([Bar(name, a, b, a, (a, b), b, note=name) for a, b in pairs], SPEED, name),
        dot_chart([Dot(name, a, b, name, a, "front", name, True) for a, b in pairs], AXIS, SPEED, name),
    ]


def test_untrusted_text_never_becomes_markup() -> None:
    for svg in all_charts(HOSTILE, (3.0, 5.0, 8.0)):
        root = parsed(svg)  # well-formed
        assert not [node for node in root.iter() if node.tag.endswith("script")]
        assert "\x1b" not in svg
        assert "\u202e" not in svg


def test_nothing_that_is_no_number_is_drawn() -> None:
    draw = random.Random(5)
    for _ in range(200):
        values = tuple(draw.choice(ODD) for _ in range(draw.randrange(1, 6)))
        for svg in all_charts("x", values):
            for node in parsed(svg).iter():
                for name, value in node.attrib.items():
                    if name != "aria-label":
                        assert not re.search(r"\b(nan|inf)\b", value), (values, name, value)


def test_charts_without_data_say_so() -> None:
    for svg in (bar_chart([], SPEED, "t"), dot_chart([], AXIS, SPEED, "t")):
        assert "Nothing was measured." in words(svg)


def test_a_picture_tells_those_who_can_not_see_it() -> None:
    root = parsed(bar_chart([Bar("Q4_0", 188.0), Bar("Q8_0", 150.0)], SPEED, "Decode"))
    assert root.get("role") == "img"
    assert root.get("aria-label") == "Decode. Q4_0: 188 t/s; Q8_0: 150 t/s"
    assert root.get("viewBox", "").startswith(f"0 0 {WIDTH:g} ")


def test_bars_are_as_long_as_their_values() -> None:
    svg = bar_chart([Bar("a", 100.0, limit=200.0), Bar("b", 50.0)], SPEED, "Decode")
    wide = [float(node.get("width", "0")) for node in parsed(svg).iter() if node.get("class") == "bar"]
    assert wide[0] == pytest.approx(2 * wide[1], rel=0.01)
    assert "100 t/s, 50% of the limit" in words(svg)


# ---- markup and page -------------------------------------------------------------------------------


def test_markup_is_kept_and_text_is_escaped() -> None:
    assert element("p", "a<b", element("b", "&"), class_="x", id=None, data_v='"') == (
        '<p class="x" data-v="&quot;">a&lt;b<b>&amp;</b></p>'
    )
    assert joined(Markup("<br/>"), "<br/>") == "<br/>&lt;br/&gt;"
    assert text("\x1b[1mbold\x1b[0m") == "bold"
    assert element("line", x1=1.0, x2=2.25, y1=-0.001) == '<line x1="1" x2="2.25" y1="0"/>'


class Reader(HTMLParser):
    """Tags that are open at the end, and what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole_page(name: str) -> str:
    table = Table((name, "n"), ((Cell(name), Cell("1", 1.0, 0.5)), (Cell("b"), Cell("–"))), frozenset({1}), marked=0)
    chart = Figure(bar_chart([Bar(name, 1.0)], SPEED, name), name)
    parts = (Tiles(((name, name),)), Paragraph(name), FactList(((name, name),)), table, chart)
    return page(name, [Section(name, parts)], lead=name)


def test_a_page_is_whole_and_fetches_nothing() -> None:
    html = whole_page(HOSTILE)
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    assert reader.fetched == []
    assert reader.tags.count("script") == 1
    assert "url(" not in html
    assert "@import" not in html
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert "\x1b" not in html


def test_a_page_allows_its_own_script_alone() -> None:
    html = whole_page("x")
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src &#x27;sha256-{digest}&#x27;" in html
    assert len(script[1].strip().splitlines()) <= 16
    assert "<script" not in page("x", [Section("", (Paragraph("y"),))])


def test_cells_carry_what_they_are_sorted_by() -> None:
    html = whole_page("x")
    assert '<td class="n share" style="--share:50.0%" data-v="1.0">1</td>' in html
    assert '<td class="n">–</td>' in html
    assert '<tr class="marked">' in html


def test_every_colour_has_a_dark_twin() -> None:
    light, dark = STYLE.split("@media", 1)
    names = re.findall(r"(--\w+):#", light)
    assert len(names) > 5
    assert set(names) == set(re.findall(r"(--\w+):#", dark))
