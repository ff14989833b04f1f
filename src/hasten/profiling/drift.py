"""Drift: how the time of a step, the denormal numbers and the memory change in the course of a training.

The real training runs on, block by block. If its last blocks are slower than its first ones, a fresh run of the same
training takes turns with it: only what is slower than a run at the start, in the same seconds, is no disturbance of the
machine. Whether denormal numbers are the cause is measured, too: at last the training that ran on computes with zeros
instead.
"""

import math
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import psutil
import torch

from hasten.benchmarking.arm import Arm
from hasten.benchmarking.fork_server import Worker
from hasten.benchmarking.ratio import Ratio, ratio_of_rounds
from hasten.benchmarking.worker_group import WorkerGroup, start_workers
from hasten.core.errors import RunError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.engine.memory import fit_together
from hasten.engine.tasks import TaskRef
from hasten.utils.denormals import count_denormals, set_flush_denormals

RUN_SHARE = 0.7  # of the time for running the training on; the rest is for the comparison with a fresh run
BLOCKS, STRETCHES = 72, 8  # blocks of steps are timed; the state is counted once per stretch of blocks
MIN_BLOCK_SECONDS = 0.02
EDGE_BLOCKS = 12  # at most, are the start of the training, and the end of what was measured
START_STEPS = 300  # that the blocks of the start have at most: the longer they are, the less differs from them
PAIRS = EDGE_BLOCKS // 2  # of blocks, in the comparison with a fresh run, which may be made twice
MIN_RATIO = 1.1  # of step times; processes of one recipe differ by 2 to 3 %
MIN_SHARE = 1e-3  # of the values, that are denormal
MIN_GROWTH = 16 << 20  # bytes of memory

STATE_NAMES = {
    "exp_avg": "the optimizer's first moment (exp_avg)",
    "exp_avg_sq": "the optimizer's second moment (exp_avg_sq)",
    "momentum_buffer": "the optimizer's momentum (momentum_buffer)",
}


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of a training, and the state at its end."""

    step: int  # the last one
    seconds_per_step: float  # the median over its steps, of which those of a block have the mean of it
    denormal: dict[str, int]  # number of denormal values by kind of tensor, such as "weights", "gradients" or "exp_avg"
    values: dict[str, int]  # number of all values by kind of tensor
    rss: int  # bytes of memory of the process

    def denormal_kinds(self) -> list[str]:
        """Kinds of tensors of which at least MIN_SHARE of the values are denormal, the most first."""
        kinds = [kind for kind, number in self.denormal.items() if number > MIN_SHARE * self.values[kind]]
        return sorted(kinds, key=lambda kind: -self.denormal[kind])


@dataclass(frozen=True)
class Drift:
    """What was measured of a training at several positions."""

    rows: list[Stretch] = field(default_factory=list[Stretch])
    slow_from: int | None = None  # the step from which steps are slower than at the start; None without a drift
    ratio: Ratio | None = None  # time of a step at the end / at the start, measured in turns; None without a drift
    flushed: Ratio | None = None  # the same with zeros instead of denormal numbers; None if there are none, or unknown
    not_measured: str = ""  # why steps that seem slower were not compared with those of a fresh run; "" if they were

    @property
    def has_denormals(self) -> bool:
        """Whether some kind of tensor holds denormal numbers in any stretch."""
        return any(row.denormal_kinds() for row in self.rows)

    @property
    def denormals_gain(self) -> float | None:
        """How many times as fast steps at the end are with zeros instead of denormal numbers; None if unsure."""
        if self.ratio is None or self.flushed is None or self.flushed.high >= self.ratio.low:
            return None
        return self.ratio.median / self.flushed.median

    def reached(self, steps: int | None) -> bool:
        """Whether the rows extend to about the end of a training of ``steps`` steps; False if that is unknown."""
        return steps is not None and bool(self.rows) and self.rows[-1].step >= (1 - 1 / STRETCHES) * steps

    def seconds_of_steps(self, steps: int | None) -> float | None:
        """Seconds of the steps of a whole training: every stretch at its own speed, what follows at that of the last.

        None without rows, or if the number of steps is unknown.
        """
        if not self.rows or steps is None:
            return None
        ends = [*(min(row.step, steps) for row in self.rows[:-1]), steps]
        lengths = (end - begin for begin, end in pairwise([0, *ends]))
        return sum(length * row.seconds_per_step for length, row in zip(lengths, self.rows, strict=True))


def measure_drift(
    task: TaskRef,
    recipe: Recipe,
    *,
    device: str,
    seed: int,
    seconds: float,
    deadline: float | None = None,
    on_progress: ProgressCallback = no_progress,
) -> Drift:
    """Runs a training on for about ``seconds`` or to its end, and returns what changes.

    ``seconds`` include the comparison with a fresh run. The other arguments are those of ``diagnose``.

    Raises:
        RunError: The run could not be built or trained.
        DeadlineError: It had not run on for long enough at ``deadline``.
    """
    arguments = {"task": task, "methods": recipe.methods, "device": device, "seed": seed}
    on_progress("running the training on", 0.0, seconds)
    with start_workers(1, "hasten.profiling.drift:DriftProbe", None, deadline, **arguments) as probe:
        plan = probe.call("build")
        longest = max(1, math.ceil(max(MIN_BLOCK_SECONDS, RUN_SHARE * seconds / BLOCKS) / plan["step"]))
        if plan["steps"]:
            longest = min(longest, max(1, plan["steps"] // BLOCKS))
        shortest = min(longest, START_STEPS // EDGE_BLOCKS)
        blocks, rows = _run_on(probe, (shortest, longest), plan["steps"], RUN_SHARE * seconds)
        if len(blocks) < 6:
            return Drift(rows)
        start, end = _start_and_end(blocks)
        if end < MIN_RATIO * start:
            return Drift(rows)
        on_progress("comparing the training with its start", RUN_SHARE, (1 - RUN_SHARE) * seconds)
        try:
            has_denormals = Drift(rows).has_denormals
            ratio, flushed = _compare_with_start(
                probe, arguments, shortest, (1 - RUN_SHARE) * seconds, deadline, has_denormals=has_denormals
            )
        except RunError as error:  # also at the deadline: what the training that ran on has shown is known
            return Drift(rows, not_measured=f"steps seem slower, but no fresh run confirms it: {error}")
    if ratio.median < MIN_RATIO or (ratio.low or 0.0) <= 1.0:
        return Drift(rows)
    return Drift(rows, _slow_from(blocks), ratio, flushed)


def describe(drift: Drift) -> str | None:
    """The drift in one sentence; None without one.

    Only denormal numbers are named as a cause, where steps were faster with zeros instead.
    """
    parts = [part for part in (_describe_time(drift), _describe_memory(drift.rows)) if part]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else None


class DriftProbe(Arm):
    """An arm that also counts the denormal numbers in its state, and can compute with zeros instead."""

    def flush(self) -> bool:
        """Sets this process to compute with zero instead of denormal numbers; False if the processor cannot."""
        return set_flush_denormals(True)

    def state(self) -> dict[str, Any]:
        """Trains one step, and returns ``step``, ``denormal``, ``values`` and ``rss``, see ``Drift.rows``."""
        run, tensors = self.program.run, defaultdict[str, list[torch.Tensor]](list)

        def count_gradients(*_: Any) -> None:
            gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
            counts["gradients"] = count_denormals(gradients)

        counts: dict[str, tuple[int, int]] = {}
        hooks = hasattr(run.optimizer, "register_step_pre_hook")  # not of an optimizer that is no torch optimizer
        handle = run.optimizer.register_step_pre_hook(count_gradients) if hooks else None
        try:
            self.train(1)
        finally:
            if handle:
                handle.remove()
        tensors["weights"] = [*run.model.parameters()]
        for state in getattr(run.optimizer, "state", {}).values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    tensors[name].append(value)
        counts |= {kind: count_denormals(values) for kind, values in tensors.items()}
        return {
            "step": run.progress.step,
            "denormal": {kind: denormal for kind, (denormal, _) in counts.items()},
            "values": {kind: values for kind, (_, values) in counts.items()},
            "rss": psutil.Process().memory_info().rss,
        }


def _run_on(
    probe: Worker | WorkerGroup, limits: tuple[int, int], last_step: int | None, seconds: float
) -> tuple[list[tuple[int, float]], list[Stretch]]:
    """Trains block by block: (first step, seconds of a step) of each, and a row for each stretch.

    A block has the fewest steps of ``limits`` at the start, then a share of the steps so far, up to the most: that
    shows where the speed changes, early or late.
    """
    blocks: list[tuple[int, float]] = []
    rows: list[Stretch] = []
    times: list[float] = []  # of each step since the last row
    fewest, most = limits
    began, step = time.monotonic(), probe.call("state")["step"]
    while time.monotonic() - began < seconds:
        count = max(fewest, min(most, step // EDGE_BLOCKS))
        if last_step is not None and step + count > last_step:
            break
        blocks.append((step, probe.call("train", count=count)["seconds"] / count))
        times += [blocks[-1][1]] * count
        step += count
        done = max((time.monotonic() - began) / seconds, step / last_step if last_step else 0.0)
        if done >= (len(rows) + 1) / STRETCHES:
            state = probe.call("state")
            rows.append(Stretch(seconds_per_step=median(times), **state))
            step, times = state["step"], []
    return blocks, rows


def _start_and_end(blocks: list[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a step at the start and at the end, each the median of a sixth of the blocks, EDGE_BLOCKS at most."""
    count = max(1, min(EDGE_BLOCKS, len(blocks) // 6))
    times = [taken for _, taken in blocks]
    return median(times[:count]), median(times[-count:])


def _compare_with_start(
    probe: Worker | WorkerGroup,
    arguments: dict[str, Any],
    count: int,
    seconds: float,
    deadline: float | None,
    *,
    has_denormals: bool,
) -> tuple[Ratio, Ratio | None]:
    """Time of a step of the training that ran on / of a fresh one, and the same once it flushes denormal numbers.

    Their existence is no proof that they cost time. The mode is switched once: what has become zero stays zero.
    The fresh run ends within the steps that are the start of the training.

    Raises:
        RunError: memory does not suffice for both, or one of them failed.
    """
    peaks, flushed = probe.call("peak_memory"), None
    if not fit_together(peaks, peaks):
        raise RunError("memory does not suffice for two runs at once")
    probe.suspend()
    with start_workers(1, "hasten.benchmarking.arm:Arm", None, deadline, **arguments) as fresh:
        fresh.call("build")
        part = seconds / 2 if has_denormals else seconds
        ratio = _ratio_in_turns(probe, fresh, count, part)
        with suppress(RunError):  # then the cause stays unknown
            if has_denormals and probe.call("flush"):
                flushed = _ratio_in_turns(probe, fresh, count, part)
    return ratio, flushed


def _ratio_in_turns(probe: Worker | WorkerGroup, fresh: Worker | WorkerGroup, count: int, seconds: float) -> Ratio:
    """Time of a step of ``probe`` / of ``fresh``, from blocks of both in turns."""
    times: dict[Any, list[float]] = {probe: [], fresh: []}
    began = time.monotonic()
    while len(times[fresh]) < 3 or (time.monotonic() - began < seconds and len(times[fresh]) < PAIRS):
        order = (probe, fresh) if len(times[fresh]) % 2 == 0 else (fresh, probe)
        for arm in order:
            times[arm].append(arm.call("train", count=count)["seconds"])
            arm.suspend()
    return ratio_of_rounds([(times[probe], times[fresh])], 0.05)  # two processes of a recipe differ, too


def _slow_from(blocks: list[tuple[int, float]]) -> int:
    """The first step after the last block (single ones aside) whose time is nearer to the start's than to the end's."""
    times = [taken for _, taken in blocks]
    smooth = [median(times[max(0, i - 1) : i + 2]) for i in range(len(times))]
    level = math.sqrt(math.prod(_start_and_end(blocks)))
    last = max((i for i, taken in enumerate(smooth) if taken < level), default=-1)
    return blocks[min(last + 1, len(blocks) - 1)][0]


def _describe_time(drift: Drift) -> str | None:
    time = f"steps take {drift.ratio.median:.1f} times as long as at the start" if drift.ratio else ""
    slower = f"from about step {drift.slow_from:,} on, {time}" if drift.ratio else ""
    denormal = [row for row in drift.rows if row.denormal_kinds()]
    if not denormal:
        return slower or None
    last = denormal[-1]
    kind = last.denormal_kinds()[0]
    numbers = f"{last.denormal[kind]:,} of {last.values[kind]:,} values of {STATE_NAMES.get(kind, f'the {kind}')}"
    if drift.denormals_gain:
        return f"from about step {drift.slow_from:,} on, {numbers} are denormal; {time}"
    if not slower and not drift.not_measured:
        slower = "steps take no longer than at the start"
    numbers = f"from about step {denormal[0].step:,} on, {numbers} are denormal"
    return f"{numbers}; {slower}" if slower else numbers


def _describe_memory(rows: list[Stretch]) -> str | None:
    """A clause on memory that grows in all stretches after the first, as caches and pools do not; else None."""
    rows = rows[1:]
    growth = rows[-1].rss - rows[0].rss if len(rows) > 2 else 0
    if growth < MIN_GROWTH or any(
        after.rss - before.rss < growth / (4 * len(rows)) for before, after in pairwise(rows)
    ):
        return None
    start, end = (f"{row.rss / (1 << 20):,.0f} MiB at step {row.step:,}" for row in (rows[0], rows[-1]))
    return f"the memory of the process grows from {start} to {end}"
