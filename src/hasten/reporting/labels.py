"""Places the labels of a chart: not over each other, the marks or the edge, and over as few lines as possible."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, hypot
from typing import NamedTuple

LETTER, LINE = 7.6, 16  # pixels: width of a letter (bold) and height of a line of text
CELL = 10  # pixels: resolution in which curves are avoided
Point = tuple[float, float]


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)

    def overlap(self, other: "Box") -> float:
        """The area that both cover."""
        if self.left >= other.right or self.right <= other.left or self.top >= other.bottom or self.bottom <= other.top:
            return 0.0
        width = min(self.right, other.right) - max(self.left, other.left)
        return width * (min(self.bottom, other.bottom) - max(self.top, other.top))

    def nearest(self, point: Point) -> Point:
        """The point of the rectangle that is nearest to ``point``."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.top), self.bottom)

    def distance(self, point: Point) -> float:
        """Pixels from a point to the rectangle."""
        near = self.nearest(point)
        return hypot(near[0] - point[0], near[1] - point[1])


def text_box(x: float, baseline: float, content: str, anchor: str = "") -> Box:
    """What a text covers; ``anchor``: "", "middle" or "end", as in the CSS classes."""
    width = LETTER * len(content)
    left = x - {"": 0.0, "middle": width / 2, "end": width}[anchor]
    return Box(left, baseline - LINE + 4, left + width, baseline + 4)


def best_box(
    candidates: Iterable[tuple[float, Box]], forbidden: Sequence[Box], avoided: Sequence[Box], inside: Box
) -> Box:
    """The cheapest of (cost, box): outside or over a forbidden box a pixel costs 50, over an avoided one 0.3."""

    def cost(candidate: tuple[float, Box]) -> float:
        own, area = candidate
        outside = area.area - area.overlap(inside)
        return own + 50 * (outside + sum(map(area.overlap, forbidden))) + 0.3 * sum(map(area.overlap, avoided))

    return min(candidates, key=cost)[1]


def covered(line: Sequence[Point]) -> set[Box]:
    """The cells of a grid through which a line of points passes."""
    cells = set()
    for (x1, y1), (x2, y2) in pairwise(line):
        steps = max(1, min(200, ceil(2 * max(abs(x2 - x1), abs(y2 - y1)) / CELL)))
        for step in range(steps + 1):
            x, y = x1 + (x2 - x1) * step / steps, y1 + (y2 - y1) * step / steps
            left, top = x // CELL * CELL, y // CELL * CELL
            cells.add(Box(left, top, left + CELL, top + CELL))
    return cells
