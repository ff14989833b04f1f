"""The weights live at a server, on rank 0; processes send it their gradients and do not wait for each other more than ``staleness`` steps.

Dean et al. 2012 (DistBelief) let every gradient change the weights as it comes: with n processes that is n updates where one process makes one, so
that rates, schedules and momenta mean something else. Here an update is what it is anywhere, as in the bounded delay of Li et al. 2014 (section 3.4):

    w[t+1] = the run's optimizer, with the settings of step t (w[t], mean over the ranks of their gradients of step t)

made as soon as the last of these has come. What is given up is where gradients are taken: a rank begins its step t with the newest weights that there
are when it asks, and waits only while they lack more than ``staleness`` updates, t - v > staleness (Ho et al. 2013). So nobody is ever further ahead of
the slowest, every gradient counts once, and ``staleness=0`` is ddp. The state of the run is the server's: weights, and what the optimizer knows of them;
statistics of batch normalisation are those of rank 0, as with ddp. Methods that change gradients see those of one rank each, before the mean.

Whenever all ranks meet (checkpoints, evaluations, and some times a second to agree on them) the slowest is waited for. Ranks do equally many steps: what
can be won is the time that steps wait for a rank which is slow now and then, not for one that always is. All messages go through rank 0.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import PeerFailure
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import ContextFactory, StepFn
from hasten.distributed.collectives import (
    GradientBucket,
    broadcast_module,
    check_no_sparse_gradients,
    warn_local_batch_norm,
)


@dataclass(frozen=True)
class ParameterServer(Method):
    card = Card(
        summary="processes send gradients to a server and go on with its newest weights, at most some steps old",
        exactness=Exactness.CHANGES_TRAINING,
        source="Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server; Ho et al. 2013; Dean et al. 2012",
        gain_when="processes are slow in turns, each now and then, and the network of rank 0 carries what all of them say",
        accelerates={"backward"},
        applies_to={"distributed"},
        invalidates={"replicated_weights", "reduced_gradients"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"staleness": 1}, {"staleness": 4}),
    )
    staleness: int = option(2, at_least=0)  # updates that a rank's weights may lack

    def process_context(self, context: ContextFactory, run: RunContext) -> ContextFactory:
        line = run.checkpoint_state[self.name] = Line(run, self.staleness)

        @contextmanager
        def connected():
            with context():
                try:
                    yield
                    run.ranks.any(False)  # nobody hangs up while another still waits for an answer
                finally:
                    line.close()

        return connected

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        check_no_sparse_gradients(model, self.name)
        warn_local_batch_norm(model)
        broadcast_module(model)
        run.parallel.merge_rank_states = run.checkpoint_state[self.name].settled
        return model

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        line = run.checkpoint_state[self.name]

        def exchanged():
            line.exchange()
            optimizer_step()  # finds no gradients; schedules want to see it called

        return exchanged

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return run.checkpoint_state[self.name].settled(model)


class Server:
    """The weights that count, and how far each worker has come. Called by a thread for each worker.

    Attributes:
        pushed: steps of which a worker's gradients have come, by worker.
        version: updates made.
        newest: the weights after them, one after the other; never changed, but replaced.
    """

    def __init__(self, weights: list[torch.Tensor], optimizer: torch.optim.Optimizer, world: int, staleness: int):
        self.weights, self.optimizer, self.staleness = weights, optimizer, staleness
        self.pushed, self.version, self.newest = [0] * world, 0, flat(weights)
        self.sums: dict[int, torch.Tensor] = {}  # of the gradients of a step that have come
        self.settings: dict[int, list[dict]] = {}  # of the optimizer's groups in a step
        self.lost: set[int] = set()  # workers that have hung up
        self.failure: Exception | None = None  # of an update
        self.changed = threading.Condition()

    def exchange(self, worker: int, gradients: torch.Tensor, settings: list[dict] | None = None) -> torch.Tensor:
        """Takes a worker's gradients of its next step, and gives the weights for the one after it.

        Args:
            gradients: those of all weights, and for each whether it has one, one after the other.
            settings: of the optimizer's groups in this step; one of the workers tells them.
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
        """The newest weights, as soon as so many updates were made.

        Raises:
            Aftermath: they never will, since a worker has gone.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.version >= updates or self.failure or self._missing(updates))
            if self.failure:
                raise self.failure
            if self.version < updates:
                raise PeerFailure(f"rank {min(self._missing(updates))} has ended without a word")
            return self.newest

    def lose(self, worker: int) -> None:
        """A worker sends nothing any more, which matters only where something is waited for."""
        with self.changed:
            self.lost.add(worker)
            self.changed.notify_all()

    def _missing(self, updates: int) -> set[int]:
        return {worker for worker in self.lost if self.pushed[worker] < updates}

    def _update(self) -> None:
        try:
            self._step(self.sums.pop(self.version) / len(self.pushed), self.settings.pop(self.version))
        except Exception as error:  # all workers have to hear of it, whichever came last
            self.failure = error
        self.version, self.newest = self.version + 1, flat(self.weights)
        self.changed.notify_all()

    @torch.no_grad()
    def _step(self, mean: torch.Tensor, settings: list[dict]) -> None:
        sizes = [weight.numel() for weight in self.weights]
        *gradients, present = mean.split([*sizes, len(sizes)])
        for weight, gradient, there in zip(self.weights, gradients, present.tolist(), strict=True):
            weight.grad = gradient.view_as(weight).to(weight) if there else None
        for group, of_step in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(of_step)
        self.optimizer.step()


class Line:
    """This rank's line to the server; on rank 0 the server itself, and a thread for each of the others."""

    def __init__(self, run: RunContext, staleness: int):
        self.run, self.staleness, self.leads = run, staleness, run.ranks.is_main_process
        self.server: Server | None = None
        self.group: dist.ProcessGroup | None = None
        self.threads: list[threading.Thread] = []

    def exchange(self) -> None:
        """Sends this step's gradients away and takes up the newest weights."""
        if self.group is None:
            self._open()
        weights = trained(self.run.unwrapped_model)
        gradients = GradientBucket(weights)
        message = flat([*gradients.tensors, gradients.shares])
        if self.leads:
            settings = [
                {name: value for name, value in group.items() if name != "params"}
                for group in self.run.optimizer.param_groups
            ]
            newest = self.server.exchange(0, message, copy.deepcopy(settings))
        else:
            newest = message.new_empty(sum(weight.numel() for weight in weights))
            dist.send(message, 0, group=self.group)
            dist.recv(newest, 0, group=self.group)
        put(newest, weights)
        for weight in weights:
            weight.grad = None

    def settled(self, state):
        """``state``, which shares its tensors with the model: on rank 0 after the updates of all steps that are done."""
        if self.server:
            put(self.server.after(self.server.pushed[0]), trained(self.run.unwrapped_model))
        return state

    def close(self) -> None:
        """Hangs up: a receiver without patience breaks the connections of its group, so that nobody waits on them any more."""
        group, self.group = self.group, None
        if group is None:
            return
        with suppress(RuntimeError, ValueError):
            other = 0 if self.run.ranks.rank else 1
            dist.irecv(torch.empty(1), other, group=group, tag=1).wait(timedelta(milliseconds=1))
        if self.server:
            self.server.lose(0)  # a thread may wait for this rank's own gradients
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)

    def _open(self) -> None:
        if self.leads and self.server is None:
            self.server = self._begun()
        elif not self.leads:
            self.run.optimizer.state.clear()  # taken up from a checkpoint; the server has it
        else:
            self.server.lost.clear()
        self.group = dist.new_group(backend="gloo")
        others = range(1, self.run.ranks.world_size) if self.leads else ()
        self.threads = [
            threading.Thread(target=self._serve, args=(worker, self.group), daemon=True) for worker in others
        ]
        for thread in self.threads:
            thread.start()

    def _begun(self) -> Server:
        """The server, with the weights as they are now, and the optimizer as the run has it, whichever methods have had a hand in it.

        What that knows of the weights is shared with the run's, which a checkpoint holds.
        """
        own, mine = self.run.optimizer, trained(self.run.unwrapped_model)
        copies = {
            id(weight): torch.nn.Parameter(weight.detach().clone(), weight.requires_grad)
            for weight in (*mine, *members(own))
        }
        weights = [copies[id(weight)] for weight in mine]
        optimizer = object.__new__(
            type(own)
        )  # not by copy(): an Optimizer leaves out what its class has added; and ``step`` is a schedule's
        vars(optimizer).update(
            copy.deepcopy({name: value for name, value in vars(own).items() if name not in ("state", "step")}, copies)
        )
        optimizer.state = defaultdict(dict, {copies[id(weight)]: own.state[weight] for weight in members(own)})
        return Server(weights, optimizer, self.run.ranks.world_size, self.staleness)

    def _serve(self, worker: int, group: dist.ProcessGroup) -> None:
        weights = self.server.weights
        message = self.server.newest.new_empty(self.server.newest.numel() + len(weights))
        try:
            while True:
                dist.recv(message, worker, group=group)
                dist.send(self.server.exchange(worker, message), worker, group=group)
        except (
            Exception
        ):  # it has hung up, as all do in the end; or the server cannot go on, which the others hear as well
            self.server.lose(worker)

    def state_dict(self) -> dict:
        return {}  # the model's and the optimizer's say it all

    def load_state_dict(self, state: dict) -> None:
        self.server = None  # begins with what was loaded


def trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def members(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of all numbers, one after the other, in one type that holds them all; on the CPU, where messages are made."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()


@torch.no_grad()
def put(numbers: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """The other way round."""
    for tensor, part in zip(tensors, numbers.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
