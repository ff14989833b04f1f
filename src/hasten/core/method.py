"""The contract that every acceleration method implements.

A method is asked once, while a run is being built. Each hook receives a thing and returns a better
thing; a hook that is not overridden costs nothing. After building only plain functions are left.

The hooks, in the order in which the run is built::

    setup             () -> None                  before everything else: writes what later stages read, such as the mesh
    process_context   () -> context               around everything: thread counts, allocator; must undo itself
    plan              TrainPlan                   how many samples a step, how many steps, when to stop
    data              Batches                     where batches come from (training and validation alike)
    model             module                      surgery, memory layout, compilation
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
    export            module                      what evaluation and the saved model see
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from hasten.core.card import Card, Exactness

if TYPE_CHECKING:
    import torch

    from hasten.core.data import BatchSource
    from hasten.core.run_context import RunContext, TrainPlan
    from hasten.core.types import (
        BackwardFn,
        Batch,
        BatchFn,
        ContextFactory,
        ForwardFn,
        LossFn,
        OptimizerFactory,
        StepFn,
    )

BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def option(default: Any, *, one_of: tuple[str, ...] = (), **bounds: float) -> Any:
    """A field of a method with its range: one of some words, or a finite number within bounds.

    Args:
        default: used where the recipe names no value; may lie outside the range (None for "the method chooses").
        one_of: the words that are allowed.
        bounds: limits of a number, by the keys of ``BOUNDS``: ``at_least``, ``above``, ``at_most``, ``below``.

    Raises:
        TypeError: an unknown bound, or neither words nor bounds.
    """
    if unknown := bounds.keys() - BOUNDS.keys():
        raise TypeError(f"an option has no bound {sorted(unknown)[0]!r}; there are {', '.join(BOUNDS)}")
    if not one_of and not bounds:
        raise TypeError("an option states its range: give one_of or a bound")
    words = [f"one of {', '.join(one_of)}" if len(one_of) > 1 else one_of[0]] if one_of else []
    if bounds:
        words.append(" and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items()))
    return field(default=default, metadata={"one_of": one_of, "bounds": bounds, "range": " or ".join(words)})


def in_range(value: Any, one_of: tuple[str, ...], bounds: dict[str, float]) -> bool:
    """Whether a value is in the range that an option states."""
    if not bounds or isinstance(value, bool) or not isinstance(value, (int, float)):
        return value in one_of
    return (isinstance(value, int) or math.isfinite(value)) and all(
        BOUNDS[name](value, bound) for name, bound in bounds.items()
    )


def validate_options(method: Any) -> None:
    """Checks the options of a method against their ranges.

    Raises:
        ValueError: an option lies outside its range.
    """
    for each in fields(method):
        value, about = getattr(method, each.name), each.metadata
        if "range" in about and value is not each.default and not in_range(value, about["one_of"], about["bounds"]):
            finite = "finite and " if isinstance(value, float) and not math.isfinite(value) else ""
            raise ValueError(f"{each.name} must be {finite}{about['range']}, not {value!r:.40}")


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


HOOKS = (
    "setup",
    "process_context",
    "plan",
    "data",
    "model",
    "parallelize",
    "optimizer",
    "batch_transform",
    "loss",
    "forward",
    "backward",
    "forward_backward",
    "grad_transform",
    "optimizer_step",
    "zero_grad",
    "export",
)


def hooks_of(method: Method | type[Method]) -> tuple[str, ...]:
    """The hooks that a method overrides."""
    cls = method if isinstance(method, type) else type(method)
    return tuple(hook for hook in HOOKS if getattr(cls, hook) is not getattr(Method, hook))


def required_traits(method: Method) -> frozenset[str]:
    """The traits of the run that a method relies on: those of its card, and ``monolithic_forward`` where it follows from its hooks.

    A method that changes the forward or backward pass relies on each rank computing both for its samples by itself. A method
    that changes no bit, such as an observer, may miss what is computed otherwise.
    """
    changes_a_pass = method.card.exactness is not Exactness.BIT_EXACT and {"forward", "backward"}.intersection(
        hooks_of(method)
    )
    return method.card.requires | ({"monolithic_forward"} if changes_a_pass else frozenset())
