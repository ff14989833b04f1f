"""Names of the types that hooks receive and return."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Batch: TypeAlias = Any  # tensors in any nesting of tuples, lists, dicts and dataclasses
ContextFactory: TypeAlias = Callable[[], AbstractContextManager[Any]]
BatchFn: TypeAlias = Callable[[Batch], Batch]
LossFn: TypeAlias = "Callable[[Any, Any], torch.Tensor]"  # (output, target) -> scalar
ForwardFn: TypeAlias = "Callable[[Batch], torch.Tensor]"  # batch -> scalar loss
BackwardFn: TypeAlias = "Callable[[torch.Tensor], None]"  # scalar loss -> None
EffectCheck: TypeAlias = Callable[[], Generator[None, None, str] | str]  # see RunContext.observe_effect
StepFn: TypeAlias = Callable[[], None]  # one part of a training step, without arguments
OptimizerFactory: TypeAlias = "Callable[[torch.nn.Module], Any]"  # model -> optimizer, or (optimizer, schedule)
