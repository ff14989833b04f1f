"""A method that makes a task's own step compute in float64, for the check of exactness."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import Batch, ForwardFn


class OwnStepInDouble(Method):
    """Converts the float32 tensors that a task's own step makes (noise, labels, a state) to float64, values unchanged.

    In a module of its own, since that names a method; and no part of ``RunConditions``, because its hook excludes
    strategies that divide the forward pass, such as pipeline.
    """

    card = Card(summary="own step in float64", exactness=Exactness.CHANGES_TRAINING, order=WrapOrder.FIRST)

    def forward(self, forward: ForwardFn, run: RunContext) -> ForwardFn:
        def forward_in_double(batch: Batch) -> torch.Tensor:
            with _NewTensorsInDouble():
                return forward(batch)

        return forward_in_double


class _NewTensorsInDouble(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.double() if isinstance(result, torch.Tensor) and result.dtype == torch.float32 else result
