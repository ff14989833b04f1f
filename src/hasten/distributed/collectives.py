"""Whole copies of a model, one a process, kept alike by averaging their gradients, or their weights: what strategies have in common."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hasten._torch_compat import BatchNorm
from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.core.method import Method
from hasten.core.run_context import RunContext, TrainProgress
from hasten.core.types import Batch, ContextFactory, ForwardFn, StepFn
from hasten.distributed.batch_norm import DistributedBatchNorm
from hasten.distributed.dtensor_state import to_local
from hasten.utils.batch import map_tensors

BUCKET_BYTES = 2_000_000  # numbers that travel together


def warn_local_batch_norm(
    model: torch.nn.Module, remedy: str = "", part: str = "each process's part of a batch"
) -> None:
    """Says so where batch normalisation would see less than in one process."""
    if has_local_batch_norm(model):
        warnings.warn(
            f"batch normalisation sees {part} alone: not the same formula as in one{remedy}",
            HastenWarning,
            stacklevel=3,
        )


def has_local_batch_norm(model: torch.nn.Module) -> bool:
    """Whether a model has batch normalisation over no more than what a process gives it."""
    norms = [part for part in model.modules() if isinstance(part, BatchNorm)]
    return any(not isinstance(norm, (torch.nn.SyncBatchNorm, DistributedBatchNorm)) for norm in norms)


def resolve_parallel_size(method: Method, world: int) -> int:
    """The ranks that hold one copy of the model between them, as a method's ``degree`` says.

    Raises:
        Refusal: so many do not divide the ranks, or share nothing.
    """
    degree = method.degree or world
    if degree == 1:
        raise ConfigurationError(
            f"{method.name}:degree=1 leaves every process a whole copy: take a degree of 2 or more, or leave {method.name} out"
        )
    if world % degree:
        divisors = [str(number) for number in range(2, world + 1) if world % number == 0]
        raise ConfigurationError(
            f"{method.name}:degree={degree} does not divide {world} processes; take {' or '.join(divisors)}"
        )
    return degree


def assign_mesh_dim(method: Method, run: RunContext, dimension: str) -> None:
    """Gives a dimension of the mesh as many ranks of each copy of the model as the method's ``degree`` says; 0 is all that the other dimension leaves.

    Raises:
        Refusal: the degrees do not fit the ranks, or each would take all that the other leaves.
    """
    parallel = run.parallel
    parallel.mesh_dim_owner[dimension] = method
    world, methods = parallel.ranks.world_size, parallel.mesh_dim_owner.values()
    if len(methods) == 1:
        degrees = [resolve_parallel_size(method, world)]
    else:
        given = math.prod(each.degree for each in methods if each.degree)
        degrees = [each.degree or world // given for each in methods]
        named = " and ".join(f"{each.name}:degree={each.degree}" if each.degree else each.name for each in methods)
        if not any(each.degree for each in methods):
            raise ConfigurationError(
                f"{named} would each take all {world} processes; give one of them a degree, such as {method.name}:degree=2"
            )
        if min(degrees) < 2 or world % math.prod(degrees):
            raise ConfigurationError(
                f"{named} do not fit {world} processes: each takes 2 or more, and their product has to divide the processes"
            )
    parallel.model_parallel_size = math.prod(degrees)
    parallel.pp_size = dict(zip(parallel.mesh_dim_owner, degrees, strict=True)).get("stages", 1)


def get_device_mesh(run: RunContext) -> DeviceMesh:
    """The ranks of the run: copies of the model, the stages of a copy, and the shards of a stage, which follow each other."""
    parallel = run.parallel
    if parallel.device_mesh is None:
        shape = (parallel.ranks.world_size // parallel.model_parallel_size, parallel.pp_size, parallel.tp_size)
        parallel.device_mesh = init_device_mesh(run.device.type, shape, mesh_dim_names=("copies", "stages", "shards"))
    return parallel.device_mesh


def reduce_over_replicas(grad_transform: StepFn, run: RunContext) -> StepFn:
    """``grad_transform``, and then the mean of the gradients over the replicas of the model, where there are several."""
    if run.parallel.model_parallel_size == run.ranks.world_size:
        return grad_transform
    weights = [weight for weight in run.unwrapped_model.parameters() if weight.requires_grad and not weight.is_meta]
    common, own = (
        [weight for weight in weights if (weight in run.parallel.replicated_params) is shared]
        for shared in (True, False)
    )
    copies = get_device_mesh(run)["copies"].get_group()

    def averaged():
        grad_transform()
        all_reduce_gradients(
            common, copies
        )  # by themselves: where they lie in a message decides in which order it is added up
        all_reduce_gradients(own, copies)

    return averaged


def broadcast_module(model: torch.nn.Module, device: torch.device | None = None) -> None:
    """Gives every rank the first one's weights and buffers: a task may have drawn them from a generator that nobody seeds."""
    broadcast_tensors([*model.parameters(), *model.buffers()], device=device)


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Gives all ranks, or those of a group, the first one's tensors; where these are elsewhere, one after the other by way of a device."""
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        there = tensor.detach().to(device or tensor.device).contiguous()
        dist.broadcast(there.reshape(-1).view(torch.uint8), group=group, group_src=0)  # gloo does not know all types
        if there.data_ptr() != tensor.data_ptr() or there.device != tensor.device:
            tensor.copy_(there)


def check_no_sparse_gradients(model: torch.nn.Module, who: str) -> None:
    """Refuses a model with gradients that name the rows they are of."""
    tables = [name for name, part in model.named_modules() if getattr(part, "sparse", False) is True]
    if tables:
        raise ConfigurationError(
            f"{who} averages whole gradients, and those of {tables[0]} are sparse; make it with sparse=False, or leave {who} out"
        )


def buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors some at a time, those of one list of one type and in one place."""
    bucket, size = [], 0
    for tensor in tensors:
        if bucket and (
            size + tensor.numel() > BUCKET_BYTES or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


@torch.no_grad()
def all_reduce_mean(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Makes each tensor its mean over all ranks, or those of a group; they have to ask for the same ones at once."""

    def send(numbers: torch.Tensor) -> None:
        numbers /= dist.get_world_size(
            group
        )  # before they are added up: the sum may be greater than any number of the type
        dist.all_reduce(numbers, group=group)

    coalesced(tensors, send)


@torch.no_grad()
def coalesced(tensors: Iterable[torch.Tensor], send: Callable[[torch.Tensor], object]) -> None:
    """Lets many tensors travel in few messages: ``send`` changes all their numbers, one after the other."""
    for bucket in buckets(tensors):
        numbers = torch.cat([tensor.reshape(-1) for tensor in bucket])
        send(numbers)
        for tensor, part in zip(bucket, numbers.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def find_divergent_tensors(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Those of some tensors that are not the same to the bit on all ranks, or those of a group; they have to ask for the same ones at once."""
    tensors = list(tensors)
    if not tensors:
        return []
    marks = torch.tensor([crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy()) for tensor in tensors])
    bounds = torch.cat([marks, -marks]).to(tensors[0].device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    most, least = bounds.cpu().chunk(2)
    return [tensor for tensor, differs in zip(tensors, most != -least, strict=True) if differs]


class GradientBucket:
    """The gradients of some weights on their way to the other ranks. A weight that has none on this rank takes part with zeros.

    Attributes:
        tensors: one a weight, to be changed in place.
        shares: of the ranks that have one; it travels with the others.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter]):
        self.weights = weights
        self.tensors = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        like = to_local(weights[0])
        self.shares = like.new_tensor([weight.grad is not None for weight in weights])

    def write_back(self) -> None:
        """Gives the weights what has become of their gradients; one that nobody has a gradient of stays without."""
        for number, (weight, gradient) in enumerate(zip(self.weights, self.tensors, strict=True)):
            if weight.grad is None and self.shares[number] > 0:
                weight.grad = gradient


def all_reduce_gradients(weights: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Makes the gradient of each weight, or this rank's part of it, its mean over all ranks, or those of a group, in few messages."""
    if not weights:
        return
    gradients = GradientBucket(weights)
    all_reduce_mean([*map(to_local, gradients.tensors), gradients.shares], group)
    gradients.write_back()


def check_sync_period(run: RunContext, option: str, period: int) -> None:
    """Refuses processes that would each train by themselves from the first step to the last."""
    if run.plan.steps is not None and period > run.plan.steps:
        raise ConfigurationError(
            f"{option}={period} is longer than the run of {run.plan.steps} steps, in which the processes would never meet; take a shorter one"
        )


def allow_divergent_replicas(run: RunContext, name: str) -> None:
    """Lets the copies of the model differ between the ranks: a checkpoint holds the mean, and for each rank its own."""
    run.parallel.rank_state[name] = LocalReplicaState(run)
    run.parallel.merge_rank_states = lambda state: average_state(state, run)


class LocalReplicaState:
    """This rank's copy of the model, and the state of its optimizer."""

    def __init__(self, run: RunContext):
        self.run = run

    def state_dict(self) -> dict:
        return {"model": self.run.unwrapped_model.state_dict(), "optimizer": self.run.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict) -> None:
        """Comes after the mean, beside whose tensors these are put."""
        self.run.unwrapped_model.load_state_dict(state["model"])
        optimizer = self.run.optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for number, weight in enumerate(weights):
            mean = optimizer.state.pop(weight, {})
            if number in state["optimizer"]:
                optimizer.state[weight] = {
                    name: _beside(mean.get(name), own) for name, own in state["optimizer"][number].items()
                }


def _beside(there, value):
    both = isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor)
    return value.to(there.device) if both else value


def average_state(state, run: RunContext):
    """A copy of a state of any nesting, whose real numbers are their mean over all ranks, which ask at once; what not all of them have stays."""
    state = map_tensors(lambda tensor: tensor.detach().clone(), state)
    own = dict(_named(state))
    told = json.dumps({name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in own.items()})
    first, *others = map(json.loads, run.ranks.all_gather(told.encode()))
    alike = [name for name, built in first.items() if all(other.get(name) == built for other in others)]
    all_reduce_mean(find_divergent_tensors(filter(is_real_or_complex, map(own.get, alike))))
    return state


def _named(state, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state, by the keys that lead to them."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, (Mapping, list, tuple)):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _named(value, f"{name}/{key}")


def average_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model whose weights and statistics are their mean over all ranks, which have to ask at once; what they have alike stays as it is."""
    mean = copy.deepcopy(model)
    tensors = {id(tensor): tensor for tensor in (*mean.parameters(), *mean.buffers())}
    all_reduce_mean(find_divergent_tensors(filter(is_real_or_complex, tensors.values())))
    return mean


def is_real_or_complex(tensor: torch.Tensor) -> bool:
    """Whether its numbers have a mean of their own type."""
    return tensor.is_floating_point() or tensor.is_complex()


def sync_on_last_microbatch(forward_backward: ForwardFn, progress: TrainProgress, no_sync: ContextFactory) -> ForwardFn:
    """``forward_backward``, which exchanges gradients after the last microbatch of a batch only."""

    def synced_on_last_microbatch(piece: Batch) -> torch.Tensor:
        if progress.is_last_microbatch:
            return forward_backward(piece)
        with no_sync():
            return forward_backward(piece)

    return synced_on_last_microbatch
