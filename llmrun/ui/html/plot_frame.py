"""What all plots share: their parts as data, the sheet with title, axes and grid, the CSS.

Owns how plots look; must not know what is plotted. Whoever shows a plot gives STYLE with it, which follows the
reader's light or dark setting.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from llmrun.ui.html.label_places import LabelAnchor, Rectangle
from llmrun.ui.html.markup import Markup, element, joined
from llmrun.ui.html.scales import Scale, number
from llmrun.ui.terminal.sanitize import clean

WIDTH = 720.0
TOP = 66.0
"""Room for the title and the name of the vertical axis."""
BELOW = 52.0
"""Room for the numbers and the name of the horizontal axis."""
NAMES = 190.0
"""The most room for names of things."""

STYLE = """
:root{--paper:#fff;--ink:#16181d;--soft:#5a6270;--rule:#e3e6eb;--axis:#a3abb8;--halo:#fff;
--c0:#0072b2;--dull:#9aa2af}
@media screen and (prefers-color-scheme:dark){:root{--paper:#14161a;--ink:#eceef2;--soft:#a4acb9;--rule:#2b2f37;
--axis:#5d6673;--halo:#14161a;--c0:#56b4e9;--dull:#6f7886}}
.plot{display:block;width:100%;height:auto;font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.plot text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.plot .title{fill:var(--ink);font-size:15px;font-weight:600}
.plot .name{fill:var(--ink);font-size:13px;font-weight:600}
.plot .halo{paint-order:stroke;stroke:var(--halo);stroke-width:4px;stroke-linejoin:round}
.plot .grid{stroke:var(--rule)}.plot .axis{stroke:var(--axis)}
.plot .k0{--c:var(--c0)}.plot .dull{--c:var(--dull)}.plot .ink{--c:var(--ink)}
.plot .line{fill:none;stroke:var(--c);stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}
.plot .thin{fill:none;stroke:var(--c);stroke-width:1.25}.plot .dash{stroke-dasharray:5 4}
.plot .mark{fill:var(--c);stroke:var(--paper);stroke-width:1.5}.plot .sample{fill:var(--c);opacity:.35}
.plot .bar{fill:var(--c)}.plot .bubble{fill:var(--c);fill-opacity:.25;stroke:var(--c);stroke-width:1.5}
.plot g:hover>.mark,.plot g:hover>.bubble,.plot g:hover>.bar{stroke:var(--ink)}
""".strip()
"""CSS that plots need, once on a page."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What is measured along an axis: e.g. "size" in "GB"."""

    name: str
    unit: str = ""

    @property
    def title(self) -> str:
        """Name and unit."""
        return f"{self.name} ({self.unit})" if self.name and self.unit else self.name or self.unit

    def label(self, value: float) -> str:
        """A value with its unit, for people."""
        return f"{number(value)} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class PlotArea:
    """The area that is drawn in: its ends in the picture's units; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float


def picture(height: float, title: str, description: str, *parts: str) -> Markup:
    """A whole SVG.

    Args:
        height: in units of which the picture is WIDTH wide.
        title: over it.
        description: what a user who can't see it should know.
    """
    return element(
        "svg",
        element("desc", description),
        element("text", title, x=0, y=18, class_="title"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=f"{title}. {description}",
        class_="plot",
    )


def text_width(words: str, size: float = 12.0, *, bold: bool = False) -> float:
    """About how wide a text will be; fonts differ, so this is on the safe side."""
    units = sum(
        0 if unicodedata.combining(c) else 1.0 if unicodedata.east_asian_width(c) in "WF" else 0.63 for c in words
    )
    return units * size * (1.08 if bold else 1.0)


def shortened(words: str, most: float, size: float = 12.0, *, bold: bool = False) -> str:
    """A text cut to a width, with an ellipsis for what is missing in its middle: names differ at their ends."""
    words = clean(words)
    kept = len(words)
    short = words
    while kept and text_width(short, size, bold=bold) > most:
        kept -= 1
        short = words[: kept // 3].rstrip() + "…" + words[len(words) - (kept - kept // 3) :].lstrip()
    return short


def y_axis(sheet: PlotArea, scale: Scale, axis: Axis) -> Markup:
    """Horizontal lines with their numbers at the left, and the name above."""
    parts = [element("text", axis.title, x=0, y=sheet.top - 14)] if axis.title else []
    for value, label in _ticks(scale):
        y = scale(value)
        parts.append(element("line", x1=sheet.left, x2=sheet.right, y1=y, y2=y, class_="grid"))
        parts.append(element("text", label, x=sheet.left - 8, y=y + 4, text_anchor="end"))
    return element("g", *parts)


def x_axis(sheet: PlotArea, scale: Scale, axis: Axis) -> Markup:
    """The line below with its numbers, as many as have room, and the name below them."""
    parts = [element("line", x1=sheet.left, x2=sheet.right, y1=sheet.bottom, y2=sheet.bottom, class_="axis")]
    taken = float("-inf")
    for value, label in _ticks(scale):
        x, half = scale(value), text_width(label) / 2
        parts.append(element("line", x1=x, x2=x, y1=sheet.bottom, y2=sheet.bottom + 5, class_="axis"))
        if x - half < taken + 6:
            continue
        parts.append(element("text", label, x=x, y=sheet.bottom + 20, text_anchor="middle"))
        taken = x + half
    parts.append(element("text", axis.title, x=sheet.right, y=sheet.bottom + 40, text_anchor="end"))
    return element("g", *parts)


def _ticks(scale: Scale) -> list[tuple[float, str]]:
    zero = [(0.0, "0")] if scale.base and scale.low_place != scale.start else []
    return [*zero, *((tick, number(tick)) for tick in scale.ticks)]


def left_margin(scale: Scale) -> float:
    """Room for the numbers of a vertical axis."""
    return max((text_width(label) for _, label in _ticks(scale)), default=0.0) + 12


def polyline(places: Iterable[tuple[float, float]]) -> str:
    """Path data of straight lines from place to place."""
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in places)


def tooltip(lines: Iterable[str]) -> Markup:
    """What is shown while the pointer rests on the element that this is put into."""
    return element("title", Markup("\n".join(joined(line) for line in lines if line)))


def spot_label(name: str, spot: LabelAnchor, box: Rectangle, caption: str = "") -> Markup:
    """The name of a dot in its box, joined to the dot by a line when it is not beside it."""
    centred = abs((box.left + box.right) / 2 - spot.x) < 1
    x, anchor = (spot.x, "middle") if centred else (box.left, "start") if box.left > spot.x else (box.right, "end")
    near_x, near_y = min(max(spot.x, box.left), box.right), min(max(spot.y, box.top), box.bottom)
    across, down = near_x - spot.x, near_y - spot.y
    distance = math.hypot(across, down)
    lead = Markup()
    if distance > spot.radius + 10:
        edge = (spot.x + across * spot.radius / distance, spot.y + down * spot.radius / distance)
        lead = element("path", d=polyline([edge, (near_x, near_y)]), class_="thin dull")
    words = element(
        "text", shortened(name, NAMES, 13, bold=True), x=x, y=box.top + 13, text_anchor=anchor, class_="name halo"
    )
    below = element("text", caption, x=x, y=box.top + 28, text_anchor=anchor, class_="halo") if caption else Markup()
    return element("g", lead, words, below)


def nothing_measured(height: float) -> Markup:
    """What stands in a picture without data."""
    return element("text", "Nothing was measured.", x=WIDTH / 2, y=height / 2, text_anchor="middle")
