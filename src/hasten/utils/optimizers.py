"""What a task's optimizer function returns: an optimizer, perhaps with a schedule, or several of them as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hasten._torch_compat import chained_schedulers
from hasten.core.errors import ConfigurationError

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)  # that torch has a fused step for


def optimizer_and_schedule(made: Any) -> tuple[Any, Any]:
    """A task's optimizer function's result as (optimizer, schedule or None); ConfigurationError for other tuples.

    Lists of several optimizers and schedules become an ``OptimizerList`` and a ``ScheduleList``.
    """
    result: tuple[Any, ...] = made if isinstance(made, tuple) else (made, None)  # pyright: ignore[reportUnknownVariableType]
    if len(result) != 2:
        given = f"it returned a tuple of {len(result)} items"
        advice = "several optimizers are a list"
        raise ConfigurationError(
            f"Task(optimizer=) must return a torch optimizer, or (optimizer, schedule); {given}; {advice}"
        )
    optimizer, schedule = result
    if isinstance(optimizer, list):
        optimizer = OptimizerList(optimizer)  # pyright: ignore[reportUnknownArgumentType]
    return optimizer, ScheduleList(schedule) if isinstance(schedule, list) else schedule  # pyright: ignore[reportUnknownArgumentType]


def parameters_outside(model: torch.nn.Module, optimizer: Any) -> list[torch.nn.Parameter]:
    """The parameters of an optimizer that the model does not hold, such as those of a loss."""
    held = set(map(id, model.parameters()))
    return [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) not in held]


def takes_steps(make_optimizer: Callable[..., Any]) -> bool:
    """Whether a task's optimizer function takes ``(model, steps)`` rather than ``(model)``."""
    try:
        parameters = inspect.signature(make_optimizer).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.default is p.empty and p.kind in positional]) >= 2


def scale_learning_rates(optimizer: Any, schedule: Any, factor: float) -> None:
    """Multiplies every learning rate, and the base and peak rates that a schedule stores, by ``factor``, in place."""
    for group in optimizer.param_groups:
        for key in group.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
            group[key] = group[key] * factor
    for scheduler in {id(one): one for one in _nested_schedulers(schedule)}.values():  # each once
        for name in ("base_lrs", "max_lrs"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])


def _nested_schedulers(schedule: Any) -> Iterator[Any]:
    """A schedule and, at any depth, the schedulers inside it."""
    yield schedule
    for inner in chained_schedulers(schedule):
        yield from _nested_schedulers(inner)


def sparse_gradients_layer(model: torch.nn.Module, parameters: Iterable[torch.Tensor] | None = None) -> str | None:
    """The name of the first layer with ``sparse=True`` (embeddings) whose weights, trained and among ``parameters`` (of
    the model, by default), get sparse gradients; None if there is none.
    """
    counted = {id(weight) for weight in (model.parameters() if parameters is None else parameters)}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            weights = module.parameters(recurse=False)
            if any(weight.requires_grad and id(weight) in counted for weight in weights):
                return name or type(module).__name__
    return None


def fused_step_obstacle(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> str | None:
    """Why an optimizer (of ``model``) cannot be switched to torch's fused step, in words; None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in FUSED:  # not isinstance: a subclass may override step
        return f"torch has no fused {name} (only {', '.join(cls.__name__ for cls in FUSED)})"
    if all(group.get("fused") for group in optimizer.param_groups):
        return f"the task's {name} is fused already"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"a differentiable {name} cannot be fused"
    parameters: list[torch.Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if type(optimizer) is torch.optim.SGD and any(group["dampening"] for group in optimizer.param_groups):
        return "torch's fused SGD treats dampening differently where a weight gets its first gradient later"
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "some parameters are complex, which the fused step does not support"
    if any(map(_has_gaps, parameters)):
        return "a weight is a slice of a larger tensor; the fused step writes over the gaps between its numbers"
    if type(optimizer) is torch.optim.Adagrad and any(parameter.device.type != "cpu" for parameter in parameters):
        return "torch has a fused Adagrad for the CPU only"
    if model is not None and (layer := sparse_gradients_layer(model, parameters)) is not None:
        return f"the gradients of {layer} are sparse (sparse=True), which the fused step does not support"
    return None


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Whether a tensor in memory leaves numbers out, as a slice of columns does."""
    is_plain = not is_lazy(tensor) and type(tensor.data) is torch.Tensor  # a subclass has its own memory format
    return is_plain and torch.empty_like(tensor, device="meta").stride() != tensor.stride()


def follow_strides(optimizer: torch.optim.Optimizer) -> None:
    """Keeps the state of an optimizer in the memory format of its weights, also where it is loaded later.

    torch's fused kernels on the CPU walk through memory and check no strides: with state in another format, such as
    that of a checkpoint from before the weights became channels-last, they update weights by the state of others. What
    is saved is contiguous, so that a run without hasten can load it.
    """
    align_state(optimizer)
    optimizer.register_load_state_dict_post_hook(align_state)
    optimizer.register_state_dict_post_hook(_with_contiguous_state)


def start_late_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook before the step of a fused SGD: gives weights without momentum one of zeros, where others have one.

    The fused kernel fails at a weight that gets its first gradient later than the others, such as that of a layer which
    was frozen. From zeros the momentum is the gradient, as it is without the kernel.
    """
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        states = {weight: optimizer.state[weight] for weight in group["params"] if weight.grad is not None}
        late = [weight for weight, state in states.items() if state.get("momentum_buffer") is None]
        if len(late) < len(states):
            for weight in late:
                states[weight]["momentum_buffer"] = torch.zeros_like(weight)


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Replaces state tensors that have the shape of their weight by copies in the memory format of the weight."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_like_weight = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            # momentum may be sparse
            if is_like_weight and value.layout is torch.strided and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _with_contiguous_state(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    def contiguous(value: Any) -> Any:
        return value.contiguous() if isinstance(value, torch.Tensor) and value.layout is torch.strided else value

    state = {key: {name: contiguous(value) for name, value in values.items()} for key, values in saved["state"].items()}
    return {**saved, "state": state}


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

    @property
    def is_last(self) -> bool:
        """Whether the current optimizer is the last one of a training step."""
        return self.current == len(self.optimizers) - 1

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
