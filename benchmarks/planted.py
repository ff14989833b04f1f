"""Planted effects: a speed-up of known size must be found, and a harm at the edge of the margin must be refused.

Speed: a training waits 20 ms for each batch, and a method shortens this wait by a known factor. The rest of the step is
measured separately, so the true ratio is known, and the interval of ``hasten.compare`` must contain it.

Harm: final metrics with a known spread over the seeds are passed to the gate after each seed, as the tuner does. A
recipe whose metric is worse by exactly the margin must be refused in at least 95 of 100 cases. The power (how often an
equally good recipe passes) is printed, too, because a gate that refuses everything is useless.

Figures: the true ratio lies in the interval in at least 95 % of the comparisons; harm at the margin is refused in at
least 95 %.
"""

from __future__ import annotations

import random
import statistics
import sys
from itertools import cycle, islice, product
from pathlib import Path
from time import perf_counter

from _common import finish, interval, parser, print_progress, show
from planted_task import SECONDS_A_BATCH, slow

from hasten import compare
from hasten.tuning.confirm import MAX_FURTHER

HERE = Path(__file__).parent
SHARES = (0.5, 0.8, 0.9, 0.95)
CERTAIN = 0.95
MARGIN = 0.005
SPREADS = (0.1, 0.3, 1.0, 3.0)  # standard deviation of the metric over the seeds, in margins
EARLIER_SEEDS = 3  # seeds of the baseline that the tuner has before the gate


def step_seconds(steps: int = 200) -> tuple[float, float]:
    """Returns the time of a step without the wait: lower and upper quartile."""
    from hasten.engine.loop import train_steps as training_steps
    from hasten.engine.plan import build

    times, last = [], None
    for _ in islice(training_steps(build(slow(seconds=0.0))), steps):
        now = perf_counter()
        times += [now - last] if last else []
        last = now
    low, _, high = statistics.quantiles(times, n=4)
    return low, high


def planted_speed(comparisons: int, budget: float) -> list[dict]:
    found = []
    for number, share in enumerate(islice(cycle(SHARES), comparisons)):
        before = step_seconds()
        method = f"{HERE / 'planted_task.py'}:Sooner:share={share}"
        result = compare(
            f"{HERE / 'planted_task.py'}:slow", "baseline", method, budget=budget, device="cpu", seed=number
        )
        steps = [*before, *step_seconds()]
        truth = sorted((SECONDS_A_BATCH + step) / (SECONDS_A_BATCH * share + step) for step in (min(steps), max(steps)))
        ratio = result["ratio"]
        inside = ratio["low"] <= truth[1] and ratio["high"] >= truth[0]
        print_progress(f"comparison {number + 1} of {comparisons}: wait x {share}: {'inside' if inside else 'OUTSIDE'}")
        found.append(
            {
                "share": share,
                "truth": truth,
                "ratio": ratio,
                "verdict": result["verdict"],
                "blocks": result["blocks"],
                "inside": inside,
            }
        )
    return found


def gate_passes(harm: float, spread: float, further: int, chance: random.Random) -> bool:
    """Returns whether a recipe that is worse by ``harm`` passes the gate, asked after as many seeds as in the tuner.

    ``further``: additional seeds of the recipe for each pair.
    """
    from hasten.tuning.gate import LOOKS, quality_gate

    earlier = [chance.gauss(0.9, spread) for _ in range(EARLIER_SEEDS)]
    before = {seed: chance.gauss(0.9, spread) for seed in range(max(LOOKS))}
    after = {seed: chance.gauss(0.9 - harm, spread) for seed in range(max(LOOKS) * (1 + further))}
    for seeds in LOOKS:
        gate = quality_gate(
            {seed: before[seed] for seed in range(seeds)},
            {seed: after[seed] for seed in range(seeds * (1 + further))},
            margin=MARGIN,
            higher_is_better=True,
            more_baseline=earlier,
        )
        if gate.settled:
            return gate.passed
    return gate.passed


def planted_harm(repetitions: int) -> list[dict]:
    chance = random.Random(0)
    return [
        {
            "spread_in_margins": spread,
            "further_seeds_a_pair": further,
            "refused_at_margin": sum(
                not gate_passes(MARGIN, spread * MARGIN, further, chance) for _ in range(repetitions)
            )
            / repetitions,
            "passed_without_harm": sum(gate_passes(0.0, spread * MARGIN, further, chance) for _ in range(repetitions))
            / repetitions,
        }
        for spread, further in product(SPREADS, (0, MAX_FURTHER))
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--comparisons", type=int, default=40)
    options.add_argument("--budget", type=float, default=30.0, help="seconds of a comparison at most")
    options.add_argument("--repetitions", type=int, default=2000, help="of the gate, for each spread")
    options = options.parse_args()

    speed = planted_speed(options.comparisons, options.budget)
    rows = [
        (
            share,
            f"{interval(t for one in of for t in one['truth']).median:.4f}",
            f"{interval(one['ratio']['median'] for one in of):.4f}",
            f"{sum(one['inside'] for one in of)} of {len(of)}",
        )
        for share in SHARES
        if (of := [one for one in speed if one["share"] == share])
    ]
    show(("wait times", "true ratio", "found", "true ratio inside the interval"), rows)
    inside = sum(one["inside"] for one in speed)

    harm = planted_harm(options.repetitions)
    print()
    show(
        ("spread over seeds / margin", "further seeds a pair", "harm of one margin refused", "no harm passed"),
        [
            (
                row["spread_in_margins"],
                row["further_seeds_a_pair"],
                f"{row['refused_at_margin']:.1%}",
                f"{row['passed_without_harm']:.1%}",
            )
            for row in harm
        ],
    )
    caught = min(row["refused_at_margin"] for row in harm)
    reached = inside >= CERTAIN * len(speed) and caught >= CERTAIN
    figure = (
        f"ratio found in {CERTAIN:.0%} and harm refused in {CERTAIN:.0%}; they are {inside} of "
        f"{len(speed)} and {caught:.1%} at worst"
    )
    return finish(options, figure, reached, {"speed": speed, "harm": harm})


if __name__ == "__main__":
    sys.exit(main())
