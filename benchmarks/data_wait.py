"""Data wait: the fraction of a training step that waits for its batch, on every workload of the suite.

Arms: the workload as it is, the baseline (its own dataset, read sample by sample in the training process), and
hasten's data methods, each with its defaults. Every arm trains in a process of its own; they run in turns, block by
block, and the others are suspended. All arms train on the same batches, so differences between steps are due to the
loader; time to a target is not measured. The wait is what ``hasten diagnose`` calls input: from requesting a batch to
having it.

A method that stores the data in memory reads all samples once before its first step. This is reported separately, in
seconds and as the wait of a whole run of the workload: (starting + waiting) / (starting + steps). Two bounds: *gather*,
the bytes of a batch gathered from memory in random order by the training thread, as a fraction of such a step; *read
once*, every sample read once by all cores at the rate of one and gathered from then on, as a fraction of such a run.
Files are in the page cache.

Figure: the fastest arm of each workload waits at most 1 % of its steps' time; where the gather bound is larger, it is
reported instead.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from contextlib import ExitStack

import torch
from _common import Interval, finish, in_turns, interval, parser, print_line, print_progress, show

from hasten import ConfigurationError, Recipe, RunError
from hasten.benchmarking.fork_server import Worker
from hasten.engine.environment import cores
from hasten.engine.registry import method_names
from hasten.engine.tasks import TaskRef
from hasten.profiling.ablations import import_path
from hasten.profiling.probe import Probe
from hasten.profiling.time_phases import TimePhases
from hasten.utils.batch import batch_size, batch_tensors

FIGURE = 0.01
WORKLOADS = ("digits", "adult", "fashion_mnist", "tiny_shakespeare", "cifar10", "imdb")
TEXTBOOK = "textbook"  # the baseline; a key of published records
TUNED = "autotune_loader"
METHODS = ("in_memory_batches", "loader_workers", TUNED)
STORE = (
    # bytes of the store that the bound gathers from, if the data are that large: more than the CPU caches hold
    256_000_000
)
GATHERS = 50
FEWEST = 5  # steps per block
CONVERGENCE_TIMEOUT_S = 12.0  # seconds in which an autotuner may converge before it is timed
HEADINGS = (
    "workload",
    "loader",
    "wait, of a step",
    "bound: gather",
    "step, ms",
    "steps a second, over the baseline's",
    "start, s more",
    "wait, of a run",
    "bound: read once",
)


class Waiting(Probe):
    """An arm that measures how long its steps wait for data, and the bounds of that wait."""

    def warm_up(self, seconds: float) -> None:
        """Trains until buffers are full, workers run, and an autotuner has converged."""
        began, autotuner = time.perf_counter(), self.program.run.checkpoint_state.get(TUNED)
        while (passed := time.perf_counter() - began) < seconds or (
            autotuner and autotuner.wait_fraction is None and passed < CONVERGENCE_TIMEOUT_S
        ):
            self.train(1)

    def wait_fraction(self, steps: int) -> dict:
        """Returns the seconds of a block of steps and the part of them spent waiting for batches."""
        block = self.timed_block(steps)
        return {"seconds": block["seconds"], "waited": block["phases"]["input"], "steps": steps}

    def reading(self, seconds: float) -> dict:
        """Reads samples of the dataset; returns seconds per sample. For an arm that reads samples."""
        dataset, taken = self.program.train.spec.dataset, []
        began = time.perf_counter()
        for number in torch.randperm(len(dataset)).tolist():
            dataset[number]
            taken.append(time.perf_counter() - began)
            if taken[-1] > seconds:
                break
        return {"samples": len(dataset), "sample": taken[-1] / len(taken)}

    def gathering(self) -> float:
        """Returns seconds to gather a batch, field by field, from as many samples in memory, into mapped memory."""
        fields = batch_tensors(next(iter(self.program.train.epoch(0, 0))))
        rows, samples = batch_size(fields), len(self.program.train.spec.dataset)
        copies = -(-min(samples, STORE * rows // sum(field.nbytes for field in fields)) // rows)
        stores = [field.repeat(copies, *[1] * (field.ndim - 1)) for field in fields]
        into, taken = [torch.empty_like(field) for field in fields], []
        for index in torch.randint(0, copies * rows, (GATHERS, rows)):
            began = time.perf_counter()
            for store, buffer in zip(stores, into, strict=True):
                torch.index_select(store, 0, index, out=buffer)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)


def task_of(workload: str) -> TaskRef:
    """Returns the workload without its validation data: nothing is evaluated here."""

    def training():
        return dataclasses.replace(TaskRef.of(workload).load(), validation_data=None)

    training.__name__ = workload
    return TaskRef.of(training)


def arms_of(
    workload: str, stack: ExitStack, warm_up: float
) -> tuple[dict[str, Worker], dict[str, dict], dict[str, str]]:
    """Returns (suspended arms that can run, their plans, reasons why the others cannot)."""
    arms, plans, missing, task, known = {}, {}, {}, task_of(workload).to_json(), method_names()
    for name in (TEXTBOOK, *(each for each in METHODS if each in known)):
        print_progress(f"{workload}: {name}")
        recipe = Recipe({} if name == TEXTBOOK else {name: {}}).with_method(import_path(TimePhases))
        worker = stack.enter_context(
            Worker("data_wait:Waiting", task=task, methods=recipe.methods, device="cpu", seed=0)
        )
        try:
            plans[name] = worker.call("build")
            worker.call("warm_up", seconds=warm_up)
        except RunError as error:
            if name == TEXTBOOK:
                raise
            missing[name] = str(error)
            continue
        finally:
            worker.suspend()
        arms[name] = worker
    return arms, plans, missing


def measured(workload: str, options) -> dict:
    """Measures blocks of all arms in turn, and the values that the bounds are computed from.

    Raises:
        ConfigurationError: the workload cannot run on this machine.
        RunError: the workload fails on this machine.
    """
    with ExitStack() as stack:
        arms, plans, missing = arms_of(workload, stack, options.warm_up)
        steps = {name: max(FEWEST, math.ceil(options.seconds / plans[name]["step"])) for name in arms}
        blocks = in_turns(
            {name: (lambda name=name: block_of(arms[name], steps[name])) for name in arms}, options.rounds
        )
        reading = arms[TEXTBOOK].call("reading", seconds=options.seconds)
        gather = arms[TEXTBOOK].call("gathering")
    plan = plans[TEXTBOOK]
    return {
        "blocks": blocks,
        "missing": missing,
        "starts": {name: plans[name]["start"] for name in arms},
        "gather": gather,
        "read_once": reading["samples"] * reading["sample"] / cores(),
        "steps_of_a_run": plan["epochs"] * reading["samples"] / plan["batch_size"],
    }


def block_of(arm: Worker, steps: int) -> dict:
    try:
        return arm.call("wait_fraction", steps=steps)
    finally:
        arm.suspend()


def outcome(measurement: dict) -> dict[str, dict]:
    """Returns, for each arm, the seconds and the wait fraction of a step and of a whole run, and both bounds."""
    found = {}
    for name, blocks in measurement["blocks"].items():
        step, wait = (
            interval(block[what] / block[of] for block in blocks)
            for what, of in (("seconds", "steps"), ("waited", "seconds"))
        )
        waited, work = step.median * wait.median, step.median * (1 - wait.median)
        start = max(0.0, measurement["starts"][name] - measurement["starts"][TEXTBOOK])
        found[name] = {
            "step": step,
            "wait": wait,
            "bound": measurement["gather"] / (measurement["gather"] + work),
            "start": start,
            "wait_of_a_run": share_of_a_run(measurement, start, waited, work),
            "bound_of_a_run": share_of_a_run(measurement, measurement["read_once"], measurement["gather"], work),
        }
    return found


def share_of_a_run(measurement: dict, start: float, waited: float, work: float) -> float:
    """Returns the fraction of a run spent on starting and waiting, from the seconds that steps wait and work."""
    waiting = start + measurement["steps_of_a_run"] * waited
    return waiting / (waiting + measurement["steps_of_a_run"] * work)


def fastest(arms: dict[str, dict]) -> str:
    return min(arms, key=lambda name: arms[name]["step"].median)


def rows_of(workload: str, arms: dict[str, dict]) -> list[tuple[str, ...]]:
    """Returns the workload's rows of the table, in the order of HEADINGS."""
    rows = []
    for name, arm in arms.items():
        step = Interval(*(1e3 * each for each in dataclasses.astuple(arm["step"])))
        over = arms[TEXTBOOK]["step"].median / step.median * 1e3
        a_step, a_run = (
            (f"{arm['wait']:.2%}", f"{arm['bound']:.2%}"),
            (f"{arm['wait_of_a_run']:.2%}", f"{arm['bound_of_a_run']:.2%}"),
        )
        rows.append((workload, name, *a_step, f"{step:.3g}", f"{over:.2f}", f"{arm['start']:.1f}", *a_run))
    return rows


def main() -> int:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default: all")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=0.5, help="of each arm in a round")
    options.add_argument("--warm-up", type=float, default=1.5, help="seconds of each arm before the first round")
    options.add_argument("--quick", action="store_true", help="digits, three short rounds")
    options = options.parse_args()
    if options.quick:
        options.workloads, options.rounds, options.seconds, options.warm_up = (
            options.workloads or ["digits"],
            3,
            0.2,
            0.3,
        )
    outcomes, failed = {}, {}
    for workload in options.workloads or WORKLOADS:
        try:
            outcomes[workload] = measured(workload, options)
        except (RunError, ConfigurationError) as error:
            failed[workload] = str(error)
    found = {workload: outcome(each) for workload, each in outcomes.items()}
    show(HEADINGS, [row for workload, arms in found.items() for row in rows_of(workload, arms)])
    for name, why in failed.items():
        print_line(f"{name} not measured: {why}")
    for name, why in (
        (f"{workload}, {name}", why) for workload, each in outcomes.items() for name, why in each["missing"].items()
    ):
        print_line(f"{name}: {why}")
    best = {workload: (fastest(arms), arms[fastest(arms)]) for workload, arms in found.items()}
    over = [workload for workload, (_, arm) in best.items() if arm["wait"].median > FIGURE]
    forbidden = [workload for workload in over if best[workload][1]["bound"] > FIGURE]
    waits = [
        f"a step waits for data at most {FIGURE:.0%} of its time with the fastest loader, or the bound is reported"
    ]
    waits += [
        f"{workload} {arm['wait']:.2%} ({name}, bound {arm['bound']:.2%})" for workload, (name, arm) in best.items()
    ]
    waits += [f"the bound forbids it on {', '.join(forbidden)}"] if forbidden else []
    return finish(
        options,
        "; ".join(waits),
        None if failed or not best else over == forbidden,
        {"outcomes": outcomes, "found": found, "failed": failed},
    )


if __name__ == "__main__":
    sys.exit(main())
