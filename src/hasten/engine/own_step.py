"""The training step that a task brings: ``(model, batch, context) -> loss``, and its updates by several optimizers."""

from collections.abc import Iterator
from inspect import isgenerator
from typing import Any

import torch

from hasten.core.errors import RunError
from hasten.core.run_context import RunContext
from hasten.core.task import StepContext
from hasten.core.types import Batch, ForwardFn, StepFn
from hasten.utils.batch import map_tensors
from hasten.utils.optimizers import OptimizerList


class OwnStep:
    """Calls Task(step=) and detaches the state that it carries to the next batch; that state is part of checkpoints."""

    def __init__(self, run: RunContext) -> None:
        self.run, self.context = run, StepContext(run.progress)
        self.losses: Iterator[Any] = iter(())  # of the current batch, not yet computed; for several optimizers
        run.checkpoint_state["step"] = self

    def forward(self, batch: Batch) -> Any:
        """The loss of a batch, for one optimizer."""
        loss = self._begin(batch)
        if isgenerator(loss):
            raise RunError("Task(step=) is a generator, which is for several optimizers; return the loss")
        self._detach()
        return loss

    def next_loss(self, batch: Batch) -> Any:
        """The loss for the current one of several optimizers; RunError if there is none."""
        optimizers = self.run.optimizer
        assert isinstance(optimizers, OptimizerList)
        if optimizers.current == 0:
            self.losses = self._begin(batch)
        count = len(optimizers.optimizers)
        if not isgenerator(self.losses):
            advice = "Task(step=) must be a generator that yields a loss for each"
            raise RunError(f"the task has {count} optimizers: {advice}")
        loss = next(self.losses, None)
        if loss is None:
            yielded = f"Task(step=) yielded {optimizers.current} losses"
            raise RunError(f"{yielded}; the task has {count} optimizers: yield a loss for each")
        return loss

    def update_each(
        self, forward_backward: ForwardFn, grad_transform: StepFn, optimizer_step: StepFn, zero_grad: StepFn
    ) -> ForwardFn:
        """``(batch) -> sum of the losses``: both passes and the update of one optimizer after the other."""
        optimizers = self.run.optimizer
        assert isinstance(optimizers, OptimizerList)
        count = len(optimizers.optimizers)

        def updates(batch: Batch) -> torch.Tensor:
            total: Any = 0.0
            for index in range(count):
                optimizers.current = index
                total = total + forward_backward(batch).detach()
                grad_transform()
                optimizer_step()
                zero_grad()
            if next(self.losses, None) is not None:
                problem = f"Task(step=) yields more losses than the task has optimizers ({count})"
                raise RunError(f"{problem}; yield one loss for each")
            self._detach()
            return total

        return updates

    def _begin(self, batch: Batch) -> Any:
        if self.run.progress.batch == 0:
            self.context.state = {}
        return self.run.task.step(self.run.model, batch, self.context)

    def _detach(self) -> None:
        if self.context.state:
            self.context.state = map_tensors(torch.Tensor.detach, self.context.state)

    def state_dict(self) -> dict[str, Any]:
        return self.context.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.context.state = map_tensors(lambda tensor: tensor.to(self.run.device), state)
