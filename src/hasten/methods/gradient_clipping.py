"""All gradients together shortened to a greatest norm: g *= min(1, max_norm / ||g||).

By itself it saves no time. It makes higher learning rates and lower precision survivable, and those do.
"""

from dataclasses import dataclass

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn
from hasten.distributed.dtensor_state import clip_norm


@dataclass(frozen=True)
class GradientClipping(Method):
    card = Card(
        summary="the norm of all gradients together limited to max_norm",
        exactness=Exactness.CHANGES_TRAINING,
        source="Pascanu et al. 2013, arXiv 1211.5063",
        gain_when="recurrent nets and transformers with a learning rate at the edge of what is stable",
        accelerates={"steps"},
        requires={"gradient_norm", "reduced_gradients"},
        order=WrapOrder.LATE,
        after=("float16",),
        presets=({}, {"max_norm": 0.25}),
        remedy_for={"divergence": {}},
    )
    max_norm: float = option(1.0, above=0)

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        parameters, max_norm = list(run.model.parameters()), self.max_norm

        def clipped():
            grad_transform()
            clip_norm(parameters, max_norm, run.global_grad_norm, run.duplicate_params)

        return clipped
