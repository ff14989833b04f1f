"""Evaluates and saves a running average of the weights, which is often as good as a lower learning rate."""

import copy
from dataclasses import dataclass

import torch

from hasten._torch_compat import foreach_copy_, foreach_lerp_
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn


@dataclass(frozen=True)
class Ema(Method):
    """After every step from ``start`` on: average <- d * average + (1 - d) * weights, with d = min(decay, (1 + t) / (10 + t)).

    t counts the averaged steps, so that a short run is not held back by its first weights. Buffers, such as the
    statistics of batch normalisation, are those of the live model.
    """

    decay: float = option(0.999, above=0, below=1)
    start: int = option(0, at_least=0)  # steps

    card = Card(
        summary="average the weights over the last steps; evaluate and save the average",
        exactness=Exactness.CHANGES_TRAINING,
        source="https://doi.org/10.1137/0330046",  # Polyak and Juditsky 1992
        gain_when="the learning rate stays high to the end, so that the last steps only add noise",
        accelerates={"steps"},
        requires={"full_weights", "replicated_weights"},
        order=WrapOrder.LATE,
        after=("compile", "float16"),
        presets=({"decay": 0.99}, {"decay": 0.999}),
    )

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        if run.plan.steps is not None and self.start >= run.plan.steps:
            run.report_no_effect(self, f"the run ends after {run.plan.steps} steps, before the average starts")
            return optimizer_step
        weights, progress = list(run.model.parameters()), run.progress
        averages = run.checkpoint_state[self.name] = Averages(weights)

        def averaged():
            optimizer_step()
            t = progress.step - self.start
            averages.follow(weights, min(self.decay, (1 + t) / (10 + t)) if t >= 0 else 0.0)

        return averaged

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        if self.name not in run.checkpoint_state:
            return model
        averaged = copy.deepcopy(model)
        with torch.no_grad():
            foreach_copy_(list(averaged.parameters()), run.checkpoint_state[self.name].tensors)
        return averaged


class Averages:
    """Running averages of some tensors; they travel in the checkpoint."""

    def __init__(self, weights: list[torch.Tensor]):
        self.tensors = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def follow(self, weights: list[torch.Tensor], decay: float) -> None:
        foreach_lerp_(self.tensors, weights, 1 - decay)

    def state_dict(self) -> dict:
        return {str(number): tensor for number, tensor in enumerate(self.tensors)}

    def load_state_dict(self, state: dict) -> None:
        for number, tensor in enumerate(self.tensors):
            tensor.copy_(state[str(number)])
