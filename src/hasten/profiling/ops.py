"""The view of operations: which operations of a training step ran in which precision under a recipe.

It shows the lists of ``torch.autocast`` as they acted on this model, and the loss scale if there is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from hasten._torch_compat import without_modes
from hasten._torch_compat_compile import compile_seconds
from hasten.benchmarking.arm import Arm
from hasten.benchmarking.worker_group import start_workers
from hasten.core.errors import ConfigurationError
from hasten.core.progress import ProgressCallback, no_progress
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.plan import Program
from hasten.engine.registry import cards_that_state, make_methods
from hasten.engine.tasks import TaskRef
from hasten.reporting.result_schema import LossScaleStep, Operation, Operations
from hasten.utils.op_recorder import OpRecorder

OBSERVED_STEPS = 5
COMPILED = (
    "a part of this run is compiled: the operations that call a library, such as matrix products, are visible; "
    "fused kernels are not"
)
ONE_PROCESS = "--ops observes a single process; leave --processes out"
REPLAYED = "nothing is visible: {method} replays the forward and backward pass as one recorded graph; leave it out"


def check_lower_precision(recipe: Recipe) -> None:
    """Raises a ConfigurationError if no method of the recipe chooses a lower precision for the forward pass."""
    if lowers_precision(recipe):
        return
    cards = cards_that_state("invalidates").items()
    known = " or ".join(f"--with {name}" for name, card in cards if "uniform_precision" in card.invalidates)
    raise ConfigurationError(
        f"--ops needs a recipe with lower precision, and nothing in this one ({recipe}) lowers it; add {known}"
    )


def lowers_precision(recipe: Recipe) -> bool:
    """Whether a method of the recipe chooses a lower precision for the forward pass."""
    return bool(_invalidating(recipe, "uniform_precision"))


def measure_operations(
    task: TaskRef,
    recipe: Recipe,
    *,
    device: str,
    seed: int,
    deadline: float | None = None,
    on_progress: ProgressCallback = no_progress,
) -> Operations:
    """Trains OBSERVED_STEPS steps, after a warm-up, in a worker process that records their operations.

    No rows, but a note, if a method replays a graph. The arguments are those of ``diagnose``.

    Raises:
        RunError: the run could not be built or trained.
        DeadlineError: it was not over at the deadline.
    """
    on_progress("the operations of a step", 0.0, None)
    if replaying := _invalidating(recipe, "python_between_kernels"):
        return {"steps": 0, "rows": [], "loss_scale": [], "note": REPLAYED.format(method=replaying[0])}
    arguments = {"task": task, "methods": recipe.methods, "device": device, "seed": seed}
    with start_workers(1, "hasten.profiling.ops:RecordedArm", None, deadline, **arguments) as arm:
        arm.call("build")
        return arm.call("record", count=OBSERVED_STEPS)


@runtime_checkable
class ScalesLoss(Protocol):
    """What a method that scales the loss has in ``RunContext.checkpoint_state``."""

    value: float  # the factor of the loss in the next step
    overflow: bool  # whether the gradients of the last step overflowed


class RecordedArm(Arm):
    """An arm, in a worker process, that records the operations of its steps. It has no evaluations."""

    def build_program(self, task: Task) -> Program:
        program, self.loss_scale = super().build_program(task), list[LossScaleStep]()
        scales = [state for state in program.run.checkpoint_state.values() if isinstance(state, ScalesLoss)]

        def zero_grad() -> None:  # the last function of a step
            program.zero_grad()
            self.loss_scale.extend({"value": scale.value, "overflow": scale.overflow} for scale in scales)

        return dataclasses.replace(program, validation=None, zero_grad=zero_grad)

    def record(self, count: int) -> Operations:
        """Trains ``count`` steps under one recorder, and returns the operations, see ``Operations``."""
        recorder = OpRecorder(timed=True)
        with recorder:
            for _ in range(count):
                next(self.steps)
        note = COMPILED if compile_seconds() else ""
        return {"steps": count, "rows": rows_of(recorder, count), "loss_scale": self.loss_scale, "note": note}

    def _epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch. The recorder does not see how they are loaded."""
        with without_modes():
            batches = iter(super()._epoch(epoch, start))
        while True:
            with without_modes():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def rows_of(recorder: OpRecorder, steps: int) -> list[Operation]:
    """The operations as plain data, the longest first, see ``Operations``."""
    flops = recorder.flops()
    seconds = sum(stats.seconds for stats in recorder.ops.values())
    return [
        {
            "op": name,
            "dtype": str(dtype or "").removeprefix("torch."),
            "calls_per_step": stats.count / steps,
            "flops_share": stats.flops / flops if flops else None,
            "time_share": stats.seconds / seconds,
        }
        for (name, dtype), stats in sorted(recorder.ops.items(), key=lambda item: -item[1].seconds)
    ]


def _invalidating(recipe: Recipe, trait: str) -> list[str]:
    """The methods of a recipe whose cards state that a trait (key of TRAITS) does not hold in a run with them."""
    return [method.name for method in make_methods(recipe) if trait in method.card.invalidates]
