"""Two arms of a task in fresh processes, which take turns and are at the same position of the training when compared.

A position is a number of training samples since the start of the run. It matters because steps change speed while a
training goes on, so that a recipe which is further in the training differs from itself.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from hasten.benchmarking.fork_server import Worker
from hasten.benchmarking.worker_group import WorkerGroup, start_workers
from hasten.core.errors import RunError
from hasten.core.progress import ProgressCallback
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef

CHUNK_SECONDS = 1.0  # of untimed steps in one call
MIN_CLOCK_RATIO = 0.8  # of the time that an arm reports for a block to that measured in this process
MAX_TRIES = 3  # for the two clocks to agree


@contextmanager
def build_pair(
    task: TaskRef,
    recipes: tuple[Recipe, Recipe],
    *,
    order: tuple[int, int],
    device: str,
    seed: int,
    processes: tuple[int, int],
    timeout: float,
    deadline: float | None,
    with_evaluation: bool,
    watch: ProgressCallback,
) -> "Iterator[Pair]":
    """Context manager: builds both arms, in the given order, each in processes of its own that end with the block.

    See ``Arm.build`` for ``with_evaluation``.
    """
    with ExitStack() as stack:
        built, seconds = {}, 0.0
        for index in order:
            watch(f"building {recipes[index]}", 0.0, None)
            arguments = {"task": task, "methods": recipes[index].methods, "device": device, "seed": seed}
            started = start_workers(processes[index], "hasten.benchmarking.arm:Arm", timeout, deadline, **arguments)
            arm = stack.enter_context(started)
            began = time.monotonic()  # not sooner: the first worker waits for torch to be imported
            built[index] = arm, arm.call("build", with_evaluation=with_evaluation)
            arm.suspend()
            seconds += time.monotonic() - began
        arms, plans = zip(built[0], built[1], strict=True)
        yield Pair(arms, plans, timeout, seconds)


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
        self.arms, self.plans, self.timeout, self.build_seconds = arms, plans, timeout, build_seconds
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

    def time_evaluations(self, order: tuple[int, int]) -> list[float]:
        """Seconds of an evaluation of arm 0 and of arm 1."""
        seconds = [0.0, 0.0]
        for index in order:
            seconds[index] = self.arms[index].call("evaluate", timeout=self.timeout)
            self.arms[index].suspend()
        return seconds

    def _steps_to(self, index: int, position: float) -> int:
        """Steps from the position of an arm to another, a multiple of its synchronization period."""
        plan = self.plans[index]
        periods = (position - self.positions[index]) / (plan["samples_per_step"] * plan["sync_period"])
        return plan["sync_period"] * round(periods)

    def _train(self, index: int, steps: int) -> dict[str, float]:
        """Trains an arm for ``steps`` steps. The timeout limits its silence; the time of the steps is added to it."""
        expected = 2 * steps * self.plans[index]["step"]
        block = self.arms[index].call("train", count=steps, timeout=self.timeout + expected)
        self.arms[index].suspend()
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
