"""Charts as SVG text: lines, bars, dots with names. Pure functions from plain data.

Owns which part of a chart goes where; must not know what was measured, or on what page a chart ends up. Names are
untrusted text. Numbers that are none (NaN, infinite) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmrun.ui.html.label_places import Box, Spot, along, place_labels, spread
from llmrun.ui.html.markup import Markup, element
from llmrun.ui.html.plot_frame import (
    BELOW,
    NAMES,
    TOP,
    WIDTH,
    PlotAxis,
    Point,
    Sheet,
    left_margin,
    mark,
    nothing_measured,
    picture,
    polyline,
    shortened,
    spot_label,
    text_width,
    tone,
    tooltip,
    whisker,
    x_axis,
    y_axis,
)
from llmrun.ui.html.scales import Scale, is_drawable, number, scale

_BAR_NAMES = 270.0  # room for names before bars
_LINE = 17.0  # between names one below the other


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """Points of one thing, which a line joins."""

    name: str
    points: tuple[Point, ...]


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


def line_chart(series: Sequence[PlotSeries], x: PlotAxis, y: PlotAxis, title: str) -> Markup:
    """Lines with marks, intervals and single measurements; each has its name at its right end.

    Args:
        series: at best not more than six, which have colours of their own.
        x, y: what is along the axes.
        title: over it.
    """
    kept = [PlotSeries(one.name, tuple(sorted(filter(_is_sound, one.points), key=lambda p: p.x))) for one in series]
    kept = [one for one in kept if one.points]
    height = max(380.0, TOP + BELOW + _LINE * len(kept))
    points = [point for one in kept for point in one.points]
    names = min(max((text_width(one.name, 13, bold=True) for one in kept), default=0.0) + 16, NAMES)
    top, bottom = TOP, height - BELOW
    rows = scale([value for point in points for value in _heights(point)], y.kind, bottom, top, from_zero=y.from_zero)
    sheet = Sheet(left_margin(rows, y), top, WIDTH - names, bottom)
    columns = scale(
        [point.x for point in points], x.kind, sheet.left + 8, sheet.right - 8, from_zero=x.from_zero, whole=x.whole
    )
    ends = [rows(one.points[-1].y) for one in kept]
    labels = spread(ends, _LINE, top + 4, bottom - 4)
    parts = [y_axis(sheet, rows, y), x_axis(sheet, columns, x)]
    for index, one in enumerate(kept):
        parts.append(_line(one, index, columns, rows, x, y))
        parts.append(_end_label(one.name, index, columns(one.points[-1].x), ends[index], labels[index], names, sheet))
    return picture(height, title, _described(kept, x, y), *(parts if points else [nothing_measured(height)]))


def bar_chart(bars: Sequence[Bar], axis: PlotAxis, title: str) -> Markup:
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


def dot_chart(dots: Sequence[Dot], x: PlotAxis, y: PlotAxis, title: str) -> Markup:
    """Named discs; a dashed line shows which ones belong together.

    Args:
        dots: those whose names matter most come first.
        x, y: what is along the axes.
        title: over it.
    """
    kept = [dot for dot in dots if is_drawable(dot.x, dot.y)]
    height = 440.0
    rows = scale([dot.y for dot in kept], y.kind, height - BELOW, TOP + 20, from_zero=y.from_zero)
    sheet = Sheet(left_margin(rows, y), TOP, WIDTH, height - BELOW)
    columns = scale([dot.x for dot in kept], x.kind, sheet.left + 24, sheet.right - 24, from_zero=x.from_zero)
    most = max((dot.weight for dot in kept if is_drawable(dot.weight)), default=0.0)
    radii = [
        4.0 + (5.0 * (max(dot.weight, 0.0) / most) ** 0.5 if most > 0 and is_drawable(dot.weight) else 0.0)
        for dot in kept
    ]
    spots = [
        Spot(columns(dot.x), rows(dot.y), radius, _label_width(dot), 32.0 if dot.caption else 16.0)
        for dot, radius in zip(kept, radii, strict=True)
    ]
    front = sorted((columns(dot.x), rows(dot.y)) for dot in kept if dot.joined)
    boxes = place_labels(spots, Box(sheet.left, sheet.top, sheet.right, sheet.bottom), along(front))
    parts = [y_axis(sheet, rows, y), x_axis(sheet, columns, x)]
    if len(front) > 1:
        parts.append(element("path", d=polyline(front), class_="thin dash k0"))
    parts += [_disc(dot, spot, x, y) for dot, spot in zip(kept, spots, strict=True)]
    parts += [spot_label(dot.name, spot, box, dot.caption) for dot, spot, box in zip(kept, spots, boxes, strict=True)]
    description = "; ".join(f"{dot.name}: {x.label(dot.x)}, {y.label(dot.y)}" for dot in kept) or "Nothing was measured"
    return picture(height, title, description, *(parts if kept else [nothing_measured(height)]))


# ---- lines -----------------------------------------------------------------------------------------


def _is_sound(point: Point) -> bool:
    return is_drawable(point.x, point.y)


def _heights(point: Point) -> list[float]:
    return [value for value in (point.y, point.low, point.high, *point.samples) if value is not None]


def _line(one: PlotSeries, index: int, columns: Scale, rows: Scale, x: PlotAxis, y: PlotAxis) -> Markup:
    places = [(columns(point.x), rows(point.y)) for point in one.points]
    parts = [element("path", d=polyline(places), class_="line")] if len(places) > 1 else []
    for point, (across, down) in zip(one.points, places, strict=True):
        parts += [
            element("circle", cx=across, cy=rows(sample), r=2.0, class_="sample")
            for sample in point.samples
            if is_drawable(sample)
        ]
        if point.low is not None and point.high is not None and is_drawable(point.low, point.high):
            parts.append(whisker(across, rows(point.low), rows(point.high)))
        value = y.label(point.y) + _interval(point.low, point.high)
        tip = tooltip([one.name, f"{x.name}: {x.label(point.x)}" if x.name else x.label(point.x), value, point.note])
        parts.append(element("g", tip, mark(across, down, index)))
    return element("g", *parts, class_=tone(index))


def _interval(low: float | None, high: float | None) -> str:
    if low is None or high is None or not is_drawable(low, high):
        return ""
    return f" ({number(low)} to {number(high)})"


def _end_label(name: str, index: int, x: float, y: float, label_y: float, room: float, sheet: Sheet) -> Markup:
    start = sheet.right + 10
    lead = (
        element("path", d=polyline([(x + 7, y), (start - 3, label_y)]), class_="thin")
        if x + 30 < start or abs(y - label_y) > 4
        else Markup()
    )
    words = element("text", shortened(name, room - 12, 13, bold=True), x=start, y=label_y + 4, class_="name tone")
    return element("g", tooltip([name]), lead, words, class_=tone(index))


def _described(series: Sequence[PlotSeries], x: PlotAxis, y: PlotAxis) -> str:
    said = []
    for one in series:
        first, last = one.points[0], one.points[-1]
        said.append(f"{one.name}: {y.label(first.y)} at {x.label(first.x)}")
        if last is not first:
            said[-1] += f", {y.label(last.y)} at {x.label(last.x)}"
    return "; ".join(said) or "Nothing was measured"


# ---- bars ------------------------------------------------------------------------------------------


def _bar_value(bar: Bar, axis: PlotAxis) -> str:
    said = axis.label(bar.value)
    if bar.limit is not None and is_drawable(bar.limit) and bar.limit > 0:
        said += f", {bar.value / bar.limit:.0%} of the limit"
    return said


def _bar(bar: Bar, across: Scale, names: float, top: float, thick: float, axis: PlotAxis) -> Markup:
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


def _disc(dot: Dot, spot: Spot, x: PlotAxis, y: PlotAxis) -> Markup:
    facts = [dot.name, f"{x.name}: {x.label(dot.x)}", f"{y.name}: {y.label(dot.y)}", dot.caption, dot.note]
    return element(
        "g",
        tooltip(facts),
        element("circle", cx=spot.x, cy=spot.y, r=spot.radius, class_="bubble"),
        element("circle", cx=spot.x, cy=spot.y, r=3.0, class_="mark"),
        class_=_DOT_CLASSES[dot.kind],
    )
