"""Diagnoses a job of several ranks: where a step of each goes, what talking costs, and who is waited for.

Runs inside the ranks, which all make the same calls. Blocks of real steps take turns in which a part of them is switched off, so that
what the machines do besides hits all kinds alike: as they are; without averaging the gradients; without it, but with a word to each
other after every backward pass, whose time is how long a rank waits for the latest one; and with one batch again and again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hasten._torch_compat import ddp_bucket_sizes
from hasten.benchmarking.arm import Arm
from hasten.benchmarking.compare import SYNC_PERIOD_BUDGETS, block_steps, check_blocks_are_fair
from hasten.benchmarking.ratio import ERROR, Ratio, ratio_of, spread
from hasten.benchmarking.system_noise import SystemNoise
from hasten.core.card import Card
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S, SINGLE_PROCESS, ProcessGroupInfo
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.distributed.process_group import check_ranks_agree, init_process_group
from hasten.engine.composition import check_conflicts, sort_methods
from hasten.engine.devices import pick_device
from hasten.engine.error_messages import explain_error
from hasten.engine.plan import Program
from hasten.engine.registry import DISTRIBUTED, drop_distributed, make_methods, method_class, method_names
from hasten.engine.resources import single_process_threads
from hasten.engine.tasks import TaskRef
from hasten.engine.train import device_of, identity_of
from hasten.launch.comm_benchmark import communication_device, neighbor_latency, seconds_per_call
from hasten.profiling.ablations import ReplayedBatch, disabled_phases, outside_name
from hasten.profiling.advise import advise
from hasten.profiling.communication import communication_cost, verdict_of
from hasten.profiling.facts import facts_of
from hasten.profiling.gradient_compression import SAVED_BY_ROUNDING, cast_speedup, rounding_seconds
from hasten.profiling.phase_timer import Timeline
from hasten.profiling.stragglers import find_straggler, phases_of_the_slowest, rank_phase_times, skew_of
from hasten.utils.durations import parse_budget

EXCHANGE, MEETING, INPUT = "exchange", "meeting", "input"
KINDS = {
    "whole": (),
    "own": (EXCHANGE, MEETING),
    "silent": (EXCHANGE,),
    "replayed": (INPUT,),
}  # of blocks, and what is switched in each
CEILINGS = {EXCHANGE: "silent", INPUT: "replayed"}
LEAST_ROUNDS, MOST_ROUNDS = 4, 14
LINK_BYTES = 1_000_000
EXCHANGES = 3  # in a row, by themselves
NOBODY_ELSE = "one process has no other to wait for; say --processes 2, or more, or leave launch out"
NOT_SHARED_SO = (
    "cannot measure the communication ceiling: gradient exchange can be disabled only under DistributedDataParallel"
)


def diagnose_ranks(
    task,
    *,
    recipe=None,
    budget: float | str = 60.0,
    device: str | None = None,
    seed: int = 0,
    watch: ProgressCallback = no_progress,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> dict:
    """What the ranks of the job that this process is in lose to each other.

    Args:
        as ``diagnose`` has them.
        patience: seconds to wait for another rank that says nothing.

    Returns:
        Plain data: ``verdict`` (a sentence), ``ranks`` (seconds of a step by phase, of each), ``skew``, ``communication`` (seconds of a step:
        the exchange by itself, exposed and hidden), ``straggler`` (who, how long, why; or None), ``links``, ``ceilings`` (time with / time
        without, with intervals), ``speedup`` over one process as the user would start it, with its ``threads``, and the ``efficiency`` (of the speed-up that
        so many devices or threads more would give at best), ``advice`` and ``not_advised``.

    Raises:
        Refusal: a wrong request, or this process is alone. Failure: the task could not run.
    """
    task, recipe, device, budget = TaskRef.of(task), Recipe.coerce(recipe), pick_device(device), parse_budget(budget)
    with init_process_group(device, timeout) as ranks:
        if ranks.is_single_process:
            raise ConfigurationError(NOBODY_ELSE)
        check_conflicts(sort_methods(make_methods(recipe)))
        given = task.load()
        code = task.fingerprint() if task.given is None else None
        check_ranks_agree(ranks, identity_of(given, seed, code, recipe))
        without_metric = TaskRef.of(dataclasses.replace(given, validation_data=None))
        probe = RankProbe(without_metric, recipe, device_of(ranks, device), seed, ranks)
        try:
            found = _diagnosed(probe, ranks, budget, watch if ranks.is_main_process else no_progress)
        except Exception as error:
            raise explain_error(error, "the training", given.batch_size or 0) from error
        finally:
            probe.end()
    return {"kind": "diagnose_ranks", "task": str(task), "recipe": str(recipe), "device": device, **found}


def _diagnosed(probe: RankProbe, ranks: ProcessGroupInfo, budget: float, watch: ProgressCallback) -> dict:
    began, noise = time.monotonic(), SystemNoise()
    watch("building the run", 0.0, None)
    plan = probe.build()
    plan |= {"step": ranks.all_reduce_max([plan["step"]])[0]}
    count = block_steps(plan)
    check_blocks_are_fair(probe.plain, plan, count, SYNC_PERIOD_BUDGETS * budget, LEAST_ROUNDS * len(probe.kinds))
    single, why_not = _single(probe, ranks)
    blocks, exchanges = _rounds(probe, single, count, ranks, began + budget, watch)
    told = [json.loads(each) for each in ranks.all_gather(json.dumps(blocks).encode())]
    links = neighbor_latency(LINK_BYTES, ranks, communication_device(ranks))

    paces = {kind: _of_the_slowest(told, kind, "pace") for kind in probe.kinds}
    step = median(_of_the_slowest(told, "whole", "step"))
    ceilings = {name: ratio_of(paces["whole"], paces[kind], ERROR) for name, kind in CEILINGS.items() if kind in paces}
    alone = [block["pace"] for block in told[0]["alone"]]
    speedup = ratio_of(alone, paces["whole"], ERROR) if alone else None
    rows = rank_phase_times(told)
    talk = communication_cost(step, ceilings.get(EXCHANGE), probe.buckets(), exchanges)
    straggler = find_straggler(rows, told, step, links, talk["exposed"])
    advice, against = _advice(probe, ceilings, phases_of_the_slowest(rows, step), talk, step)
    not_measured = ({} if EXCHANGE in ceilings else {EXCHANGE: NOT_SHARED_SO, "straggler": NOT_SHARED_SO}) | why_not
    return {
        "verdict": verdict_of(straggler, ceilings, talk, rows, step),
        "processes": ranks.world_size,
        "backend": dist.get_backend(),
        "ranks": rows,
        "skew": skew_of(rows),
        "communication": talk,
        "straggler": straggler,
        "links": [
            {"from": rank, "to": (rank + 1) % ranks.world_size, "bytes": LINK_BYTES, "seconds": each}
            for rank, each in enumerate(links)
        ],
        "ceilings": {name: ratio.to_json() for name, ratio in ceilings.items()},
        "speedup": speedup and speedup.to_json(),
        "threads": {"each": torch.get_num_threads(), "alone": single_process_threads()},
        "efficiency": speedup and speedup.median / _times_as_much(probe, ranks),
        "not_measured": not_measured,
        "advice": advice,
        "not_advised": against,
        "facts": sorted(facts_of(probe.program)),
        "batch_size": plan["batch_size"],
        "seconds_per_step": step,
        "samples_per_second": 1 / median(paces["whole"]),
        "blocks": len(paces["whole"]),
        "system_noise": noise.summary(
            100 * spread(paces["whole"]), sum(block["switches"] for block in told[0]["whole"])
        ),
        "seconds": time.monotonic() - began,
    }


class RankProbe(Arm):
    """This rank's part of a run whose exchange of gradients and whose input can be switched off, block by block. All ranks call the same."""

    def __init__(self, task: TaskRef, recipe: Recipe, device: str, seed: int, ranks: ProcessGroupInfo):
        self.plain, self.waited, self.waits = recipe, 0.0, []
        self.steps = (nothing for nothing in ())
        methods = {**recipe.methods, outside_name(Timeline): {}}
        super().__init__(
            task, methods, device, seed, dataclasses.replace(ranks, all_reduce_max=self._timed(ranks.all_reduce_max))
        )

    def program_of(self, task: Task) -> Program:
        """All batches and words of the other ranks are taken away with the input, so that is switched outermost."""
        program = super().program_of(task)
        model = program.run.model
        self.shared = model if isinstance(model, DistributedDataParallel) else None
        train = ReplayedBatch().data(program.train, program.run)
        return dataclasses.replace(program, train=train, forward_backward=self._switchable(program))

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        return {
            kind: switched for kind, switched in KINDS.items() if self.shared is not None or EXCHANGE not in switched
        }

    def block(self, count: int, switched: tuple[str, ...]) -> dict:
        """So many steps: seconds of one, of one sample of the whole batch, of each phase, of the processor, and of every wait."""
        run = self.program.run
        tape, away = run.checkpoint_state["timeline"], disabled_phases(run)
        before = (
            [weight.detach().clone() for weight in run.unwrapped_model.parameters()] if EXCHANGE in switched else []
        )
        run.ranks.any(False)  # all begin together
        self.waits, self.waited = [], 0.0
        away.update(switched)
        tape.start()
        block = self.train(count)
        phases = tape.stop()
        away.clear()
        with torch.no_grad():
            for weight, was in zip(
                run.unwrapped_model.parameters(), before, strict=bool(before)
            ):  # the same again on all ranks
                weight.copy_(was)
        if not block["samples"]:
            raise RunError("the training ended within a block of steps")
        return {
            "pace": block["seconds"] / block["samples"],
            "step": block["seconds"] / count,
            "cpu": block["cpu"] / count,
            "switches": block["switches"],
            "phases": {phase: seconds / count for phase, seconds in phases.items()},
            "waits": self.waits,
        }

    def buckets(self) -> list[int] | None:
        """Bytes of the gradients that travel together; None where a method changes how they travel."""
        if self.shared is None:
            return None
        return ddp_bucket_sizes(self.shared)

    def exchange(self) -> Callable[[], None] | None:
        """The same all-reduces as in a step, with nothing beside them."""
        sizes = self.buckets()
        if sizes is None:
            return None
        like = next(self.shared.parameters())
        given = [torch.zeros(size // like.element_size(), dtype=like.dtype, device=like.device) for size in sizes]
        group = self.shared.process_group

        def call() -> None:
            for work in [dist.all_reduce(each, group=group, async_op=True) for each in given]:
                work.wait()

        return call

    def end(self) -> None:
        """Lets go of the pass that is being read, so that worker processes end now."""
        self.steps.close()

    def _sum_over_ranks(self, used: dict[str, float]) -> dict[str, float]:
        return used  # every rank is looked at by itself

    def _meet(self) -> None:
        pass  # where ranks meet is what is measured

    def _switchable(self, program: Program) -> Callable:
        micro, away, ranks = program.forward_backward, disabled_phases(program.run), program.run.ranks

        def switchable(batch):
            if EXCHANGE not in away:
                return micro(batch)
            with self.shared.no_sync():
                loss = micro(batch)
            if MEETING in away:
                self._synchronize()
                ranks.any(False)
                self.waits.append(self.waited)
                self.waited = 0.0
            return loss

        return switchable

    def _timed(self, most: Callable) -> Callable:
        """What the ranks tell each other before a step is waiting, too."""

        def timed(numbers):
            began = time.perf_counter()
            result = most(numbers)
            self.waited += time.perf_counter() - began
            return result

        return timed


def _rounds(
    probe: RankProbe, single: Arm | None, count: int, ranks: ProcessGroupInfo, until: float, watch: ProgressCallback
) -> tuple[dict[str, list[dict]], list[float]]:
    """Blocks of every kind, in turns, and seconds of each exchange by itself."""
    blocks: dict[str, list[dict]] = {kind: [] for kind in (*probe.kinds, "alone")}
    exchanges, exchange, began = [], probe.exchange(), time.monotonic()
    for number in range(1, MOST_ROUNDS + 1):
        for kind in list(probe.kinds)[:: 1 if number % 2 else -1]:
            blocks[kind].append(probe.block(count, probe.kinds[kind]))
        if exchange:
            exchanges.append(seconds_per_call(exchange, EXCHANGES, ranks, probe.program.run.device))
        if single:  # the others wait for the first rank
            with _threads_of_one():
                block = single.train(max(1, count // ranks.world_size))
            blocks["alone"].append({"pace": block["seconds"] / block["samples"]})
        now = time.monotonic()
        left = min(until - now, (now - began) / number * (MOST_ROUNDS - number))
        watch("timing the ranks", min(1.0, (now - began) / max(1e-9, now - began + left)), max(0.0, left))
        if ranks.any(number >= LEAST_ROUNDS and now > until):
            break
    return blocks, exchanges


def _single(probe: RankProbe, ranks: ProcessGroupInfo) -> tuple[Arm | None, dict[str, str]]:
    """On the first rank: the same training by one process, if there is memory enough for the whole batch; why not, on all."""
    single, why = None, ""
    if ranks.is_main_process:
        machines = ranks.world_size / int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
        needed = (
            1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * machines
        )  # what is free here is a rank's part of this machine
        try:
            if probe.program.run.services.free_memory() < needed:
                raise RunError("there may be too little memory to try one process")
            single = Arm(probe.task, drop_distributed(probe.plain).methods, probe.device, probe.seed, SINGLE_PROCESS)
            with _threads_of_one():
                single.build()
        except Exception as error:  # whatever a second copy of the task meets: the diagnosis is of the job
            single, why = None, str(error) or type(error).__name__
    why = ranks.broadcast(why.encode()).decode()
    return single, {"speedup": why} if why else {}


@contextmanager
def _threads_of_one() -> Iterator[None]:
    """Inside, this rank has the threads that one process would have; the other ranks wait, and take none."""
    before = torch.get_num_threads()
    torch.set_num_threads(single_process_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _times_as_much(probe: RankProbe, ranks: ProcessGroupInfo) -> float:
    """How many times the devices, or the threads, of one process the job has."""
    on_cpu = probe.program.run.device.type == "cpu"
    return ranks.world_size * (torch.get_num_threads() / single_process_threads() if on_cpu else 1)


def _of_the_slowest(told: list[dict], kind: str, what: str) -> list[float]:
    return [max(block[what] for block in blocks) for blocks in zip(*(each[kind] for each in told), strict=True)]


def _talks_less(card: Card) -> bool:
    """Whether a method changes how gradients travel, rather than what a process keeps."""
    return DISTRIBUTED in card.applies_to and "backward" in card.accelerates and "full_weights" not in card.invalidates


def _goes_with(recipe: Recipe, name: str) -> bool:
    """Whether a method could be added: another strategy than the one in use would take its place, of which no phase of this one tells anything."""
    try:
        check_conflicts(make_methods(recipe.with_method(name)))
    except ConfigurationError:
        return False
    return True


def _advice(
    probe: RankProbe, ceilings: dict[str, Ratio], phases: dict[str, float], talk: dict, step: float
) -> tuple[list[dict], list[dict]]:
    """Methods that change how ranks talk can give at most what it would be not to talk; of rounding more is known."""
    cards = {
        name: method_class(name).card
        for name in method_names()
        if name not in probe.plain.methods and _goes_with(probe.plain, name)
    }
    talking = {name for name, card in cards.items() if _talks_less(card)} if EXCHANGE in ceilings else ()
    measured = {name: max(1.0, ratio.median) for name, ratio in ceilings.items()}
    headroom, told = {INPUT: measured[INPUT]} | dict.fromkeys(talking, measured.get(EXCHANGE)), {}
    rounding = [name for name in talking if cards[name].gradient_bytes_saved == SAVED_BY_ROUNDING]
    if rounding and talk["seconds"] and talk["exposed"] is not None:
        codec = rounding_seconds(talk["bytes"], probe.program.run.device)
        for name in rounding:
            headroom[name], told[name] = cast_speedup(talk, codec, step)
    advice, against = advise(phases, headroom, facts_of(probe.program), cards)
    for row in (*advice, *against):
        row["why"] = told.get(row["method"], row["why"])
        if cards[row["method"]].default_for and talking:
            row["why"] += "; it is in use, so that is for its settings"
    return advice, against
