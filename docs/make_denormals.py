"""Writes the table of docs/denormals.md and the curves docs/denormals.svg from results of benchmarks/denormals.py.

python docs/make_denormals.py RESULT.json...
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

from hasten.reporting.svg import element, line, text

DOCS = Path(__file__).resolve().parent
MARKS = "<!-- table: begin -->", "<!-- table: end -->"
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 280, 60, 40
COLORS = {"as it is": "#c2410c", "flushed": "#0f766e"}
STRETCHES = 30  # points of a curve


def main() -> None:
    results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
    trainings = {name: runs for result in results for name, runs in result["trainings"].items()}
    here, costs = results[0]["environment"], results[0]["operations"]
    lines = [
        "| training | as it is, s | flushed, s | times as fast, every round | metric or loss, both |",
        "|---|---|---|---|---|",
    ]
    lines += [row(name, runs) for name, runs in trainings.items()]
    words = ", ".join(f"{name} {cost:.1f} times as long" for name, cost in costs.items())
    about = f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, {results[0]['date']}"
    lines += ["", f"{about}. On denormal numbers this processor takes, relative to ones: {words}."]
    page = DOCS / "denormals.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    page.write_text("\n".join([before + MARKS[0], *lines, MARKS[1] + after]), encoding="utf-8")
    name = "fashion_network" if "fashion_network" in trainings else next(iter(trainings))
    (DOCS / "denormals.svg").write_text(curves(name, trainings[name]) + "\n", encoding="utf-8")


def row(name: str, runs: dict) -> str:
    plain, flushed = ([run["seconds"] for run in runs[arm]] for arm in COLORS)
    ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(plain, flushed, strict=True))
    outcomes = [runs[arm][0]["metric"] or runs[arm][0]["loss"] for arm in COLORS]
    same = f"{outcomes[0]:.6g}" if outcomes[0] == outcomes[1] else f"{outcomes[0]:.6g} and {outcomes[1]:.6g}"
    return f"| {name} | {median(plain):.1f} | {median(flushed):.1f} | {ratios} | {same} |"


def curve(runs: list[dict]) -> list[tuple[float, float]]:
    """(step, ms a step) over equal stretches of a training: the median of the runs."""
    return [(steps, median(times)) for steps, times in zip(*_stretches(runs), strict=True)]


def _stretches(runs: list[dict]) -> tuple[list[float], list[list[float]]]:
    last = min(run["points"][-1][0] for run in runs)
    edges = [last * index / STRETCHES for index in range(STRETCHES + 1)]
    seconds = [[_at(run["points"], edge) for edge in edges] for run in runs]
    times = [[1e3 * (b - a) / (last / STRETCHES) for a, b in pairwise(one)] for one in seconds]
    return edges[1:], [list(column) for column in zip(*times, strict=True)]


def _at(points: list[list[float]], step: float) -> float:
    """Seconds at a step, by linear interpolation between the log points; evaluations share the step of a point."""
    points = [[0, 0.0], *points]
    for (a, before), (b, after) in pairwise(points):
        if a <= step <= b and b > a:
            return before + (after - before) * (step - a) / (b - a)
    return points[-1][1]


def curves(name: str, runs: dict) -> str:
    by_arm = {arm: curve(runs[arm])[1:] for arm in COLORS}  # the first stretch contains the start
    steps = max(step for points in by_arm.values() for step, _ in points)
    top = 1.2 * max(ms for points in by_arm.values() for _, ms in points)

    def place(step: float, ms: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - 20) * step / steps, (HEIGHT - BOTTOM) * (1 - ms / top)

    parts = [line(LEFT, HEIGHT - BOTTOM, WIDTH - 20, HEIGHT - BOTTOM, "axis")]
    parts += [text(LEFT - 8, place(0, ms)[1] + 4, f"{ms:.1f}", "tick") for ms in (top / 4, top / 2, 3 * top / 4)]
    parts += [
        text(place(step, 0)[0], HEIGHT - 22, f"{step:,.0f}", "tick") for step in (steps / 3, 2 * steps / 3, steps)
    ]
    parts += [text(LEFT, 14, "ms a step", "name"), text(WIDTH / 2, HEIGHT - 4, "step", "name")]
    for index, (arm, points) in enumerate(by_arm.items()):
        drawn = " ".join(",".join(f"{value:.1f}" for value in place(*point)) for point in points)
        parts.append(element("polyline", points=drawn, fill="none", stroke=COLORS[arm], class_="curve"))
        parts.append(element("text", arm, x=WIDTH - 100, y=16 + 18 * index, fill=COLORS[arm]))
    style = (
        ".axis{stroke:#888}.curve{stroke-width:2}.tick,.name{fill:#666}.tick{text-anchor:end}text{font:13px sans-serif}"
    )
    title = f"Step time of {name}, with and without flushed denormal numbers"
    drawing = element(
        "svg",
        element("title", title),
        element("style", style),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
    )
    return str(drawing)


if __name__ == "__main__":
    main()
