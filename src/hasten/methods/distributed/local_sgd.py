"""Every process trains by itself; every ``period`` steps the weights of all are averaged (Local SGD, Stich 2018, arXiv 1805.09767).

    start                   so many steps at first average gradients, as ddp does (post-local SGD, Lin et al. 2018, arXiv 1808.07217)
    inner, inner_period     ranks that follow each other, ``inner`` at a time (those of one machine), also average among themselves, more often
                            (hierarchical averaging, section 5 of the latter)

The optimizer's momenta stay each rank's own, as in Lin et al.'s local momentum. A gradient counts by its rank's samples, so that averaging after every
step of plain SGD is ddp. What is evaluated, exported and gone on with by another number of processes is the mean of all ranks, momenta included.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn
from hasten.distributed.collectives import (
    all_reduce_gradients,
    all_reduce_mean,
    allow_divergent_replicas,
    average_model,
    broadcast_module,
    check_no_sparse_gradients,
    check_sync_period,
    find_divergent_tensors,
    is_real_or_complex,
    warn_local_batch_norm,
)


@dataclass(frozen=True)
class LocalSGD(Method):
    card = Card(
        summary="processes train by themselves and average their weights every few steps",
        exactness=Exactness.CHANGES_TRAINING,
        source="Stich 2018, arXiv 1805.09767; Lin et al. 2018, arXiv 1808.07217",
        gain_when="sending the gradients takes longer than a step's arithmetic; mild periods cost little quality",
        accelerates={"backward"},
        applies_to={"distributed"},
        invalidates={"replicated_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"period": 4}, {"period": 16}),
        trial_priority=5,
    )
    period: int = option(8, at_least=1)  # steps
    warmup_steps: int = option(0, at_least=0)  # steps
    group_size: int = option(0, at_least=0)  # ranks of a group; 0: no groups
    group_period: int = option(1, at_least=1)  # steps

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        self._refuse_what_never_acts(run)
        if self.warmup_steps:
            check_no_sparse_gradients(model, self.name)
        warn_local_batch_norm(model)
        broadcast_module(model)
        allow_divergent_replicas(run, self.name)
        run.parallel.sync_period, run.parallel.warmup_steps = (
            math.lcm(self.period, self.group_period if self.group_size else 1),
            self.warmup_steps,
        )
        return model

    def _refuse_what_never_acts(self, run: RunContext) -> None:
        if self.group_size and run.ranks.world_size % self.group_size:
            raise ConfigurationError(
                f"local_sgd:inner={self.group_size} has to divide the {run.ranks.world_size} processes"
            )
        if self.group_period > 1 and not self.group_size:
            raise ConfigurationError(
                f"local_sgd:inner_period={self.group_period} is that of groups; say with inner how many processes make one"
            )
        if self.group_size and self.group_period % self.period == 0:
            raise ConfigurationError(
                f"local_sgd:inner_period={self.group_period} is due when all processes meet anyway, every {self.period} steps; take a longer period"
            )
        if run.plan.steps is not None and self.warmup_steps >= run.plan.steps:
            run.report_no_effect(self, f"it begins after {self.warmup_steps} steps, and the run has {run.plan.steps}")
        elif not self.warmup_steps:
            check_sync_period(run, f"{self.name}:period", self.period)

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        if not self.warmup_steps:
            return grad_transform
        weights, progress = (
            [weight for weight in run.unwrapped_model.parameters() if weight.requires_grad],
            run.progress,
        )

        def averaged_at_first():
            grad_transform()
            if progress.step < self.warmup_steps:
                all_reduce_gradients(weights)

        return averaged_at_first

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        weights, progress = list(filter(is_real_or_complex, run.unwrapped_model.parameters())), run.progress
        frozen, trained = ([weight for weight in weights if weight.requires_grad is learns] for learns in (False, True))
        group = dist.new_subgroups(self.group_size)[0] if self.group_size else None

        def meet(group=None):
            """What is frozen travels only where it differs: a task may have changed it all the same, or let it learn since."""
            all_reduce_mean([*trained, *find_divergent_tensors(frozen, group)], group)

        def averaged():
            optimizer_step()
            done = progress.step + 1 - self.warmup_steps
            if done > 0 and done % self.period == 0:
                meet()
            elif done > 0 and self.group_size and done % self.group_period == 0:
                meet(group)

        return averaged

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return average_model(model)
