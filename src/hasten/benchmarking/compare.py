"""Measures which of two arms of a task is faster, in interleaved blocks, until it is sure or the budget is spent.

What is compared is the time of equal training: the same samples through the real step (loader, copy, forward, backward,
update, reading the losses), including evaluations. While one arm runs, all processes of the other are suspended. The
order is A B, B A, A B, ..., so that a drift of the machine affects both alike. Several rounds, each with fresh
processes, show how much two processes of one recipe differ. Two arms that do not fit into memory together run one after
the other, as whole processes, and the result says so.
"""

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hasten.benchmarking.blocks import SYNC_PERIOD_BUDGETS
from hasten.benchmarking.fork_server import DeadlineError, mark_warnings_shown, reset_shown_warnings
from hasten.benchmarking.gpu_state import gpu_summary
from hasten.benchmarking.measurement import MAX_ROUNDS, MIN_ROUNDS, ArmSamples, Measurement, order_of
from hasten.benchmarking.pair import ArmBuilder, ArmsDoNotFitError, SequentialPair, build_pair
from hasten.benchmarking.ratio import LOOKS, Ratio, ratio_of, spread
from hasten.benchmarking.system_noise import SystemNoise
from hasten.core.errors import MemoryExhaustedError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.data_adapters import check_process_count
from hasten.engine.devices import pick_device
from hasten.engine.registry import make_methods
from hasten.engine.resources import warn_oversubscribed
from hasten.engine.tasks import TaskLike, TaskRef
from hasten.reporting.result_schema import CompareResult
from hasten.utils.durations import parse_budget

TIMEOUT_S = 120.0  # seconds of silence, beyond the budget, after which an arm counts as hanging
LATER_SHARE = 0.25  # of the budget of ``compare``, for a look later in the training


@dataclass
class Comparison:
    """The result of a comparison: the verdict, the ratio (time of a / time of b) that it is based on, the samples of
    both arms, the reason, the seconds that it took, and the noise (``SystemNoise.summary`` and ``gpu_summary``).
    """

    verdict: str
    ratio: Ratio
    a: ArmSamples
    b: ArmSamples
    why: str
    seconds: float
    noise: dict[str, Any]
    by_position: list[tuple[int, Ratio]] = field(default_factory=list)  # (step of a, ratio of the steps from there on)
    interleaved: bool = True  # False: memory did not suffice for both arms at once

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
            "rounds": len({block["round"] for block in self.a.blocks}),
            "blocks": len(self.a.blocks),
            "by_position": [{"step": step, "ratio": ratio.to_json()} for step, ratio in self.by_position],
            "losses": self.losses(),
            "why": self.why,
            "seconds_per_1000_samples": {name: arm.seconds_per_1000_samples() for name, arm in arms.items()},
            "cpu_ratio": ratio_of(cpu_a, cpu_b).median if min(cpu_a + cpu_b) > 0 else None,
            "evaluation_seconds": {name: min(arm.evaluations, default=None) for name, arm in arms.items()},
            "start_seconds": {name: arm.plan["start"] for name, arm in arms.items()},
            "effects": {name: arm.plan.get("effects", {}) for name, arm in arms.items()},
            "peak_memory_bytes": {name: arm.peak_memory for name, arm in arms.items()},
            "interleaved": self.interleaved,
            "system_noise": self.noise,
            "seconds": self.seconds,
        }
        return cast(CompareResult, result)

    def losses(self) -> dict[str, list[Any]]:
        """Mean training loss of each block, by arm, and the ``samples`` trained on until its end, the same for both.

        Those of the first round: the other rounds train the same again. None: there was none, or it is not finite.
        """
        a, b = ([block for block in arm.blocks if block["round"] == 1] for arm in (self.a, self.b))
        losses = {
            name: [block["loss"] if math.isfinite(block["loss"]) else None for block in blocks]
            for name, blocks in (("a", a), ("b", b))
        }
        return {"samples": [block["position"] for block in a], **losses}


def compare(
    task: TaskLike,
    a: Recipe | str | Path | Iterable[str] | None = "baseline",
    b: Recipe | str | Path | Iterable[str] | None = "baseline",
    *,
    budget: float | str = 60.0,
    processes: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    seed: int = 0,
    on_progress: ProgressCallback = no_progress,
) -> dict[str, Any]:
    """Measures which of two recipes trains a task faster, and by how much.

    Args:
        task: A workload's name, ``file.py:function``, a Task, a function that returns one, or ``hasten.script(...)``.
        a: A recipe: a Recipe, a ``.toml`` file, "baseline" or ``--with`` text.
        b: Another recipe.
        budget: Maximum seconds once both recipes are built for the first time, or a text such as "10m".
        processes: Ranks of each arm.
        timeout: Seconds of silence, beyond the budget, after which an arm counts as hanging; 120 by default.
        device: "cpu" or "cuda"; by default a GPU if there is one.
        seed: Seed of both runs.
        on_progress: Receives the progress.

    Returns:
        ``verdict`` ("faster" if b is), ``ratio`` (time of a / time of b) with its interval, ``rounds`` (pairs of
        processes), ``blocks``, ``by_position`` (the ratio of the steps at the start and later in the training),
        ``peak_memory_bytes`` (of each arm and rank, see ``engine/memory.py``), ``interleaved`` (False if the arms do
        not fit into memory together) and more.

    Raises:
        ConfigurationError: A wrong request.
        RunError: An arm could not run.
    """
    reset_shown_warnings()
    ref, seconds = TaskRef.of(task), parse_budget(budget)
    ref.begin("command")
    recipes = Recipe.coerce(a), Recipe.coerce(b)
    if processes > 1:
        with mark_warnings_shown():
            loaded = ref.load()
            for recipe in recipes:
                check_process_count(loaded, processes, make_methods(recipe))
            warn_oversubscribed(processes)
    device = pick_device(device)
    try:
        comparison = run_interleaved(
            ref,
            *recipes,
            budget=seconds,
            processes=(processes, processes),
            timeout=timeout or TIMEOUT_S,
            later_share=LATER_SHARE,
            device=device,
            seed=seed,
            on_progress=on_progress,
        )
    except MemoryExhaustedError as error:
        arm = error.arm or 0
        raise MemoryExhaustedError(f"{'ab'[arm]} ({recipes[arm]}) does not fit into memory: {error}") from None
    return {"task": str(ref), "device": ref.device(device), **comparison.to_json()}


def run_interleaved(
    task: TaskRef,
    a: Recipe,
    b: Recipe,
    *,
    budget: float,
    device: str,
    processes: tuple[int, int] = (1, 1),
    seed: int = 0,
    rounds: tuple[int, int] = (MIN_ROUNDS, MAX_ROUNDS),
    looks: Iterable[int] = LOOKS,
    timeout: float = TIMEOUT_S,
    longest: float | None = None,
    start_step: int = 0,
    later_share: float = 0.0,
    deadline: float | None = None,
    on_progress: ProgressCallback = no_progress,
) -> Comparison:
    """Measures two recipes in interleaved blocks; ``compare`` is its public form, and documents the other arguments.

    * ``budget``: seconds from when the first pair of processes is built; building further pairs is included.
    * ``rounds``: fewest and most rounds, each with a fresh pair of processes. There are fewer if the ratio is beyond
      doubt, and a single one, with as many blocks as fit, if the budget does not allow the fewest. (1, 1) is quick, and
      its interval as wide as PROCESS_SPREAD makes it.
    * ``looks``: numbers of pairs of blocks. The first is that of a round; a single round may stop after each of them.
    * ``timeout`` does not limit the building of an arm of one process, which waits for no other process.
    * ``longest``: seconds that MIN_PAIRS blocks of a strategy that communicates seldom may take, by default
      SYNC_PERIOD_BUDGETS budgets.
    * ``start_step``: step of a at which the blocks begin; in every round both arms train on to it, untimed.
    * ``later_share``: share of the budget (0 to 1) for blocks later in the training, if it is long enough.
    * ``deadline``: time of ``time.monotonic`` at which the comparison ends with the blocks that it has.

    Raises:
        RunError: an arm could not run.
        DeadlineError: there were fewer than MIN_PAIRS pairs of blocks at the deadline.
    """
    for recipe in (a, b):  # before processes are started
        task.check_recipe(recipe)
    began, noise = time.monotonic(), SystemNoise()
    arms = ArmSamples(a, processes=processes[0]), ArmSamples(b, processes=processes[1])
    longest = longest or SYNC_PERIOD_BUDGETS * budget
    done = Measurement(arms, budget, *rounds, sorted(looks), longest, start_step, later_share * budget, on_progress)
    where = task, (a, b), device, seed, processes, timeout + budget, deadline
    try:
        while not done.is_over:
            _run_round(done, ArmBuilder(*where, done.needs_evaluations(), on_progress))
    except DeadlineError:
        if not done.end_now():
            raise
    switches = sum(block["switches"] for block in arms[0].blocks)
    figures = noise.summary(100 * spread(arms[0].seconds_per_sample()), int(switches))
    figures |= gpu_summary([*arms[0].blocks, *arms[1].blocks])
    measured = done.why(), time.monotonic() - began, figures, done.by_position, not done.is_sequential
    return Comparison(done.verdict, done.ratio, *arms, *measured)


def _run_round(done: Measurement, builder: ArmBuilder) -> None:
    """Runs a round with both arms at once, or, from when memory does not suffice for that, one after the other."""
    if done.is_sequential:
        plans = [arm.plan for arm in done.arms if arm.plan]
        with ExitStack() as stack:
            done.run_round(SequentialPair(stack, builder, plans, order_of(done.rounds)))
        return
    try:
        # b first in the first round, to notice at once if it has no effect
        with build_pair(builder, order_of(done.rounds + 1)) as pair:
            done.run_round(pair)
    except ArmsDoNotFitError:
        done.run_sequentially()
