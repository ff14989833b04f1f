"""The step profile of a run: blocks of its real steps, timed phase by phase, with page faults and flops."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hasten.benchmarking.blocks import (
    SYNC_PERIOD_BUDGETS,
    block_steps,
    check_blocks_are_fair,
    evaluation_seconds_per_sample,
)
from hasten.benchmarking.fork_server import Worker
from hasten.benchmarking.gpu_state import gpu_summary
from hasten.benchmarking.ratio import spread
from hasten.benchmarking.system_noise import SystemNoise
from hasten.benchmarking.worker_group import WorkerGroup, start_workers
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import LARGER_BATCH, NoUpdate, ReplayedBatch, ResidentBatch, import_path
from hasten.profiling.ceilings import Ceilings, measure_ceilings
from hasten.profiling.time_phases import TimePhases
from hasten.reporting.result_schema import Flops

TIMING_SHARE = 0.4  # of the budget, for the phases; the rest is for the ceilings
MIN_PAIRS, MAX_PAIRS = 3, 8  # of blocks with and without the phase timer
FAIR_SECONDS = 60.0  # that blocks of ranks which communicate seldom may take, however small the budget
COUNTED_STEPS = 3
MANY_FAULTS = 100  # page faults a step; fewer are the background of the machine


@dataclass(frozen=True)
class StepProfile:
    """What was measured of a run. Times in seconds, shares between 0 and 1; None for what could not be measured."""

    plan: dict  # as ``Arm.build`` returned it
    phases: dict[str, float]  # share of the run's wall clock of each phase; they sum to 1
    ceilings: Ceilings  # those that can be measured in this one process
    step: float  # seconds of a step, without evaluations
    sample: float  # seconds per training sample, without evaluations
    evaluation: float | None  # seconds of an evaluation; None if the task has no validation data
    timing_cost: float  # relative increase of a step's time because its phases are timed
    faults_per_step: float  # minor page faults
    system_share: float  # time in the operating system / CPU time, or wall clock if that is longer
    issue_share: float  # of the time, until the host has queued a block's work; the GPU then finishes it
    queued_steps: float  # steps that the GPU had not finished when the host had queued the last one, as a fraction
    host_reads_per_step: float | None  # values that the host reads from the device
    input: Any  # throughput of the input pipeline, see ``InputThroughput``; only ``not_measured`` if that failed
    flops: Flops | None  # operations per second, the machine's peak and their quotient
    facts: frozenset[str]  # keys of ``FACTS`` that hold
    system_noise: dict  # how disturbed the machine was
    metric: dict[str, Any]  # what the run is judged by, as ``DiagnoseResult`` has it
    code: dict[str, Any]  # what a script's own code costs: ``synchronizations`` and ``functions``

    @property
    def wasted_share(self) -> float:
        """The part of ``system_share`` that an allocator which keeps memory could save: all, with MANY_FAULTS, or 0.

        Beside a GPU the system works for its driver, and the process waits in a loop: no allocator would save that.
        """
        return self.system_share if self.faults_per_step >= MANY_FAULTS and "cpu" in self.facts else 0.0

    def seconds_per_run(self, of_steps: float | None = None) -> float | None:
        """Estimated seconds of a whole run, its start and evaluations included; None if its length is unknown.

        ``of_steps``: seconds of all its steps; None: each takes as long as the first ones.
        """
        plan = self.plan
        if plan["steps"] is None:
            return None
        samples = plan["epochs"] * (plan["samples_per_epoch"] or plan["steps"] * plan["batch_size"] / plan["epochs"])
        steps = samples * self.sample if of_steps is None else of_steps
        return plan["start"] + steps + samples * evaluation_seconds_per_sample(plan, self.evaluation)


def profile_steps(
    task: TaskRef,
    recipe: Recipe,
    *,
    device: str,
    seed: int,
    budget: float,
    input_budget: float = 0.0,
    ceilings: bool = False,
    processes: int = 1,
    timeout: float | None = None,
    deadline: float | None = None,
    on_progress: ProgressCallback = no_progress,
) -> StepProfile:
    """Profiles a task under a recipe with its real steps, in about ``budget`` seconds.

    ``budget`` is for the phases and, with ``ceilings``, their ceilings, which get the larger part; ``input_budget`` are
    further seconds for the throughput of the input pipeline, which is not measured if it is 0. With several processes
    the phases are those of rank 0. The other arguments are those of ``diagnose``.

    Raises:
        DeadlineError: the phases were not measured at the deadline.
        RunError: the run could not be built or trained.
    """
    observers = (TimePhases, ReplayedBatch, NoUpdate, *((ResidentBatch,) if device != "cpu" else ()))
    methods = {**recipe.methods, **{import_path(method): {} for method in observers}}
    on_progress("building the run", 0.0, None)
    arguments = {"task": task, "methods": methods, "device": device, "seed": seed}
    with start_workers(processes, "hasten.profiling.probe:Probe", timeout, deadline, **arguments) as probe:
        plan = probe.call("build")
        noise, count = SystemNoise(), block_steps(plan)
        check_blocks_are_fair(recipe, plan, count, max(FAIR_SECONDS, SYNC_PERIOD_BUDGETS * budget), 2 * MIN_PAIRS)
        on_progress("timing the phases of the step", 0.1, budget)
        is_long = 2 * MIN_PAIRS * count * plan["step"] > budget
        timed, plain = _run_blocks(
            probe, count, budget * TIMING_SHARE if ceilings else budget, 1 if is_long else MIN_PAIRS
        )
        if task.command and plan["evaluation"] is None:  # a script may have evaluated first in these blocks
            plan |= probe.call("evaluations")
        evaluation = plan["evaluation"]
        if evaluation is not None and not is_long:
            evaluation = min(evaluation, probe.call("evaluate") or evaluation)  # a restarted script has none yet
        facts = probe.call("facts")
        extra = evaluation_seconds_per_sample(plan, evaluation)
        phases, measured = _phase_shares(timed, extra), Ceilings()
        if ceilings:
            shares = {"input": phases["input"], LARGER_BATCH: 1.0 - phases["evaluation"]}
            if "cuda" in facts:  # whatever the timer says: a copy waits for the steps that are queued before it
                shares["copy"] = 1.0
            shares |= {name: phases[name] for name in ("logging", "optimizer_step")}
            left = budget * (1 - TIMING_SHARE)
            times = {"count": count, "step": plan["step"], "extra": extra}
            rest = partial(_later, on_progress)
            measured = measure_ceilings(probe, shares, **times, budget=left, on_progress=rest)
        metric = (_call_if_possible(probe, "metric", seconds=input_budget) if input_budget else None) or {}
        operations = _call_if_possible(probe, "operations", count=1 if is_long else COUNTED_STEPS) or {}
        flops = _call_if_possible(probe, "flops", dtype=operations.get("dtype", "float32"))
        on_progress("the stages of the input pipeline", 1.0, input_budget)
        input_throughput = _input_throughput(probe, input_budget, processes) if input_budget else None
    both = timed + plain
    samples, seconds, steps = _sum(plain, "samples"), _sum(plain, "seconds"), _steps(plain, count)
    timing_costs = sorted(_per_sample(a) / _per_sample(b) for a, b in zip(timed, plain, strict=True))
    return StepProfile(
        plan=plan,
        phases=phases,
        ceilings=measured,
        step=seconds / steps,
        sample=seconds / samples,
        evaluation=evaluation,
        timing_cost=max(0.0, timing_costs[len(timing_costs) // 2] - 1),  # below zero it is noise
        faults_per_step=_sum(both, "faults") / _steps(both, count),
        system_share=_sum(both, "system") / max(_sum(both, "seconds"), _sum(both, "cpu")),
        issue_share=_sum(plain, "issue_seconds") / seconds,
        queued_steps=(seconds - _sum(plain, "issue_seconds")) * steps / len(plain) / seconds,
        host_reads_per_step=operations.get("host_reads_per_step"),
        input=input_throughput,
        flops=_flops_rates(flops, samples / seconds) if flops else None,
        facts=frozenset(facts),
        system_noise=noise.summary(100 * spread([_per_sample(block) for block in plain]), int(_sum(both, "switches")))
        | gpu_summary(both),
        metric=metric,
        code={name: operations.get(name, []) for name in ("synchronizations", "functions")},
    )


def _run_blocks(
    probe: Worker | WorkerGroup, count: int, budget: float, least: int = MIN_PAIRS
) -> tuple[list[dict], list[dict]]:
    """Runs blocks of ``count`` steps, with and without phase timer in turn: (timed blocks, plain blocks)."""
    timed, plain, began = [], [], time.monotonic()
    while len(plain) < least or (time.monotonic() - began < budget and len(plain) < MAX_PAIRS):
        timed.append(probe.call("timed_block", count=count))
        plain.append(probe.call("block", count=count))
    return timed, plain


def _steps(blocks: list[dict], count: int) -> float:
    """Steps of all blocks: ``count`` each, or as many as were left where a script has ended."""
    return sum(block.get("count", count) for block in blocks)


def _later(on_progress: ProgressCallback, what: str, done: float, seconds_left: float | None = None) -> None:
    """Progress of the ceilings, which come after the phases."""
    on_progress(what, TIMING_SHARE + (1 - TIMING_SHARE) * done, seconds_left)


def _phase_shares(blocks: list[dict], evaluation: float) -> dict[str, float]:
    """Shares of the wall clock of a run, from timed blocks and the seconds of evaluation per training sample.

    "logging" is what no phase accounts for: the loop, its log, reading losses.
    """
    samples = _sum(blocks, "samples")
    total = _sum(blocks, "seconds") + samples * evaluation
    shares = {phase: sum(block["phases"][phase] for block in blocks) / total for phase in blocks[0]["phases"]}
    shares["evaluation"] = samples * evaluation / total
    shares["logging"] = max(0.0, 1.0 - math.fsum(shares.values()))
    return {phase: share / math.fsum(shares.values()) for phase, share in shares.items()}


def _flops_rates(flops: Mapping[str, Any], samples_per_second: float) -> Flops:
    achieved, peak = flops["flops_per_sample"] * samples_per_second, flops["peak_flops"]
    return {
        "achieved_gflops": achieved / 1e9,
        "peak_gflops": peak / 1e9,
        "share": achieved / peak,
        "format": flops["format"],
        "best_format": flops["best_format"],
        "best_peak_gflops": flops["best_peak_flops"] / 1e9,
        "copy_gb_per_second": flops["copy_bytes_per_second"] / 1e9,
    }


def _call_if_possible(probe: Worker | WorkerGroup, method: str, **arguments: Any) -> dict | None:
    """Calls a measurement of the probe; None if it raises RunError, as under a CUDA graph or in a script."""
    try:
        return probe.call(method, **arguments)
    except RunError:
        return None


def _input_throughput(probe: Worker | WorkerGroup, budget: float, processes: int) -> dict:
    """Throughput of the input pipeline; a failure, also the death of the process, is a reason in ``not_measured``."""
    if processes > 1:
        return {"not_measured": {"input": "measured in one process only; leave --processes out"}}
    try:
        return probe.call("input", budget=budget)
    except (RunError, ConfigurationError) as error:
        return {"not_measured": {"input": str(error)}}


def _per_sample(block: Mapping[str, float]) -> float:
    return block["seconds"] / block["samples"]


def _sum(blocks: list[dict], key: str) -> float:
    return sum(block[key] for block in blocks)
