"""Collectives of data-parallel methods: replicas of a model, kept equal by averaging gradients or weights."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from hasten._torch_compat import BatchNorm
from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.core.run_context import RunContext, TrainProgress
from hasten.core.types import Batch, ContextFactory, ForwardFn
from hasten.distributed.batch_norm import DistributedBatchNorm
from hasten.distributed.dtensor_state import to_local
from hasten.utils.batch import map_tensors
from hasten.utils.copy_model import copy_model
from hasten.utils.optimizers import sparse_gradients_layer

BUCKET_ELEMENTS = 2_000_000  # elements sent in one message


def broadcast_module(model: torch.nn.Module, device: torch.device | None = None) -> None:
    """Copies parameters and buffers of rank 0 to all ranks: the task may have drawn them without a seed."""
    broadcast_tensors([*model.parameters(), *model.buffers()], device=device)


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Copies the tensors of the group's rank 0 to all its ranks, in place; through ``device`` if it is given."""
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        sent = tensor.detach().to(device or tensor.device).contiguous()
        dist.broadcast(sent.reshape(-1).view(torch.uint8), group=group, group_src=0)  # gloo does not support all dtypes
        if sent.data_ptr() != tensor.data_ptr() or sent.device != tensor.device:
            tensor.copy_(sent)


@contextmanager
def buffers_of_main_process(model: torch.nn.Module) -> Iterator[None]:
    """Context manager: all ranks have the buffers of rank 0, and afterwards their own. All ranks must enter it."""
    buffers = list(model.buffers())
    own = [buffer.clone() for buffer in buffers]
    broadcast_tensors(buffers)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)


@torch.no_grad()
def all_reduce_mean(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replaces each tensor by its mean over the ranks of the group. All ranks must pass the same tensors."""

    def send(values: torch.Tensor) -> None:
        values /= dist.get_world_size(group)  # before the sum, which may exceed the range of the dtype
        dist.all_reduce(values, group=group)

    coalesced(tensors, send)


@torch.no_grad()
def coalesced(tensors: Iterable[torch.Tensor], send: Callable[[torch.Tensor], object]) -> None:
    """Calls ``send(flat)``, which changes ``flat`` in place, on 1-d concatenations of tensors; copies results back."""
    for bucket in buckets(tensors):
        values = torch.cat([tensor.reshape(-1) for tensor in bucket])
        send(values)
        for tensor, part in zip(bucket, values.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields groups of consecutive tensors of one dtype and device, of at most BUCKET_ELEMENTS or one larger tensor."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        is_full = size + tensor.numel() > BUCKET_ELEMENTS
        if bucket and (is_full or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


class GradientBucket:
    """The gradients of some parameters, to be exchanged. A parameter without a gradient on this rank contributes zeros.

    ``tensors`` has one gradient per parameter, to be changed in place. ``shares`` is 1-d, one element per parameter: 1
    if this rank has its gradient. Averaged with the gradients, it becomes the fraction of ranks that have it.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.params = params
        self.tensors = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        self.shares = to_local(params[0]).new_tensor([param.grad is not None for param in params])

    def write_back(self) -> None:
        """Sets ``.grad`` of parameters that have none on this rank, unless no rank had one."""
        for index, (param, gradient) in enumerate(zip(self.params, self.tensors, strict=True)):
            if param.grad is None and self.shares[index] > 0:
                param.grad = gradient


def all_reduce_gradients(params: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Replaces each gradient (of a DTensor: its local shard) by its mean over the group; a missing one counts as 0."""
    if not params:
        return
    gradients = GradientBucket(params)
    all_reduce_mean([*map(to_local, gradients.tensors), gradients.shares], group)
    gradients.write_back()


def sync_on_last_microbatch(forward_backward: ForwardFn, progress: TrainProgress, no_sync: ContextFactory) -> ForwardFn:
    """``forward_backward``, which exchanges gradients only after the last microbatch of a batch."""

    def synced_on_last_microbatch(microbatch: Batch) -> torch.Tensor:
        if progress.is_last_microbatch:
            return forward_backward(microbatch)
        with no_sync():
            return forward_backward(microbatch)

    return synced_on_last_microbatch


@torch.no_grad()
def find_divergent_tensors(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """The tensors that are not bitwise equal on all ranks of the group. All ranks must pass the same tensors."""
    tensors = list(tensors)
    if not tensors:
        return []
    checksums = torch.tensor([crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data) for tensor in tensors])
    bounds = torch.cat([checksums, -checksums]).to(tensors[0].device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    largest, negated_smallest = bounds.cpu().chunk(2)
    return [tensor for tensor, differs in zip(tensors, largest != -negated_smallest, strict=True) if differs]


def allow_divergent_replicas(run: RunContext, name: str) -> None:
    """Declares that replicas differ between ranks: checkpoints store their mean and, as ``name``, every replica."""
    assert run.parallel is not None
    run.parallel.rank_state[name] = LocalReplicaState(run)
    run.parallel.merge_rank_states = lambda state: average_state(state, run)


class LocalReplicaState:
    """Saves and loads this rank's replica of the model and optimizer state, where replicas differ between ranks."""

    def __init__(self, run: RunContext) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.run.unwrapped_model.state_dict(), "optimizer": self.run.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores this rank's replica; the mean in the checkpoint must have been loaded into the model before."""
        self.run.unwrapped_model.load_state_dict(state["model"])
        optimizer = self.run.optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            mean = optimizer.state.pop(param, {})
            if index in state["optimizer"]:
                values = state["optimizer"][index].items()
                optimizer.state[param] = {name: _to_device_of(mean.get(name), value) for name, value in values}


def _to_device_of(reference: Any, value: Any) -> Any:
    both_tensors = isinstance(reference, torch.Tensor) and isinstance(value, torch.Tensor)
    return value.to(reference.device) if both_tensors else value


def average_state(state: Any, run: RunContext) -> Any:
    """A copy of a nested state: tensors that all ranks have alike are averaged, others stay. All ranks must call it."""
    state = map_tensors(lambda tensor: tensor.detach().clone(), state)
    local = dict(_named_tensors(state))
    first, *others = run.ranks.all_gather({name: (tensor.dtype, tensor.shape) for name, tensor in local.items()})
    shared = [local[name] for name, layout in first.items() if all(other.get(name) == layout for other in others)]
    all_reduce_mean(find_divergent_tensors(filter(is_real_or_complex, shared)))
    return state


def _named_tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for all tensors of a nested state; the name joins the keys that lead to the tensor."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, (Mapping, list, tuple)):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _named_tensors(value, f"{name}/{key}")


def average_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with parameters and buffers averaged over all ranks; bitwise equal ones stay unchanged."""
    mean = copy_model(model)
    tensors = {id(tensor): tensor for tensor in (*mean.parameters(), *mean.buffers())}
    all_reduce_mean(find_divergent_tensors(filter(is_real_or_complex, tensors.values())))
    return mean


def is_real_or_complex(tensor: torch.Tensor) -> bool:
    """Whether the tensor is floating-point or complex, so that it can be averaged in its dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_no_sparse_gradients(model: torch.nn.Module, method: str) -> None:
    """Raises ``ConfigurationError`` if a layer has ``sparse=True`` (embeddings), so its gradients are sparse."""
    if (layer := sparse_gradients_layer(model)) is not None:
        remedy = f"make it with sparse=False, or leave {method} out"
        raise ConfigurationError(f"{method} averages dense gradients, and those of {layer} are sparse; {remedy}")


def check_sync_period(run: RunContext, option: str, period: int) -> None:
    """Raises ``ConfigurationError`` if ``period``, in steps, exceeds the run: ranks would never communicate."""
    if run.plan.steps is not None and period > run.plan.steps:
        effect = "in which the processes would never communicate; take a shorter one"
        raise ConfigurationError(f"{option}={period} is longer than the run of {run.plan.steps} steps, {effect}")


def warn_local_batch_norm(
    model: torch.nn.Module, remedy: str = "", part: str = "each process's part of a batch"
) -> None:
    """Warns if batch normalization would compute its statistics on ``part`` of the batch, not all of it."""
    if has_local_batch_norm(model):
        difference = f"batch normalization sees {part} only: not the same formula as in a single process"
        warnings.warn(difference + remedy, HastenWarning, stacklevel=3)


def has_local_batch_norm(model: torch.nn.Module, layer: type[torch.nn.Module] = BatchNorm) -> bool:
    """Whether a batch normalization layer of class ``layer`` computes its statistics on this process's samples only."""
    norms = [module for module in model.modules() if isinstance(module, layer)]
    return any(not isinstance(norm, (torch.nn.SyncBatchNorm, DistributedBatchNorm)) for norm in norms)
