"""Charts as SVG text: bars, dots with names. Pure functions from plain data.

Owns which part of a chart goes where; must not know what was measured, or on what page a chart ends up. Names are
untrusted text. Numbers that are none (NaN, infinite) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmrun.ui.html.label_places import LabelAnchor, Rectangle, along, place_labels
from llmrun.ui.html.markup import Markup, element
from llmrun.ui.html.plot_frame import (
    BELOW,
    NAMES,
    TOP,
    WIDTH,
    Axis,
    PlotArea,
    left_margin,
    nothing_measured,
    picture,
    polyline,
    shortened,
    spot_label,
    text_width,
    tooltip,
    x_axis,
    y_axis,
)
from llmrun.ui.html.scales import Scale, is_drawable, number, scale

_BAR_NAMES = 270.0  # room for names before bars


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with a name.

    Attributes:
        low, high: of its interval, where one is known.
        samples: the single measurements.
        limit: what is possible at all; a mark shows it.
        dull: not what the reader should look at first.
        note: more to say about it.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    samples: tuple[float, ...] = ()
    limit: float | None = None
    dull: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """A named place in a plane.

    Attributes:
        caption: a second line below the name.
        weight: the area of its disc, in any unit; 0 or less gives the smallest.
        kind: "front" are the best; "beaten" are not; "origin" is what the others come from.
    """

    name: str
    x: float
    y: float
    caption: str = ""
    weight: float = 0.0
    kind: Literal["front", "beaten", "origin"] = "front"
    note: str = ""
    joined: bool = False


def bar_chart(bars: Sequence[Bar], axis: Axis, title: str) -> Markup:
    """Horizontal bars from zero, each with its name before it and its value behind it.

    Args:
        bars: from top to bottom.
        axis: what their length is.
        title: over it.
    """
    kept = [bar for bar in bars if is_drawable(bar.value) and bar.value >= 0]
    step, thick, top = 34.0, 20.0, 58.0
    height = top + step * max(len(kept), 1) + 8
    names = min(max((text_width(bar.name, 13, bold=True) for bar in kept), default=0.0) + 12, _BAR_NAMES)
    room = max((text_width(_bar_value(bar, axis)) for bar in kept), default=0.0) + 14
    lengths = [value for bar in kept for value in (bar.value, bar.high, bar.limit) if value is not None]
    across = Scale(
        0.0, 0.0, max([v for v in lengths if is_drawable(v)], default=1.0) or 1.0, names, WIDTH - room, names, ()
    )
    parts = [element("text", axis.title, x=0, y=42)]
    for index, bar in enumerate(kept):
        parts.append(_bar(bar, across, names, top + step * index, thick, axis))
    description = "; ".join(f"{bar.name}: {_bar_value(bar, axis)}" for bar in kept) or "Nothing was measured"
    return picture(height, title, description, *(parts if kept else [nothing_measured(height)]))


def dot_chart(dots: Sequence[Dot], x: Axis, y: Axis, title: str) -> Markup:
    """Named discs; a dashed line shows which ones belong together.

    Args:
        dots: those whose names matter most come first.
        x, y: what is along the axes, which are logarithmic.
        title: over it.
    """
    kept = [dot for dot in dots if is_drawable(dot.x, dot.y)]
    height = 440.0
    rows = scale([dot.y for dot in kept], height - BELOW, TOP + 20)
    sheet = PlotArea(left_margin(rows), TOP, WIDTH, height - BELOW)
    columns = scale([dot.x for dot in kept], sheet.left + 24, sheet.right - 24)
    most = max((dot.weight for dot in kept if is_drawable(dot.weight)), default=0.0)
    radii = [
        4.0 + (5.0 * (max(dot.weight, 0.0) / most) ** 0.5 if most > 0 and is_drawable(dot.weight) else 0.0)
        for dot in kept
    ]
    spots = [
        LabelAnchor(columns(dot.x), rows(dot.y), radius, _label_width(dot), 32.0 if dot.caption else 16.0)
        for dot, radius in zip(kept, radii, strict=True)
    ]
    front = sorted((columns(dot.x), rows(dot.y)) for dot in kept if dot.joined)
    boxes = place_labels(spots, Rectangle(sheet.left, sheet.top, sheet.right, sheet.bottom), along(front))
    parts = [y_axis(sheet, rows, y), x_axis(sheet, columns, x)]
    if len(front) > 1:
        parts.append(element("path", d=polyline(front), class_="thin dash k0"))
    parts += [_disc(dot, spot, x, y) for dot, spot in zip(kept, spots, strict=True)]
    parts += [spot_label(dot.name, spot, box, dot.caption) for dot, spot, box in zip(kept, spots, boxes, strict=True)]
    description = "; ".join(f"{dot.name}: {x.label(dot.x)}, {y.label(dot.y)}" for dot in kept) or "Nothing was measured"
    return picture(height, title, description, *(parts if kept else [nothing_measured(height)]))


def _interval(low: float | None, high: float | None) -> str:
    if low is None or high is None or not is_drawable(low, high):
        return ""
    return f" ({number(low)} to {number(high)})"


# ---- bars ------------------------------------------------------------------------------------------


def _bar_value(bar: Bar, axis: Axis) -> str:
    said = axis.label(bar.value)
    if bar.limit is not None and is_drawable(bar.limit) and bar.limit > 0:
        said += f", {bar.value / bar.limit:.0%} of the limit"
    return said


def _bar(bar: Bar, across: Scale, names: float, top: float, thick: float, axis: Axis) -> Markup:
    end, middle = across(bar.value), top + thick / 2
    parts = [
        tooltip([bar.name, _bar_value(bar, axis) + _interval(bar.low, bar.high), bar.note]),
        element("text", shortened(bar.name, names - 12, 13, bold=True), x=0, y=middle + 4.5, class_="name"),
        element("rect", x=names, y=top, width=max(end - names, 1.0), height=thick, rx=2, class_="bar"),
    ]
    ends = [end]
    if bar.low is not None and bar.high is not None and is_drawable(bar.low, bar.high):
        low, high = across(bar.low), across(bar.high)
        ends.append(high)
        parts.append(element("path", d=f"M{low:.2f} {middle - 4:.2f}v8m0-4H{high:.2f}m0-4v8", class_="thin ink"))
    for sample in filter(is_drawable, bar.samples):
        parts.append(element("circle", cx=across(sample), cy=middle, r=2.0, class_="sample ink"))
    if bar.limit is not None and is_drawable(bar.limit):
        limit = across(bar.limit)
        parts.append(element("path", d=f"M{limit:.2f} {top - 3:.2f}v{thick + 6:g}", class_="line ink"))
        ends.append(limit)
    parts.append(element("text", _bar_value(bar, axis), x=max(ends) + 8, y=middle + 4.5))
    return element("g", *parts, class_="dull" if bar.dull else "k0")


# ---- dots ------------------------------------------------------------------------------------------

_DOT_CLASSES = {"front": "k0", "beaten": "dull", "origin": "ink"}


def _label_width(dot: Dot) -> float:
    return max(text_width(_short_name(dot), 13, bold=True), text_width(dot.caption))


def _short_name(dot: Dot) -> str:
    return shortened(dot.name, NAMES, 13, bold=True)


def _disc(dot: Dot, spot: LabelAnchor, x: Axis, y: Axis) -> Markup:
    facts = [dot.name, f"{x.name}: {x.label(dot.x)}", f"{y.name}: {y.label(dot.y)}", dot.caption, dot.note]
    return element(
        "g",
        tooltip(facts),
        element("circle", cx=spot.x, cy=spot.y, r=spot.radius, class_="bubble"),
        element("circle", cx=spot.x, cy=spot.y, r=3.0, class_="mark"),
        class_=_DOT_CLASSES[dot.kind],
    )
