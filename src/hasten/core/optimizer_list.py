"""Several optimizers, and several schedules, of one task: methods and checkpoints use them as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class OptimizerList:
    """Several optimizers as one, except that ``step`` updates only the ``current`` one, which the engine sets.

    The state has the form of that of one optimizer, with the parameters numbered through.
    """

    def __init__(self, optimizers: Sequence[Any]):
        self.optimizers, self.current = list(optimizers), 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {parameter: values for optimizer in self.optimizers for parameter, values in optimizer.state.items()}

    def step(self) -> None:
        """Updates the parameters of the current optimizer."""
        self.optimizers[self.current].step()

    def zero_grad(self) -> None:
        """Sets the gradients of all optimizers to None: a loss also has gradients for parameters of the others."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Registers the hook with each optimizer; returns a handle with ``remove()`` for all of them."""
        return _joined([optimizer.register_step_pre_hook(hook) for optimizer in self.optimizers])

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        """As ``register_step_pre_hook``, after the update."""
        return _joined([optimizer.register_step_post_hook(hook) for optimizer in self.optimizers])

    def state_dict(self) -> dict[str, Any]:
        """The states of all optimizers as one."""
        states, groups = dict[int, Any](), list[dict[str, Any]]()
        for optimizer in self.optimizers:
            first, own = sum(len(group["params"]) for group in groups), optimizer.state_dict()
            states |= {first + index: values for index, values in own["state"].items()}
            for group in own["param_groups"]:
                groups.append(group | {"params": [first + index for index in group["params"]]})
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        groups, first = list(state["param_groups"]), 0
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            own, groups = groups[:count], groups[count:]
            indices = [index for group in own for index in group["params"]]
            states = {index - first: state["state"][index] for index in indices if index in state["state"]}
            own = [group | {"params": [index - first for index in group["params"]]} for group in own]
            optimizer.load_state_dict({"state": states, "param_groups": own})
            first += len(indices)


class ScheduleList:
    """The learning-rate schedules of several optimizers, which step together."""

    def __init__(self, schedules: Sequence[Any]):
        self.schedules = list(schedules)

    @property
    def _schedulers(self) -> list[Any]:  # as torch's ChainedScheduler, so that scale_learning_rates finds them
        return self.schedules

    def step(self) -> None:
        """Advances every schedule by one step."""
        for schedule in self.schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(index): schedule.state_dict() for index, schedule in enumerate(self.schedules)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, schedule in enumerate(self.schedules):
            schedule.load_state_dict(state[str(index)])


def _joined(handles: list[Any]) -> Any:
    return SimpleNamespace(remove=lambda: [handle.remove() for handle in handles])
