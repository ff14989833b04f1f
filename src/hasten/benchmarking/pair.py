"""Two arms of a task in fresh processes, which take turns and are at the same position of the training when compared.

A position is a number of training samples since the start of the run. It matters because steps change speed in the
course of a training, so that a recipe which is further in the training differs from itself.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from hasten.benchmarking.fork_server import Worker
from hasten.benchmarking.worker_group import WorkerGroup, start_workers
from hasten.core.errors import MemoryExhaustedError, RunError
from hasten.core.progress import ProgressCallback
from hasten.core.recipe import Recipe
from hasten.engine.memory import MemoryPeak, fit_together
from hasten.engine.tasks import TaskRef

CHUNK_SECONDS = 1.0  # of untimed steps in one call
MIN_CLOCK_RATIO = 0.8  # of the time that an arm reports for a block to that measured in this process
MAX_TRIES = 3  # for the two clocks to agree


@dataclass
class ArmBuilder:
    """Builds the arms of a comparison, each in processes of its own; see ``Arm.build`` for ``with_evaluation``.

    Attributes:
        seconds: that building has taken so far.
    """

    task: TaskRef
    recipes: tuple[Recipe, Recipe]
    device: str
    seed: int
    processes: tuple[int, int]
    timeout: float
    deadline: float | None
    with_evaluation: bool
    on_progress: ProgressCallback
    seconds: float = 0.0

    @contextmanager
    def built(self, index: int) -> Iterator[tuple[Worker | WorkerGroup, dict[str, Any]]]:
        """Context manager: arm 0 or 1, suspended, and its plan. Its processes have ended at the end of the block."""
        recipe = self.recipes[index]
        self.on_progress(f"building {recipe}", 0.0, None)
        arguments = {"task": self.task, "methods": recipe.methods, "device": self.device, "seed": self.seed}
        where = self.processes[index], "hasten.benchmarking.arm:Arm", self.timeout, self.deadline
        with ExitStack() as stack:
            with blame(index):
                arm = stack.enter_context(start_workers(*where, **arguments))
                began = time.monotonic()  # not sooner: the first worker waits for torch to be imported
                plan = arm.call("build", with_evaluation=self.with_evaluation)
                arm.suspend()
                self.seconds += time.monotonic() - began
            yield arm, plan


@contextmanager
def blame(index: int) -> Iterator[None]:
    """Context manager: sets ``arm`` of a RunError raised inside to ``index`` (0: a, 1: b)."""
    try:
        yield
    except RunError as error:
        error.arm = index
        raise


@contextmanager
def build_pair(builder: ArmBuilder, order: tuple[int, int]) -> "Iterator[Pair]":
    """Context manager: builds both arms, in the given order; their processes end with the block.

    Raises:
        ArmsDoNotFitError: memory does not suffice for both arms, or became scarce; for one it may.
        MemoryExhaustedError: the arm that is built first does not fit by itself.
    """
    with ExitStack() as stack:
        try:
            built: dict[int, Any] = {order[0]: stack.enter_context(builder.built(order[0]))}
        except MemoryExhaustedError:
            with builder.built(0):  # b is not blamed where a, which it is compared with, does not fit either
                raise
        try:
            built[order[1]] = stack.enter_context(builder.built(order[1]))
            arms, plans = zip(built[0], built[1], strict=True)
            if not fit_together(*(plan["peak_memory"] for plan in plans)):
                raise ArmsDoNotFitError
            yield Pair(arms, plans, builder.timeout, builder.seconds)
        except MemoryExhaustedError:
            raise ArmsDoNotFitError from None


class ArmsDoNotFitError(Exception):
    """Raised where two arms do not fit into memory together; ``SequentialPair`` can compare them."""


class Pair:
    """Two built arms, suspended while they do not run.

    Attributes:
        plans: the results of ``Arm.build``, which took ``build_seconds`` for both.
        positions: samples that each arm has trained on.
    """

    def __init__(
        self,
        arms: Sequence[Worker | WorkerGroup],
        plans: Sequence[dict[str, Any]],
        timeout: float,
        build_seconds: float = 0.0,
    ):
        self.arms, self.plans = dict(enumerate(arms)), list(plans)
        self.timeout, self.build_seconds = timeout, build_seconds
        self.positions = [plan["samples"] for plan in plans]

    def run_to(self, position: float) -> None:
        """Trains both arms, untimed, to a position; an arm that is already there or beyond stays where it is."""
        for index, plan in enumerate(self.plans):
            chunk = max(1, int(CHUNK_SECONDS / max(plan["step"], 1e-6)))
            while (left := self._steps_to(index, position)) > 0:
                self._train(index, min(left, chunk))

    def time_blocks(self, samples: float, order: tuple[int, int]) -> list[dict[str, float]]:
        """Times one block of ``samples`` samples in each arm: the blocks of arm 0 and of arm 1, see ``Arm.train``.

        Both blocks end at the same position, up to half a step.
        """
        self.run_to(max(self.positions))  # one arm may be ahead: its batches are larger, or a block was repeated
        end, blocks = max(self.positions) + samples, [{}, {}]
        for index in order:
            blocks[index] = self._time_block(index, max(1, self._steps_to(index, end)))
        return blocks

    def peak_memory(self) -> list[list[MemoryPeak]]:
        """The peak memory of arm 0 and of arm 1, of each rank."""
        return [self._call(index, "peak_memory") for index in self.arms]

    def time_evaluations(self, order: tuple[int, int]) -> list[float]:
        """Seconds of an evaluation of arm 0 and of arm 1."""
        seconds = {index: self._call(index, "evaluate") for index in order}
        return [seconds[0], seconds[1]]

    def _call(self, index: int, method: str, seconds: float = 0.0, **arguments: Any) -> Any:
        """Calls a method of an arm and suspends it. The timeout limits its silence beyond ``seconds`` of work."""
        result = self.arms[index].call(method, timeout=self.timeout + seconds, **arguments)
        self.arms[index].suspend()
        return result

    def _steps_to(self, index: int, position: float) -> int:
        """Steps from the position of an arm to another, a multiple of its synchronization period."""
        plan = self.plans[index]
        periods = (position - self.positions[index]) / (plan["samples_per_step"] * plan["sync_period"])
        return plan["sync_period"] * round(periods)

    def _train(self, index: int, steps: int) -> dict[str, float]:
        with blame(index):
            block = self._call(index, "train", seconds=2 * steps * self.plans[index]["step"], count=steps)
        self.positions[index] = block["position"]
        return block

    def _time_block(self, index: int, steps: int) -> dict[str, float]:
        """Times a block in the arm and in this process; repeats it if the clocks differ, RunError if they always do."""
        block, seen = {}, 0.0
        for _ in range(MAX_TRIES):
            began = time.monotonic()
            block = self._train(index, steps)
            # an arm that runs its own loop also evaluates, or starts again, inside of a block
            seen = time.monotonic() - began - block.get("untimed", 0.0)
            if block["samples"] > 0 and MIN_CLOCK_RATIO * seen - 0.05 <= block["seconds"] <= seen + 0.05:
                return block
        raise RunError(
            f"the arm reports {block['seconds']:.2f} s for {block['samples']} samples, but the clock of the comparison "
            f"{seen:.2f} s; a method must not change the clock or the count of samples"
        )


class SequentialPair(Pair):
    """Two arms that do not fit into memory together: one runs all its blocks of a round, then the other one.

    Each arm is built for its part of a round and has ended, and released its memory, before the other one is built.
    ``plans`` are those of earlier rounds; without them both arms are built once, to know how long their blocks are. The
    blocks of arm ``order[0]`` come first.
    """

    def __init__(self, stack: ExitStack, builder: ArmBuilder, plans: Sequence[dict[str, Any]], order: tuple[int, int]):
        self.stack, self.builder, self.order, self.start = stack, builder, order, 0.0
        self.built: int | None = None  # which arm is there
        self.peaks: list[list[MemoryPeak]] = [[], []]
        super().__init__([], list(plans) or [{"samples": 0}, {"samples": 0}], builder.timeout)
        if not plans:
            try:
                for index in reversed(order):
                    self._build(index)
            except MemoryExhaustedError:
                self._build(0)  # as in build_pair
                raise
            self.build_seconds = builder.seconds

    def run_to(self, position: float) -> None:
        """Sets the position at which both arms begin their blocks; each trains on to it once it is built."""
        self.start = max(position, *self.positions)

    def time_round(self, samples: float, pairs: int) -> list[list[dict[str, float]]]:
        """Times ``pairs`` blocks in one arm, then as many in the other: the blocks of arm 0 and of arm 1."""
        blocks: list[list[dict[str, float]]] = [[], []]
        for index in self.order:
            self._build(index)
            if (steps := self._steps_to(index, self.start)) > 0:
                self._train(index, steps)
            for number in range(pairs):
                end = self.start + (number + 1) * samples
                blocks[index].append(self._time_block(index, max(1, self._steps_to(index, end))))
            self.peaks[index] = self._call(index, "peak_memory")
        return blocks

    def peak_memory(self) -> list[list[MemoryPeak]]:
        return self.peaks

    def _build(self, index: int) -> None:
        """Builds an arm, unless it is there, after the other one has ended."""
        if self.built == index:
            return
        self.stack.close()
        arm, plan = self.stack.enter_context(self.builder.built(index))
        self.arms, self.built = {index: arm}, index
        self.plans[index], self.positions[index] = plan, plan["samples"]
