"""Profiles a job of several ranks: the phases of a step on each rank, the cost of communication, and the straggler.

Runs inside the ranks, which all make the same calls. Blocks of real steps of several kinds (``rank_probe.py``) take
turns, so that a disturbance of the machines affects all kinds alike.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hasten.benchmarking.arm import Arm
from hasten.benchmarking.blocks import SYNC_PERIOD_BUDGETS, block_steps, check_blocks_are_fair
from hasten.benchmarking.ratio import ALPHA, Ratio, ratio_of, spread
from hasten.benchmarking.system_noise import SystemNoise
from hasten.core.card import REMEDIES, Card
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S, SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.distributed.process_group import check_ranks_agree, init_process_group
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.devices import pick_device
from hasten.engine.error_messages import explain_error
from hasten.engine.memory import held_bytes, memory_peak
from hasten.engine.registry import DISTRIBUTED, drop_distributed, make_methods, method_class, method_names
from hasten.engine.resources import single_process_threads
from hasten.engine.tasks import TaskRef
from hasten.engine.train import device_of, run_identity
from hasten.launch.comm_benchmark import communication_device, neighbor_latency, seconds_per_call
from hasten.profiling.advise import advise
from hasten.profiling.communication import (
    HALF_PRECISION_SAVING,
    cast_speedup,
    communication_cost,
    describe_job_diagnosis,
    measure_cast_seconds,
)
from hasten.profiling.probe import facts_of
from hasten.profiling.rank_probe import EXCHANGE, INPUT, RankProbe
from hasten.profiling.stragglers import find_straggler, rank_phase_times, skew_of, slowest_rank_shares
from hasten.reporting.result_schema import Advice, NotAdvised
from hasten.utils.durations import parse_budget
from hasten.utils.process_setting import with_setting

CEILINGS = {EXCHANGE: "no_exchange", INPUT: "no_input"}  # the kind of block that each is measured with
MIN_ROUNDS, MAX_ROUNDS = 4, 14
LINK_BYTES = 1_000_000
EXCHANGES = 3  # per measurement of the exchange by itself
ONE_RANK = "a single process has no other ranks to profile; pass --processes N with N >= 2, or leave `launch` out"
DDP_ONLY = (
    "cannot measure the communication ceiling: gradient exchange can be disabled only under DistributedDataParallel"
)


def diagnose_ranks(
    task: Any,
    *,
    recipe: Recipe | str | Path | Iterable[str] | None = None,
    budget: float | str = 60.0,
    device: str | None = None,
    seed: int = 0,
    on_progress: ProgressCallback = no_progress,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> dict:
    """Measures what the ranks of a job lose by communication and by waiting for each other. All ranks call it.

    The arguments are those of ``diagnose``; ``timeout`` are the seconds to wait for another rank in a collective.
    Rank 0 calls ``on_progress``.

    Returns:
        Plain data. ``verdict``: a sentence. ``ranks``: seconds of a step by phase, of each rank. ``skew``: phase ->
        seconds between the slowest and the fastest rank. ``communication``: seconds of the exchange by itself, exposed
        and hidden. ``straggler``: rank, seconds and cause, or None. ``links``: seconds of a message of 1 MB to the next
        rank. ``ceilings``: time with / time without, with intervals. ``speedup`` over one process with all
        ``threads``. ``efficiency``: speed-up / factor of devices or threads. ``advice`` and ``not_advised``: methods.

    Raises:
        ConfigurationError: a wrong request, or there is only one rank.
        RunError: the task could not run.
    """
    task, recipe, device, budget = TaskRef.of(task), Recipe.coerce(recipe), pick_device(device), parse_budget(budget)
    with init_process_group(device, timeout) as ranks:
        if ranks.is_single_process:
            raise ConfigurationError(ONE_RANK)
        check_conflicts(sort_methods(make_methods(recipe)))
        loaded = task.load()
        code = task.fingerprint() if task.obj is None else None
        check_ranks_agree(ranks, run_identity(loaded, seed, code, recipe))
        without_metric = TaskRef.of(dataclasses.replace(loaded, validation_data=None))
        probe = RankProbe(without_metric, recipe, device_of(ranks, device), seed, ranks)
        try:
            result = _profile(probe, ranks, budget, on_progress if ranks.is_main_process else no_progress)
        except Exception as error:
            raise explain_error(error, "the training", loaded.batch_size or 0) from error
        finally:
            probe.steps.close()  # ends the worker processes of the current epoch
    return {"kind": "diagnose_ranks", "task": str(task), "recipe": str(recipe), "device": device, **result}


def _profile(probe: RankProbe, ranks: ProcessGroupInfo, budget: float, on_progress: ProgressCallback) -> dict:
    began, noise = time.monotonic(), SystemNoise(os.getppid() or None)  # of the launcher of all ranks here
    on_progress("building the run", 0.0, None)
    plan = probe.build()
    plan |= {"step": ranks.all_reduce_max([plan["step"]])[0]}
    count = block_steps(plan)
    check_blocks_are_fair(probe.plain_recipe, plan, count, SYNC_PERIOD_BUDGETS * budget, MIN_ROUNDS * len(probe.kinds))
    single, no_speedup = _build_single_process(probe, ranks)
    blocks, exchanges = _run_rounds(probe, single, count, ranks, began + budget, on_progress)
    rank_blocks = [json.loads(content) for content in ranks.all_gather(json.dumps(blocks).encode())]
    links = neighbor_latency(LINK_BYTES, ranks, communication_device(torch.device(probe.device)))

    times = {kind: _slowest(rank_blocks, kind, "seconds_per_sample") for kind in probe.kinds}
    step = median(_slowest(rank_blocks, "plain", "seconds_per_step"))
    ceilings = {name: ratio_of(times["plain"], times[kind], ALPHA) for name, kind in CEILINGS.items() if kind in times}
    single_times = [block["seconds_per_sample"] for block in rank_blocks[0]["single_process"]]
    speedup = ratio_of(single_times, times["plain"], ALPHA) if single_times else None
    rows = rank_phase_times(rank_blocks)
    cost = communication_cost(step, ceilings.get(EXCHANGE), probe.buckets(), exchanges)
    straggler = find_straggler(rows, rank_blocks, step, links, cost["exposed"])
    advice, not_advised = _advise(probe, ceilings, slowest_rank_shares(rows, step), cost, step)
    not_measured = {} if EXCHANGE in ceilings else {EXCHANGE: DDP_ONLY, "straggler": DDP_ONLY}
    switches = sum(block["switches"] for block in rank_blocks[0]["plain"])
    on_cpu = probe.program.run.device.type == "cpu"
    # devices (on the CPU: threads) of the job / those of a single process
    resource_factor = ranks.world_size * (torch.get_num_threads() / single_process_threads() if on_cpu else 1)
    return {
        "verdict": describe_job_diagnosis(straggler, ceilings, cost, rows, step),
        "processes": ranks.world_size,
        "backend": dist.get_backend(),
        "ranks": rows,
        "skew": skew_of(rows),
        "communication": cost,
        "straggler": straggler,
        "links": [
            {"from": rank, "to": (rank + 1) % ranks.world_size, "bytes": LINK_BYTES, "seconds": seconds}
            for rank, seconds in enumerate(links)
        ],
        "ceilings": {name: ratio.to_json() for name, ratio in ceilings.items()},
        "speedup": speedup and speedup.to_json(),
        "threads": {"per_rank": torch.get_num_threads(), "single_process": single_process_threads()},
        "efficiency": speedup and speedup.median / resource_factor,
        "not_measured": not_measured | no_speedup,
        "advice": advice,
        "not_advised": not_advised,
        "facts": sorted(facts_of(probe.program)),
        "batch_size": plan["batch_size"],
        "peak_memory_bytes": plan["peak_memory"],
        "seconds_per_step": step,
        "samples_per_second": 1 / median(times["plain"]),
        "blocks": len(times["plain"]),
        "system_noise": noise.summary(100 * spread(times["plain"]), switches),
        "seconds": time.monotonic() - began,
    }


def _run_rounds(
    probe: RankProbe,
    single: Arm | None,
    count: int,
    ranks: ProcessGroupInfo,
    until: float,
    on_progress: ProgressCallback,
) -> tuple[dict[str, list[dict]], list[float]]:
    """Runs blocks of all kinds in turns: ({kind: blocks}, seconds of each gradient exchange alone)."""
    blocks: dict[str, list[dict]] = {kind: [] for kind in (*probe.kinds, "single_process")}
    exchanges, exchange, began = [], probe.exchange(), time.monotonic()
    for index in range(1, MAX_ROUNDS + 1):
        for kind in list(probe.kinds)[:: 1 if index % 2 else -1]:
            blocks[kind].append(probe.block(count, probe.kinds[kind]))
        if exchange:
            exchanges.append(seconds_per_call(exchange, EXCHANGES, ranks, probe.program.run.device))
        if single:  # the other ranks wait for rank 0
            with _all_threads():
                block = single.train(max(1, count // ranks.world_size))
            blocks["single_process"].append({"seconds_per_sample": block["seconds"] / block["samples"]})
        now = time.monotonic()
        left = min(until - now, (now - began) / index * (MAX_ROUNDS - index))
        on_progress("timing the ranks", min(1.0, (now - began) / max(1e-9, now - began + left)), max(0.0, left))
        if ranks.any(index >= MIN_ROUNDS and now > until):
            break
    return blocks, exchanges


def _build_single_process(probe: RankProbe, ranks: ProcessGroupInfo) -> tuple[Arm | None, dict[str, str]]:
    """(on rank 0: arm of the same training in one process; {"speedup": reason} on all ranks if there is none)."""
    single, why = None, ""
    if ranks.is_main_process:
        peak = memory_peak(probe.program.run.device)
        ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
        # a full batch needs the memory of all ranks; on the CPU what is available is this rank's part of its node
        needed = held_bytes(peak) * ranks.world_size / (1 if "reserved" in peak else ranks_of_node)
        try:
            if peak["available"] - peak["current"] < needed:
                raise RunError("the speed-up over one process is not measured: memory may not suffice for it")
            methods = drop_distributed(probe.plain_recipe).methods
            single = Arm(probe.task, methods, probe.device, probe.seed, SINGLE_PROCESS)
            with _all_threads():
                single.build()
        except Exception as error:  # a second copy of the task may fail in any way; the job is still diagnosed
            single, why = None, str(error) or type(error).__name__
    why = ranks.broadcast(why.encode()).decode()
    return single, {"speedup": why} if why else {}


def _slowest(rank_blocks: list[dict], kind: str, key: str) -> list[float]:
    """Maximum over the ranks of the value ``key``, for each block of a kind."""
    return [max(block[key] for block in blocks) for blocks in zip(*(rank[kind] for rank in rank_blocks), strict=True)]


def _changes_communication(card: Card) -> bool:
    """Whether a method makes the exchange of gradients faster, while each rank still holds all weights."""
    return DISTRIBUTED in card.applies_to and "backward" in card.accelerates and "full_weights" not in card.invalidates


def _is_compatible(recipe: Recipe, name: str) -> bool:
    """Whether a method can be added to the recipe without a conflict; a second strategy always conflicts."""
    try:
        check_conflicts(make_methods(recipe.with_method(name)))
    except ConfigurationError:
        return False
    return True


def _advise(
    probe: RankProbe, ceilings: dict[str, Ratio], phases: dict[str, float], cost: dict, step: float
) -> tuple[list[Advice], list[NotAdvised]]:
    """(advice, not advised) as ``advise``; the bound of 16-bit gradients includes the time to round them."""
    recipe = probe.plain_recipe
    names = [name for name in method_names() if name not in recipe.methods and _is_compatible(recipe, name)]
    cards = {name: method_class(name).card for name in names}
    medians = {name: max(1.0, ratio.median) for name, ratio in ceilings.items()}
    exchanging = [name for name in cards if EXCHANGE in ceilings and _changes_communication(cards[name])]
    bounds = {INPUT: medians[INPUT]} | dict.fromkeys(exchanging, medians.get(EXCHANGE, 1.0))
    reasons: dict[str, str] = {}
    rounding = [name for name in exchanging if cards[name].gradient_bytes_saved == HALF_PRECISION_SAVING]
    if rounding and cost["seconds"] and cost["exposed"] is not None:
        seconds = measure_cast_seconds(cost["bytes"], probe.program.run.device)
        for name in rounding:
            bounds[name], reasons[name] = cast_speedup(cost, seconds, step)
    facts = facts_of(probe.program)
    advice, not_advised = advise(phases, bounds, facts, cards, facts & REMEDIES.keys())
    for row in (*advice, *not_advised):
        row["why"] = reasons.get(row["method"], row["why"])
        if cards[row["method"]].default_for and exchanging:
            row["why"] += "; it is in use, so this concerns its options"
    return advice, not_advised


def _all_threads() -> AbstractContextManager[None]:
    """Context manager: gives this rank all threads of a single process, while the other ranks only wait."""
    return with_setting(nullcontext, torch.set_num_threads, single_process_threads(), torch.get_num_threads)()
