"""The anatomy of a run: blocks of its real steps, timed phase by phase, and what a look at its operations shows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hasten.benchmarking.compare import SYNC_PERIOD_BUDGETS, block_steps, evaluation_seconds_per_sample, check_blocks_are_fair
from hasten.benchmarking.fork_server import Worker
from hasten.benchmarking.ratio import spread
from hasten.benchmarking.system_noise import SystemNoise
from hasten.benchmarking.worker_group import WorkerGroup, start_workers
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import LARGER_BATCH, NoUpdate, ReplayedBatch, outside_name
from hasten.profiling.ceilings import Ceilings, measure_ceilings
from hasten.profiling.phase_timer import Timeline
from hasten.reporting.result_schema import Flops

TIMELINE_SHARE = 0.4  # of the budget; the rest is for taking phases away
LEAST_PAIRS, MOST_PAIRS = 3, 8  # of blocks with and without the phases being timed
FAIR_SECONDS = 60.0  # that blocks of processes which talk seldom may take, however small the budget
WATCHED_STEPS = 3
LEAST_FAULTS = 100  # page faults a step; fewer are the machine's background


@dataclass(frozen=True)
class StepProfile:
    """What a run showed of itself. Times in seconds, shares between 0 and 1.

    Attributes:
        plan: as the arm's ``build`` gave it, with ``build_seconds``.
        phases: share of the run's wall clock of each phase; they sum to 1.
        headroom: the ceilings that this one process could measure.
        step, sample: of the training alone, without evaluations.
        timing_cost: how much longer a step takes because its phases are timed.
        system_share: of the processors' time, spent in the operating system.
        input: throughput of the input pipeline, as of ``measure_input``; only ``not_measured`` if that failed.
        flops: operations a second reached, the machine's peak and their quotient; None where they could not be counted.
    """

    plan: dict
    phases: dict[str, float]
    headroom: Ceilings
    step: float
    sample: float
    evaluation: float | None
    timing_cost: float
    faults_per_step: float
    system_share: float
    host_reads_per_step: float | None
    input: dict | None
    flops: Flops | None
    facts: frozenset[str]
    noise: dict

    @property
    def faults_show(self) -> bool:
        return self.faults_per_step >= LEAST_FAULTS

    def seconds_a_run(self) -> float | None:
        """Start + steps + evaluations; None where the data's length is unknown."""
        plan = self.plan
        if plan["steps"] is None:
            return None
        samples = plan["epochs"] * (plan["samples_per_epoch"] or plan["steps"] * plan["batch_size"] / plan["epochs"])
        return plan["start"] + samples * (self.sample + evaluation_seconds_per_sample(plan, self.evaluation))


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
    watch: ProgressCallback = no_progress,
) -> StepProfile:
    """The anatomy of a task under a recipe, from about ``budget`` seconds of its real steps.

    Args:
        input_budget: seconds for the throughput of the input pipeline, beside ``budget``; 0: it is not measured.
        ceilings: whether to measure too what it would be to do without a phase; takes the larger part of the budget.
        processes: that train together; the phases are those of rank 0.
        patience: seconds of silence after which they count as hanging.

    Raises:
        Failure: the run could not be built or trained.
    """
    methods = {**recipe.methods, **{outside_name(method): {} for method in (Timeline, ReplayedBatch, NoUpdate)}}
    watch("building the run", 0.0, None)
    where = {"task": task.to_json(), "device": device, "seed": seed}
    with start_workers(processes, "hasten.profiling.probe:Probe", timeout, methods=methods, **where) as probe:
        began = time.monotonic()
        plan = probe.call("build")
        plan["build_seconds"] = time.monotonic() - began
        noise, count = SystemNoise(), block_steps(plan)
        check_blocks_are_fair(recipe, plan, count, max(FAIR_SECONDS, SYNC_PERIOD_BUDGETS * budget), 2 * LEAST_PAIRS)
        watch("timing the phases of the step", 0.1, budget)
        timed, plain = _blocks(probe, count, budget * TIMELINE_SHARE if ceilings else budget)
        evaluation = None if plan["evaluation"] is None else min(plan["evaluation"], probe.call("evaluate"))
        extra = evaluation_seconds_per_sample(plan, evaluation)
        phases, headroom = _shares(timed, extra), Ceilings()
        if ceilings:
            shares = {"input": phases["input"], LARGER_BATCH: 1.0 - phases["evaluation"]} | {
                name: phases[name] for name in ("logging", "optimizer_step")
            }
            left = budget * (1 - TIMELINE_SHARE)
            headroom = measure_ceilings(
                probe, shares, count=count, step=plan["step"], extra=extra, budget=left, watch=watch
            )
        facts = probe.call("facts")
        operations = _if_possible(probe, "operations", count=WATCHED_STEPS) or {}
        arithmetic = _if_possible(probe, "arithmetic", dtype=operations.get("dtype", "float32"))
        watch("the stages of the input pipeline", 1.0, input_budget)
        input_throughput = _input_throughput(probe, input_budget, processes) if input_budget else None
    both = timed + plain
    samples, seconds = _sum(plain, "samples"), _sum(plain, "seconds")
    return StepProfile(
        plan=plan,
        phases=phases,
        headroom=headroom,
        step=seconds / (count * len(plain)),
        sample=seconds / samples,
        evaluation=evaluation,
        timing_cost=_middle([_pace(a) / _pace(b) for a, b in zip(timed, plain, strict=True)]) - 1,
        faults_per_step=_sum(both, "faults") / (count * len(both)),
        system_share=_sum(both, "system") / max(_sum(both, "seconds"), _sum(both, "cpu")),
        host_reads_per_step=operations.get("host_reads_per_step"),
        input=input_throughput,
        flops=arithmetic and _rates(arithmetic, samples / seconds),
        facts=frozenset(facts),
        noise=noise.summary(100 * spread([_pace(block) for block in plain]), int(_sum(both, "switches"))),
    )


def _blocks(probe: Worker | WorkerGroup, count: int, budget: float) -> tuple[list[dict], list[dict]]:
    """Blocks with and without the phases being timed, in turn."""
    timed, plain, began = [], [], time.monotonic()
    while len(plain) < LEAST_PAIRS or (time.monotonic() - began < budget and len(plain) < MOST_PAIRS):
        timed.append(probe.call("anatomy", count=count))
        plain.append(probe.call("block", count=count))
    return timed, plain


def _shares(blocks: list[dict], evaluation: float) -> dict[str, float]:
    """Of the whole wall clock, evaluations included; what no phase accounts for is the loop itself, its log and its reading of losses."""
    samples = _sum(blocks, "samples")
    whole = _sum(blocks, "seconds") + samples * evaluation
    shares = {phase: sum(block["phases"][phase] for block in blocks) / whole for phase in blocks[0]["phases"]}
    shares["evaluation"] = samples * evaluation / whole
    shares["logging"] = max(0.0, 1.0 - math.fsum(shares.values()))
    return {phase: share / math.fsum(shares.values()) for phase, share in shares.items()}


def _rates(arithmetic: dict, samples_a_second: float) -> Flops:
    achieved, peak = arithmetic["flops_a_sample"] * samples_a_second, arithmetic["peak_flops"]
    return {"achieved_gflops": achieved / 1e9, "peak_gflops": peak / 1e9, "share": achieved / peak}


def _if_possible(probe: Worker | WorkerGroup, method: str, **arguments) -> dict | None:
    """What a look inside gives; None for a run that does not bear being looked at (a captured graph, a compiled step)."""
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


def _pace(block: dict) -> float:
    return block["seconds"] / block["samples"]


def _sum(blocks: list[dict], key: str) -> float:
    return sum(block[key] for block in blocks)


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
