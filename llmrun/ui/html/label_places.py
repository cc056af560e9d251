"""Where the names of dots go, so that they hide neither each other nor a dot. Pure; must not know SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle: left, top, right, bottom; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Rectangle) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0

    @property
    def area(self) -> float:
        """Width times height."""
        return (self.right - self.left) * (self.bottom - self.top)


@dataclass(frozen=True, slots=True)
class LabelAnchor:
    """A dot that wants a name: its middle, its radius, and the size of the name."""

    x: float
    y: float
    radius: float
    width: float
    height: float


_SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))  # the liked ones first
_GAPS = (5.0, 14.0, 26.0, 40.0)
_ROUNDS = 3


def place_labels(spots: Sequence[LabelAnchor], inside: Rectangle, avoid: Sequence[Rectangle] = ()) -> list[Rectangle]:
    """A box for the name of each dot, in order: beside its dot, moved away where something is in the way.

    Args:
        spots: the rightmost choose first, because most names stand at the right.
        inside: where names should stay.
        avoid: what they should not cover where they can help it.
    """
    dots = [Rectangle(s.x - s.radius, s.y - s.radius, s.x + s.radius, s.y + s.radius) for s in spots]
    places: dict[int, Rectangle] = {}
    for _ in range(_ROUNDS):  # who chose first did not know where the others would go
        for index in sorted(range(len(spots)), key=lambda one: -spots[one].x):
            spot = spots[index]
            others = [box for other, box in places.items() if other != index]
            strangers = [dot for other, dot in enumerate(dots) if other != index]
            candidates = [_beside(spot, side, gap) for gap in _GAPS for side in _SIDES]
            costs = [
                sum(box.overlap(other) * 10 for other in others)
                + sum(box.overlap(dot) * 6 for dot in dots)
                + sum(box.overlap(other) for other in avoid)
                + sum(_crosses(spot, box, dot) * 60 for dot in strangers)
                + (box.area - box.overlap(inside)) * 20
                + rank
                for rank, box in enumerate(candidates)
            ]
            places[index] = candidates[costs.index(min(costs))]
    return [places[index] for index in range(len(spots))]


def _crosses(spot: LabelAnchor, box: Rectangle, dot: Rectangle) -> bool:
    """Whether the way from a dot to its name leads over another dot."""
    near_x, near_y = min(max(spot.x, box.left), box.right), min(max(spot.y, box.top), box.bottom)
    steps = [(spot.x + (near_x - spot.x) * share, spot.y + (near_y - spot.y) * share) for share in (0.25, 0.5, 0.75, 1)]
    return any(dot.left <= x <= dot.right and dot.top <= y <= dot.bottom for x, y in steps)


def _beside(spot: LabelAnchor, side: tuple[int, int], gap: float) -> Rectangle:
    across, down = side
    reach = spot.radius + gap
    if across and down:
        reach *= 0.8  # the corner of a square round the dot is farther than its side
    left = spot.x - spot.width / 2 if not across else spot.x + reach if across > 0 else spot.x - reach - spot.width
    top = spot.y - spot.height / 2 if not down else spot.y + reach if down > 0 else spot.y - reach - spot.height
    return Rectangle(left, top, left + spot.width, top + spot.height)


def along(places: Sequence[tuple[float, float]], step: float = 6.0) -> list[Rectangle]:
    """Small boxes along straight lines from place to place: what names should not cover."""
    boxes = []
    for (x1, y1), (x2, y2) in pairwise(places):
        count = max(1, int(max(abs(x2 - x1), abs(y2 - y1)) / step))
        for index in range(count):
            x, y = x1 + (x2 - x1) * index / count, y1 + (y2 - y1) * index / count
            boxes.append(Rectangle(x - 2, y - 2, x + 2, y + 2))
    return boxes
