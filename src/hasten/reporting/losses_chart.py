"""Charts of a quantization: what each int8 model loses, and what each layer costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hasten.reporting import formatting
from hasten.reporting.svg import box, dot, line, svg, text

Json = Mapping[str, Any]
ROW = 30
MAX_LAYERS = 12


def losses(trials: Sequence[Json], chosen: Json | None, max_loss: float | None, width: int) -> Markup:
    """A row for each trial: a dot at its loss, right of the limit in the forbidden area, and its size and speed."""
    left, right = (230, 150) if width > 500 else (0, 0)
    row = ROW if width > 500 else 46
    limit = max_loss or 0.0
    farthest = 4 * max(limit, 1e-4)  # beyond it a dot stands at the edge, with its number
    height = len(trials) * row + 26

    def at(loss: float) -> float:
        return (
            left + 8 + (min(max(loss, -0.2 * farthest), farthest) / farthest + 0.2) / 1.2 * (width - left - right - 16)
        )

    parts = [
        box(at(limit), 0, width - right - at(limit), height - 26, "forbidden"),
        line(at(0.0), 0, at(0.0), height - 26, "axis"),
        line(at(limit), 0, at(limit), height - 20, "limit"),
        text(at(limit), height - 4, f"allowed: {formatting.loss_percent(limit)}", "tick middle"),
    ]
    for index, trial in enumerate(trials):
        is_chosen = chosen is not None and trial["name"] == chosen["name"]
        kind = "tuned" if is_chosen else "baseline" if trial["passed"] else "bad"
        y = index * row + row / 2 + (0 if width > 500 else 8)
        loss = trial["loss"] if trial["loss"] is not None else float("inf")
        parts += [
            text(
                0, y + 5 if width > 500 else y - 12, formatting.shorten(trial["name"], 36), "label", title=trial["name"]
            ),
            dot(at(loss), y, 5.5, f"dot {kind}"),
            text(width, y + 5 if width > 500 else y - 12, _note(trial), "tick end"),
        ]
        if loss >= farthest:
            number = f"{loss:.1%}" if loss < float("inf") else "not finite"
            parts.append(text(at(loss) - 12, y + 5, number, "small end bad"))
    description = "; ".join(f"{trial['name']}: {formatting.loss_percent(trial['loss'])}" for trial in trials)
    return svg(width, height, "Loss of the metric of each int8 model", description, parts)


def layers(costs: Mapping[str, float | None], width: int) -> Markup:
    """Bars: how much the metric loses if a layer alone is int8."""
    shown = sorted(((name, cost or 0.0) for name, cost in costs.items()), key=lambda item: -item[1])[:MAX_LAYERS]
    left, right = (230, 80) if width > 500 else (0, 0)
    longest = max((cost for _, cost in shown), default=0.0) or 1.0
    parts, row = [], ROW if width > 500 else 46
    for index, (name, cost) in enumerate(shown):
        y = index * row + (6 if width > 500 else 22)
        parts += [
            text(0, y + 14 if width > 500 else y - 6, formatting.shorten(name, 30), "label", title=name),
            box(left, y, max(max(cost, 0.0) / longest * (width - left - right), 1.5), 18, "bar baseline"),
            text(width, y + 14 if width > 500 else y - 6, formatting.loss_percent(cost), "value end"),
        ]
    description = "; ".join(f"{name}: {formatting.loss_percent(cost)}" for name, cost in shown)
    return svg(width, len(shown) * row + 8, "What each layer costs", description, parts)


def _note(trial: Json) -> str:
    """Size, and the speed at the largest batch if it was measured."""
    speeds = list(trial["speedup"].values())
    speed = f", {formatting.ratio(speeds[-1]['median'])}" if speeds else ""
    return f"{formatting.file_size(trial['bytes'])}{speed}"
