"""Evaluates and saves a running average of the weights, which is often as good as a lower learning rate."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hasten._torch_compat import foreach_copy_, foreach_lerp_
from hasten.contract.card import Card, Exactness, Order
from hasten.contract.method import Method, Run, setting


@dataclass(frozen=True)
class Ema(Method):
    """After every step from ``start`` on: average <- d * average + (1 - d) * weights, with d = min(decay, (1 + t) / (10 + t)).

    t counts the averaged steps, so that a short run is not held back by its first weights. Buffers, such as the
    statistics of batch normalisation, are those of the live model.
    """

    decay: float = setting(0.999, above=0, below=1)
    start: int = setting(0, at_least=0)  # steps

    card = Card(
        summary="average the weights over the last steps; evaluate and save the average",
        exactness=Exactness.OTHER_MATHS,
        source="https://doi.org/10.1137/0330046",  # Polyak and Juditsky 1992
        gain_when="the learning rate stays high to the end, so that the last steps only add noise",
        speeds={"steps"},
        needs={"whole weights", "like weights"},
        order=Order.LATE,
        after=("compile", "float16"),
        tries=({"decay": 0.99}, {"decay": 0.999}),
    )

    def update(self, update: Callable, run: Run) -> Callable:
        if run.loop.steps is not None and self.start >= run.loop.steps:
            run.nothing_to_do(self, f"the run ends after {run.loop.steps} steps, before the average starts")
            return update
        weights, clock = list(run.model.parameters()), run.clock
        averages = run.kept[self.name] = Averages(weights)

        def averaged():
            update()
            t = clock.step - self.start
            averages.follow(weights, min(self.decay, (1 + t) / (10 + t)) if t >= 0 else 0.0)

        return averaged

    def export(self, model: torch.nn.Module, run: Run) -> torch.nn.Module:
        if self.name not in run.kept:
            return model
        averaged = copy.deepcopy(model)
        with torch.no_grad():
            foreach_copy_(list(averaged.parameters()), run.kept[self.name].tensors)
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
