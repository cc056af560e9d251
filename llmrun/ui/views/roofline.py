"""The roofline: how fast work was, below what memory and processor allow. Pure; must not know what was measured how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.ui.html.label_places import Box, Spot, along, place_labels
from llmrun.ui.html.markup import Markup, element
from llmrun.ui.html.plot_frame import (
    BELOW,
    NAMES,
    TOP,
    WIDTH,
    PlotAxis,
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
    x_axis,
    y_axis,
)
from llmrun.ui.html.scales import Scale, is_drawable, number, scale

_SAME = 1.08


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the processor computes at most, in operations/s."""

    name: str
    operations: float


@dataclass(frozen=True, slots=True)
class RooflineWork:
    """Something that was measured.

    Attributes:
        intensity: operations for each byte from memory.
        operations: per second.
        note: more to say about it.
        label: what stands beside its mark; None is its name, "" nothing.
    """

    name: str
    intensity: float
    operations: float
    note: str = ""
    label: str | None = None


def roofline(bandwidth: float, ceilings: Sequence[Ceiling], works: Sequence[RooflineWork], title: str) -> Markup:
    """How fast work was, below what memory and processor allow; both axes are logarithmic.

    Args:
        bandwidth: bytes/s that can be read from memory.
        ceilings: what the processor computes at most.
        works: what was measured.
        title: over it.
    """
    roofs = _distinct([roof for roof in ceilings if is_drawable(roof.operations) and roof.operations > 0])
    kept = [
        work
        for work in works
        if is_drawable(work.intensity, work.operations) and min(work.intensity, work.operations) > 0
    ]
    if not is_drawable(bandwidth) or bandwidth <= 0 or not (roofs or kept):
        return picture(200.0, title, "Nothing was measured", nothing_measured(200.0))
    height = 440.0
    x, y = (
        PlotAxis("operations for each byte from memory", kind="log10"),
        PlotAxis("billion operations/s", kind="log10"),
    )
    knees = [roof.operations / bandwidth for roof in roofs]
    reach = [*knees, *(work.intensity for work in kept)]
    ends = [min(reach) / 2, max(reach) * 2]
    highest = max(roof.operations for roof in roofs) if roofs else bandwidth * ends[1]
    lowest = min([bandwidth * ends[0], *(work.operations for work in kept)])
    rows = scale([lowest / 2e9, highest / 1e9, *(work.operations / 1e9 for work in kept)], "log10", height - BELOW, TOP)
    sheet = Sheet(left_margin(rows, y), TOP, WIDTH, height - BELOW)
    columns = scale(ends, "log10", sheet.left, sheet.right)
    start = max(columns.low, rows.low * 1e9 / bandwidth)
    end = max(min(columns.high, highest / bandwidth), start * 1.01)
    slope = [(columns(at), rows(at * bandwidth / 1e9)) for at in (start, end)]
    parts = [y_axis(sheet, rows, y), x_axis(sheet, columns, x, grid=True), *_slope(bandwidth, slope)]
    for index, roof in enumerate(roofs):
        parts.append(_roof(roof, index + 1, bandwidth, columns, rows))
    parts += _works(kept, columns, rows, sheet, along(slope) + [_words_box(roof, columns, rows) for roof in roofs])
    facts = [
        f"memory: {number(bandwidth / 1e9)} GB/s",
        *(f"{roof.name}: {_billions(roof.operations)}" for roof in roofs),
    ]
    facts += [
        f"{work.name}: {_billions(work.operations)} at {number(work.intensity)} operations a byte" for work in kept
    ]
    return picture(height, title, "; ".join(facts), *parts)


def _distinct(roofs: Sequence[Ceiling]) -> list[Ceiling]:
    """Roofs that are so near each other that one line shows them become one."""
    kept: list[list[Ceiling]] = []
    for roof in sorted(roofs, key=lambda one: one.operations):
        if kept and roof.operations <= kept[-1][0].operations * _SAME:
            kept[-1].append(roof)
        else:
            kept.append([roof])
    return [Ceiling(", ".join(dict.fromkeys(one.name for one in near)), near[-1].operations) for near in kept]


def _billions(operations: float) -> str:
    return f"{number(operations / 1e9)} billion operations/s"


def _slope(bandwidth: float, places: Sequence[tuple[float, float]]) -> list[Markup]:
    """The line that memory draws, its name along it."""
    line = element("path", d=polyline(places), class_="line ink")
    (x1, y1), (x2, y2) = places
    x, y = x1 + (x2 - x1) * 0.08, y1 + (y2 - y1) * 0.08
    words = element("text", f"memory, {number(bandwidth / 1e9)} GB/s", x=0, y=-8, class_="halo")
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    return [line, element("g", words, transform=f"translate({x:.1f} {y:.1f}) rotate({angle:.1f})")]


def _roof(roof: Ceiling, index: int, bandwidth: float, columns: Scale, rows: Scale) -> Markup:
    start, y = columns(roof.operations / bandwidth), rows(roof.operations / 1e9)
    return element(
        "g",
        tooltip([roof.name, _billions(roof.operations)]),
        element("path", d=polyline([(start, y), (columns.end, y)]), class_="line"),
        element(
            "text",
            _roof_words(roof),
            x=columns.end,
            y=y - 7,
            text_anchor="end",
            class_="tone halo",
        ),
        class_=tone(index),
    )


def _words_box(roof: Ceiling, columns: Scale, rows: Scale) -> Box:
    y = rows(roof.operations / 1e9)
    return Box(columns.end - text_width(_roof_words(roof)), y - 20, columns.end, y + 3)


def _roof_words(roof: Ceiling) -> str:
    return shortened(f"{roof.name}, {number(roof.operations / 1e9)}", NAMES)


def _works(
    works: Sequence[RooflineWork], columns: Scale, rows: Scale, sheet: Sheet, avoid: Sequence[Box]
) -> list[Markup]:
    spots = [
        Spot(columns(work.intensity), rows(work.operations / 1e9), 5.0, _name_width(_label(work)), 16.0)
        for work in works
    ]
    boxes = place_labels(spots, Box(sheet.left, sheet.top, sheet.right, sheet.bottom), avoid)
    parts = []
    for work, spot, box in zip(works, spots, boxes, strict=True):
        tip = [
            work.name,
            _billions(work.operations),
            f"{number(work.intensity)} operations a byte",
            work.note,
        ]
        parts.append(element("g", tooltip(tip), mark(spot.x, spot.y, 0, radius=5.0), class_="k0"))
        parts.append(spot_label(_label(work), spot, box))
    return parts


def _label(work: RooflineWork) -> str:
    return work.name if work.label is None else work.label


def _name_width(name: str) -> float:
    return text_width(shortened(name, NAMES, 13, bold=True), 13, bold=True)
