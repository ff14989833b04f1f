"""z-scores every gradient: each layer's gradient gets mean zero and standard deviation one."""

from dataclasses import dataclass

import torch

from hasten.core.card import Card, Exactness
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn

GRANULARITIES = ("tensor", "row")
EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass(frozen=True)
class ZNorm(Method):
    """g <- (g - mean g) / (std g + eps), with the population's deviation, over a whole ``tensor`` or each ``row`` of it.

    Biases and the scales of normalisation layers are left alone (``skip_1d``), and embeddings always: most of their
    rows have no gradient in a step, and a mean taken off would give them one. The magnitude of the gradient is erased:
    with plain SGD the learning rate has to be chosen anew, and clipping would clip the same norm in every step.
    """

    granularity: str = option("tensor", one_of=GRANULARITIES)
    skip_1d: bool = True
    eps: float = option(1e-8, above=0)

    card = Card(
        summary="z-score each gradient tensor",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://arxiv.org/abs/2408.01215",
        gain_when="networks with skip connections under Adam; the paper claims accuracy, not time: measure",
        accelerates={"steps"},
        applies_to={"matrix_weights"},
        requires={"full_weights", "reduced_gradients"},
        invalidates={"gradient_norm"},
        after=("float16",),  # it wants gradients without a loss scale
        presets=({"granularity": "tensor"}, {"granularity": "row"}),
    )

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        embeddings = {module.weight for module in run.model.modules() if isinstance(module, EMBEDDINGS)}
        wanted = (p for p in run.model.parameters() if p.requires_grad and p not in embeddings)
        touched = [p for p in wanted if p.numel() > 1 and (p.ndim > 1 or not self.skip_1d)]
        if not touched:
            run.report_no_effect(self, "no parameter outside embeddings has two or more dimensions")
            return grad_transform

        @torch.no_grad()
        def znorm():
            grad_transform()
            for parameter in touched:
                if (g := parameter.grad) is not None and not g.is_sparse:
                    precise = g.float() if g.dtype.itemsize < 4 else g
                    deviation, mean = torch.std_mean(precise, dim=self._axes(g), correction=0, keepdim=True)
                    g.sub_(mean).div_(deviation + self.eps)

        return znorm

    def _axes(self, g: torch.Tensor) -> tuple[int, ...]:
        """The axes that share a mean: all, or all but the first where rows have more than one element."""
        rows = self.granularity == "row" and g.ndim > 1 and g[0].numel() > 1
        return tuple(range(1 if rows else 0, g.ndim))
