"""HTML pages and their charts, from the Jinja2 templates of this folder: one file each, without network.

All data are untrusted: control and invisible characters are removed from texts, everything else is escaped.
parts.html.jinja draws the charts, whose scales and places of labels are computed here.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.cells import fitting, width
from llmrun.ui.terminal.format import counted, milliseconds, percent, rate
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from jinja2.environment import Environment

_FOLDER = Path(__file__).parent


def render(template: str, *, scripts: Sequence[str] = ("sort.js",), **data: object) -> str:
    """Return a whole page.

    Args:
        template: a file of this folder, without its ending.
        scripts: files of this folder, or absolute paths; the page's policy allows no other script.
        data: the template's variables.
    """
    codes = [(_FOLDER / name).read_text(encoding="utf-8") for name in scripts]
    digests = (base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    page = _environment().get_template(f"{template}.html.jinja")
    return page.render(**data, scripts=codes, script_hashes=hashes)


def _environment() -> Environment:
    # From its submodules: a process that renders chat templates has an empty `jinja2` (engine/llama/library.py).
    from jinja2.environment import Environment
    from jinja2.loaders import FileSystemLoader
    from jinja2.runtime import StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters.update(
        counted=counted, digits=digits, milliseconds=milliseconds, percent=percent, rate=rate, size=readable_size,
        width_of=width_of,
    )  # fmt: skip
    return environment


def _printable(value: object) -> object:
    """Return a value as a template may print it; Markup has been cleaned where its parts were printed."""
    return clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def is_drawable(value: float | None) -> bool:
    """Return whether a value is a finite number of a size that any measurement has."""
    return value is not None and (value == 0 or 1e-30 < abs(value) < 1e30)


def width_of(value: float, maximum: float) -> str:
    """Return a value as a CSS percentage of a maximum, from 0% to 100%."""
    share = value / maximum if is_drawable(value) and is_drawable(maximum) and maximum > 0 else 0.0
    return f"{min(max(share, 0.0), 1.0):.1%}"


def digits(value: float) -> str:
    """Return a number with three significant digits or more, and thousands separated, e.g. "0.05", "1,024"."""
    if not math.isfinite(value):
        return "?"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-4:
        return f"{value:.3g}"
    if size >= 100:
        return f"{value:,.0f}"
    decimals = 0 if size == 0 else max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_WIDTH, _TOP, _BOTTOM, _LEFT, _MARGIN = 720, 66, 388, 60, 24  # pixels of the plot; the template has the same
_LABEL_CELLS, _CELL, _LINE = 24, 7.8, 15.0  # of a label: maximum width, pixels of a cell and of a line
_SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))  # the preferred ones first
_GAPS = (5.0, 14.0, 26.0, 40.0)
_ZERO_SHARE = 0.1  # of an axis, for values of zero, which have no logarithm


class Bar(NamedTuple):
    """A value with a name, and where known its interval, its samples and the maximum that is possible."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    samples: Sequence[float] = ()
    limit: float | None = None
    dull: bool = False
    note: str = ""


class Dot(NamedTuple):
    """A named point. kind is a CSS class: "front", "beaten" or "origin"; a dashed line runs through joined points."""

    name: str
    x: float
    y: float
    caption: str = ""
    weight: float = 0.0
    kind: str = "front"
    note: str = ""
    joined: bool = False


class Box(NamedTuple):
    """A rectangle in pixels; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(across, 0.0) * max(down, 0.0)


_PLOT = Box(_LEFT, _TOP, _WIDTH, _BOTTOM)


def drawable_bars(bars: Iterable[Bar]) -> list[Bar]:
    """Return the bars that have a length, without intervals, samples and limits that can't be drawn."""
    shown = []
    for bar in bars:
        samples = [sample for sample in bar.samples if is_drawable(sample)]
        bar = bar._replace(samples=samples, limit=bar.limit if is_drawable(bar.limit) else None)
        if not (is_drawable(bar.low) and is_drawable(bar.high)):
            bar = bar._replace(low=None, high=None)
        if is_drawable(bar.value) and bar.value >= 0:
            shown.append(bar)
    return shown


def scatter(title: str, dots: Iterable[Dot], x: tuple[str, str], y: tuple[str, str]) -> dict[str, Any]:
    """Return the data of a plot with logarithmic axes.

    Args:
        title: the heading.
        dots: points that can't be drawn are left out.
        x, y: the name and the unit of each axis.
    """
    shown = [dot for dot in dots if is_drawable(dot.x) and is_drawable(dot.y)]
    x_at, x_ticks = _axis([dot.x for dot in shown], _LEFT + _MARGIN, _WIDTH - _MARGIN)
    y_at, y_ticks = _axis([dot.y for dot in shown], _BOTTOM, _TOP + _MARGIN)
    points = [(round(x_at(dot.x), 1), round(y_at(dot.y), 1)) for dot in shown]
    maximum = max((dot.weight for dot in shown if is_drawable(dot.weight)), default=0.0)
    shares = [dot.weight / maximum if maximum > 0 and is_drawable(dot.weight) else 0.0 for dot in shown]
    radii = [round(4 + 5 * max(share, 0.0) ** 0.5, 1) for share in shares]
    labels = [fitting(clean(dot.name), _LABEL_CELLS) for dot in shown]
    sizes = [
        (max(width(label), width(dot.caption)) * _CELL, _LINE * (2 if dot.caption else 1))
        for dot, label in zip(shown, labels, strict=True)
    ]
    return {
        "title": title,
        "axes": [f"{name} ({unit})" if unit else name for name, unit in (x, y)],
        "ticks": (x_ticks, y_ticks),
        "dots": list(zip(shown, points, radii, labels, place_labels(points, radii, sizes), strict=True)),
        "texts": [f"{digits(dot.x)} {x[1]}, {digits(dot.y)} {y[1]}".strip() for dot in shown],
        "line": sorted(point for dot, point in zip(shown, points, strict=True) if dot.joined),
    }


def _axis(values: Sequence[float], start: float, end: float) -> tuple[Callable[[float], float], list[Any]]:
    """Return the place of each value on a logarithmic axis, and the axis's ticks; zero is at the start."""
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=10.0)
    low, high = (low / 1.1, high * 1.1) if high > low * 1.8 else (low / 1.5, high * 1.5)
    first = start + (end - start) * (_ZERO_SHARE if len(positive) < len(values) else 0.0)

    def place(value: float) -> float:
        return start if value <= 0 else first + (end - first) * math.log(value / low) / math.log(high / low)

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(decades) // 8)
    factors = (1, 1.5, 2, 3, 5, 7) if high / low <= 10 else (1, 2, 5) if high / low <= 1000 else (1,)
    ticks = [10.0**power * factor for power in decades[::every] for factor in factors]
    shown = [0.0] * (first != start) + [tick for tick in ticks if low <= tick <= high]
    return place, [(round(place(tick), 1), digits(tick)) for tick in shown]


def place_labels(
    points: Sequence[tuple[float, float]], radii: Sequence[float], sizes: Sequence[tuple[float, float]]
) -> list[Box]:
    """Return a box for the label of each disc, with the least overlap of discs, other labels and the plot's edges."""
    taken = [Box(x - r, y - r, x + r, y + r) for (x, y), r in zip(points, radii, strict=True)]
    placed: dict[int, Box] = {}
    for index in sorted(range(len(points)), key=lambda each: -points[each][0]):  # most labels are right of their disc
        (x, y), (wide, high), boxes = points[index], sizes[index], []
        for gap in _GAPS:
            for across, down in _SIDES:
                reach = radii[index] + gap
                left, top = x + across * (reach + wide / 2) - wide / 2, y + down * (reach + high / 2) - high / 2
                boxes.append(Box(round(left, 1), round(top, 1), left + wide, top + high))
        costs = [round(sum(map(box.overlap, taken)) + wide * high - box.overlap(_PLOT)) for box in boxes]
        placed[index] = boxes[costs.index(min(costs))]
        taken.append(placed[index])
    return [placed[index] for index in range(len(points))]
