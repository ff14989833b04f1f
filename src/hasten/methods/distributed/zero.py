"""ZeRO: shards the memory of data parallel training over the ranks (Rajbhandari et al. 2020, arXiv 1910.02054).

Data parallel training keeps weights, gradients and optimizer state of the full model on every rank. Of n ranks each
keeps

    stage 1    1/n of the optimizer state    DistributedDataParallel; the optimizer sees a shard of every weight
    stage 2    and 1/n of the gradients      torch's fully_shard; weights stay gathered until the backward pass ends
    stage 3    and 1/n of the weights        torch's fully_shard; weights are gathered block by block when needed

With float32 and Adam a weight costs 16 bytes; between two steps 8 + 8/n in stage 1 and 16/n in the others. During a
step, stage 2 holds the full weights besides its shard, 4 + 16/n (the paper's has 4 + 12/n), and stage 3 those of one
block. Weights are sharded along their first dimension.

While the run is built every rank holds the full model for a moment, but not with ``init=meta``: the model is created on
the meta device, and its tensors are initialized one after the other, with the values that they have in a single
process; a rank keeps its shard of each. Checkpoints and the exported model are assembled in host memory.

``param_dtype=bfloat16`` gathers half the bytes: FSDP's mixed precision, with gradients added up in float32. It rounds,
so it is not what the card promises, and the tuner refuses it; beside ``bfloat16``, which casts after gathering, ranks
exchange float32.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from hasten import Card, ConfigurationError, Exactness, Method, RunContext, RunError, WrapOrder, option
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.types import BackwardFn, ForwardFn, OptimizerFactory, StepFn
from hasten.distributed import collectives
from hasten.distributed.deferred_init import module_tensors
from hasten.distributed.dtensor_state import check_optimizer_supports_dtensor, local_shard_like, to_local
from hasten.utils.observe_step import observe_collectives
from hasten.utils.optimizers import optimizer_and_schedule

DIVERGED = (
    "the batches of the ranks pass different layers, but stages 2 and 3 of zero gather layers on all ranks together; "
    "use ddp:find_unused_parameters=true"
)
MIN_BLOCK_NUMEL = 10_000  # smaller blocks are gathered with the root module
CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList)


@dataclass(frozen=True)
class Zero(Method):
    """Shards optimizer state (stage 1), gradients (stage 2) and weights (stage 3) over the ranks."""

    card = Card(
        summary="shards the optimizer state, the gradients and the weights over processes",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Rajbhandari et al. 2020, arXiv 1910.02054; torch.distributed.fsdp.fully_shard",
        gain_when="model, gradients and optimizer do not fit one device, or leave too little memory for a larger batch",
        accelerates={"optimizer_step"},
        applies_to={"distributed"},
        invalidates={"full_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
        presets=({"stage": 1}, {"stage": 2}, {"stage": 3}),
    )
    stage: int = option(2, at_least=1, at_most=3)
    hybrid_shard_size: int = option(0, at_least=0)  # ranks per replica (hybrid sharding, stages 2 and 3); 0: all ranks
    init: str = option("device", one_of=("device", "meta"))  # meta: no rank ever holds the full model (stages 2 and 3)
    # in which weights are gathered and layers compute (stages 2 and 3); the shards stay as they are
    param_dtype: str = option("own", one_of=("own", "bfloat16"))
    cpu_offload: bool = False  # keeps weights and optimizer state in host memory (stages 2 and 3, on a GPU)

    def setup(self, run: RunContext) -> None:
        assert run.parallel is not None
        if self.init == "meta":
            run.parallel.init_device = "meta"

    def parallelize(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        assert run.parallel is not None
        self._check_options(run)
        collectives.warn_local_batch_norm(model, remedy="; sync_batch_norm gives that")
        names = ("allreduce_",) if self.stage == 1 else ("_allgather_base_", "_reduce_scatter_base_")
        run.observe_effect(self, partial(observe_collectives, *names))
        if self.stage == 1:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        if scalar := next((name for name, weight in model.named_parameters() if not weight.ndim), None):
            raise ConfigurationError(
                f"the weight {scalar} has no dimension, and stages 2 and 3 of zero shard along the first; "
                "give it the shape (1,), or use stage=1"
            )
        if len(dtypes := {str(weight.dtype).removeprefix("torch.") for weight in model.parameters()}) > 1:
            raise ConfigurationError(
                f"the weights have several dtypes ({', '.join(sorted(dtypes))}), "
                "and stages 2 and 3 of zero support one; use stage=1"
            )
        run.parallel.eval_needs_all_ranks = True
        options: dict[str, Any] = {"mesh": _mesh(run, self.hybrid_shard_size), "reshard_after_forward": self.stage == 3}
        if self.param_dtype == "bfloat16":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        if self.init == "meta":
            device = torch.device("cpu") if self.cpu_offload else run.device
            return _shard_meta_model(model, partial(_shard, options=options), device, run)
        collectives.broadcast_module(model)
        return _shard(model, options)

    def _check_options(self, run: RunContext) -> None:
        world, size = run.ranks.world_size, self.hybrid_shard_size
        if size and (self.stage == 1 or world % size):
            raise ConfigurationError(
                f"zero:hybrid_shard_size={size} needs stage 2 or 3, and must divide the {world} processes"
            )
        if self.init == "meta" and self.stage == 1:
            raise ConfigurationError("zero:init=meta is for stages 2 and 3; stage 1 keeps the full model on every rank")
        if self.param_dtype != "own" and self.stage == 1:
            raise ConfigurationError("zero:param_dtype is for stages 2 and 3; stage 1 gathers no weights")
        if self.cpu_offload and (self.stage == 1 or run.device.type == "cpu"):
            raise ConfigurationError("zero:cpu_offload=true is for stages 2 and 3 on a GPU; leave it out")

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:
        mesh = _mesh(run) if self.stage == 1 else None  # in the other stages the weights are shards already

        def make_for_shards(model: torch.nn.Module) -> Any:
            optimizer, schedule = optimizer_and_schedule(make(model))
            if mesh is not None:
                for group in optimizer.param_groups:
                    group["params"] = [_shard_parameter(weight, mesh, optimizer.state) for weight in group["params"]]
            check_optimizer_supports_dtensor(optimizer, self.name)
            return optimizer if schedule is None else (optimizer, schedule)

        return make_for_shards

    def backward(self, backward: BackwardFn, run: RunContext) -> BackwardFn:
        """``backward``, preceded by a check that all ranks ran the same blocks: torch would mix up their weights."""
        if self.stage == 1:
            return backward
        gathered: list[int] = []

        def record(index: int, block: torch.nn.Module, inputs: Any) -> None:
            if block.training:
                gathered.append(index)

        blocks = [module for module in run.unwrapped_model.modules() if isinstance(module, FSDPModule)]
        for index, block in enumerate(blocks):
            cast(torch.nn.Module, block).register_forward_pre_hook(partial(record, index))

        def checked_backward(loss: torch.Tensor) -> None:
            checksum = crc32(repr(gathered).encode())
            gathered.clear()
            largest, negated_smallest = run.ranks.all_reduce_max([checksum, -checksum])
            if largest != -negated_smallest:
                raise RunError(DIVERGED)
            backward(loss)

        return checked_backward

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        if self.stage > 1 or run.plan.microbatches == 1:
            return forward_backward  # stages 2 and 3 reduce after every microbatch: they never hold full gradients
        no_sync = cast(DistributedDataParallel, run.model).no_sync
        return collectives.sync_on_last_microbatch(forward_backward, run.progress, no_sync)

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        if self.stage > 1:
            return optimizer_step
        shards = [shard for group in run.optimizer.param_groups for shard in group["params"]]
        # the same on all ranks, whichever layers their batches pass
        trained = [shard for shard in shards if shard.ndim and shard.requires_grad]
        mesh, ranks = _mesh(run), run.ranks

        def step_and_gather() -> None:
            for shard in shards:
                shard.grad = None if shard.full.grad is None else _as_dtensor(shard.full.grad, mesh)
            optimizer_step()
            for bucket in collectives.buckets(trained):
                _gather(bucket, ranks)

        return step_and_gather

    def zero_grad(self, zero_grad: StepFn, run: RunContext) -> StepFn:
        if self.stage > 1:
            return zero_grad

        def zero_all() -> None:
            zero_grad()
            run.unwrapped_model.zero_grad()

        return zero_all

    def export(self, model: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        return cast(torch.nn.Module, model.module) if self.stage == 1 else model


def _mesh(run: RunContext, shard_size: int = 0) -> DeviceMesh:
    """A DeviceMesh of all ranks in one dimension; with ``shard_size``, (replicas, shards) for hybrid sharding."""
    world, device_type = run.ranks.world_size, run.device.type
    if shard_size in (0, world):
        return init_device_mesh(device_type, (world,))
    return init_device_mesh(device_type, (world // shard_size, shard_size), mesh_dim_names=("dp_replicate", "dp_shard"))


def _shard(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    for weight in model.parameters():  # torch shards contiguous ones only; activations stay channels-last
        # of other layouts torch raises an error: a transposed view of another weight would no longer be tied to it
        if any(weight.is_contiguous(memory_format=layout) for layout in CHANNELS_LAST):
            weight.data = weight.data.contiguous()
    for block in _blocks(model):
        fully_shard(block, **options)
    if policy := options.get("mp_policy"):
        options = options | {"mp_policy": replace(policy, output_dtype=torch.float32)}  # for the loss
    return cast(torch.nn.Module, fully_shard(model, **options))


@torch.no_grad()
def _shard_meta_model(
    model: torch.nn.Module, shard: Callable[[torch.nn.Module], torch.nn.Module], device: torch.device, run: RunContext
) -> torch.nn.Module:
    """Shards a model on the meta device and initializes its tensors one by one: at most one is held in full."""
    assert run.parallel is not None
    uses = list(module_tensors(model))
    tensors = list({id(tensor): tensor for *_, tensor in uses}.values())
    model = shard(model).to_empty(device=device)
    for index, tensor in run.parallel.materialize(tensors):
        collectives.broadcast_tensors([tensor], device=run.device)
        for module, name in ((module, name) for module, name, meta in uses if meta is tensors[index]):
            target = getattr(module, name)
            if target.is_meta:  # neither a parameter nor a buffer
                setattr(module, name, tensor.clone())
            else:
                to_local(target).copy_(local_shard_like(tensor, target))
        del tensor  # frees it before the next one is created
    return model


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules to gather one by one: large items of ModuleLists and the like whose weights nothing else uses."""
    uses = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    containers = [module for module in model.modules() if isinstance(module, CONTAINERS)]
    blocks: list[torch.nn.Module] = []
    for item in (item for container in containers for item in container if not isinstance(item, CONTAINERS)):
        inside = Counter(id(weight) for module in item.modules() for weight in module.parameters(recurse=False))
        is_shared = any(uses[weight] > inside[weight] for weight in inside)
        is_nested = any(item in block.modules() for block in blocks)
        if sum(w.numel() for w in item.parameters()) >= MIN_BLOCK_NUMEL and not is_shared and not is_nested:
            blocks.append(item)
    return blocks


def _shard_parameter(weight: torch.nn.Parameter, mesh: DeviceMesh, state: dict[Any, Any]) -> torch.nn.Parameter:
    """This rank's shard of a weight, for the optimizer: a view, so that an update of the shard updates the weight.

    Optimizer state that exists already (Adagrad's sums) is sharded alike, and copied, so that the full state is freed.
    """
    shard = torch.nn.Parameter(_as_dtensor(weight.detach(), mesh), weight.requires_grad)
    cast(Any, shard).full = weight
    if weight in state:
        state[shard] = {
            name: _as_dtensor(value, mesh).clone()
            if isinstance(value, torch.Tensor) and value.shape == weight.shape
            else value
            for name, value in state.pop(weight).items()
        }
    return shard


def _as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A full tensor as a DTensor sharded by rows, which views this rank's rows; a scalar is replicated."""
    if not tensor.ndim:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    rows, rank = -(-len(tensor) // mesh.size()), mesh.get_local_rank()
    local = tensor[rows * rank : rows * (rank + 1)]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def _gather(shards: list[Any], ranks: ProcessGroupInfo) -> None:
    """Sends each rank's updated shards to all others, into the full weights. All ranks must call it."""
    rows = [-(-len(shard) // ranks.world_size) for shard in shards]  # of one rank; the last ranks may have fewer
    lengths = [count * shard.shape[1:].numel() for count, shard in zip(rows, shards, strict=True)]
    local = torch.zeros(sum(lengths), dtype=shards[0].dtype, device=shards[0].device)
    for part, shard in zip(torch.split(local, lengths), shards, strict=True):
        values = shard.to_local()
        part[: values.numel()] = values.flatten()
    gathered = [torch.empty_like(local) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, local)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    for rank, of_rank in enumerate(gathered):
        for part, count, shard in zip(torch.split(of_rank, lengths), rows, shards, strict=True):
            target = shard.full[count * rank : count * (rank + 1)]
            target.copy_(part[: target.numel()].view_as(target))
