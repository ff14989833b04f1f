"""Two arms of a task take turns, block by block, until it is sure which is faster or the budget is spent.

What is compared is the time of equal training: the same number of samples through the real step
(loader, copy, forward, backward, update, reading the losses), with the evaluations that fall due.
While one arm runs, all processes of the other are frozen; the order is A B, B A, A B, ..., so that
a drift of the machine hits both alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean

from hasten.contract.errors import Failure
from hasten.contract.recipe import Recipe
from hasten.contract.spans import budget_of
from hasten.contract.watch import Watch, silent
from hasten.engine.budget import notice_turns
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.devices import pick_device
from hasten.engine.find import make_methods
from hasten.engine.sources import refuse_processes
from hasten.engine.tasks import TaskRef
from hasten.measure.job import Job, started
from hasten.measure.noise import Noise
from hasten.measure.ratio import ERROR, LOOKS, SAME, UNSURE, Ratio, ratio_of, spread, verdict_of, with_evaluations
from hasten.measure.workers import Worker, listen_anew, told_already

BLOCK_SECONDS = 0.3  # long enough to bury the timer and the switch between processes
BLOCK_STEPS = 5
LONG_BLOCK_SECONDS = 3.0  # steps so long that five would make a longer block are taken fewer at a time
FEWEST_PAIRS = 3
RHYTHM_BUDGETS = 4  # that as many blocks may take
FIRST_EVALUATIONS = 2  # of each arm, before the first block
CLOCKS_AGREE = 0.8  # share of what we see a block take that the arm itself must have seen
TRIES = 3  # for the clocks to agree
PATIENCE = 120.0  # seconds of silence, beyond the budget, after which an arm counts as hanging


@dataclass
class Side:
    """What one arm told and took."""

    recipe: Recipe
    plan: dict
    processes: int = 1
    blocks: list[dict] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)

    def seconds_a_sample(self) -> list[float]:
        """Of every block; without evaluations."""
        return [block["seconds"] / block["samples"] for block in self.blocks]

    def evaluating_a_sample(self) -> float:
        """Seconds of evaluation that fall on a training sample."""
        every = self.plan["evaluate_every"] or self.plan["samples_a_pass"]
        return fmean(self.evaluations) / every if self.evaluations and every else 0.0

    def evaluations_share(self) -> float:
        """Seconds that evaluations take in a run, for every second of its steps."""
        return self.evaluating_a_sample() / fmean(self.seconds_a_sample())

    def seconds_per_1000_samples(self) -> float:
        """Of a run, with the evaluations that fall due."""
        return 1000 * (_middle(self.seconds_a_sample()) + self.evaluating_a_sample())

    def cpu_seconds_a_sample(self) -> list[float]:
        return [block["cpu"] / block["samples"] for block in self.blocks]


@dataclass
class Comparison:
    """The outcome: a verdict, the ratio behind it, and everything that was timed."""

    verdict: str
    ratio: Ratio
    a: Side
    b: Side
    why: str
    seconds: float
    noise: dict

    def to_json(self) -> dict:
        per_thousand = {name: side.seconds_per_1000_samples() for name, side in (("a", self.a), ("b", self.b))}
        cpu = [side.cpu_seconds_a_sample() for side in (self.a, self.b)]
        return {
            "kind": "compare",
            "a": str(self.a.recipe),
            "b": str(self.b.recipe),
            "processes": self.a.processes,
            "verdict": self.verdict,
            "ratio": self.ratio.to_json(),
            "blocks": len(self.a.blocks),
            "why": self.why,
            "seconds_per_1000_samples": per_thousand,
            "cpu_ratio": ratio_of(*cpu).median if all(min(side) > 0 for side in cpu) else None,
            "evaluation_seconds": {name: min(side.evaluations, default=None) for name, side in (("a", self.a), ("b", self.b))},
            "start_seconds": {"a": self.a.plan["start"], "b": self.b.plan["start"]},
            "noise": self.noise,
            "seconds": self.seconds,
        }


def compare(
    task,
    a="baseline",
    b="baseline",
    *,
    budget: float | str = 60.0,
    processes: int = 1,
    patience: float | None = None,
    device: str | None = None,
    seed: int = 0,
    watch: Watch = silent,
) -> dict:
    """Which of two recipes trains a task faster, and by how much.

    Args:
        task: a workload's name, ``file.py:function`` or a Task.
        a, b: recipes: a Recipe, a ``.toml`` file, "baseline" or ``--with`` text.
        budget: seconds to spend at most on blocks, or a text such as "10m".
        processes: that train together, in either arm; both are whole jobs then.
        patience: seconds of silence, beyond the budget, after which an arm counts as hanging; two minutes unless said.

    Returns:
        ``verdict`` ("faster": b is), ``ratio`` (time of a / time of b) with its interval, ``blocks`` and what they showed.

    Raises:
        Refusal: a wrong request. Failure: an arm that could not run.
    """
    listen_anew()
    task, budget = TaskRef.of(task), budget_of(budget)
    recipes = Recipe.read(a), Recipe.read(b)
    if processes > 1:
        with told_already():
            loaded = task.load()
            for recipe in recipes:
                refuse_processes(loaded, processes, make_methods(recipe))
            notice_turns(processes)
    done = take_turns(
        task, *recipes, budget=budget, processes=(processes,) * 2, patience=patience or PATIENCE,
        device=pick_device(device), seed=seed, watch=watch,
    )  # fmt: skip
    return {"task": str(task), **done.to_json()}


def take_turns(
    task: TaskRef,
    a: Recipe,
    b: Recipe,
    *,
    budget: float,
    device: str,
    processes: tuple[int, int] = (1, 1),
    seed: int = 0,
    looks: Iterable[int] = LOOKS,
    patience: float = PATIENCE,
    longest: float | None = None,
    watch: Watch = silent,
) -> Comparison:
    """The measurement behind ``compare``.

    Args:
        processes: of each arm.
        looks: after how many pairs one may stop when sure.
        patience: seconds of silence, beyond the budget, after which an arm counts as hanging. Building is given more than that in one process,
            which waits for nobody.
        longest: seconds that the fewest fair blocks of processes that talk seldom may take; some budgets unless said.
    """
    for recipe in (a, b):  # a wrong request is told before anything is started
        check_conflicts(sort_methods(make_methods(recipe)))
    began, noise, looks = time.monotonic(), Noise(), sorted(looks)
    with ExitStack() as stack:
        arms, sides = [], []
        for recipe, ranks in zip(
            (b, a), reversed(processes), strict=True
        ):  # the newcomer first: one with nothing to act on is found out at once
            watch(f"building {recipe}", 0.0, None)
            where = {"task": task.to_json(), "device": device, "seed": seed}
            arm = started(ranks, "hasten.measure.arm:Arm", patience + budget, methods=recipe.methods, **where)
            arms.insert(0, stack.enter_context(arm))
            sides.insert(0, Side(recipe, arm.call("build"), ranks))
            arm.freeze()
        lengths = [block_steps(side.plan) for side in sides]
        for side, length in zip(sides, lengths, strict=True):
            refuse_unfair_blocks(side.recipe, side.plan, length, longest or RHYTHM_BUDGETS * budget)
        ready = time.monotonic()
        while True:
            while _evaluation_is_due(sides, budget):
                _take_evaluations(arms, sides, patience + budget)
            pairs = len(sides[0].blocks)
            for turn in (0, 1) if pairs % 2 == 0 else (1, 0):
                length = lengths[turn]
                sides[turn].blocks.append(_block(arms[turn], length, patience + max(budget, 2 * length * sides[turn].plan["step"])))
                arms[turn].freeze()
            pairs += 1
            spent = time.monotonic() - ready
            left = min(budget, spent / pairs * looks[-1]) - spent
            watch(f"{a} against {b}", min(1.0, spent / max(spent + left, 1e-9)), max(0.0, left))
            limit = budget if pairs >= looks[0] else 2 * budget  # an interval from fewer pairs says next to nothing
            out_of_budget = pairs >= FEWEST_PAIRS and spent + spent / pairs > limit
            if pairs in looks or out_of_budget:
                ratio = _ratio(*sides, ERROR / len(looks))
                verdict = verdict_of(ratio)
                if verdict != UNSURE or out_of_budget or pairs >= looks[-1]:
                    break
    why = _why(verdict, ratio, pairs, out_of_budget)
    told = noise.told(100 * spread(sides[0].seconds_a_sample()), sum(block["switches"] for block in sides[0].blocks))
    return Comparison(verdict, ratio, *sides, why, time.monotonic() - began, told)


def _block(arm: Worker | Job, steps: int, patience: float) -> dict:
    """A block of steps, and a second clock beside the arm's own. On a busy machine one answer may come late, and is taken anew.

    Raises:
        Failure: the two clocks differ every time: something in the arm has tampered with time, or with what it counts.
    """
    for _ in range(TRIES):
        began = time.monotonic()
        block = arm.call("train", count=steps, timeout=patience)
        seen = time.monotonic() - began
        if block["samples"] > 0 and CLOCKS_AGREE * seen - 0.05 <= block["seconds"] <= seen + 0.05:
            return block
    raise Failure(
        f"the arm says {block['seconds']:.2f} s for {block['samples']} samples, the clock beside it {seen:.2f} s: not to be believed"
    )


def refuse_unfair_blocks(recipe: Recipe, plan: dict, steps: int, longest: float, fewest: int = FEWEST_PAIRS) -> None:
    """Blocks show a run where each holds all that its steps do; processes that talk seldom do so in one step of many.

    Raises:
        Failure: so many fair blocks take too long, or the run begins with steps of another kind.
    """
    seconds = fewest * steps * plan["step"]
    if plan["prelude"]:
        first = f"the first {plan['prelude']} steps of {recipe} are other ones, and blocks of steps cannot show a whole run"
        raise Failure(f"{first}; leave start out")
    if plan["rhythm"] > 1 and seconds > longest:
        every = f"{recipe} repeats itself every {plan['rhythm']} steps"
        raise Failure(f"{every}, so that {fewest} fair blocks take {seconds:.0f} s, and the budget allows {longest:.0f}; give a larger one")


def block_steps(plan: dict) -> int:
    """So many that a block is long enough, and holds whole repetitions of what the steps do."""
    enough = math.ceil(BLOCK_SECONDS / max(plan["step"], 1e-6))
    few = max(1, int(LONG_BLOCK_SECONDS / max(plan["step"], 1e-6)))
    rhythm = plan.get("rhythm", 1)
    return rhythm * math.ceil(max(enough, min(BLOCK_STEPS, few)) / rhythm)


def _ratio(a: Side, b: Side, error: float) -> Ratio:
    """Of whole runs: their steps in pairs, and their evaluations, of which there are fewer."""
    steps = ratio_of(a.seconds_a_sample(), b.seconds_a_sample(), error)
    if not a.evaluations:
        return steps
    spreads = [max(spread(side.seconds_a_sample()), spread(side.evaluations)) / math.sqrt(len(side.evaluations)) for side in (a, b)]
    return with_evaluations(steps, (a.evaluations_share(), b.evaluations_share()), spreads, len(a.blocks), error)


def _evaluation_is_due(sides: list[Side], budget: float) -> bool:
    """Evaluations come as often as in a run, but two come first; an eighth of the budget is enough for those."""
    if sides[0].plan["evaluation"] is None:
        return False
    evaluated, trained = (sum(sum(times) for times in each) for each in zip(*map(_times, sides), strict=True))
    if len(sides[0].evaluations) < FIRST_EVALUATIONS:
        return evaluated <= budget / 8
    return evaluated < sum(side.evaluations_share() for side in sides) / len(sides) * trained if trained else False


def _times(side: Side) -> tuple[list[float], list[float]]:
    return side.evaluations, [block["seconds"] for block in side.blocks]


def _take_evaluations(arms: list, sides: list[Side], patience: float) -> None:
    """One of each arm, in turns which goes first."""
    for turn in (0, 1) if len(sides[0].evaluations) % 2 == 0 else (1, 0):
        sides[turn].evaluations.append(arms[turn].call("evaluate", timeout=patience))
        arms[turn].freeze()


def _why(verdict: str, ratio: Ratio, pairs: int, out_of_budget: bool) -> str:
    if verdict == UNSURE:
        return f"the interval {ratio.low:.3f} to {ratio.high:.3f} settles nothing after {pairs} pairs" + (
            ", and the budget is spent" if out_of_budget else ""
        )
    if verdict == SAME:
        return f"after {pairs} pairs the ratio is known to lie between {ratio.low:.3f} and {ratio.high:.3f}"
    return f"after {pairs} pairs the whole interval {ratio.low:.3f} to {ratio.high:.3f} lies on one side of 1"


def _middle(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
