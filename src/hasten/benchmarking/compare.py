"""Measures which of two arms of a task is faster, in interleaved blocks, until it is sure or the budget is spent.

What is compared is the time of equal training: the same number of samples through the real step (loader, copy, forward,
backward, update, reading the losses), with the evaluations that fall due. While one arm runs, all processes of the
other are suspended. The order is A B, B A, A B, ..., so that a drift of the machine hits both alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean, median_high

from hasten.benchmarking.fork_server import Worker, mark_warnings_shown, reset_shown_warnings
from hasten.benchmarking.ratio import ERROR, LOOKS, SAME, UNSURE, Ratio, ratio_of, spread, verdict_of, with_evaluations
from hasten.benchmarking.system_noise import SystemNoise
from hasten.benchmarking.worker_group import WorkerGroup, start_workers
from hasten.core.errors import RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.data_adapters import check_process_count
from hasten.engine.devices import pick_device
from hasten.engine.registry import make_methods
from hasten.engine.resources import warn_oversubscribed
from hasten.engine.tasks import TaskRef
from hasten.reporting.result_schema import CompareResult
from hasten.utils.durations import parse_budget

BLOCK_SECONDS = 0.3  # long enough to bury the timer and the switch between processes
BLOCK_STEPS = 5
LONG_BLOCK_SECONDS = 3.0  # if five steps take longer, a block has fewer steps
FEWEST_PAIRS = 3
RHYTHM_BUDGETS = 4  # that as many blocks may take
FIRST_EVALUATIONS = 2  # of each arm, before the first block
CLOCKS_AGREE = 0.8  # least fraction of a block's time, seen from here, that the arm must report
TRIES = 3  # for the clocks to agree
TIMEOUT_S = 120.0  # seconds of silence, beyond the budget, after which an arm counts as hanging


@dataclass
class ArmSamples:
    """The plan of one arm and the times measured of it, in seconds."""

    recipe: Recipe
    plan: dict
    processes: int = 1
    blocks: list[dict] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)

    def seconds_per_sample(self) -> list[float]:
        """Of every block, without evaluations."""
        return [block["seconds"] / block["samples"] for block in self.blocks]

    def cpu_seconds_per_sample(self) -> list[float]:
        return [block["cpu"] / block["samples"] for block in self.blocks]

    def evaluation_seconds_per_sample(self) -> float:
        return evaluation_seconds_per_sample(self.plan, fmean(self.evaluations) if self.evaluations else None)

    def evaluation_ratio(self) -> float:
        """Seconds of evaluation in a run for every second of its steps."""
        return self.evaluation_seconds_per_sample() / fmean(self.seconds_per_sample())

    def seconds_per_1000_samples(self) -> float:
        """Of a run, with its evaluations."""
        return 1000 * (median_high(self.seconds_per_sample()) + self.evaluation_seconds_per_sample())

    def time_block(self, arm: Worker | WorkerGroup, steps: int, timeout: float) -> None:
        """Times one more block, then suspends the arm."""
        self.blocks.append(_time_block(arm, steps, timeout))
        arm.suspend()

    def time_evaluation(self, arm: Worker | WorkerGroup, timeout: float) -> None:
        """Times one more evaluation, then suspends the arm."""
        self.evaluations.append(arm.call("evaluate", timeout=timeout))
        arm.suspend()


@dataclass
class Comparison:
    """A verdict, the ratio behind it, and everything that was timed."""

    verdict: str
    ratio: Ratio
    a: ArmSamples
    b: ArmSamples
    why: str
    seconds: float
    noise: dict

    def to_json(self) -> CompareResult:
        arms = {"a": self.a, "b": self.b}
        cpu_a, cpu_b = self.a.cpu_seconds_per_sample(), self.b.cpu_seconds_per_sample()
        return {
            "kind": "compare",
            "a": str(self.a.recipe),
            "b": str(self.b.recipe),
            "processes": self.a.processes,
            "verdict": self.verdict,
            "ratio": self.ratio.to_json(),
            "blocks": len(self.a.blocks),
            "why": self.why,
            "seconds_per_1000_samples": {name: arm.seconds_per_1000_samples() for name, arm in arms.items()},
            "cpu_ratio": ratio_of(cpu_a, cpu_b).median if min(cpu_a + cpu_b) > 0 else None,
            "evaluation_seconds": {name: min(arm.evaluations, default=None) for name, arm in arms.items()},
            "start_seconds": {name: arm.plan["start"] for name, arm in arms.items()},
            "system_noise": self.noise,
            "seconds": self.seconds,
        }


def compare(
    task,
    a="baseline",
    b="baseline",
    *,
    budget: float | str = 60.0,
    processes: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    seed: int = 0,
    watch: ProgressCallback = no_progress,
) -> dict:
    """Which of two recipes trains a task faster, and by how much.

    Args:
        task: a workload's name, ``file.py:function`` or a Task.
        a, b: recipes: a Recipe, a ``.toml`` file, "baseline" or ``--with`` text.
        budget: seconds to spend at most on blocks, or a text such as "10m".
        processes: that train together, in either arm; both are whole jobs then.
        patience: seconds of silence, beyond the budget, after which an arm counts as hanging; two minutes unless said.

    Returns:
        ``verdict`` ("faster": b is), ``ratio`` (time of a / time of b) with its interval, ``blocks`` and what they
        showed.

    Raises:
        Refusal: a wrong request. Failure: an arm that could not run.
    """
    reset_shown_warnings()
    task, budget = TaskRef.of(task), parse_budget(budget)
    recipes = Recipe.coerce(a), Recipe.coerce(b)
    if processes > 1:
        with mark_warnings_shown():
            loaded = task.load()
            for recipe in recipes:
                check_process_count(loaded, processes, make_methods(recipe))
            warn_oversubscribed(processes)
    comparison = run_interleaved(
        task,
        *recipes,
        budget=budget,
        processes=(processes, processes),
        timeout=timeout or TIMEOUT_S,
        device=pick_device(device),
        seed=seed,
        watch=watch,
    )
    return {"task": str(task), **comparison.to_json()}


def run_interleaved(
    task: TaskRef,
    a: Recipe,
    b: Recipe,
    *,
    budget: float,
    device: str,
    processes: tuple[int, int] = (1, 1),
    seed: int = 0,
    looks: Iterable[int] = LOOKS,
    timeout: float = TIMEOUT_S,
    longest: float | None = None,
    watch: ProgressCallback = no_progress,
) -> Comparison:
    """The measurement behind ``compare``.

    Args:
        processes: of each arm.
        looks: numbers of pairs after which the comparison may stop when it is sure.
        patience: seconds of silence, beyond the budget, after which an arm counts as hanging. Building an arm of one
            process has no limit, because it waits for no other one.
        longest: seconds that the fewest fair blocks may take for processes that communicate seldom; RHYTHM_BUDGETS
            budgets by default.
    """
    for recipe in (a, b):  # a wrong request is refused before anything is started
        check_conflicts(sort_methods(make_methods(recipe)))
    began, noise, looks, timeout = time.monotonic(), SystemNoise(), sorted(looks), timeout + budget
    with ExitStack() as stack:
        arms: list[Worker | WorkerGroup] = []
        samples: list[ArmSamples] = []
        for index, recipe in ((1, b), (0, a)):  # the new one first, to find out at once if it has no effect
            watch(f"building {recipe}", 0.0, None)
            arguments = {"task": task.to_json(), "methods": recipe.methods, "device": device, "seed": seed}
            arm = start_workers(processes[index], "hasten.benchmarking.arm:Arm", timeout, **arguments)
            arms.insert(0, stack.enter_context(arm))
            samples.insert(0, ArmSamples(recipe, arm.call("build"), processes[index]))
            arm.suspend()
        steps = [block_steps(each.plan) for each in samples]
        for each, count in zip(samples, steps, strict=True):
            refuse_unfair_blocks(each.recipe, each.plan, count, longest or RHYTHM_BUDGETS * budget)
        started = time.monotonic()
        while True:
            while _evaluation_is_due(samples, budget):
                for turn in _order(len(samples[0].evaluations)):
                    samples[turn].time_evaluation(arms[turn], timeout)
            for turn in _order(len(samples[0].blocks)):
                expected = 2 * steps[turn] * samples[turn].plan["step"]
                samples[turn].time_block(arms[turn], steps[turn], timeout + max(budget, expected))
            pairs = len(samples[0].blocks)
            spent = time.monotonic() - started
            left = min(budget, spent / pairs * looks[-1]) - spent
            watch(f"{a} against {b}", min(1.0, spent / max(spent + left, 1e-9)), max(0.0, left))
            limit = budget if pairs >= looks[0] else 2 * budget  # an interval from fewer pairs says next to nothing
            out_of_budget = pairs >= FEWEST_PAIRS and spent + spent / pairs > limit
            if pairs in looks or out_of_budget:
                ratio = _ratio(samples[0], samples[1], ERROR / len(looks))
                verdict = verdict_of(ratio)
                if verdict != UNSURE or out_of_budget or pairs >= looks[-1]:
                    break
    why = _why(verdict, ratio, pairs, out_of_budget)
    switches = sum(block["switches"] for block in samples[0].blocks)
    figures = noise.summary(100 * spread(samples[0].seconds_per_sample()), switches)
    return Comparison(verdict, ratio, samples[0], samples[1], why, time.monotonic() - began, figures)


def _order(done: int) -> tuple[int, int]:
    """Which arm goes first: a, b, b, a, a, b, ..."""
    return (0, 1) if done % 2 == 0 else (1, 0)


def _time_block(arm: Worker | WorkerGroup, steps: int, timeout: float) -> dict:
    """Times a block, also by a clock of this process. On a busy machine one reply may come late, and the block is
    repeated.

    Raises:
        Failure: the two clocks differ every time: something in the arm changes time, or the count of samples.
    """
    for _ in range(TRIES):
        began = time.monotonic()
        block = arm.call("train", count=steps, timeout=timeout)
        seen = time.monotonic() - began
        if block["samples"] > 0 and CLOCKS_AGREE * seen - 0.05 <= block["seconds"] <= seen + 0.05:
            return block
    raise RunError(
        f"the arm says {block['seconds']:.2f} s for {block['samples']} samples, the clock beside it {seen:.2f} s:"
        " not to be believed"
    )


def refuse_unfair_blocks(recipe: Recipe, plan: dict, steps: int, longest: float, fewest: int = FEWEST_PAIRS) -> None:
    """Checks that blocks can stand for a whole run: each must hold all that the steps do in turn.

    Raises:
        Failure: ``fewest`` fair blocks take more than ``longest`` seconds, or the first steps differ from the others.
    """
    seconds = fewest * steps * plan["step"]
    if plan["prelude"]:
        raise RunError(
            f"the first {plan['prelude']} steps of {recipe} are other ones, and blocks of steps cannot show a whole run;"
            " leave start out"
        )
    if plan["rhythm"] > 1 and seconds > longest:
        raise RunError(
            f"{recipe} repeats itself every {plan['rhythm']} steps, so that {fewest} fair blocks take {seconds:.0f} s,"
            f" and the budget allows {longest:.0f}; give a larger one"
        )


def block_steps(plan: dict) -> int:
    """Number of steps of a block: long enough to be timed, and a multiple of the plan's ``rhythm``."""
    step = max(plan["step"], 1e-6)
    enough = math.ceil(BLOCK_SECONDS / step)
    at_most = max(1, int(LONG_BLOCK_SECONDS / step))
    rhythm = plan.get("rhythm", 1)
    return rhythm * math.ceil(max(enough, min(BLOCK_STEPS, at_most)) / rhythm)


def evaluation_seconds_per_sample(plan: dict, evaluation: float | None) -> float:
    """Seconds of evaluation that fall on one training sample, if one evaluation takes ``evaluation`` seconds."""
    interval = plan["evaluate_every"] or plan["samples_a_pass"]
    return evaluation / interval if evaluation and interval else 0.0


def _ratio(a: ArmSamples, b: ArmSamples, error: float) -> Ratio:
    """Of whole runs: of their steps, in pairs, and of their evaluations, of which there are fewer."""
    steps = ratio_of(a.seconds_per_sample(), b.seconds_per_sample(), error)
    if not a.evaluations:
        return steps
    errors = [
        max(spread(arm.seconds_per_sample()), spread(arm.evaluations)) / math.sqrt(len(arm.evaluations))
        for arm in (a, b)
    ]
    return with_evaluations(steps, (a.evaluation_ratio(), b.evaluation_ratio()), errors, len(a.blocks), error)


def _evaluation_is_due(samples: list[ArmSamples], budget: float) -> bool:
    """Evaluations come as often as in a run. The first two come before the blocks, within an eighth of the budget."""
    if samples[0].plan["evaluation"] is None:
        return False
    evaluated = sum(sum(arm.evaluations) for arm in samples)
    if len(samples[0].evaluations) < FIRST_EVALUATIONS:
        return evaluated <= budget / 8
    trained = sum(block["seconds"] for arm in samples for block in arm.blocks)
    return trained > 0 and evaluated < fmean(arm.evaluation_ratio() for arm in samples) * trained


def _why(verdict: str, ratio: Ratio, pairs: int, out_of_budget: bool) -> str:
    low, high = f"{ratio.low:.3f}", f"{ratio.high:.3f}"
    if verdict == UNSURE:
        end = ", and the budget is spent" if out_of_budget else ""
        return f"the interval {low} to {high} settles nothing after {pairs} pairs{end}"
    if verdict == SAME:
        return f"after {pairs} pairs the ratio is known to lie between {low} and {high}"
    return f"after {pairs} pairs the whole interval {low} to {high} lies on one side of 1"
