"""Parameter server with bounded delay: a rank continues while its gradients travel, at weights that are a few updates
old.

Dean et al. 2012 (DistBelief) let every gradient change the weights when it arrives: n workers then make n updates where
a single process makes one, so that learning rates, schedules and momenta mean something else. Here an update is the
usual one, as in the bounded delay of Li et al. 2014 (section 3.4):

    w[t+1] = optimizer step from w[t], with the settings and the mean gradient over all ranks of step t

made as soon as the last of these gradients has arrived. Only the weights at which gradients are computed are older: a
rank begins its step t with the newest weights of that moment, and waits only while they lack more than ``staleness``
updates (Ho et al. 2013). So no rank is further ahead of the slowest one, every gradient counts once, and
``staleness=0`` equals ddp. Batch norm statistics are those of rank 0, as with ddp. Methods that transform gradients see
those of one rank, before the mean.

Every rank is a server of all weights: the gradients are all-reduced in the background, and each rank makes the same
updates in the same order. A single server would send the same weights, but all traffic would pass its network.

All ranks wait for the slowest when they meet: at checkpoints, at evaluations, and to agree on them some times a second.
All ranks do the same number of steps, so the gain is the waiting for ranks that are slow now and then, not for one that
always is.
"""

import copy
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from hasten import Card, ContextFactory, Exactness, Method, NoEffectError, RunContext, StepFn, WrapOrder, option
from hasten._torch_compat import mark_updated
from hasten.distributed import collectives
from hasten.distributed.collectives import GradientBucket


@dataclass(frozen=True)
class ParameterServer(Method):
    """Averages gradients in the background and updates the weights when the average has arrived."""

    card = Card(
        summary="ranks send gradients and continue with the newest weights, a few updates old at most",
        exactness=Exactness.CHANGES_TRAINING,
        source="Li et al. 2014 (Scaling Distributed ML with the Parameter Server); Ho et al. 2013; Dean et al. 2012",
        gain_when="ranks take turns in being slow, or sending the gradients takes long",
        accelerates={"backward"},
        applies_to={"distributed"},
        invalidates={"replicated_weights", "reduced_gradients"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"staleness": 1}, {"staleness": 4}),
    )
    staleness: int = option(2, at_least=0)  # updates that a rank's weights may lack

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        updates = run.checkpoint_state[self.name] = DelayedUpdates(run, self.staleness)

        @contextmanager
        def connected() -> Generator[None]:
            with context():
                try:
                    yield
                    updates.finish()
                finally:
                    updates.close()

        return connected

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        assert run.parallel is not None
        collectives.check_no_sparse_gradients(model, self.name)
        collectives.warn_local_batch_norm(model)
        collectives.broadcast_module(model)
        run.parallel.merge_rank_states = run.checkpoint_state[self.name].finish
        return model

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        updates: DelayedUpdates = run.checkpoint_state[self.name]
        updates.weights = [weight for weight in run.unwrapped_model.parameters() if weight.requires_grad]
        updates.optimizer_step = optimizer_step

        def describe() -> str:
            if not updates.sent:
                raise NoEffectError("this rank has sent no gradients")
            return f"gradients were sent {updates.sent} times; {len(updates.pending)} updates are pending"

        run.observe_effect(self, describe)
        return updates.send_and_update

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return run.checkpoint_state[self.name].finish(model)


class DelayedUpdates:
    """The updates whose gradients have been sent by this rank and have not arrived from all others."""

    def __init__(self, run: RunContext, staleness: int):
        self.run, self.staleness = run, staleness
        self.weights: list[torch.nn.Parameter] = []
        self.optimizer_step: StepFn  # makes one update
        self.group: Any = None  # of gloo, whose collectives run in threads of their own
        self.pending: deque[tuple[Any, torch.Tensor, list[dict[str, Any]]]] = deque()  # work, gradients, settings
        self.sent = 0

    def send_and_update(self) -> None:
        """Sends the gradients of this step; then makes the updates that are due, or whose gradients have arrived."""
        if self.group is None:
            self.group = cast(Any, dist).new_group(backend="gloo")
        bucket = GradientBucket(self.weights)
        message = torch.cat([tensor.detach().flatten() for tensor in (*bucket.tensors, bucket.shares)]).cpu()
        groups = self.run.optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        work = cast(Any, dist).all_reduce(message, group=self.group, async_op=True)
        self.pending.append((work, message, copy.deepcopy(settings)))
        self.sent += 1
        for weight in self.weights:
            weight.grad = None
        mark_updated(self.run.optimizer)  # else a schedule that steps before the first update would warn
        while self.pending and (len(self.pending) > self.staleness or self.pending[0][0].is_completed()):
            self._update()

    def finish(self, state: Any = None) -> Any:
        """Makes all pending updates; returns ``state`` unchanged."""
        while self.pending:
            self._update()
        return state

    def _update(self) -> None:
        """Waits for the oldest gradients; makes the optimizer step with their mean and the settings of their step."""
        work, total, settings = self.pending.popleft()
        work.wait()
        sizes, groups = [weight.numel() for weight in self.weights], self.run.optimizer.param_groups
        parts: Any = torch.split(total / self.run.ranks.world_size, [*sizes, len(sizes)])
        *gradients, has_gradient = parts
        for weight, gradient, exists in zip(self.weights, gradients, has_gradient, strict=True):
            weight.grad = gradient.view_as(weight).to(weight) if exists else None
        current = [dict(group) for group in groups]
        for group, values in zip(groups, settings, strict=True):
            group.update(values)
        self.optimizer_step()
        for group, values in zip(groups, current, strict=True):
            group.update(values)
        for weight in self.weights:
            weight.grad = None

    def close(self) -> None:
        """Ends the connections. After an error, ranks that wait for this one fail at once."""
        group, self.group = self.group, None
        if group is None:
            return
        if self.pending:
            self.pending.clear()
            with suppress(RuntimeError, ValueError):  # a receive that times out closes all connections of the group
                other = (self.run.ranks.rank + 1) % self.run.ranks.world_size
                cast(Any, dist).irecv(torch.empty(1), other, group=group, tag=1).wait(timedelta(milliseconds=1))
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)

    def state_dict(self) -> dict[str, Any]:
        return {}  # all state is in the model and in the optimizer: checkpoints are saved without pending updates

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
