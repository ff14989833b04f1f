"""The chart of the frontier: speed-up against quality, or a list of intervals where no quality was measured.

The evidence of a recipe is the shape and the color of its mark. Labels are placed where they overlap nothing.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import hypot, log
from typing import NamedTuple

from markupsafe import Markup

from hasten.reporting import formatting
from hasten.reporting.charts import ticks
from hasten.reporting.result_schema import EVIDENCE_LEVELS
from hasten.reporting.svg import LETTER, LINE, box, dot, element, line, svg, text, whisker
from hasten.reporting.view_model import Json

ROUND_RATIOS = (*(0.1, 0.2, 0.3, 0.5, 0.7), 1, *(1.2, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500, 1000))
Point = tuple[float, float]
MARK = 6.5  # pixels: radius of a mark
LEADER = 20  # pixels between a mark and its label from which on a line joins them


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        return max(0.0, width) * max(0.0, min(self.bottom, other.bottom) - max(self.top, other.top))

    def nearest(self, point: Point) -> Point:
        """The point of the rectangle that is nearest to ``point``."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.top), self.bottom)

    def distance(self, point: Point) -> float:
        """Pixels from a point to the rectangle."""
        near = self.nearest(point)
        return hypot(near[0] - point[0], near[1] - point[1])


def text_box(left: float, baseline: float, content: str) -> Box:
    """The rectangle of a text that begins at x ``left`` and stands on y ``baseline``."""
    return Box(left, baseline - LINE + 4, left + LETTER * len(content), baseline + 4)


def has_quality(rows: Sequence[Json]) -> bool:
    """Whether the quality of a recipe was measured, so that the chart has two dimensions."""
    return any(row["quality"]["mean"] is not None for row in rows)


def frontier(rows: Sequence[Json], metric: Json, margin: float | None, width: int) -> Markup:
    """The rows of ``frontier_rows`` as a chart of ``width`` pixels; ``margin``: of the quality gate."""
    if not has_quality(rows):
        return _intervals(rows, width)
    return _plane(rows, metric, margin, width)


def legend(rows: Sequence[Json]) -> list[tuple[Markup, str]]:
    """(drawing, meaning) of each kind of mark among the rows."""
    roles = {"baseline": "the task as it is", "strong baseline": "strong baseline", "recommended": "recommended"}
    marked = [(role, "", name) for role, name in roles.items() if any(row["role"] == role for row in rows)]
    shown = {row["evidence"] for row in rows if row["role"] not in ("baseline", "strong baseline")}
    levels = [("", level, level) for level in EVIDENCE_LEVELS if level in shown]
    kinds = sorted([*marked, *levels], key=lambda kind: kind[0] == "recommended")
    return [(small_mark(role, evidence), name) for role, evidence, name in kinds]


def small_mark(role: str, evidence: str) -> Markup:
    """The mark of a recipe for the legend and the table."""
    return svg(24, 22, role or evidence or "recipe", "", _mark(12, 11, role, evidence), class_="mark inline")


def _plane(rows: Sequence[Json], metric: Json, margin: float | None, width: int) -> Markup:
    """Speed-up to the right, quality up; recipes of unknown quality lie in a strip below."""
    height, top = (400 if width > 500 else 340), 30
    floor = height - 42
    plot = Box(66, top, width - 12, floor - (26 if any(row["height"] is None for row in rows) else 0))
    low, high = _height_range(rows, margin)
    ratios, at = _ratio_axis(rows, plot.left + 14, plot.right - 14)

    def up(value: float) -> float:
        return plot.bottom - (value - low) / (high - low) * (plot.bottom - plot.top)

    change = "improvement" if metric["higher_is_better"] is False else "change"
    parts = [text(0, 14, f"{change} of {metric['name'] or 'the metric'}; up is better", "tick")]
    taken: list[Box] = []
    if margin:
        y = up(-margin)
        parts.append(box(plot.left, y, plot.right - plot.left, plot.bottom - y, "forbidden"))
        parts.append(line(plot.left, y, plot.right, y, "target"))
        note = "worse than the margin"
        parts.append(text(plot.left + 6, plot.bottom - 8, note, "tick"))
        taken.append(text_box(plot.left + 6, plot.bottom - 8, note))
    for value in ticks(low, high, 6):
        parts.append(line(plot.left, up(value), plot.right, up(value), "axis" if value == 0 else "grid"))
        parts.append(text(plot.left - 8, up(value) + 4, _signed(value), "tick end"))
    if plot.bottom < floor:
        parts.append(line(plot.left, plot.bottom, plot.right, plot.bottom, "axis"))
        parts.append(text(plot.left - 8, floor - 9, "unknown", "tick end"))
    parts += [*_ratio_grid(ratios, at, top, floor), line(plot.left, floor, plot.right, floor, "axis")]
    parts.append(text(plot.right, height - 4, "speed-up", "tick end"))
    points = [
        (at(row["speedup"]["median"]), floor - 13 if row["height"] is None else up(row["height"])) for row in rows
    ]
    for row, point in zip(rows, points, strict=True):
        lines, covered = _error_bars(row, point, at, up)
        parts += lines
        taken += covered
    labels = [f"{row['number']} {row['role']}".strip() for row in rows]
    parts += place_labels(labels, points, taken, Box(plot.left, plot.top, plot.right, floor))
    for row, point in zip(rows, points, strict=True):
        parts += _mark(*point, row["role"], row["evidence"])
    return svg(width, height, "The frontier: speed-up against quality", _description(rows), parts)


def _error_bars(
    row: Json, point: Point, at: Callable[[float], float], up: Callable[[float], float]
) -> tuple[list[Markup], list[Box]]:
    """(drawing, rectangles that it covers) of the interval of the speed-up and, if known, that of the quality."""
    (x, y), kind = point, f"interval thin {_kind(row['role'], row['evidence'])}"
    left, right = (at(row["speedup"][end] or row["speedup"]["median"]) for end in ("low", "high"))
    parts = whisker(left, right, y, 4, kind) if right - left > 1 else []
    covered = [Box(left, y - 2, right, y + 2)]
    ends = [up(row["quality"][end]) for end in ("low", "high") if row["quality"][end] is not None]
    if len(ends) == 2 and row["height"] is not None:
        parts += [line(x, ends[0], x, ends[1], kind), *(line(x - 4, end, x + 4, end, kind) for end in ends)]
        covered.append(Box(x - 2, min(ends), x + 2, max(ends)))
    return parts, covered


def _ratio_grid(ratios: Sequence[float], at: Callable[[float], float], top: float, floor: float) -> list[Markup]:
    lines = [line(at(ratio), top, at(ratio), floor, "axis" if ratio == 1 else "grid") for ratio in ratios]
    return [*lines, *(text(at(ratio), floor + 18, f"{ratio:g}{formatting.TIMES}", "tick middle") for ratio in ratios)]


def _intervals(rows: Sequence[Json], width: int) -> Markup:
    """A row with name and interval for each recipe, on one axis of ratios."""
    wide = width > 500
    left, right, step, top = (320, 150, 36, 8) if wide else (4, 4, 54, 8)
    floor = top + len(rows) * step
    ratios, at = _ratio_axis(rows, left + 12, width - right - 12)
    parts = _ratio_grid(ratios, at, top, floor)
    parts.append(text(width - right, floor + 36, "speed-up", "tick end"))
    for index, row in enumerate(rows):
        text_y = top + index * step + (23 if wide else 15)
        y = text_y - 4 if wide else text_y + 18
        name, longest = f"{row['number']}  {row['role'] or row['text']}", 40 if wide else 24
        shown = name if len(name) <= longest else name[: longest - 1] + "\u2026"
        kind = f"interval thin {_kind(row['role'], row['evidence'])}"
        low_x, high_x = (at(row["speedup"][end] or row["speedup"]["median"]) for end in ("low", "high"))
        parts.append(text(0, text_y, shown, "label halo", title=row["text"]))
        parts.append(text(width, text_y, formatting.with_interval(row["speedup"]), "value end halo"))
        parts += whisker(low_x, high_x, y, 5, kind) if high_x - low_x > 1 else []
        parts += _mark(at(row["speedup"]["median"]), y, row["role"], row["evidence"])
    return svg(width, floor + 40, "The frontier: speed-ups", _description(rows), parts)


def place_labels(labels: Sequence[str], points: Sequence[Point], avoided: Sequence[Box], inside: Box) -> list[Markup]:
    """Draws ``labels`` near their ``points``, each where it hides least; a line joins those that lie further away."""
    placed = [Box(x - MARK - 3, y - MARK - 3, x + MARK + 3, y + MARK + 3) for x, y in points]
    parts: list[Markup] = []
    for index in sorted(range(len(labels)), key=lambda index: -len(labels[index])):  # long ones are hard to place
        point, others = points[index], [*points[:index], *points[index + 1 :]]

        def cost(area: Box, point: Point = point, others: Sequence[Point] = others) -> float:
            own = area.distance(point)
            wrong = sum(max(0.0, own + 10 - area.distance(other)) for other in others)  # seems to belong to another
            hidden = area.overlap(area) - area.overlap(inside) + sum(map(area.overlap, placed))
            return own + 4 * wrong + 50 * hidden + 0.3 * sum(map(area.overlap, avoided))

        best = min(_candidates(*point, LETTER * len(labels[index])), key=cost)
        placed.append(best)
        if best.distance(point) > LEADER:
            parts.insert(0, line(*point, *best.nearest(point), "leader"))
        is_left = best.right < point[0]  # then it ends beside its point, however wide the letters are
        x, kind = (best.right, "label end halo") if is_left else (best.left, "label halo")
        parts.append(text(x, best.bottom - 4, labels[index], kind))
    return parts


def _candidates(x: float, y: float, width: float) -> list[Box]:
    """Positions around a point: at its right and left, and above and below it with either end or the middle at it."""
    boxes = []
    for gap in (MARK + 5, 20, 34, 50, 70, 95, 125, 160, 200):
        beside = [(x + gap, y - LINE / 2), (x - gap - width, y - LINE / 2)]
        lefts, tops = (x - MARK, x - width / 2, x + MARK - width), (y - gap - LINE + 2, y + gap - 2)
        diagonal = product((x + gap, x - gap - width), (y - gap - LINE, y + gap))
        boxes += [(left, top) for left, top in (*beside, *product(lefts, tops), *diagonal)]
    return [Box(left, top, left + width, top + LINE) for left, top in boxes]


def _mark(x: float, y: float, role: str, evidence: str) -> list[Markup]:
    """Baseline: a cross; strong baseline: a triangle; else the shape of the evidence. A ring marks "recommended"."""
    kind, size = f"symbol {_kind(role, evidence)}", MARK
    ring = [dot(x, y, size + 3.5, "ring")] if role == "recommended" else []
    if role == "baseline":
        ends = ((-1, -1, 1, 1), (-1, 1, 1, -1))
        return [line(x + a * 5, y + b * 5, x + c * 5, y + d * 5, kind) for a, b, c, d in ends]
    if role == "strong baseline":
        return [_polygon(kind, (x, y - size - 1), (x + size + 1, y + size - 1), (x - size - 1, y + size - 1))]
    if evidence == "exact":
        return [*ring, box(x - 5.5, y - 5.5, 11, 11, kind)]
    if evidence == "precision checked":
        reach = size + 1.5
        return [*ring, _polygon(kind, (x, y - reach), (x + reach, y), (x, y + reach), (x - reach, y))]
    return [*ring, dot(x, y, size, kind)] if evidence or not ring else ring


def _kind(role: str, evidence: str) -> str:
    """The CSS class that colors a mark."""
    if role in ("baseline", "strong baseline"):
        return role.replace(" ", "_")
    return evidence.split(" ")[0] if evidence in EVIDENCE_LEVELS else "other"


def _polygon(kind: str, *points: tuple[float, float]) -> Markup:
    return element("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=kind)


def _height_range(rows: Sequence[Json], margin: float | None) -> tuple[float, float]:
    """(low, high) of the quality axis: all intervals, 0, and some of what is worse than the margin."""
    values = [row["quality"][key] for row in rows for key in ("mean", "low", "high")]
    values = [0.0, *([-1.4 * margin] if margin else []), *(value for value in values if value is not None)]
    low, high = min(values), max(values)
    pad = (high - low) * 0.1 or 1.0
    return low - pad, high + pad


def _ratio_axis(rows: Sequence[Json], left: float, right: float) -> tuple[list[float], Callable[[float], float]]:
    """Round ratios that are not too close, and the position of a ratio on a logarithmic axis."""
    values = [row["speedup"][key] or row["speedup"]["median"] for row in rows for key in ("low", "median", "high")]
    low, high = max(min(1.0, *values), 0.02), min(max(1.2, *values), 2000.0)

    def at(ratio: float) -> float:
        return left + log(min(max(ratio, low), high) / low) / log(high / low) * (right - left)

    shown, gap = list[float](), 44 if right - left < 400 else 60
    for ratio in sorted(ROUND_RATIOS, key=lambda ratio: abs(log(ratio))):  # 1 is always shown
        if low <= ratio <= high and all(abs(at(ratio) - at(other)) >= gap for other in shown):
            shown.append(ratio)
    return sorted(shown), at


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+g}".replace("-", formatting.MINUS)


def _description(rows: Sequence[Json]) -> str:
    return "; ".join(
        f"{row['number']}: {row['text']}, {formatting.with_interval(row['speedup'])} as fast, quality {row['change']}"
        for row in rows
    )
