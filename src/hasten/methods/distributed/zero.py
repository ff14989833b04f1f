"""The memory of data parallel training shared out among the processes (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054).

Data parallel training keeps weights, gradients and the optimizer's state of the whole model on every process. Of n processes each keeps

    stage 1    1/n of the optimizer's state          DistributedDataParallel; the optimizer sees this process's part of every weight
    stage 2    and 1/n of the gradients              torch's fully_shard; weights stay whole from the forward to the end of the backward pass
    stage 3    and 1/n of the weights                torch's fully_shard; weights are gathered block by block when they are needed

With 4-byte numbers and Adam a weight costs 16 bytes; between two steps 8 + 8/n in stage 1 and 16/n in the others. While a step is on its way stage 2 has the
whole weights beside its part, 4 + 16/n (the paper's has 4 + 12/n), and stage 3 those of one block. Parts are cut along a weight's first dimension.

While the run is being built every process has the whole model for a moment. With ``place=memory`` none ever has: the model is made on the meta device, and
its tensors one after the other, with the numbers that they have in one process; of each a process keeps its part. What checkpoints and the exported model
need is put together in the host's memory.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.task import optimizer_and_schedule
from hasten.core.types import BackwardFn, ForwardFn, OptimizerFactory, StepFn
from hasten.distributed.collectives import (
    broadcast_module,
    broadcast_tensors,
    buckets,
    sync_on_last_microbatch,
    warn_local_batch_norm,
)
from hasten.distributed.deferred_init import module_tensors
from hasten.distributed.dtensor_state import check_optimizer_supports_dtensor, local_shard_like, to_local

DIFFERENT = "the data lead the ranks through different layers, and stages 2 and 3 of zero gather those together; take ddp:find_unused_parameters=true"
FEWEST = 10_000  # numbers that a block has; smaller ones travel with the whole


@dataclass(frozen=True)
class Zero(Method):
    card = Card(
        summary="the optimizer's state, the gradients and the weights shared out among processes",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Rajbhandari et al. 2020, arXiv 1910.02054; torch.distributed.fsdp.fully_shard",
        gain_when="the model, its gradients and its optimizer do not fit one device, or a larger batch would if they took less",
        accelerates={"optimizer_step"},
        applies_to={"distributed"},
        invalidates={"full_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"stage": 1}, {"stage": 2}, {"stage": 3}),
    )
    stage: int = option(2, at_least=1, at_most=3)
    hybrid_shard_size: int = option(
        0, at_least=0
    )  # processes that share one copy (hybrid sharding, of stages 2 and 3); 0: all of them
    init: str = option(
        "whole", one_of=("whole", "memory")
    )  # memory: no process ever makes the whole model (stages 2 and 3)
    cpu_offload: bool = (
        False  # weights and the optimizer's state wait in the memory of the host (stages 2 and 3, on a GPU)
    )

    def setup(self, run: RunContext) -> None:
        if self.init == "memory":
            run.parallel.init_device = "meta"

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        self._refuse_what_cannot_be(run)
        warn_local_batch_norm(model, remedy="; sync_batch_norm gives that")
        if self.stage == 1:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        if scalar := next((name for name, weight in model.named_parameters() if not weight.ndim), None):
            raise ConfigurationError(
                f"the weight {scalar} has no dimension, and stages 2 and 3 cut along the first; give it the shape (1,), or take stage 1"
            )
        if len(types := {str(weight.dtype).removeprefix("torch.") for weight in model.parameters()}) > 1:
            raise ConfigurationError(
                f"the weights are of several types ({', '.join(sorted(types))}), and stages 2 and 3 want one; take stage 1"
            )
        run.parallel.eval_needs_all_ranks = True
        share_out = partial(
            _sharded, mesh=_mesh(run, self.hybrid_shard_size), keep_whole=self.stage == 2, offload=self.cpu_offload
        )
        if self.init == "memory":
            return _shared_out_unmade(model, share_out, "cpu" if self.cpu_offload else run.device, run)
        broadcast_module(model)
        return share_out(model)

    def _refuse_what_cannot_be(self, run: RunContext):
        world = run.ranks.world_size
        if self.hybrid_shard_size and (self.stage == 1 or world % self.hybrid_shard_size):
            raise ConfigurationError(
                f"zero:hybrid_shard_size={self.hybrid_shard_size} is for stages 2 and 3, and has to divide the {world} processes"
            )
        if self.init == "memory" and self.stage == 1:
            raise ConfigurationError(
                "zero:init=meta is for stages 2 and 3, since stage 1 keeps the whole model; leave it out"
            )
        if self.cpu_offload and (self.stage == 1 or run.device.type == "cpu"):
            raise ConfigurationError("zero:cpu_offload=true is for stages 2 and 3 on a GPU; leave it out")

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        mesh = _mesh(run) if self.stage == 1 else None  # in the other stages the weights are parts already

        def of_own_parts(model):
            optimizer, schedule = optimizer_and_schedule(make(model))
            for group in optimizer.param_groups if mesh else ():
                group["params"] = [_own_part_of(weight, mesh, optimizer.state) for weight in group["params"]]
            check_optimizer_supports_dtensor(optimizer, self.name)
            return optimizer if schedule is None else (optimizer, schedule)

        return of_own_parts

    def backward(self, backward: BackwardFn, run: RunContext) -> BackwardFn:
        """Before gradients are shared out, the ranks make sure that they gathered the same blocks: of blocks of one size torch would mix the weights."""
        if self.stage == 1:
            return backward
        gathered = []
        for number, block in enumerate(part for part in run.unwrapped_model.modules() if isinstance(part, FSDPModule)):
            block.register_forward_pre_hook(
                lambda block, _, number=number: gathered.append(number) if block.training else None
            )

        def backward_of_the_same(loss):
            told = crc32(repr(gathered).encode())
            gathered.clear()
            most, least = run.ranks.all_reduce_max([told, -told])
            if most != -least:
                raise RunError(DIFFERENT)
            backward(loss)

        return backward_of_the_same

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        if self.stage > 1 or run.plan.microbatches == 1:
            return forward_backward  # of a batch in several pieces, stages 2 and 3 share out the gradients of each: whole ones are what they spare
        return sync_on_last_microbatch(forward_backward, run.progress, run.model.no_sync)

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        if self.stage > 1:
            return optimizer_step
        parts, mesh = [part for group in run.optimizer.param_groups for part in group["params"]], _mesh(run)
        learning = [
            part for part in parts if part.ndim and part.requires_grad
        ]  # on all ranks alike, whatever their data lead through

        def updated():
            for part in parts:
                part.grad = None if part.whole.grad is None else _as_part(part.whole.grad, mesh)
            optimizer_step()
            for bucket in buckets(learning):
                _gather(bucket, run.ranks)

        return updated

    def zero_grad(self, zero_grad: StepFn, run: RunContext) -> StepFn:
        if self.stage > 1:
            return zero_grad

        def cleared():
            zero_grad()
            run.unwrapped_model.zero_grad()

        return cleared

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return model.module if self.stage == 1 else model


def _mesh(run: RunContext, shards: int = 0):
    """All ranks in a row, or in rows of as many as share one copy."""
    world, kind = run.ranks.world_size, run.device.type
    if shards in (0, world):
        return init_device_mesh(kind, (world,))
    return init_device_mesh(kind, (world // shards, shards), mesh_dim_names=("copies", "shards"))


def _sharded(model, mesh, keep_whole, offload):
    options = {"mesh": mesh, "reshard_after_forward": not keep_whole}
    options |= {"offload_policy": CPUOffloadPolicy()} if offload else {}
    for block in _blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


@torch.no_grad()
def _shared_out_unmade(model, share_out, device, run: RunContext):
    """Shares out a model without numbers, and makes its tensors, the largest of which is all that is ever whole."""
    held = list(module_tensors(model))
    wanted = list({id(tensor): tensor for *_, tensor in held}.values())
    model = share_out(model).to_empty(device=device)
    for number, tensor in run.parallel.materialize(wanted):
        broadcast_tensors([tensor], device=run.device)
        for module, name in ((module, name) for module, name, unmade in held if unmade is wanted[number]):
            there = getattr(module, name)
            if there.is_meta:  # neither a weight nor a buffer
                setattr(module, name, tensor.clone())
            else:
                to_local(there).copy_(local_shard_like(tensor, there))
        del tensor  # or it would be there beside the next one
    return model


def _blocks(model) -> list:
    """The members of its lists of modules that have weights of their own, and enough of them; each is gathered by itself."""
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    lists = [module for module in model.modules() if isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList))]
    found = []
    for member in (
        member
        for each in lists
        for member in each
        if not isinstance(member, (torch.nn.Sequential, torch.nn.ModuleList))
    ):
        weights = list(member.parameters())
        inside = Counter(id(weight) for module in member.modules() for weight in module.parameters(recurse=False))
        shared = any(users[number] > inside[number] for number in inside)
        nested = any(member in other.modules() for other in found)
        if sum(weight.numel() for weight in weights) >= FEWEST and not shared and not nested:
            found.append(member)
    return found


def _own_part_of(weight, mesh, state):
    """This rank's part of a weight for the optimizer: a view, so that what it does to the part it does to the weight.

    What an optimizer's ``state`` knows of the weight since it was made (Adagrad's sums) is cut alike, and copied, or the whole would stay in memory.
    """
    part = torch.nn.Parameter(_as_part(weight.detach(), mesh), weight.requires_grad)
    part.whole = weight
    if weight in state:
        known = state.pop(weight)
        state[part] = {
            name: _as_part(value, mesh).clone()
            if isinstance(value, torch.Tensor) and value.shape == weight.shape
            else value
            for name, value in known.items()
        }
    return part


def _as_part(tensor, mesh):
    if not tensor.ndim:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    rows, rank = -(-len(tensor) // mesh.size()), mesh.get_local_rank()
    own = tensor[rows * rank : rows * (rank + 1)]
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def _gather(parts, ranks):
    """Everybody's parts of some weights, put into the weights."""
    rows = [-(-len(part) // ranks.world_size) for part in parts]  # of a rank, but for the last ones
    lengths = [count * part.shape[1:].numel() for count, part in zip(rows, parts, strict=True)]
    own = torch.zeros(sum(lengths), dtype=parts[0].dtype, device=parts[0].device)
    for room, part in zip(own.split(lengths), parts, strict=True):
        local = part.to_local()
        room[: local.numel()] = local.flatten()
    everybodys = [torch.empty_like(own) for _ in range(ranks.world_size)]
    dist.all_gather(everybodys, own)
    for rank, of_rank in enumerate(everybodys):
        for room, count, part in zip(of_rank.split(lengths), rows, parts, strict=True):
            place = part.whole[count * rank : count * (rank + 1)]
            place.copy_(room[: place.numel()].view_as(place))
