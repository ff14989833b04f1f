"""What the check that every method acts costs: seconds per trial, and time of the steps after the observed one.

The recipes have the heaviest checks: their recorders see every operation of the observed step. The check costs the
difference between the observed step and a usual one. Later steps are timed one by one, with and without an observer in
turns.

Figures: at most 1 s per trial; nothing per step (the interval of the ratio contains 1).
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from time import perf_counter

import torch
from _common import finish, interval, parser, print_line, show

from hasten.core.recipe import Recipe
from hasten.engine.loop import train_steps
from hasten.engine.plan import Program, build
from hasten.engine.registry import make_methods
from hasten.engine.tasks import TaskRef

RECIPES = {
    "cifar10": "channels_last + fused_optimizer + gradient_clipping",
    "tiny_shakespeare": "activation_checkpointing + fused_optimizer + gradient_clipping + ema",
}
LIMIT_S = 1.0
WARM_UP = 5  # steps, of which the third is observed


def build_program(task: str) -> Program:
    return build(TaskRef.of(task).load(), make_methods(Recipe.parse(RECIPES[task])))


def seconds(steps: Iterator) -> float:
    began = perf_counter()
    next(steps)
    return perf_counter() - began


def check_seconds(task: str) -> tuple[float, float]:
    """(extra seconds of the observed step, seconds of a usual one) of a new run."""
    program = build_program(task)
    with program.process_context():
        steps = program.effects.observed(train_steps(program))
        taken = [seconds(steps) for _ in range(2 * WARM_UP)]
        steps.close()
    usual = statistics.median(taken[3:])
    return taken[2] - usual, usual


def later_steps(task: str, count: int) -> list[float]:
    """Time of a step with an observer / without one, pair by pair; the order alternates."""
    observed, plain = build_program(task), build_program(task)
    with observed.process_context(), plain.process_context():
        arms = [observed.effects.observed(train_steps(observed)), train_steps(plain)]
        for arm in arms:
            for _ in islice(arm, WARM_UP):
                pass
        ratios = []
        for index in range(count):
            taken = {}
            for arm in arms if index % 2 else arms[::-1]:
                taken[arm] = seconds(arm)
            ratios.append(taken[arms[0]] / taken[arms[1]])
        for arm in arms:
            arm.close()
    return ratios


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=100, help="pairs of later steps")
    options.add_argument("--runs", type=int, default=6, help="runs whose observed step is timed")
    options = options.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, numbers, reached = [], {}, True
    for task in RECIPES:
        checks = [check_seconds(task) for _ in range(options.runs)]
        cost, usual = interval(extra for extra, _ in checks), interval(step for _, step in checks)
        ratio = interval(later_steps(task, options.steps))
        reached &= cost.high <= LIMIT_S and ratio.low <= 1 <= ratio.high
        rows.append((task, f"{usual.median:.3f}", f"{cost:.3f}", f"{ratio:.3f}"))
        numbers[task] = {"recipe": RECIPES[task], "checks": checks, "check_seconds": cost, "later_steps_ratio": ratio}
    show(("task", "s a step", "s of the check", "later steps, with / without observer"), rows)
    print_line(f"recipes: {RECIPES}")
    return finish(options, f"check at most {LIMIT_S:g} s per trial, later steps at ratio 1", reached, numbers)


if __name__ == "__main__":
    sys.exit(main())
