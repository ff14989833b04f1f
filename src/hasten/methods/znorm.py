"""ZNorm: z-scores gradients, so that each has mean zero and standard deviation one."""

from dataclasses import dataclass
from functools import partial

import torch

from hasten import Card, Exactness, Method, NoEffectError, RunContext, StepFn, option
from hasten.utils.observe_step import observe_gradients
from hasten.utils.op_recorder import NOT_CHECKED

EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass(frozen=True)
class ZNorm(Method):
    """g <- (g - mean(g)) / (std(g) + eps), with the population standard deviation.

    Embeddings are never changed: most of their rows have no gradient in a step, and subtracting the mean would give
    them one. The magnitude of the gradients is lost: plain SGD needs another learning rate, and gradient clipping would
    clip to the same norm in every step.
    """

    card = Card(
        summary="z-score each gradient tensor",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://arxiv.org/abs/2408.01215",
        gain_when="networks with skip connections under Adam; the paper claims accuracy, not time: measure",
        accelerates={"steps"},
        applies_to={"matrix_weights"},
        requires={"full_weights", "reduced_gradients"},
        invalidates={"gradient_norm"},
        after=("float16",),  # the gradients must not contain the loss scale
        presets=({"granularity": "tensor"}, {"granularity": "row"}),
    )

    granularity: str = option("tensor", one_of=("tensor", "row"))  # what has a mean: a parameter, or each of its rows
    skip_1d: bool = True  # leave biases and the scales of normalization layers unchanged
    eps: float = option(1e-8, above=0)  # added to the standard deviation

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        embeddings = {module.weight for module in run.model.modules() if isinstance(module, EMBEDDINGS)}
        candidates = [p for p in run.model.parameters() if p.requires_grad and p not in embeddings]
        parameters = [p for p in candidates if p.numel() > 1 and (p.ndim > 1 or not self.skip_1d)]
        if not parameters:
            run.report_no_effect(self, "no parameter outside embeddings has two or more dimensions")
            return grad_transform

        run.observe_effect(self, partial(observe_gradients, run, parameters, _inspect))

        @torch.no_grad()
        def z_score_gradients() -> None:
            grad_transform()
            for parameter in parameters:
                g = parameter.grad
                if g is not None and not g.is_sparse:
                    precise = g.float() if g.dtype.itemsize < 4 else g
                    std, mean = torch.std_mean(precise, dim=self._dims(g), correction=0, keepdim=True)
                    g.sub_(mean).div_(std + self.eps)

        return z_score_gradients

    def _dims(self, g: torch.Tensor) -> tuple[int, ...]:
        """Dimensions over which mean and std of ``g`` are taken: all, or all but the first if a row has 2 or more."""
        by_row = self.granularity == "row" and g.ndim > 1 and g[0].numel() > 1
        return tuple(range(1 if by_row else 0, g.ndim))


def _inspect(gradients: list[torch.Tensor], total: int) -> str:
    gradients = [gradient.float() for gradient in gradients]
    gradients = [g[g.flatten(1).any(1)] if g.ndim > 1 else g for g in gradients]  # a row of zeros stays one
    statistics = [(float(g.mean()), float(g.std(correction=0))) for g in gradients if g.numel()]
    done = sum(abs(mean) < 0.01 and abs(std - 1) < 0.1 for mean, std in statistics)
    if not done and any(abs(mean) > 0.01 * std for mean, std in statistics):
        raise NoEffectError(f"none of {len(statistics)} gradients was z-scored when the optimizer used them")
    if not done:  # std / (std + eps) is far below 1
        return f"{NOT_CHECKED}: the gradients were zeros, or not much larger than eps"
    return f"{done} of {total} gradients were z-scored"
