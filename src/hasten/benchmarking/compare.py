"""Measures which of two arms of a task is faster, in interleaved blocks, until it is sure or the budget is spent.

What is compared is the time of equal training: the same number of samples through the real step (loader, copy, forward,
backward, update, reading the losses), including evaluations. While one arm runs, all processes of the other are
suspended. The order is A B, B A, A B, ..., so that a drift of the machine affects both alike.
"""

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean, median_high
from typing import Any, cast

from hasten.benchmarking.fork_server import DeadlineError, Worker, mark_warnings_shown, reset_shown_warnings
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

BLOCK_SECONDS = 0.3  # at which timer resolution and process switches are negligible
BLOCK_STEPS = 5
LONG_BLOCK_SECONDS = 3.0  # if five steps take longer, a block has fewer steps
MIN_PAIRS = 3
SYNC_PERIOD_BUDGETS = 4  # budgets that MIN_PAIRS blocks of whole synchronization periods may take
FIRST_EVALUATIONS = 2  # of each arm, before the first block
MIN_CLOCK_RATIO = 0.8  # of the time that an arm reports for a block to that measured in this process
MAX_TRIES = 3  # for the two clocks to agree
TIMEOUT_S = 120.0  # seconds of silence, beyond the budget, after which an arm counts as hanging


@dataclass
class ArmSamples:
    """The plan of one arm, as ``Arm.build`` returns it, and its measured times in seconds."""

    recipe: Recipe
    plan: dict[str, Any]
    processes: int = 1
    blocks: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)

    def seconds_per_sample(self) -> list[float]:
        """Seconds per training sample of each block, without evaluations."""
        return [block["seconds"] / block["samples"] for block in self.blocks]

    def cpu_seconds_per_sample(self) -> list[float]:
        return [block["cpu"] / block["samples"] for block in self.blocks]

    def evaluation_seconds_per_sample(self) -> float:
        return evaluation_seconds_per_sample(self.plan, fmean(self.evaluations) if self.evaluations else None)

    def evaluation_ratio(self) -> float:
        """Seconds of evaluation per second of training steps, for this arm in a whole run."""
        return self.evaluation_seconds_per_sample() / fmean(self.seconds_per_sample())

    def seconds_per_1000_samples(self) -> float:
        """Seconds per 1000 training samples: median over the blocks, plus the share of evaluations."""
        return 1000 * (median_high(self.seconds_per_sample()) + self.evaluation_seconds_per_sample())


@dataclass
class Comparison:
    """The result of a comparison: the verdict, the ratio it is based on, and all samples."""

    verdict: str
    ratio: Ratio
    a: ArmSamples
    b: ArmSamples
    why: str
    seconds: float
    noise: dict[str, Any]

    def to_json(self) -> CompareResult:
        arms = {"a": self.a, "b": self.b}
        cpu_a, cpu_b = self.a.cpu_seconds_per_sample(), self.b.cpu_seconds_per_sample()
        result: dict[str, Any] = {
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
            "effects": {name: arm.plan.get("effects", {}) for name, arm in arms.items()},
            "system_noise": self.noise,
            "seconds": self.seconds,
        }
        return cast(CompareResult, result)


def compare(
    task: Any,
    a: Any = "baseline",
    b: Any = "baseline",
    *,
    budget: float | str = 60.0,
    processes: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    seed: int = 0,
    watch: ProgressCallback = no_progress,
) -> dict[str, Any]:
    """Measures which of two recipes trains a task faster, and by how much.

    Args:
        task: a workload's name, ``file.py:function`` or a Task.
        a: a recipe: a Recipe, a ``.toml`` file, "baseline" or ``--with`` text.
        b: another recipe.
        budget: maximum seconds for blocks, or a text such as "10m".
        processes: ranks of each arm.
        timeout: seconds of silence, beyond the budget, after which an arm counts as hanging; 120 by default.
        device: "cpu" or "cuda"; by default a GPU if there is one.
        seed: seed of both runs.
        watch: receives the progress.

    Returns:
        ``verdict`` ("faster" if b is), ``ratio`` (time of a / time of b) with its interval, ``blocks`` and more.

    Raises:
        ConfigurationError: a wrong request.
        RunError: an arm could not run.
    """
    reset_shown_warnings()
    ref, seconds = TaskRef.of(task), parse_budget(budget)
    recipes = Recipe.coerce(a), Recipe.coerce(b)
    if processes > 1:
        with mark_warnings_shown():
            loaded = ref.load()
            for recipe in recipes:
                check_process_count(loaded, processes, make_methods(recipe))
            warn_oversubscribed(processes)
    comparison = run_interleaved(
        ref,
        *recipes,
        budget=seconds,
        processes=(processes, processes),
        timeout=timeout or TIMEOUT_S,
        device=pick_device(device),
        seed=seed,
        watch=watch,
    )
    return {"task": str(ref), **comparison.to_json()}


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
    deadline: float | None = None,
    watch: ProgressCallback = no_progress,
) -> Comparison:
    """Measures two recipes in interleaved blocks; ``compare`` is its public form, with the same arguments.

    ``looks`` are the numbers of pairs after which the comparison may stop if it is sure. MIN_PAIRS blocks of a strategy
    that communicates seldom may take ``longest`` seconds, by default SYNC_PERIOD_BUDGETS budgets. The timeout does not
    limit the building of an arm of one process, which waits for no other process. At ``deadline``, a time of
    ``time.monotonic``, the comparison ends with the blocks that it has.

    Raises:
        RunError: an arm could not run.
        DeadlineError: there were fewer than MIN_PAIRS pairs at the deadline.
    """
    for recipe in (a, b):  # before processes are started
        check_conflicts(sort_methods(make_methods(recipe)))
    began, noise = time.monotonic(), SystemNoise()
    looks, timeout = sorted(looks), timeout + budget
    with ExitStack() as stack:
        arms: list[Worker | WorkerGroup] = []
        samples: list[ArmSamples] = []
        for index, recipe in ((1, b), (0, a)):  # b first, to notice at once if it has no effect
            watch(f"building {recipe}", 0.0, None)
            arguments = {"task": task.to_json(), "methods": recipe.methods, "device": device, "seed": seed}
            arm = start_workers(processes[index], "hasten.benchmarking.arm:Arm", timeout, deadline, **arguments)
            arms.insert(0, stack.enter_context(arm))
            samples.insert(0, ArmSamples(recipe, arm.call("build"), processes[index]))
            arm.suspend()
        steps = [block_steps(arm.plan) for arm in samples]
        for arm, count in zip(samples, steps, strict=True):
            check_blocks_are_fair(arm.recipe, arm.plan, count, longest or SYNC_PERIOD_BUDGETS * budget)
        started = time.monotonic()
        ended = False  # by the deadline
        while True:
            try:
                while _evaluation_is_due(samples, budget):
                    for turn in _order(len(samples[0].evaluations)):
                        samples[turn].evaluations.append(arms[turn].call("evaluate", timeout=timeout))
                        arms[turn].suspend()
                for turn in _order(len(samples[0].blocks)):
                    expected = 2 * steps[turn] * samples[turn].plan["step"]
                    samples[turn].blocks.append(_time_block(arms[turn], steps[turn], timeout + max(budget, expected)))
                    arms[turn].suspend()
            except DeadlineError:
                _drop_unpaired(samples)
                if len(samples[0].blocks) < MIN_PAIRS:
                    raise
                ended = True
            pairs = len(samples[0].blocks)
            spent = time.monotonic() - started
            left = min(budget, spent / pairs * looks[-1]) - spent
            watch(f"{a} against {b}", min(1.0, spent / max(spent + left, 1e-9)), max(0.0, left))
            limit = budget if pairs >= looks[0] else 2 * budget  # an interval from fewer pairs is too wide
            out_of_budget = ended or (pairs >= MIN_PAIRS and spent + spent / pairs > limit)
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
    """(first arm, second arm), 0 for a, 1 for b, of the pair after ``done`` pairs: ab, ba, ab, ..."""
    return (0, 1) if done % 2 == 0 else (1, 0)


def _drop_unpaired(samples: list[ArmSamples]) -> None:
    """Drops the last block or evaluation of an arm if the other arm could not run its own."""
    for times in ([arm.blocks for arm in samples], [arm.evaluations for arm in samples]):
        for each in times:
            del each[min(map(len, times)) :]


def _time_block(arm: Worker | WorkerGroup, steps: int, timeout: float) -> dict[str, float]:
    """Times a block in the arm and in this process; repeats it if the clocks differ, RunError if they always do."""
    block, seen = {}, 0.0
    for _ in range(MAX_TRIES):
        began = time.monotonic()
        block = arm.call("train", count=steps, timeout=timeout)
        seen = time.monotonic() - began
        if block["samples"] > 0 and MIN_CLOCK_RATIO * seen - 0.05 <= block["seconds"] <= seen + 0.05:
            return block
    raise RunError(
        f"the arm reports {block['seconds']:.2f} s for {block['samples']} samples, but the clock of the comparison "
        f"{seen:.2f} s; a method must not change the clock or the count of samples"
    )


def check_blocks_are_fair(
    recipe: Recipe, plan: dict[str, Any], steps: int, longest: float, min_blocks: int = MIN_PAIRS
) -> None:
    """Checks that blocks represent a whole run: each must contain whole synchronization periods.

    Raises:
        RunError: ``min_blocks`` blocks of ``steps`` steps take longer than ``longest`` seconds, or the first steps of
            the recipe differ from the others.
    """
    seconds = min_blocks * steps * plan["step"]
    if plan["warmup_steps"]:
        raise RunError(
            f"the first {plan['warmup_steps']} steps of {recipe} differ from the others, so blocks cannot "
            "represent a run; compare without warmup steps"
        )
    if plan["sync_period"] > 1 and seconds > longest:
        raise RunError(
            f"{recipe} synchronizes every {plan['sync_period']} steps, so that {min_blocks} fair blocks take "
            f"{seconds:.0f} s, and the budget allows {longest:.0f}; give a larger one"
        )


def block_steps(plan: dict[str, Any]) -> int:
    """Number of steps of a block: long enough to be timed, and a multiple of the synchronization period."""
    step = max(plan["step"], 1e-6)
    enough = math.ceil(BLOCK_SECONDS / step)
    at_most = max(1, int(LONG_BLOCK_SECONDS / step))
    period = plan["sync_period"]
    return period * math.ceil(max(enough, min(BLOCK_STEPS, at_most)) / period)


def evaluation_seconds_per_sample(plan: dict[str, Any], evaluation: float | None) -> float:
    """Seconds of evaluation per training sample, if one evaluation takes ``evaluation`` seconds."""
    interval = plan["evaluate_every"] or plan["samples_per_epoch"]
    return evaluation / interval if evaluation and interval else 0.0


def _ratio(a: ArmSamples, b: ArmSamples, error: float) -> Ratio:
    """Ratio of the times of whole runs (a / b), from paired blocks and evaluations; ``error`` as in ``ratio_of``."""
    steps = ratio_of(a.seconds_per_sample(), b.seconds_per_sample(), error)
    if not a.evaluations:
        return steps
    spreads = [max(spread(arm.seconds_per_sample()), spread(arm.evaluations)) for arm in (a, b)]
    errors = [each / math.sqrt(len(a.evaluations)) for each in spreads]
    return with_evaluations(steps, (a.evaluation_ratio(), b.evaluation_ratio()), errors, len(a.blocks), error)


def _evaluation_is_due(samples: list[ArmSamples], budget: float) -> bool:
    """Whether to time evaluations now: as often as a run has them; two before all blocks if they are cheap."""
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
        return f"the interval {low} to {high} is too wide for a verdict after {pairs} pairs{end}"
    if verdict == SAME:
        return f"after {pairs} pairs the ratio is known to lie between {low} and {high}"
    return f"after {pairs} pairs the whole interval {low} to {high} lies on one side of 1"
