"""A/A test: compares a task with itself. An honest comparison reports no difference.

The three tasks have steps of about 0.5, 3 and 30 ms; the second runs into denormal numbers. Half of the comparisons run
beside a process that comes and goes and keeps a core busy. Then each task is compared with a copy whose steps are 5 %
longer, which shows what it costs to find a true ratio of 1.05.

With --out the comparisons are stored one by one, and a later call continues: the whole takes hours.

Figure: at most 5 % of the comparisons report "faster" or "slower", and no interval misses 1 by more than 2 %.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from _common import finish, interval, parser, print_line, print_progress, show

from hasten.benchmarking.compare import run_interleaved
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef

FILE = Path(__file__).parent / "step_tasks.py"
TASKS = ("short", "denormal", "long")
LONGER = f"{FILE}:Longer:share=0.05"
MISS = 0.02
ONE_WRONG_IN = 20
DISTURBER = """
import random, sys, time
draw = random.Random(int(sys.argv[1]))
while True:
    until = time.monotonic() + draw.uniform(1, 5)
    while time.monotonic() < until:
        sum(range(10000))
    time.sleep(draw.uniform(1, 5))
"""


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=200, help="self-comparisons in all")
    options.add_argument("--planted", type=int, default=30, help="comparisons with a copy that is 5 %% slower, in all")
    options.add_argument("--budget", type=float, default=60.0, help="seconds of a comparison at most")
    options.add_argument("--rounds", type=int, nargs=2, default=(3, 16), help="fewest and most pairs of processes")
    options.add_argument("--seconds", type=float, default=math.inf, help="start no further comparison after so long")
    options.add_argument("--out", type=Path, help="file of JSON lines: the comparisons done, which are not repeated")
    options = options.parse_args()
    kinds = [("self", number) for number in range(options.count)]
    kinds += [("planted", number) for number in range(options.planted)]
    done, began = stored(options.out), monotonic()
    for kind, number in kinds:
        if monotonic() - began > options.seconds:
            break
        if (kind, number) not in done:
            print_progress(f"{kind} {number + 1}")
            found = done[kind, number] = measure(kind, number, options.budget, tuple(options.rounds))
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    return report(options, [done[key] for key in kinds if key in done])


def stored(file: Path | None) -> dict[tuple[str, int], dict]:
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {(found["kind"], found["number"]): found for found in map(json.loads, lines)}


def measure(kind: str, number: int, budget: float, rounds: tuple[int, int]) -> dict:
    """One comparison; the log ratio of each round is kept, so that other estimators can be tried on it."""
    name, is_disturbed = TASKS[number % len(TASKS)], number // len(TASKS) % 2 == 1
    a, b = Recipe.coerce(LONGER) if kind == "planted" else Recipe(), Recipe()
    with disturber(number) if is_disturbed else no_disturber():
        ref = TaskRef.of(f"{FILE}:{name}")
        comparison = run_interleaved(ref, a, b, budget=budget, rounds=rounds, device="cpu", seed=number)
    sides, made = (comparison.a, comparison.b), comparison.to_json()
    logs = [
        [math.log(x / y) for x, y in zip(*(side.seconds_per_sample(each + 1) for side in sides), strict=True)]
        for each in range(made["rounds"])
    ]
    known = {key: made[key] for key in ("verdict", "ratio", "blocks", "rounds", "seconds", "system_noise")}
    found = {"kind": kind, "number": number, "task": name, "disturbed": is_disturbed, **known}
    return {**found, "step": comparison.b.plan["step"], "log_ratios": logs}


@contextmanager
def disturber(seed: int):
    """A process that keeps a core busy for 1 to 5 s, then sleeps as long, and so on."""
    process = subprocess.Popen([sys.executable, "-c", DISTURBER, str(seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def no_disturber():
    yield


def report(options, found: list[dict]) -> int:
    rows = []
    for kind in ("self", "planted"):
        for name in TASKS:
            for is_disturbed in (False, True):
                group = [
                    each
                    for each in found
                    if (each["kind"], each["task"], each["disturbed"]) == (kind, name, is_disturbed)
                ]
                if group:
                    rows.append((kind, name, "yes" if is_disturbed else "no", *summary(group)))
    show(
        (
            "comparison",
            "task",
            "disturbed",
            "number",
            "faster",
            "slower",
            "same",
            "unsure",
            "rounds",
            "seconds",
            "half width, %",
            "rounds differ, %",
            "within, %",
        ),
        rows,
    )
    selves = [each for each in found if each["kind"] == "self"]
    planted = [each for each in found if each["kind"] == "planted"]
    wrong = sum(each["verdict"] in ("faster", "slower") for each in selves)
    misses = [max(each["ratio"]["low"] - 1, 1 - each["ratio"]["high"]) for each in selves]
    print_line()
    print_line(f"The interval holds 1 in {sum(miss <= 0 for miss in misses)} of {len(selves)} self-comparisons.")
    if planted:
        sure = [each["seconds"] for each in planted if each["verdict"] == "faster"]
        holds = sum(each["ratio"]["low"] <= 1.05 <= each["ratio"]["high"] for each in planted)
        seconds = f", in {interval(sure):.0f} s" if sure else ""
        print_line(
            f"The true 1.05x is found in {len(sure)} of {len(planted)}{seconds}; the interval holds it in {holds}."
        )
    if not selves:
        return finish(options, "at most 5 % of self-comparisons give a verdict", None, {"comparisons": found})
    reached = wrong <= len(selves) / ONE_WRONG_IN and max(misses) <= MISS
    figure = (
        f"at most 5 % of {len(selves)} self-comparisons give a verdict and no interval misses 1 by more than 2 %; "
        f"it is {wrong}, and the worst misses it by {100 * max(0.0, *misses):.1f} %"
    )
    return finish(options, figure, reached, {"comparisons": found})


def summary(group: list[dict]) -> list[str]:
    """Cells of a group of comparisons: verdicts, and medians of the others."""
    verdicts = Counter(each["verdict"] for each in group)
    widths = [math.log(each["ratio"]["high"] / each["ratio"]["low"]) / 2 for each in group]
    between = [statistics.variance(map(statistics.median, each["log_ratios"])) for each in group if each["rounds"] > 1]
    within = [statistics.stdev(logs) for each in group for logs in each["log_ratios"]]
    counts = [str(verdicts[verdict]) for verdict in ("faster", "slower", "no difference", "unsure")]
    medians = [statistics.median(each[key] for each in group) for key in ("rounds", "seconds")]
    spreads = [statistics.median(widths), math.sqrt(statistics.fmean(between)) if between else math.nan]
    cells = [f"{100 * each:.1f}" for each in (*spreads, statistics.median(within))]
    return [str(len(group)), *counts, *(f"{each:.0f}" for each in medians), *cells]


if __name__ == "__main__":
    sys.exit(main())
