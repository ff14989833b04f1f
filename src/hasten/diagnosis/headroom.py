"""Ceilings by replacement: a part of the run is replaced by something free, and the two are timed against each other.

A ceiling is time with the part / time without it: what even a perfect acceleration of that part could give.
Each replacement is a method of a few lines; none of them trains anything useful.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from hasten.contract.card import Card, Exactness, Order
from hasten.contract.errors import Failure, Refusal
from hasten.contract.method import Method
from hasten.contract.recipe import Recipe
from hasten.contract.watch import Watch, silent
from hasten.engine.find import method_names
from hasten.engine.tasks import TaskRef
from hasten.measure.compare import BLOCK_SECONDS, BLOCK_STEPS, take_turns

LEAST_SHARE = 0.02  # a phase below it can never pay, so its ceiling is not measured
LOOKS = (6, 9, 14)  # pairs of blocks: a ceiling need not be known as well as a verdict
LEAST_PAIRS = 3
NEVER = 10**15  # samples
BATCH_FACTOR = 8


def _card(summary: str) -> Card:
    """Outermost, so that a replacement also takes away what the recipe's own methods put there."""
    return Card(summary=summary, exactness=Exactness.OTHER_MATHS, order=Order.LAST, after=tuple(method_names()))


class ReplayedBatch(Method):
    card = _card("gives the first batch again and again: input costs nothing")

    def data(self, batches, run):
        if not batches.training:
            return batches
        first = []

        def epoch(number, start):
            first.extend(() if first else islice(batches.epoch(number, start), 1))
            while True:
                yield first[0]

        return dataclasses.replace(batches, epoch=epoch)


class NoUpdate(Method):
    card = _card("leaves the weights as they are: the update costs nothing")

    def update(self, update, run):
        return lambda: None


class NoEvaluation(Method):
    card = _card("never measures the metric")

    def loop(self, loop, run):
        return dataclasses.replace(loop, evaluate_every=NEVER)

    def data(self, batches, run):  # the arm evaluates once while it is built: one batch is enough
        if batches.training:
            return batches
        return dataclasses.replace(batches, epoch=lambda number, start: islice(batches.epoch(number, start), 1), length=1)


class LargerBatch(Method):
    card = _card(f"{BATCH_FACTOR} times the batch: what every step costs whatever its size is paid {BATCH_FACTOR} times less often")

    def loop(self, loop, run):
        return dataclasses.replace(loop, batch_size=BATCH_FACTOR * loop.batch_size)


@dataclass
class Experiment:
    """A replacement that may be worth measuring.

    Attributes:
        name: the phase, or the method, whose ceiling it gives.
        method: the replacement, by name.
        share: of the wall clock that it could take away, by the timeline: the order in which experiments are made.
    """

    name: str
    method: str
    share: float


@dataclass
class Headroom:
    """Ceilings by name, and why the others have none."""

    ceilings: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)


def experiments(phases: dict[str, float], system_share: float, arithmetic_share: float | None) -> list[Experiment]:
    """What could be replaced, the most promising first."""
    inside = f"{__name__}:"
    compute = phases["forward"] + phases["backward"]
    steady = compute * (arithmetic_share or 0.0)  # at the machine's peak already: a larger batch cannot shorten it
    step = compute + phases["update"] + phases["gradients"] + phases["input"]
    planned = [
        Experiment("input", inside + "ReplayedBatch", phases["input"]),
        Experiment("update", inside + "NoUpdate", phases["update"]),
        Experiment("evaluation", inside + "NoEvaluation", phases["evaluation"]),
        Experiment("batch_size", inside + "LargerBatch", max(0.0, step - steady)),
    ]
    if "allocator" in method_names():
        planned.append(Experiment("allocator", "allocator", system_share))
    return sorted(planned, key=lambda experiment: -experiment.share)


def measure_headroom(
    task: TaskRef, recipe: Recipe, planned: list[Experiment], *, device: str, seed: int, budget: float, plan: dict, watch: Watch = silent
) -> Headroom:
    """Makes the experiments in turn until ``budget`` seconds are spent; each starts only if it can come to an answer.

    Args:
        plan: of the plain arm, with ``build_seconds``: what it takes to make one.
    """
    found, end = Headroom(), time.monotonic() + budget
    worth = [experiment for experiment in planned if experiment.share >= LEAST_SHARE]
    found.not_measured |= {e.name: f"it takes {e.share:.1%} of the time" for e in planned if e.share < LEAST_SHARE}
    for number, experiment in enumerate(worth):
        left = end - time.monotonic()
        building = 2 * plan["build_seconds"]
        least = building + LEAST_PAIRS * 2 * max(BLOCK_SECONDS, min(BLOCK_STEPS * plan["step"], 3.0))
        if experiment.method in recipe.methods:
            found.not_measured[experiment.name] = "the recipe has it already"
            continue
        if left < least:
            found.not_measured[experiment.name] = f"the budget is spent; it would have taken {least:.0f} s"
            continue
        share_of_budget = max(least - building, left / (len(worth) - number) - building)
        try:
            done = take_turns(
                task, recipe, recipe.with_method(experiment.method), budget=share_of_budget, device=device, seed=seed, looks=LOOKS,
                watch=_part_of(watch, experiment.name, number, len(worth)),
            )  # fmt: skip
        except (Failure, Refusal) as error:  # out of memory, a recipe that cannot go without that part
            found.not_measured[experiment.name] = str(error)
            continue
        found.ceilings[experiment.name] = done.ratio.median
        found.intervals[experiment.name] = (done.ratio.low, done.ratio.high)
    return found


def _part_of(watch: Watch, name: str, number: int, count: int) -> Callable:
    return lambda what, done, left=None: watch(f"what {name} could give", (number + done) / count, None)
