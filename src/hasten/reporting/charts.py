"""Charts as SVG text: pure functions, numbers in, Markup out.

Every chart is drawn for a width in pixels and keeps its 13-pixel text at that width; the page shows a wide and a
narrow drawing in turn. Colours are the page's: shapes carry classes, ``page.html.j2`` says what they look like.
"""

from math import ceil, floor, log, log10

from markupsafe import Markup, escape

from hasten.reporting import formatting
from hasten.reporting.svg import box, clipped, dot, element, line, svg, text, whisker

WIDE, NARROW = 820, 340
MOST_POINTS = 160  # of a drawn line


def curves(arms: list[dict], target: float | None, metric: dict, width: int) -> Markup:
    """The metric against the wall clock: a thin line for each seed, a dot where it reaches the target.

    Args:
        arms: as ``figures.arms`` gives them.
        target: drawn as a dashed line, or None.
        metric: ``{"name", "higher_is_better", "unit"}``.
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
    parts.append(
        text(
            0,
            13,
            f"{metric['name'] or 'metric'} ({'higher' if metric['higher_is_better'] else 'lower'} is better)",
            "tick",
        )
    )
    lines = [
        element(
            "polyline",
            points=" ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in thinned(line))),
            class_=f"curve {_arm(arm)}",
        )
        for arm in arms
        for line in arm["lines"]
    ]
    parts.append(clipped(left, top, width - left - right, height - top - bottom, lines))
    if target is not None:
        y = at(0, target)[1]
        worse_side = (
            y + 17 if metric["higher_is_better"] else y - 8
        )  # at the right end the curves are on the better side
        parts.append(line(left, y, width - right, y, "target"))
        parts.append(
            text(width - right, worse_side, f"target {formatting.plain(target, metric['unit'])}", "small halo end")
        )
        parts += [dot(*at(*point), 3.5, f"dot {_arm(arm)}") for arm in arms for point in arm["moments"]]
        parts += _drops(
            [arm for arm in arms if arm["time"] is not None],
            at,
            target,
            (top, floor_y),
            metric["higher_is_better"],
            width,
        )
    return svg(
        width, height, f"{metric['name'] or 'metric'} against wall-clock time", _curves_in_words(arms, target), parts
    )


def anatomy(bars: list[tuple[str, str, dict]], width: int) -> Markup:
    """Stacked bars on one scale.

    Args:
        bars: (name, what stands at the right, {phase: seconds}) from top to bottom.
    """
    longest = max((sum(phases.values()) for _, _, phases in bars), default=0) or 1.0
    row, thick = 66, 30
    parts = []
    for index, (name, note, phases) in enumerate(bars):
        y, x = index * row + 22, 0.0
        parts += [text(0, y - 7, name, "label"), text(width, y - 7, note, "tick end")]
        for phase, seconds in phases.items():
            length = seconds / longest * width
            parts.append(
                box(
                    x,
                    y,
                    max(length - 1, 0.75),
                    thick,
                    f"phase {phase_class(phase)}",
                    f"{name}, {phase}: {formatting.seconds(seconds)}",
                )
            )
            if length > 7.2 * len(phase) + 8:
                parts.append(text(x + length / 2, y + 20, phase, f"small middle on {phase_class(phase)}"))
            x += length
    told = "; ".join(
        f"{name}: " + ", ".join(f"{phase} {formatting.seconds(value)}" for phase, value in phases.items())
        for name, _, phases in bars
    )
    return svg(width, len(bars) * row - 10, "Where the time of a step goes", told, parts)


def waterfall(start: float, end: float, stairs: list[dict], width: int) -> Markup:
    """From the baseline's time down to the tuned one, a stair for each method, with the interval of its end."""
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
    for index, stair in enumerate(stairs, 1):
        note = _ratio_with_interval(stair["speedup"]) if stair["speedup"] else "the rest"
        parts += bar(
            index, stair["name"], note, stair["to"], stair["from"], "bar stair" if stair["speedup"] else "bar rest"
        )
        top = index * row + (9 if wide else 20)
        if wide:  # where names stand above the bars, a link would cross them
            parts.append(
                line(left + stair["from"] * scale, top - (row - thick), left + stair["from"] * scale, top, "link")
            )
        if stair["late"] - stair["early"] > 0:
            parts += whisker(
                left + stair["early"] * scale, left + min(stair["late"], start) * scale, top + thick / 2, 5, "whisker"
            )
    last = len(stairs) + 1
    parts += bar(last, "tuned", formatting.seconds(end), 0, end, "bar tuned")
    told = f"From {formatting.seconds(start)} to {formatting.seconds(end)}: " + ", ".join(
        f"{stair['name']} {formatting.ratio(stair['speedup']['median']) if stair['speedup'] else 'the rest'}"
        for stair in stairs
    )
    return svg(width, (last + 1) * row, "What each method gave", told, parts)


def gate(difference: dict, margin: float, unit: str, passed: bool | None, width: int) -> Markup:
    """The interval of (tuned - baseline, good direction) drawn against the margin."""
    height, y = 112, 50
    mean = difference["mean"]
    low, high = (difference[key] if difference[key] is not None else mean for key in ("low", "high"))
    right = max(high * 1.15, margin * 1.3, 1e-12)
    left = min(-margin - 0.5 * (right + margin), low - 0.06 * (right - low))

    def at(value: float) -> float:
        return (value - left) / (right - left) * width

    kind = "tuned" if passed else "bad"
    parts = [
        box(0, 22, max(at(-margin), 0), 56, "forbidden"),
        text(8, 14, "too much worse: fails", "tick"),
        line(0, 78, width, 78, "axis"),
        line(at(-margin), 22, at(-margin), 84, "limit"),
        text(
            at(-margin),
            100,
            f"margin {formatting.MINUS}{formatting.plain(margin, unit, 2)}",
            "tick end" if at(-margin) > 100 else "tick",
        ),
        line(at(0), 22, at(0), 84, "axis"),
        text(at(0), 100, "no change", "tick"),
        *whisker(at(low), at(high), y, 8, f"interval {kind}"),
        dot(at(mean), y, 6, f"dot {kind}"),
        text(
            min(max(at(mean), 40), width - 40),
            y - 14,
            formatting.metric(mean, unit, signed=True),
            f"value middle halo {kind}",
        ),
    ]
    told = f"The difference is {formatting.metric(mean, unit, signed=True)}, interval {formatting.metric(low, unit, signed=True)} to {formatting.metric(high, unit, signed=True)}; the margin is {formatting.plain(margin, unit, 2)}."
    return svg(width, height, "Quality against the margin", told, parts)


def ratio_mark(ratio: dict, domain: tuple[float, float], good: bool) -> Markup:
    """A small interval around 1 for a row of a table; every row of a column shares the domain."""
    width, height, middle = 120, 18, 9
    if ratio["median"] is None:
        return Markup("")

    def at(value: float) -> float:
        within = min(max(value, domain[0]), domain[1])
        return 4 + log(within / domain[0]) / log(domain[1] / domain[0]) * (width - 8)

    kind = "tuned" if good else "baseline"
    ends = [ratio[key] if ratio[key] is not None else ratio["median"] for key in ("low", "high")]
    parts = [
        line(at(1), 1, at(1), height - 1, "axis"),
        *whisker(at(ends[0]), at(ends[1]), middle, 3, f"interval thin {kind}"),
    ]
    parts.append(dot(at(ratio["median"]), middle, 3.5, f"dot {kind}"))
    return svg(width, height, formatting.with_interval(ratio), "", parts, class_="mark")


def phase_class(phase: str) -> str:
    """The class that colours a phase; strangers are all the same grey."""
    known = (
        "input",
        "copy",
        "forward",
        "backward",
        "grad_transform",
        "optimizer_step",
        "evaluation",
        "logging",
        "start",
        "training",
        "checkpoints",
    )
    return f"p-{phase}" if phase in known else "p-other"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within [low, high], at most about ``most`` of them."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / max(most, 1)
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thinned(line: list, most: int = MOST_POINTS) -> list:
    """At most ``most`` points of a line, its ends among them."""
    if len(line) <= most:
        return line
    return [line[round(index * (len(line) - 1) / (most - 1))] for index in range(most)]


def _ratio_with_interval(ratio: dict) -> Markup:
    interval = "" if formatting.between(ratio) == formatting.NOTHING else formatting.between(ratio)
    return escape(formatting.ratio(ratio["median"])) + element("tspan", interval, class_="aside", dx=8)


def _metric_range(values: list[float], target: float | None, higher: bool) -> tuple[float, float]:
    """The shown range: the worst fifth of the values (the first steps of a training) may lie outside."""
    ordered = sorted(values)
    cut = len(ordered) // 5
    kept = (ordered[cut:] if higher else ordered[: len(ordered) - cut]) + ([] if target is None else [target])
    low, high = min(kept, default=0.0), max(kept, default=1.0)
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    return low - pad, high + pad


def _drops(arms: list[dict], at, target: float, edges: tuple[float, float], higher: bool, width: int) -> list[Markup]:
    """From the target to the edge on the worse side, where the curves leave room, with the arm's name and time."""
    parts = []
    for index, arm in enumerate(sorted(arms, key=lambda arm: -arm["time"])):
        x, y = at(arm["time"], target)
        told = f"{arm['name'].replace('_', ' ')} {formatting.seconds(arm['time'])}"
        at_right = x + 8 * len(told) + 7 > width
        text_y = edges[1] - 10 - 19 * index if higher else edges[0] + 14 + 19 * index
        parts.append(line(x, y, x, edges[1] if higher else edges[0], f"drop {_arm(arm)}"))
        parts.append(
            text(x + (-7 if at_right else 7), text_y, told, f"label halo {_arm(arm)}{' end' if at_right else ''}")
        )
    return parts


def _time_unit(longest: float) -> tuple[str, float]:
    return next(
        ((name, size) for name, size in (("hours", 3600.0), ("minutes", 60.0)) if longest >= 4 * size), ("seconds", 1.0)
    )


def _curves_in_words(arms: list[dict], target: float | None) -> str:
    if target is None:
        return ""
    return "; ".join(
        f"{arm['name'].replace('_', ' ')} reaches {target:g} {'after ' + formatting.seconds(arm['time']) if arm['time'] is not None else 'never'}"
        for arm in arms
    )


def _arm(arm: dict) -> str:
    return arm["name"] if arm["name"] in ("baseline", "strong_baseline", "tuned") else "other-arm"
