"""Parameter server: rank 0 holds the weights; workers send it their gradients and wait only for weights of bounded
staleness.

Dean et al. 2012 (DistBelief) let every gradient change the weights when it arrives: n workers then make n updates where
a single process makes one, so that learning rates, schedules and momenta mean something else. Here an update is the
usual one, as in the bounded delay of Li et al. 2014 (section 3.4):

    w[t+1] = optimizer step from w[t], with the settings and the mean gradient over all ranks of step t

made as soon as the last of these gradients has arrived. Only the weights at which gradients are computed are older: a
rank begins its step t with the newest weights of that moment, and waits only while they lack more than ``staleness``
updates (Ho et al. 2013). So no rank is further ahead of the slowest one, every gradient counts once, and
``staleness=0`` equals ddp. The state of the run is the server's: weights and optimizer state; batch norm statistics are
those of rank 0, as with ddp. Methods that transform gradients see those of one rank, before the mean.

All ranks wait for the slowest when they meet: at checkpoints, at evaluations, and to agree on them some times a second.
All ranks do the same number of steps, so the gain is the waiting for ranks that are slow now and then, not for one that
always is. All traffic passes rank 0.
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from hasten import (
    Card,
    ContextFactory,
    Exactness,
    Method,
    NoEffectError,
    PeerFailure,
    RunContext,
    StepFn,
    WrapOrder,
    option,
)
from hasten.distributed import collectives
from hasten.distributed.collectives import GradientBucket


@dataclass(frozen=True)
class ParameterServer(Method):
    """Replaces the optimizer step by an exchange with the server on rank 0."""

    card = Card(
        summary="ranks send gradients to a server and continue with its newest weights, a few steps old at most",
        exactness=Exactness.CHANGES_TRAINING,
        source="Li et al. 2014 (Scaling Distributed ML with the Parameter Server); Ho et al. 2013; Dean et al. 2012",
        gain_when="ranks take turns in being slow, and the network of rank 0 carries the traffic of all ranks",
        accelerates={"backward"},
        applies_to={"distributed"},
        invalidates={"replicated_weights", "reduced_gradients"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"staleness": 1}, {"staleness": 4}),
    )
    staleness: int = option(2, at_least=0)  # updates that a rank's weights may lack

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        connection = run.checkpoint_state[self.name] = Connection(run, self.staleness)

        @contextmanager
        def connected() -> Generator[None]:
            with context():
                try:
                    yield
                    run.ranks.any(False)  # no rank closes its connection while another one waits for a reply
                finally:
                    connection.close()

        return connected

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        assert run.parallel is not None
        collectives.check_no_sparse_gradients(model, self.name)
        collectives.warn_local_batch_norm(model)
        collectives.broadcast_module(model)
        run.parallel.merge_rank_states = run.checkpoint_state[self.name].after_pending_updates
        return model

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        connection = run.checkpoint_state[self.name]

        def describe() -> str:
            if not connection.exchanges:
                raise NoEffectError("this rank has exchanged no gradient with the server")
            return f"{connection.exchanges} exchanges of gradients for weights with the server"

        run.observe_effect(self, describe)

        def exchange_and_step() -> None:
            connection.exchange()
            optimizer_step()  # finds no gradients; learning rate schedules require the call

        return exchange_and_step

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return run.checkpoint_state[self.name].after_pending_updates(model)


class Server:
    """The master copy of the weights. One thread per worker calls it."""

    def __init__(self, weights: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, world: int, staleness: int):
        self.weights, self.optimizer, self.staleness = weights, optimizer, staleness
        self.pushed = [0] * world  # steps whose gradients have arrived, by worker
        self.version = 0  # updates made
        self.newest = flatten(weights)  # the weights after them; replaced by an update, never changed in place
        self.sums: dict[int, torch.Tensor] = {}  # step -> sum of the gradients that have arrived
        self.settings: dict[int, list[dict[str, Any]]] = {}  # step -> settings of the optimizer's parameter groups
        self.lost: set[int] = set()  # workers whose connection is closed
        self.failure: Exception | None = None  # of an update
        self.changed = threading.Condition()

    def exchange(
        self, worker: int, gradients: torch.Tensor, settings: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """Adds the gradients of a worker (a rank) of its next step, and returns the weights for the step after it.

        The gradients of all weights are flattened and concatenated, then for each weight 1 if it has one, else 0. One
        of the workers passes the settings of the optimizer's parameter groups in this step.
        """
        with self.changed:
            step = self.pushed[worker]
            if settings is not None:
                self.settings[step] = settings
            if step in self.sums:
                self.sums[step] += gradients
            else:
                self.sums[step] = gradients.clone()
            self.pushed[worker] += 1
            if self.version < min(self.pushed):
                self._update()
            return self.after(self.pushed[worker] - self.staleness)

    def after(self, updates: int) -> torch.Tensor:
        """Waits for ``updates`` updates in all; returns the newest weights, flat. PeerFailure if a worker is lost."""
        with self.changed:
            self.changed.wait_for(lambda: self.version >= updates or self.failure or self._missing(updates))
            if self.failure:
                raise self.failure
            if self.version < updates:
                raise PeerFailure(f"rank {min(self._missing(updates))} has ended without an error message")
            return self.newest

    def lose(self, worker: int) -> None:
        """Marks a worker as disconnected; ``after`` raises if an update needs gradients that it did not send."""
        with self.changed:
            self.lost.add(worker)
            self.changed.notify_all()

    def _missing(self, updates: int) -> set[int]:
        return {worker for worker in self.lost if self.pushed[worker] < updates}

    def _update(self) -> None:
        try:
            self._step(self.sums.pop(self.version) / len(self.pushed), self.settings.pop(self.version))
        except Exception as error:  # raised in the threads of all workers
            self.failure = error
        self.version, self.newest = self.version + 1, flatten(self.weights)
        self.changed.notify_all()

    @torch.no_grad()
    def _step(self, mean: torch.Tensor, settings: list[dict[str, Any]]) -> None:
        sizes = [weight.numel() for weight in self.weights]
        *gradients, has_gradient = torch.split(mean, [*sizes, len(sizes)])
        for weight, gradient, exists in zip(self.weights, gradients, has_gradient, strict=True):
            # in the memory format of the weight: fused kernels on the CPU check no strides
            weight.grad = torch.empty_like(weight).copy_(gradient.view_as(weight)) if exists else None
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(values)
        self.optimizer.step()


class Connection:
    """This rank's connection to the server; on rank 0 the server itself, and a thread for each other rank."""

    def __init__(self, run: RunContext, staleness: int):
        self.run, self.staleness, self.is_server = run, staleness, run.ranks.is_main_process
        self.server: Server | None = None
        self.group: dist.ProcessGroup | None = None
        self.threads: list[threading.Thread] = []
        self.exchanges = 0

    def exchange(self) -> None:
        """Sends the gradients of this step to the server, removes them, and replaces the weights by the newest ones.

        Waits while these lack more than ``staleness`` updates. The first call opens the connection, on all ranks.
        """
        if self.group is None:
            self._open()
        weights = trained(self.run.unwrapped_model)
        gradients = GradientBucket(weights)
        message = flatten([*gradients.tensors, gradients.shares])
        if self.server is not None:
            groups = self.run.optimizer.param_groups
            settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            newest = self.server.exchange(0, message, copy.deepcopy(settings))
        else:
            newest = message.new_empty(sum(weight.numel() for weight in weights))
            dist.send(message, 0, group=self.group)
            dist.recv(newest, 0, group=self.group)
        unflatten_into(newest, weights)
        self.exchanges += 1
        for weight in weights:
            weight.grad = None

    def after_pending_updates(self, state: Any) -> Any:
        """Waits on rank 0 for all updates so far and copies the weights into the model; returns ``state`` unchanged."""
        if self.server is not None:
            unflatten_into(self.server.after(self.server.pushed[0]), trained(self.run.unwrapped_model))
        return state

    def close(self) -> None:
        """Closes the connection; the server's pending receive from this rank ends by a short timeout."""
        group, self.group = self.group, None
        if group is None:
            return
        with suppress(RuntimeError, ValueError):
            other = 0 if self.run.ranks.rank else 1
            work = dist.irecv(torch.empty(1), other, group=group, tag=1)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        if self.server is not None:
            self.server.lose(0)  # a thread may wait for this rank's own gradients
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)

    def _open(self) -> None:
        if not self.is_server:
            self.run.optimizer.state.clear()  # restored from a checkpoint, but the server uses its own
        elif self.server is None:
            self.server = self._new_server()
        else:
            self.server.lost.clear()
        self.group = cast(dist.ProcessGroup, cast(Any, dist).new_group(backend="gloo"))
        if self.server is not None:
            for worker in range(1, self.run.ranks.world_size):
                thread = threading.Thread(target=_serve, args=(self.server, worker, self.group), daemon=True)
                self.threads.append(thread)
                thread.start()

    def _new_server(self) -> Server:
        """A server with the current weights and a copy of the run's optimizer, as other methods have changed it.

        Both optimizers share the state of the weights, which checkpoints store.
        """
        original = self.run.optimizer
        weights, members = trained(self.run.unwrapped_model), [p for g in original.param_groups for p in g["params"]]
        copies = {id(p): torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in (*weights, *members)}
        # Not by copy(): Optimizer.__getstate__ drops what a subclass has added. ``step`` may be wrapped by a schedule.
        optimizer = object.__new__(type(original))
        attributes = {name: value for name, value in vars(original).items() if name not in ("state", "step")}
        vars(optimizer).update(copy.deepcopy(attributes, copies))
        optimizer.state = defaultdict(dict, {copies[id(weight)]: original.state[weight] for weight in members})
        return Server([copies[id(weight)] for weight in weights], optimizer, self.run.ranks.world_size, self.staleness)

    def state_dict(self) -> dict[str, Any]:
        return {}  # all state is in the model and in the optimizer

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.server = None  # a new one begins with the loaded weights


def _serve(server: Server, worker: int, group: dist.ProcessGroup) -> None:
    """Receives the gradients of a worker and sends weights, until the connection closes or an update fails."""
    message = server.newest.new_empty(server.newest.numel() + len(server.weights))
    try:
        while True:
            dist.recv(message, worker, group=group)
            dist.send(server.exchange(worker, message), worker, group=group)
    except Exception:  # the error of an update is raised on rank 0, too
        server.lose(worker)


def trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of a module that require gradients."""
    return [weight for weight in module.parameters() if weight.requires_grad]


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All tensors as one 1-d tensor on the CPU (a copy), in the promoted dtype of all of them."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()


@torch.no_grad()
def unflatten_into(values: torch.Tensor, tensors: list[torch.nn.Parameter]) -> None:
    """The inverse of ``flatten``: copies the values into the tensors."""
    for tensor, part in zip(tensors, torch.split(values, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
