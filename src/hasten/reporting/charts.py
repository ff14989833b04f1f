"""Charts as SVG: pure functions from numbers to Markup.

Each chart is drawn for a width in pixels, so that its text is 13 pixels high at that width; the page contains a wide
and a narrow drawing and shows the one that fits. Shapes have CSS classes; ``page.css`` defines their colors.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import ceil, floor, inf, log, log10

from markupsafe import Markup, escape

from hasten.core.card import PHASES
from hasten.reporting import formatting
from hasten.reporting.svg import LETTER, box, dot, element, line, svg, text, whisker
from hasten.reporting.view_model import ARMS, Json

WIDE, NARROW = 820, 340
MAX_POINTS = 160  # per line
MAX_LAYERS = 12
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
    plot = {"x": left, "y": top, "width": width - left - right, "height": height - top - bottom}
    view_box = " ".join(map(str, plot.values()))  # the outer coordinates
    parts.append(element("svg", *lines, **plot, viewBox=view_box))  # hides what lies outside of the plot
    if target is not None:
        y = at(0, target)[1]
        parts.append(line(left, y, width - right, y, "target"))
        parts += [dot(*at(*point), 3.5, f"dot {_arm_class(arm)}") for arm in arms for point in arm["target_points"]]
        name_of_line = f"target {formatting.plain(target, metric['unit'])}"
        name_y = y + 17 if metric["higher_is_better"] and y + 21 < floor_y else y - 7  # curves end on the other side
        parts.append(text(width - right - LETTER * len(name_of_line), name_y, name_of_line, "small halo"))
        labeled = list(zip(_reaching(arms), _label_heights(y, top, floor_y), strict=False))
        for arm, label_y in labeled:  # below all labels
            x = at(arm["time"], target)[0]
            parts.append(line(x, min(y, label_y), x, floor_y, f"drop {_arm_class(arm)}"))
        for arm, label_y in labeled:
            x, label = at(arm["time"], target)[0], f"{arm['label']} {formatting.seconds(arm['time'])}"
            label_width = LETTER * len(label)
            label_x = x + 7 if x + 7 + label_width < width else max(left, x - 7 - label_width)
            parts.append(text(label_x, label_y, label, f"label halo {_arm_class(arm)}"))
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
    left, right, row, thick, first = _bar_layout(width)
    scale = (width - left - right) / start
    parts = _named_bar(0, width, "baseline", formatting.seconds(start), 0, 1, "bar baseline")
    for index, step in enumerate(steps, 1):
        kind = "bar stair" if step["speedup"] else "bar combination"
        note = _ratio_with_interval(step["speedup"]) if step["speedup"] else "combined effect"
        parts += _named_bar(index, width, step["name"], note, step["to"] / start, step["from"] / start, kind)
        y, x = index * row + first, left + step["from"] * scale
        if width > 500:  # where names stand above the bars, a link would cross them
            parts.append(line(x, y - (row - thick), x, y, "link"))
        if step["high_end"] - step["low_end"] > 0:
            low, high = left + step["low_end"] * scale, left + min(step["high_end"], start) * scale
            parts += whisker(low, high, y + thick / 2, 5, "whisker")
    last = len(steps) + 1
    parts += _named_bar(last, width, "tuned", formatting.seconds(end), 0, end / start, "bar tuned")
    description = f"From {formatting.seconds(start)} to {formatting.seconds(end)}: " + ", ".join(
        f"{step['name']} {formatting.ratio(step['speedup']['median']) if step['speedup'] else 'combined effect'}"
        for step in steps
    )
    return svg(width, (last + 1) * row, "What each method contributes", description, parts)


def layers(costs: Mapping[str, float | None], width: int) -> Markup:
    """Bars of the MAX_LAYERS largest ``costs``: layer -> loss, as a fraction of the metric, if only it is int8."""
    shown = sorted(((name, cost or 0.0) for name, cost in costs.items()), key=lambda item: -item[1])[:MAX_LAYERS]
    longest = max((cost for _, cost in shown), default=0.0) or 1.0
    parts = list[Markup]()
    for index, (name, cost) in enumerate(shown):
        share = max(cost, 0.0) / longest
        parts += _named_bar(index, width, name, formatting.loss_percent(cost), 0, share, "bar baseline")
    description = "; ".join(f"{name}: {formatting.loss_percent(cost)}" for name, cost in shown)
    return svg(width, len(shown) * _bar_layout(width)[2], "What each layer costs", description, parts)


def _bar_layout(width: int) -> tuple[int, int, int, int, int]:
    """Pixels: left and right of the bars, from a row to the next, thickness of a bar, and above the first one."""
    return (210, 156, 38, 20, 9) if width > 500 else (0, 0, 48, 18, 20)


def _named_bar(index: int, width: int, name: str, note: str, low: float, high: float, kind: str) -> list[Markup]:
    """A row with a bar between two shares of the longest one: its name at the left or above, a note at the right."""
    left, right, row, thick, first = _bar_layout(width)
    y, scale, wide = index * row + first, width - left - right, width > 500
    text_y = y + 15 if wide else y - 6
    return [
        text(0, text_y, formatting.shorten(name, 26 if wide else 20), "label", title=name),
        text(width, text_y, note, "value end"),
        box(left + low * scale, y, max((high - low) * scale, 1.5), thick, kind),
    ]


def losses(trials: Sequence[Json], chosen: Json | None, max_loss: float | None, width: int) -> Markup:
    """A row for each int8 model: a dot at its loss, right of the limit in the forbidden area; its size and speed."""
    wide = width > 500
    left, right, row, text_dy = (230, 150, 30, 5) if wide else (0, 0, 46, -12)
    limit = max_loss or 0.0
    farthest = 4 * max(limit, 1e-4)  # beyond it a dot stands at the edge, with its number
    height = len(trials) * row + 26

    def at(loss: float) -> float:
        share = (min(max(loss, -0.2 * farthest), farthest) / farthest + 0.2) / 1.2
        return left + 8 + share * (width - left - right - 16)

    parts = [
        box(at(limit), 0, width - right - at(limit), height - 26, "forbidden"),
        line(at(0.0), 0, at(0.0), height - 26, "axis"),
        line(at(limit), 0, at(limit), height - 20, "limit"),
        text(at(limit), height - 4, f"allowed: {formatting.loss_percent(limit)}", "tick middle"),
    ]
    for index, trial in enumerate(trials):
        is_chosen = chosen is not None and trial["name"] == chosen["name"]
        kind = "tuned" if is_chosen else "baseline" if trial["passed"] else "bad"
        y = index * row + row / 2 + (0 if wide else 8)
        loss = trial["loss"] if trial["loss"] is not None else inf
        speed = "".join(f", {formatting.ratio(ratio['median'])}" for ratio in list(trial["speedup"].values())[-1:])
        parts += [
            text(0, y + text_dy, formatting.shorten(trial["name"], 36), "label", title=trial["name"]),
            dot(at(loss), y, 5.5, f"dot {kind}"),
            text(width, y + text_dy, f"{formatting.file_size(trial['bytes'])}{speed}", "tick end"),
        ]
        if loss >= farthest:
            number = f"{loss:.1%}" if loss < inf else "not finite"
            parts.append(text(at(loss) - 12, y + 5, number, "small end bad"))
    description = "; ".join(f"{trial['name']}: {formatting.loss_percent(trial['loss'])}" for trial in trials)
    return svg(width, height, "Loss of the metric of each int8 model", description, parts)


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


def _reaching(arms: Sequence[Json]) -> list[Json]:
    """The arms that reach the target, the slowest first."""
    return sorted((arm for arm in arms if arm["time"] is not None), key=lambda arm: -arm["time"])


def _label_heights(target_y: float, top: float, floor_y: float) -> Iterator[float]:
    """Endless y of labels in pixels: from the bottom up, or, where the target line is near it, from the top down."""
    return count(floor_y - 10, -20) if floor_y - target_y > 100 else count(top + 14, 20)


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
