"""DiLoCo: every rank trains by itself for ``sync_every`` steps; the mean change of the weights is the gradient of an
outer optimizer.

Douillard et al. 2023, arXiv 2311.08105, algorithm 1. With w the weights at the last synchronization and w_i those of
rank i now,

    d = w - mean of w_i;    v <- outer_momentum v + d;    w <- w - outer_lr (d + outer_momentum v)

which is SGD with Nesterov momentum in torch's form. All ranks continue from w; the state of the task's own optimizer
stays local. Between two outer steps, evaluation, export and a resume with another number of processes use the mean of
all ranks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten import Card, Exactness, Method, RunContext, StepFn, WrapOrder, option
from hasten._torch_compat import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub
from hasten.distributed import collectives
from hasten.utils.observe_step import observe_seldom_communication


@dataclass(frozen=True)
class DiLoCo(Method):
    """Local training with an outer optimizer every ``sync_every`` steps."""

    card = Card(
        summary="ranks train by themselves; an outer optimizer with momentum rarely applies their mean change",
        exactness=Exactness.CHANGES_TRAINING,
        source="Douillard et al. 2023, arXiv 2311.08105",
        gain_when="the network is so slow that ranks can communicate only every hundreds of steps",
        accelerates={"backward"},
        applies_to={"distributed"},
        invalidates={"replicated_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"sync_every": 50}, {"sync_every": 500}),
        trial_priority=4,
    )
    sync_every: int = option(100, at_least=1)  # steps
    outer_lr: float = option(0.7, above=0)
    outer_momentum: float = option(0.9, at_least=0, below=1)

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        assert run.parallel is not None
        collectives.check_sync_period(run, f"{self.name}:sync_every", self.sync_every)
        collectives.warn_local_batch_norm(model)
        collectives.broadcast_module(model)
        collectives.allow_divergent_replicas(run, self.name)
        run.parallel.sync_period = self.sync_every
        run.observe_effect(self, partial(observe_seldom_communication, self.sync_every))
        return model

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        weights: list[torch.Tensor] = [p for p in run.unwrapped_model.parameters() if p.requires_grad]
        progress = run.progress
        outer = run.checkpoint_state[self.name] = OuterOptimizer(weights, self.outer_lr, self.outer_momentum)

        def step_and_synchronize() -> None:
            outer.begin()
            optimizer_step()
            if (progress.step + 1) % self.sync_every == 0:
                collectives.all_reduce_mean(weights)
                outer.step()

        return step_and_synchronize

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return collectives.average_model(model)


class OuterOptimizer:
    """SGD with Nesterov momentum on the mean change of the weights."""

    def __init__(self, weights: list[torch.Tensor], lr: float, momentum: float):
        self.weights, self.lr, self.momentum = weights, lr, momentum
        self.anchor: list[torch.Tensor] = []  # the weights at the last synchronization, the same on all ranks
        self.velocity: list[torch.Tensor] = []  # the momentum buffers

    def begin(self) -> None:
        """Copies the weights into ``anchor`` before the first step, unless a checkpoint restored it."""
        if not self.anchor:
            self.anchor = [weight.detach().clone() for weight in self.weights]
            self.velocity = [torch.zeros_like(weight) for weight in self.anchor]

    @torch.no_grad()
    def step(self) -> None:
        """One outer step. Before, ``weights`` must hold the mean of all ranks; after, all ranks continue from them."""
        change = foreach_sub(self.anchor, self.weights)
        foreach_mul_(self.velocity, self.momentum)
        foreach_add_(self.velocity, change)
        foreach_add_(change, self.velocity, alpha=self.momentum)
        foreach_add_(self.anchor, change, alpha=-self.lr)
        foreach_copy_(self.weights, self.anchor)

    def state_dict(self) -> dict[str, Any]:
        return {"anchor": self.anchor, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.anchor, self.velocity = (
            [tensor.to(weight.device) for tensor, weight in zip(state[name], self.weights, strict=False)]
            for name in ("anchor", "velocity")
        )
