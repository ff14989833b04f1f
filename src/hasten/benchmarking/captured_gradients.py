"""Method that stores the gradients that the optimizers use; in a file of its own, because a file names its method."""

from dataclasses import dataclass, field

import torch

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn
from hasten.engine.registry import method_names


@dataclass
class CapturedGradients(Method):
    """Stores in ``gradients``, by parameter name, the first gradient of each parameter since the caller emptied it.

    The gradients are those after all transforms, which the optimizers use.


    With several optimizers there are several backward passes in a step; a later one also reaches parameters of others.
    """

    card = Card(
        summary="keeps gradients", exactness=Exactness.BIT_EXACT, order=WrapOrder.LAST, after=tuple(method_names())
    )
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        parameters = {name: weight for name, weight in run.model.named_parameters() if not weight.is_meta}

        def transform_and_keep() -> None:
            grad_transform()
            found = {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}
            self.gradients = found | self.gradients

        return transform_and_keep
