"""Gradient clipping by the global norm."""

from dataclasses import dataclass
from functools import partial

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext, StepFn, WrapOrder, option
from hasten.distributed.dtensor_state import clip_norm
from hasten.utils.observe_step import observe_gradients
from hasten.utils.optimizers import sparse_gradients_layer


@dataclass(frozen=True)
class GradientClipping(Method):
    """Multiplies all gradients by min(1, max_norm / n), where n is the norm of all gradients together.

    It saves no time by itself. It keeps training stable at higher learning rates and in lower precision, which save
    time.
    """

    card = Card(
        summary="limit the norm of all gradients together to max_norm",
        exactness=Exactness.CHANGES_TRAINING,
        source="Pascanu et al. 2013, arXiv 1211.5063",
        gain_when="recurrent networks and transformers with a learning rate close to divergence",
        accelerates={"steps"},
        requires={"gradient_norm", "reduced_gradients"},
        order=WrapOrder.LATE,
        after=("float16",),  # the gradients must not contain the loss scale
        presets=({}, {"max_norm": 0.25}),
        remedy_for={"divergence": {}},
        script_edit={"step": "torch.nn.utils.clip_grad_norm_({model}.parameters(), {max_norm})"},
    )

    max_norm: float = option(1.0, above=0)  # Euclidean norm

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        parameters = list(run.model.parameters())
        if layer := sparse_gradients_layer(run.model):
            reason = f"the gradients of {layer} are sparse (sparse=True), and torch computes no norm of these"
            return run.report_no_effect(self, reason, grad_transform)

        def clip_gradients() -> None:
            grad_transform()
            clip_norm([*parameters], self.max_norm, run.parallel)

        run.observe_effect(self, partial(observe_gradients, run, parameters, self._inspect))
        return clip_gradients

    def _inspect(self, gradients: list[torch.Tensor], _: int) -> str:
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if norm > 1.01 * self.max_norm:
            raise NoEffectError(f"the optimizer used gradients of norm {norm:.3g}, above max_norm={self.max_norm:g}")
        if norm > 0.99 * self.max_norm:
            return f"{len(gradients)} gradients were clipped to norm {self.max_norm:g}"
        return f"the norm of {len(gradients)} gradients was {norm:.3g}, below max_norm={self.max_norm:g}"
