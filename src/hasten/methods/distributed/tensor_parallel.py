"""Tensor parallelism: shards layers over the ranks that hold one replica of the model (Shoeybi et al. 2019, arXiv
1909.08053).

A block is a set of Linear layers whose outputs meet in one Linear and nowhere else: two layers with an activation
between them, a gated pair and the layer that joins it, or the query, key and value layers of an attention with its
output layer. The first ones are sharded by outputs ("by columns"), each rank computes its share of what lies between,
and the last one is sharded by inputs ("by rows"): one sum over the ranks gives the output of the block. torch.fx finds
the blocks, and each is checked on a sample batch: outputs and gradients must be those of the original model. All other
layers are replicated and compute the same on every rank.

If there are more ranks than ``degree``, they hold further replicas, whose gradients are averaged, or the stages of a
pipeline. While the run is built every rank holds the full model, and a copy of it for the check.
"""

import operator
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, cast

import torch
import torch.fx
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from hasten import Card, ConfigurationError, Exactness, Method, ProgressWarning, RunContext, WrapOrder, option
from hasten._torch_compat import Dropout, cpu_attention_ops, has_forward_hooks
from hasten.core.types import StepFn
from hasten.distributed.collectives import broadcast_module, warn_local_batch_norm
from hasten.distributed.fx.equivalence import PartitionPlan, verify_partition
from hasten.distributed.fx.tracing import is_random_op, is_shape_value, try_trace
from hasten.distributed.mesh import assign_mesh_dim, get_device_mesh, reduce_over_replicas
from hasten.utils.observe_step import observe_collectives

Modules: TypeAlias = dict[str, nn.Module]  # by their name in the traced module

# fmt: off
ELEMENTWISE = {
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.Hardswish, nn.Hardtanh, nn.Identity, nn.Dropout, F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.mish, F.softplus,
    F.tanh, torch.relu, torch.tanh, torch.sigmoid, torch.square, torch.mul, torch.add,
    operator.mul, operator.add, operator.sub, operator.neg, "relu", "tanh", "sigmoid", "square", "mul", "add",
}
# fmt: on
COMPUTING_OPS = ("call_function", "call_method", "call_module")
EXPECTED = (
    "Linear layers whose outputs meet in one Linear alone, "
    "through element-wise functions or an attention over separate heads"
)


@dataclass(frozen=True)
class ShardedBlock:
    """Linear layers that are sharded together, by their names."""

    first: tuple[str, ...]  # the layers that are sharded by columns
    last: str  # the layer that is sharded by rows
    elementwise: bool  # whether only element-wise functions lie between them, not an attention
    dropouts: tuple[str, ...] = ()  # dropout layers between them; a rank draws the full mask and uses its shard

    @property
    def layers(self) -> tuple[str, ...]:
        return (*self.first, self.last)

    def with_prefix(self, prefix: str) -> "ShardedBlock":
        first, dropouts = (tuple(prefix + name for name in names) for names in (self.first, self.dropouts))
        return ShardedBlock(first, prefix + self.last, self.elementwise, dropouts)

    def __str__(self) -> str:
        return f"{', '.join(self.first)} by columns, {self.last} by rows"


@dataclass(frozen=True)
class TensorParallel(Method):
    """Shards blocks of Linear layers over ``degree`` ranks."""

    card = Card(
        summary="shards the layers of one model replica over processes, by columns and rows",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Shoeybi et al. 2019, arXiv 1909.08053; torch.distributed.tensor.parallel",
        gain_when="model, gradients and optimizer do not fit one device, and processes share a fast link (NVLink)",
        accelerates={"forward", "backward", "optimizer_step"},
        applies_to={"distributed"},
        invalidates={"full_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
    )
    degree: int = option(0, at_least=0)  # ranks that layers are sharded over; 0: all, or as many as a pipeline leaves

    def setup(self, run: RunContext) -> None:
        assign_mesh_dim(self, run, "tp")

    def parallelize(self, model: nn.Module, run: RunContext) -> nn.Module:
        parallel = run.parallel
        assert parallel is not None
        if parallel.model_parallel_size < run.ranks.world_size and parallel.pp_size == 1:  # else pipeline warns
            warn_local_batch_norm(model)
        broadcast_module(model)
        mesh = get_device_mesh(run)["tp"]
        candidates, rejected = find_blocks(model, parallel.tp_size)
        blocks, more = verify_partition(model, candidates, [PartitionPlan(partial(_shard, mesh=mesh))], self.name, run)
        rejected += more
        if not blocks:
            raise ConfigurationError(
                f"tensor_parallel can shard no layer of this model over {parallel.tp_size} processes. It looked for "
                f"{EXPECTED}, of sizes that {parallel.tp_size} divides; {'; '.join(rejected[:3]) or 'there are none'}"
            )
        if run.ranks.is_main_process:
            _report(model, blocks, rejected)
        _shard(model, blocks, mesh)
        run.observe_effect(self, partial(observe_collectives, "all_reduce", "all_gather", "reduce_scatter"))
        parallel.eval_needs_all_ranks = True
        return model

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        return reduce_over_replicas(grad_transform, run)

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        def step_on_both_kinds() -> None:
            with implicit_replication():  # replicated weights are plain tensors beside the DTensors of sharded ones
                optimizer_step()

        return step_on_both_kinds


def find_blocks(model: nn.Module, degree: int) -> tuple[list[ShardedBlock], list[str]]:
    """(blocks of a model that ``degree`` ranks can share, reasons against others), as far as torch.fx can trace it."""
    uses = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    blocks: list[ShardedBlock] = []
    rejected: list[str] = []
    taken: set[str] = set()
    for prefix, root, graph in _graphs(model):
        modules: Modules = dict(cast(Iterator[tuple[str, nn.Module]], root.named_modules()))
        calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        for node in graph.nodes:
            local = _block_ending_at(node, modules) if _is_linear(node, modules) else None
            if local is None:
                continue
            layers = [cast(nn.Linear, modules[name]) for name in local.layers]
            block = local.with_prefix(prefix)
            is_reused = any(calls[name] > 1 for name in local.layers) or any(
                uses[id(weight)] > 1 for layer in layers for weight in layer.parameters()
            )
            sizes = [*(layer.out_features for layer in layers[:-1]), layers[-1].in_features]
            if shared := taken.intersection(block.layers):
                rejected.append(f"{block}: {min(shared)} is in the block before it")
            elif is_reused:
                rejected.append(f"{block}: a layer is used more than once")
            elif odd := [size for size in sizes if size % degree]:
                rejected.append(f"{block}: {degree} does not divide {odd[0]}")
            else:
                blocks.append(block)
                taken.update(block.layers)
    return blocks, rejected


def _graphs(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, torch.fx.Graph]]:
    """(name, module, torch.fx graph) of a model, or of its submodules if torch.fx cannot trace the model."""
    graph = try_trace(module)
    if graph is not None:
        yield prefix, module, graph
        return
    for name, child in module.named_children():
        yield from _graphs(child, f"{prefix}{name}.")


def _module_of(node: torch.fx.Node, modules: Modules) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _is_linear(node: torch.fx.Node, modules: Modules) -> bool:
    module = _module_of(node, modules)
    return type(module) is nn.Linear and not has_forward_hooks(module)


def _block_ending_at(last: torch.fx.Node, modules: Modules) -> ShardedBlock | None:
    """The block whose last layer is the Linear of node ``last``; None if no layers before it can be sharded."""
    first: list[torch.fx.Node] = []
    between: list[torch.fx.Node] = []
    pending = list(last.all_input_nodes)
    while pending:
        node = pending.pop()
        if node in first or node in between or is_shape_value(node):
            continue
        module = _module_of(node, modules)
        if _is_linear(node, modules):
            first.append(node)
        elif (module is not None and _needs_full_input(module)) or node.op not in COMPUTING_OPS or is_random_op(node):
            return None
        else:
            between.append(node)
            pending += node.all_input_nodes
    inside = {*first, *between, last}
    elementwise = all(_operation(node, modules) in ELEMENTWISE for node in between)
    readers = set(inside)
    if not elementwise:
        readers |= {user for node in inside for user in node.users if is_shape_value(user)}
    widths = {cast(nn.Linear, modules[str(node.target)]).out_features for node in first}
    widths.add(cast(nn.Linear, modules[str(last.target)]).in_features)
    is_read_outside = any(user not in readers for node in (*first, *between) for user in node.users)
    if not first or is_read_outside or (elementwise and len(widths) > 1):
        return None
    order = {name: index for index, name in enumerate(modules)}
    names = sorted((str(node.target) for node in first), key=lambda name: order[name])
    dropouts = [str(node.target) for node in between if type(_module_of(node, modules)) is nn.Dropout]
    return ShardedBlock(tuple(names), str(last.target), elementwise, tuple(dropouts))


def _needs_full_input(module: nn.Module) -> bool:
    """Whether a module between two layers cannot work on a shard: it has weights, or is random, unlike Dropout."""
    draws_otherwise = isinstance(module, (Dropout, nn.RReLU)) and type(module) is not nn.Dropout
    return draws_otherwise or any(True for _ in module.parameters())


def _operation(node: torch.fx.Node, modules: Modules) -> Any:
    """What a node of the graph calls: a module class, a function, or the name of a tensor method."""
    return type(_module_of(node, modules)) if node.op == "call_module" else node.target


def _report(model: nn.Module, blocks: list[ShardedBlock], rejected: list[str]) -> None:
    total = sum(weight.numel() for weight in model.parameters())
    layers = [cast(nn.Linear, model.get_submodule(name)) for block in blocks for name in block.layers]
    fraction = sum(layer.weight.numel() for layer in layers) / total
    not_sharded = [f"not sharded: {reason}" for reason in rejected]
    for line in [*blocks, *not_sharded, f"{fraction:.0%} of the weights are sharded"]:
        warnings.warn(f"tensor_parallel: {line}", ProgressWarning, stacklevel=4)


def _shard(model: nn.Module, blocks: list[ShardedBlock], mesh: DeviceMesh) -> None:
    """Replaces the weights of the blocks' layers by DTensors sharded over ``mesh``, in place."""
    if mesh.device_type == "cpu" and not all(block.elementwise for block in blocks):
        _register_cpu_attention()
    for block in blocks:
        by_columns = ColwiseParallel(use_local_output=block.elementwise)
        plan: dict[str, ParallelStyle] = {**dict.fromkeys(block.first, by_columns), block.last: RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        for name in block.dropouts:
            dropout: Any = model.get_submodule(name)
            dropout.forward = partial(_sharded_dropout, dropout, mesh)


def _sharded_dropout(dropout: nn.Dropout, mesh: DeviceMesh, inputs: torch.Tensor) -> torch.Tensor:
    """Dropout of a sharded tensor: every rank draws the mask of the full tensor, and uses its shard."""
    if not dropout.training or not dropout.p:
        return inputs
    if isinstance(inputs, DTensor):
        local, dim = inputs.to_local(), cast(int, cast(Any, inputs.placements[0]).dim)
    else:
        local, dim = inputs, inputs.ndim - 1
    shape = [size * (mesh.size() if index == dim else 1) for index, size in enumerate(local.shape)]
    mask = F.dropout(local.new_ones(shape), dropout.p).chunk(mesh.size(), dim)[mesh.get_local_rank()]
    if isinstance(inputs, DTensor):
        mask = DTensor.from_local(mask, mesh, inputs.placements, run_check=False)
    return inputs * mask


@cache
def _register_cpu_attention() -> None:
    """Registers that the CPU attention kernel computes every head independently; torch knows it for GPUs only."""
    forward_op, backward_op = cpu_attention_ops()
    register_sharding(forward_op)(partial(_shard_heads, 2, 3))
    register_sharding(backward_op)(partial(_shard_heads, 3, 6))


def _shard_heads(outputs: int, inputs: int, *_: Any, attn_mask: Any = None, scale: Any = None) -> list[Any]:
    """[(placements of the outputs, of the arguments)] that shard an attention operation by heads.

    It has ``outputs`` outputs and ``inputs`` tensor arguments of shape (batch, heads, ...), then four other arguments.
    """
    heads, mask = Shard(1), None if attn_mask is None else Replicate()
    return [([heads] * outputs, [heads] * inputs + [None, None, mask, None])]
