"""Charts as SVG: pure functions from numbers to Markup.

Each chart is drawn for a width in pixels, so that its text is 13 pixels high at that width; the page contains a wide
and a narrow drawing and shows the one that fits. Shapes have CSS classes; ``page.css`` defines their colors.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log, log10

from markupsafe import Markup, escape

from hasten.core.card import PHASES
from hasten.reporting import formatting
from hasten.reporting.labels import LETTER, LINE, Box, Point, best_box, covered, text_box
from hasten.reporting.svg import box, clipped, dot, element, line, svg, text, whisker
from hasten.reporting.view_model import ARMS, Json

WIDE, NARROW = 820, 340
MAX_POINTS = 160  # per line
PHASE_CLASSES = {*PHASES, "start", "training", "checkpoints"} - {"steps"}  # that page.css colors


def curves(arms: Sequence[Json], target: float | None, metric: Json, width: int) -> Markup:
    """The metric over wall-clock seconds: a line for each seed, a dot where it reaches ``target``, a dashed line there.

    ``arms`` is the result of ``view_model.arms``, ``metric`` is ``{"name", "higher_is_better", "unit"}``, ``width`` is
    in pixels.
    """
    height, left, right, top, bottom = (340 if width > 500 else 280), 48, 14, 26, 38
    points = [point for arm in arms for line in arm["lines"] for point in line]
    longest = max([x for x, _ in points] + [arm["time"] or 0 for arm in arms], default=0) or 1.0
    low, high = _metric_range([y for _, y in points], target, metric["higher_is_better"])

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / longest * (width - left - right), top + (high - y) / (high - low) * (height - top - bottom)

    floor_y = height - bottom
    parts = []
    for value in ticks(low, high, 5):
        y = at(0, value)[1]
        parts += [line(left, y, width - right, y, "grid"), text(left - 7, y + 4, f"{value:g}", "tick end")]
    unit, seconds = _time_unit(longest)
    for value in ticks(0, longest / seconds, 8 if width > 500 else 4):
        parts.append(text(at(value * seconds, low)[0], floor_y + 17, f"{value:g}", "tick middle"))
    parts += [line(left, floor_y, width - right, floor_y, "axis"), text(width - right, height - 3, unit, "tick end")]
    name, better = metric["name"] or "metric", "higher" if metric["higher_is_better"] else "lower"
    parts.append(text(0, 13, f"{name} ({better} is better)", "tick"))

    def curve(arm: Json, points: list) -> Markup:
        positions = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in thin_out(points)))
        return element("polyline", points=positions, class_=f"curve {_arm_class(arm)}")

    lines = [curve(arm, points) for arm in arms for points in arm["lines"]]
    parts.append(clipped(left, top, width - left - right, height - top - bottom, lines))
    if target is not None:
        y = at(0, target)[1]
        parts.append(line(left, y, width - right, y, "target"))
        parts += [dot(*at(*point), 3.5, f"dot {_arm_class(arm)}") for arm in arms for point in arm["target_points"]]
        avoided = [covered([at(*point) for point in thin_out(points)]) for arm in arms for points in arm["lines"]]
        label = f"target {formatting.plain(target, metric['unit'])}"
        parts += _target_labels(arms, at, target, label, [*set().union(*avoided)], Box(left, top, width, floor_y))
    return svg(width, height, f"{name} over wall-clock time", _curves_text(arms, target), parts)


def phase_bars(bars: Sequence[tuple[str, str, Mapping[str, float]]], width: int) -> Markup:
    """Stacked bars on one scale, from top to bottom: (name, text at the right, {phase: seconds}). Width in pixels."""
    longest = max((sum(phases.values()) for _, _, phases in bars), default=0) or 1.0
    row, thick = 66, 30
    parts = []
    for index, (name, note, phases) in enumerate(bars):
        y, x = index * row + 22, 0.0
        parts += [text(0, y - 7, name, "label"), text(width, y - 7, note, "tick end")]
        for phase, seconds in phases.items():
            length = seconds / longest * width
            title = f"{name}, {phase}: {formatting.seconds(seconds)}"
            parts.append(box(x, y, max(length - 1, 0.75), thick, f"phase {phase_class(phase)}", title))
            if length > 7.2 * len(phase) + 8:
                parts.append(text(x + length / 2, y + 20, phase, f"small middle on {phase_class(phase)}"))
            x += length
    description = "; ".join(
        f"{name}: " + ", ".join(f"{phase} {formatting.seconds(value)}" for phase, value in phases.items())
        for name, _, phases in bars
    )
    return svg(width, len(bars) * row - 10, "Where the time of a step goes", description, parts)


def waterfall(start: float, end: float, steps: Sequence[Json], width: int) -> Markup:
    """From the time of the baseline down to the tuned time, a bar for each step of ``view_model.staircase``."""
    wide = width > 500
    left, right, row, thick = (210, 156, 38, 20) if wide else (0, 0, 48, 18)
    scale = (width - left - right) / start

    def bar(index: int, name: str, note: str, low: float, high: float, kind: str) -> list[Markup]:
        y = index * row + (9 if wide else 20)
        x, end = left + low * scale, left + high * scale
        text_y = y + 15 if wide else y - 6
        return [
            text(0, text_y, formatting.shorten(name, 26 if wide else 20), "label", title=name),
            text(width, text_y, note, "value end"),
            box(x, y, max(end - x, 1.5), thick, kind),
        ]

    parts = bar(0, "baseline", formatting.seconds(start), 0, start, "bar baseline")
    for index, step in enumerate(steps, 1):
        kind = "bar stair" if step["speedup"] else "bar combination"
        note = _ratio_with_interval(step["speedup"]) if step["speedup"] else "combined effect"
        parts += bar(index, step["name"], note, step["to"], step["from"], kind)
        top, x = index * row + (9 if wide else 20), left + step["from"] * scale
        if wide:  # where names stand above the bars, a link would cross them
            parts.append(line(x, top - (row - thick), x, top, "link"))
        if step["high_end"] - step["low_end"] > 0:
            low, high = left + step["low_end"] * scale, left + min(step["high_end"], start) * scale
            parts += whisker(low, high, top + thick / 2, 5, "whisker")
    last = len(steps) + 1
    parts += bar(last, "tuned", formatting.seconds(end), 0, end, "bar tuned")
    description = f"From {formatting.seconds(start)} to {formatting.seconds(end)}: " + ", ".join(
        f"{step['name']} {formatting.ratio(step['speedup']['median']) if step['speedup'] else 'combined effect'}"
        for step in steps
    )
    return svg(width, (last + 1) * row, "What each method contributes", description, parts)


def gate(difference: Json, margin: float, unit: str, passed: bool | None, width: int) -> Markup:
    """Draws the interval of the difference in quality (tuned minus baseline; positive is better) and the margin."""
    height, y = 122, 50
    mean = difference["mean"]
    low, high = (difference[key] if difference[key] is not None else mean for key in ("low", "high"))
    right = max(high * 1.15, margin * 1.3, 1e-12)
    left = min(-margin - 0.5 * (right + margin), low - 0.06 * (right - low))

    def at(value: float) -> float:
        return (value - left) / (right - left) * width

    kind, limit, limit_x = "tuned" if passed else "bad", formatting.plain(margin, unit, 2), at(-margin)
    margin_label = f"margin {formatting.MINUS}{limit}"
    margin_end = max(limit_x, LETTER * len(margin_label))
    is_close = at(0) < margin_end + 8  # the two labels would overlap
    shown, *ends = (formatting.metric(value, unit, signed=True) for value in (mean, low, high))
    parts = [
        box(0, 22, max(limit_x, 0), 56, "forbidden"),
        text(8, 14, "worse than the margin: fails", "tick"),
        line(0, 78, width, 78, "axis"),
        line(limit_x, 22, limit_x, 84, "limit"),
        text(margin_end, 100, margin_label, "tick end"),
        line(at(0), 22, at(0), 84, "axis"),
        text(at(0), 117 if is_close else 100, "equal quality", "tick"),
        *whisker(at(low), at(high), y, 8, f"interval {kind}"),
        dot(at(mean), y, 6, f"dot {kind}"),
        text(min(max(at(mean), 40), width - 40), y - 14, shown, f"value middle halo {kind}"),
    ]
    description = f"The difference is {shown}, interval {ends[0]} to {ends[1]}; the margin is {limit}."
    return svg(width, height, "Quality difference and margin", description, parts)


def ratio_mark(ratio: Json, domain: tuple[float, float], good: bool) -> Markup:
    """A small interval mark for a table row, on a logarithmic axis; all rows of a column share ``domain``."""
    width, height, middle = 120, 18, 9
    if ratio["median"] is None:
        return Markup("")

    def at(value: float) -> float:
        within = min(max(value, domain[0]), domain[1])
        return 4 + log(within / domain[0]) / log(domain[1] / domain[0]) * (width - 8)

    kind = "tuned" if good else "baseline"
    ends = [ratio[key] if ratio[key] is not None else ratio["median"] for key in ("low", "high")]
    interval = whisker(at(ends[0]), at(ends[1]), middle, 3, f"interval thin {kind}")
    parts = [line(at(1), 1, at(1), height - 1, "axis"), *interval, dot(at(ratio["median"]), middle, 3.5, f"dot {kind}")]
    return svg(width, height, formatting.with_interval(ratio), "", parts, class_="mark")


def phase_class(phase: str) -> str:
    """The CSS class that colors a phase; unknown phases are gray."""
    return f"p-{phase}" if phase in PHASE_CLASSES else "p-other"


def ticks(low: float, high: float, limit: int) -> list[float]:
    """Round numbers within [low, high] for the labels of an axis, about ``limit`` at most."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / max(limit, 1)
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thin_out(points: list, limit: int = MAX_POINTS) -> list:
    """Selects at most ``limit`` points of a line at equal distances, including both ends."""
    if len(points) <= limit:
        return points
    return [points[round(index * (len(points) - 1) / (limit - 1))] for index in range(limit)]


def _ratio_with_interval(ratio: Json) -> Markup:
    interval = formatting.between(ratio).removeprefix(formatting.UNKNOWN)
    return escape(formatting.ratio(ratio["median"])) + element("tspan", interval, class_="aside", dx=8)


def _metric_range(values: list[float], target: float | None, higher: bool) -> tuple[float, float]:
    """(low, high) of the metric's axis. The worst fifth of the values, from early steps, may lie outside."""
    ordered = sorted(values)
    cut = len(ordered) // 5
    shown = (ordered[cut:] if higher else ordered[: len(ordered) - cut]) + ([] if target is None else [target])
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    return low - pad, high + pad


def _target_labels(
    arms: Sequence[Json],
    at: Callable[[float, float], Point],
    target: float,
    label: str,
    avoided: Sequence[Box],
    inside: Box,
) -> list[Markup]:
    """The label of the target line, and for each arm a line from the time axis to the target with its name and time."""
    target_y = at(0, target)[1]
    ends = [text_box(inside.right - 14, y, label, "end") for y in (target_y + 17, target_y - 7)]
    ends += [text_box(inside.left + 6, y, label) for y in (target_y - 7, target_y + 17)]
    placed = [best_box([(index, area) for index, area in enumerate(ends)], [], avoided, inside)]
    lines, texts = [], [text(placed[0].left, placed[0].bottom - 4, label, "small halo")]
    for arm in sorted((arm for arm in arms if arm["time"] is not None), key=lambda arm: -arm["time"]):
        x, content = at(arm["time"], target)[0], f"{arm['label']} {formatting.seconds(arm['time'])}"
        best = best_box(_beside(x, content, inside), placed, avoided, inside)
        placed.append(best)
        lines.append(line(x, min(target_y, best.top + 4), x, inside.bottom, f"drop {_arm_class(arm)}"))
        texts.append(text(best.left, best.bottom - 4, content, f"label halo {_arm_class(arm)}"))
    return lines + texts


def _beside(x: float, content: str, inside: Box) -> list[tuple[float, Box]]:
    """(cost, box) of a text at the right or left of a vertical line; lower is cheaper."""
    heights = range(int(inside.bottom) - 8, int(inside.top) + LINE, -10)
    right = [((inside.bottom - y) / 20, text_box(x + 7, y, content)) for y in heights]
    return [*right, *((7 + (inside.bottom - y) / 20, text_box(x - 7, y, content, "end")) for y in heights)]


def _time_unit(longest: float) -> tuple[str, float]:
    units = ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)
    return next(unit for unit in units if longest >= 4 * unit[1] or unit[1] == 1)


def _curves_text(arms: Sequence[Json], target: float | None) -> str:
    if target is None:
        return ""
    texts = []
    for arm in arms:
        when = "in no run" if arm["time"] is None else f"after {formatting.seconds(arm['time'])}"
        texts.append(f"{arm['label']} reaches {target:g} {when}")
    return "; ".join(texts)


def _arm_class(arm: Json) -> str:
    return arm["name"] if arm["name"] in ARMS else "other-arm"
