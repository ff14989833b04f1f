"""Every process trains by itself for ``period`` steps; how far they came, on average, is the gradient of an outer optimizer (DiLoCo).

Douillard et al. 2023, arXiv 2311.08105, algorithm 1. With w the weights that all began the period with, and w_i those rank i has come to,

    d = w - mean of w_i;    v <- momentum v + d;    w <- w - rate (d + momentum v)

which is SGD with Nesterov's momentum in torch's form. All go on from w; the state of the task's own optimizer stays each rank's own.
Between two outer steps the mean of all ranks is what is evaluated, exported and gone on with by another number of processes.
"""

from dataclasses import dataclass

import torch

from hasten._torch_compat import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn
from hasten.distributed.collectives import (
    all_reduce_mean,
    allow_divergent_replicas,
    average_model,
    broadcast_module,
    check_sync_period,
    warn_local_batch_norm,
)


@dataclass(frozen=True)
class DiLoCo(Method):
    card = Card(
        summary="processes train by themselves; an outer optimizer with momentum follows their mean every many steps",
        exactness=Exactness.CHANGES_TRAINING,
        source="Douillard et al. 2023, arXiv 2311.08105",
        gain_when="the network is so slow that a message every hundreds of steps is what it can carry",
        accelerates={"backward"},
        applies_to={"distributed"},
        invalidates={"replicated_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"period": 50}, {"period": 500}),
        trial_priority=4,
    )
    sync_every: int = option(100, at_least=1)  # steps
    outer_lr: float = option(0.7, above=0)
    outer_momentum: float = option(0.9, at_least=0, below=1)

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        check_sync_period(run, f"{self.name}:sync_every", self.sync_every)
        warn_local_batch_norm(model)
        broadcast_module(model)
        allow_divergent_replicas(run, self.name)
        run.parallel.sync_period = self.sync_every
        return model

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        weights, progress = (
            [weight for weight in run.unwrapped_model.parameters() if weight.requires_grad],
            run.progress,
        )
        outer = run.checkpoint_state[self.name] = Outer(weights, self.outer_lr, self.outer_momentum)

        def followed():
            outer.begin()
            optimizer_step()
            if (progress.step + 1) % self.sync_every == 0:
                all_reduce_mean(weights)
                outer.step()

        return followed

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return average_model(model)


class Outer:
    """The outer optimizer: the weights, where all ranks began with them, and the velocity."""

    def __init__(self, weights: list[torch.Tensor], rate: float, momentum: float):
        self.weights, self.rate, self.momentum = weights, rate, momentum
        self.began: list[torch.Tensor] = []
        self.velocity: list[torch.Tensor] = []

    def begin(self) -> None:
        """In the first step, or the first after one process trained alone."""
        if not self.began:
            self.began = [weight.detach().clone() for weight in self.weights]
            self.velocity = [torch.zeros_like(weight) for weight in self.began]

    @torch.no_grad()
    def step(self) -> None:
        """The weights are the mean of all ranks; they become what all go on from."""
        moved = foreach_sub(self.began, self.weights)
        foreach_mul_(self.velocity, self.momentum)
        foreach_add_(self.velocity, moved)
        foreach_add_(moved, self.velocity, alpha=self.momentum)
        foreach_add_(self.began, moved, alpha=-self.rate)
        foreach_copy_(self.weights, self.began)

    def state_dict(self) -> dict:
        return {"began": self.began, "velocity": self.velocity}

    def load_state_dict(self, state: dict) -> None:
        self.began, self.velocity = (
            [tensor.to(weight.device) for tensor, weight in zip(state[name], self.weights, strict=False)]
            for name in ("began", "velocity")
        )
