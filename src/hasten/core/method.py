"""The contract that every acceleration method implements.

The hooks of a method are called once, while a run is built. Each receives something and returns a replacement for it; a
hook that is not overridden costs nothing. After building only plain functions are left.

The hooks, in the order in which the run is built::

    setup             () -> None                  first: sets what later stages read, such as the mesh
    process_context   () -> context manager       around the run: thread counts, allocator; restores them on exit
    plan              TrainPlan                   samples of a step, number of steps, when to stop
    data              BatchSource                 where batches come from (training and validation alike)
    model             module                      layers replaced, memory layout, compilation
    parallelize       module                      communication between processes
    optimizer         (model) -> optimizer        or (optimizer, schedule), as the task's function returns it
    batch_transform   (batch) -> batch            on the device
    loss              (output, target) -> loss
    forward           (batch) -> loss
    backward          (loss) -> None
    forward_backward  (batch) -> loss             both passes; a method that stores the loss must detach it
    grad_transform    () -> None                  between the last backward pass and the optimizer step
    optimizer_step    () -> None
    zero_grad         () -> None
    export            module                      the model that is evaluated and saved
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Set
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from hasten.core.card import Card, Exactness
from hasten.core.types import BackwardFn, Batch, BatchFn, ContextFactory, ForwardFn, LossFn, OptimizerFactory, StepFn

if TYPE_CHECKING:
    import torch

    from hasten.core.data import BatchSource
    from hasten.core.run_context import RunContext, TrainPlan

BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


class Method:
    """Base class of all methods: hooks that change nothing. Options are dataclass fields: data, never callables."""

    card: ClassVar[Card]
    name: ClassVar[str] = "method"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__module__.rpartition(".")[2]  # the file name is the method's name: no registry

    def __post_init__(self) -> None:
        validate_options(self)

    def setup(self, run: RunContext) -> None:
        pass

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        return context

    def plan(self, plan: TrainPlan, run: RunContext) -> TrainPlan:
        return plan

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource | Iterable[Batch]:
        return batches

    def model(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return model

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return model

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        return make

    def batch_transform(self, to_device: BatchFn, run: RunContext) -> BatchFn:
        return to_device

    def loss(self, loss: LossFn, run: RunContext) -> LossFn:
        return loss

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        return forward

    def backward(self, backward: BackwardFn, run: RunContext) -> BackwardFn:
        return backward

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        return forward_backward

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        return grad_transform

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        return optimizer_step

    def zero_grad(self, zero_grad: StepFn, run: RunContext) -> StepFn:
        return zero_grad

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return model


HOOKS = tuple(name for name in vars(Method) if not name.startswith("_") and callable(vars(Method)[name]))


def hooks_of(method: Method | type[Method]) -> tuple[str, ...]:
    """Names of the hooks (such as "forward") that a method overrides."""
    cls = method if isinstance(method, type) else type(method)
    return tuple(hook for hook in HOOKS if getattr(cls, hook) is not getattr(Method, hook))


def required_traits(method: Method) -> Set[str]:
    """The traits (keys of TRAITS) that a method relies on: its card has them, or its hooks imply monolithic_forward.

    A method that changes the forward or backward pass relies on each rank computing both for its own samples. A
    BIT_EXACT method, such as one that only observes, does not: it may miss what other ranks compute.
    """
    changes_pass = bool({"forward", "backward"}.intersection(hooks_of(method)))
    if changes_pass and method.card.exactness is not Exactness.BIT_EXACT:
        return method.card.requires | {"monolithic_forward"}
    return method.card.requires


def option(default: Any, *, one_of: tuple[str, ...] = (), **bounds: float) -> Any:
    """A dataclass field of a method with its range: one of some words, or a finite number within bounds.

    Args:
        default: Used where the recipe gives no value; may lie outside the range (None for "the method chooses").
        one_of: The words that are allowed.
        bounds: Limits of a number, by the keys of ``BOUNDS``: ``at_least``, ``above``, ``at_most``, ``below``.

    Raises:
        TypeError: An unknown bound, or neither words nor bounds.
    """
    if unknown := bounds.keys() - BOUNDS.keys():
        raise TypeError(f"option() got an unknown bound {sorted(unknown)[0]!r}; expected {', '.join(BOUNDS)}")
    if not one_of and not bounds:
        raise TypeError("option() requires a range: give one_of or a bound")
    ranges = ["one of " * (len(one_of) > 1) + ", ".join(one_of)] if one_of else []
    if bounds:
        ranges.append(" and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items()))
    return field(default=default, metadata={"one_of": one_of, "bounds": bounds, "range": " or ".join(ranges)})


def in_range(value: Any, one_of: tuple[str, ...], bounds: dict[str, float]) -> bool:
    """Whether an option's value is one of ``one_of``, or a finite number within ``bounds`` (as in ``option``)."""
    if not bounds or isinstance(value, bool) or not isinstance(value, (int, float)):
        return value in one_of
    finite = isinstance(value, int) or math.isfinite(value)
    return finite and all(BOUNDS[name](value, bound) for name, bound in bounds.items())


def validate_options(method: Any) -> None:
    """Raises ValueError if an option of a method lies outside its range; defaults are always allowed."""
    for opt in fields(method):
        value, spec = getattr(method, opt.name), opt.metadata
        if "range" in spec and value is not opt.default and not in_range(value, spec["one_of"], spec["bounds"]):
            finite = "finite and " if isinstance(value, float) and not math.isfinite(value) else ""
            raise ValueError(f"{opt.name} must be {finite}{spec['range']}, not {value!r:.40}")
