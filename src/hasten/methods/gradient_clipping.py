"""All gradients together shortened to a greatest norm: g *= min(1, max_norm / ||g||).

By itself it saves no time. It makes higher learning rates and lower precision survivable, and those do.
"""

from dataclasses import dataclass

from hasten.contract.card import Card, Exactness, Order
from hasten.contract.method import Method, setting
from hasten.contract.sharded import clip_norm


@dataclass(frozen=True)
class GradientClipping(Method):
    card = Card(
        summary="the norm of all gradients together limited to max_norm",
        exactness=Exactness.OTHER_MATHS,
        source="Pascanu et al. 2013, arXiv 1211.5063",
        gain_when="recurrent nets and transformers with a learning rate at the edge of what is stable",
        speeds={"steps"},
        needs={"gradient size", "final gradients"},
        order=Order.LATE,
        after=("float16",),
        tries=({}, {"max_norm": 0.25}),
    )
    max_norm: float = setting(1.0, above=0)

    def gradients(self, gradients, run):
        parameters, max_norm = list(run.model.parameters()), self.max_norm

        def clipped():
            gradients()
            clip_norm(parameters, max_norm, run.whole_norm, run.twins)

        return clipped
