"""Local SGD: every rank trains by itself; every ``period`` steps the weights are averaged (Stich 2018, arXiv
1805.09767).

    warmup_steps                the first steps average gradients, as ddp does (post-local SGD, Lin et al. 2018,
                                arXiv 1808.07217)
    group_size, group_period    groups of consecutive ranks, such as those of one node, also average among themselves,
                                more often (hierarchical local SGD, section 5 of the same paper)

The optimizer state stays local, as in the local momentum of Lin et al. A gradient is weighted by its rank's samples, so
that averaging after every step of plain SGD equals ddp. Evaluation, export and a resume with another number of
processes use the mean of all ranks, including the optimizer state.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from hasten import Card, ConfigurationError, Exactness, Method, RunContext, StepFn, WrapOrder, option
from hasten.distributed import collectives
from hasten.utils.observe_step import observe_seldom_communication


@dataclass(frozen=True)
class LocalSGD(Method):
    """Averages the weights of all ranks every ``period`` steps, and of groups every ``group_period`` steps."""

    card = Card(
        summary="ranks train by themselves and average their weights every few steps",
        exactness=Exactness.CHANGES_TRAINING,
        source="Stich 2018, arXiv 1805.09767; Lin et al. 2018, arXiv 1808.07217",
        gain_when="sending the gradients takes longer than computing a step; short periods cost little quality",
        accelerates={"backward"},
        applies_to={"distributed"},
        invalidates={"replicated_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"period": 4}, {"period": 16}),
        trial_priority=5,
    )
    period: int = option(8, at_least=1)  # steps
    warmup_steps: int = option(0, at_least=0)
    group_size: int = option(0, at_least=0)  # ranks; 0: no groups
    group_period: int = option(1, at_least=1)  # steps

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        assert run.parallel is not None
        self._check_periods(run)
        if self.warmup_steps:
            collectives.check_no_sparse_gradients(model, self.name)
        collectives.warn_local_batch_norm(model)
        collectives.broadcast_module(model)
        collectives.allow_divergent_replicas(run, self.name)
        run.parallel.sync_period = math.lcm(self.period, self.group_period if self.group_size else 1)
        run.parallel.warmup_steps = self.warmup_steps
        run.observe_effect(self, partial(observe_seldom_communication, run.parallel.sync_period))
        return model

    def _check_periods(self, run: RunContext) -> None:
        world = run.ranks.world_size
        if self.group_size and world % self.group_size:
            raise ConfigurationError(f"local_sgd:group_size={self.group_size} must divide the {world} processes")
        if self.group_period > 1 and not self.group_size:
            raise ConfigurationError(
                f"local_sgd:group_period={self.group_period} has no effect without groups; set group_size as well"
            )
        if self.group_size and self.group_period % self.period == 0:
            raise ConfigurationError(
                f"local_sgd:group_period={self.group_period} is due only when all ranks average anyway, "
                f"every {self.period} steps; take a shorter group_period or a longer period"
            )
        if run.plan.steps is not None and self.warmup_steps >= run.plan.steps:
            run.report_no_effect(self, f"it begins after {self.warmup_steps} steps, and the run has {run.plan.steps}")
        elif not self.warmup_steps:
            collectives.check_sync_period(run, f"{self.name}:period", self.period)

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        if not self.warmup_steps:
            return grad_transform
        weights, progress = [p for p in run.unwrapped_model.parameters() if p.requires_grad], run.progress

        def average_in_warmup() -> None:
            grad_transform()
            if progress.step < self.warmup_steps:
                collectives.all_reduce_gradients(weights)

        return average_in_warmup

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        weights, progress = list(filter(collectives.is_real_or_complex, run.unwrapped_model.parameters())), run.progress
        frozen, trained = ([p for p in weights if p.requires_grad is trains] for trains in (False, True))
        group = cast(Any, dist).new_subgroups(self.group_size)[0] if self.group_size else None

        def average(group: dist.ProcessGroup | None = None) -> None:
            """Averages the weights over a group (None: all ranks); frozen ones only if they differ between ranks."""
            collectives.all_reduce_mean([*trained, *collectives.find_divergent_tensors(frozen, group)], group)

        def step_and_average() -> None:
            optimizer_step()
            done = progress.step + 1 - self.warmup_steps
            if done > 0 and done % self.period == 0:
                average()
            elif done > 0 and self.group_size and done % self.group_period == 0:
                average(group)

        return step_and_average

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return collectives.average_model(model)
