"""Layers cut among the processes: some hold one copy of the model between them (Shoeybi et al. 2019, arXiv 1909.08053).

A block is some Linear layers whose outputs meet in one Linear and nowhere else: two layers with an activation between them, a gated pair and the
layer that joins it, or the queries, keys and values of an attention with its last layer. The first ones are cut by their outputs ("columns"),
each process computes its share of what is between, and the last one is cut by its inputs ("rows"): one sum over the processes makes the
block's output whole. Blocks are found by tracing the model with torch.fx, and each has to prove on a sample that output and gradients are those
of the model as it was. Everything else of the model is on every process, computes the same there, and stays alike.

More processes than ``degree`` hold copies, whose gradients are averaged, or stages of a pipeline. While the run is being built every process has
the whole model, and a copy of it for the proof.
"""

import operator
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.fx
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hasten._torch_compat import Dropout, cpu_attention_ops, has_forward_hooks, own_parameters
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError, ProgressWarning
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import OptimizerFactory, StepFn
from hasten.distributed.collectives import broadcast_module, warn_local_batch_norm
from hasten.distributed.mesh import assign_mesh_dim, get_device_mesh, reduce_over_replicas
from hasten.distributed.fx.equivalence import PartitionPlan, verify_partition
from hasten.distributed.fx.tracing import is_random_op, is_shape_value, try_trace

FUNCTIONS = nn.functional
ELEMENTWISE = {
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.Dropout,
    FUNCTIONS.relu,
    FUNCTIONS.leaky_relu,
    FUNCTIONS.elu,
    FUNCTIONS.gelu,
    FUNCTIONS.silu,
    FUNCTIONS.mish,
    FUNCTIONS.softplus,
    FUNCTIONS.tanh,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    torch.square,
    operator.mul,
    operator.add,
    operator.sub,
    operator.neg,
    torch.mul,
    torch.add,
    "relu",
    "tanh",
    "sigmoid",
    "square",
    "mul",
    "add",
}
COMPUTES = ("call_function", "call_method", "call_module")
LOOKED_FOR = "Linear layers whose outputs meet in one Linear alone, through element-wise functions or an attention over separate heads"


@dataclass(frozen=True)
class Block:
    """Linear layers that are cut together: ``first`` by columns, ``last`` by rows, and the dropouts that stand between them."""

    first: tuple[str, ...]
    last: str
    elementwise: bool
    dropouts: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        return (*self.first, self.last)

    def __str__(self) -> str:
        return f"{', '.join(self.first)} by columns, {self.last} by rows"


@dataclass(frozen=True)
class TensorParallel(Method):
    card = Card(
        summary="the layers of one copy of the model cut among processes, by columns and rows",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Shoeybi et al. 2019, arXiv 1909.08053; torch.distributed.tensor.parallel",
        gain_when="the model does not fit a device together with its gradients and optimizer, and the processes are joined by something much faster than a network",
        accelerates={"forward", "backward", "optimizer_step"},
        applies_to={"distributed"},
        invalidates={"full_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
    )
    degree: int = option(0, at_least=0)  # processes that layers are cut among; 0: all, or as many as a pipeline leaves

    def setup(self, run: RunContext) -> None:
        assign_mesh_dim(self, run, "shards")

    def parallelize(self, model: nn.Module, run: RunContext) -> nn.Module:
        if (
            run.parallel.model_parallel_size < run.ranks.world_size and run.parallel.pp_size == 1
        ):  # else the stages tell
            warn_local_batch_norm(model)
        broadcast_module(model)
        mesh = get_device_mesh(run)["shards"]
        found, doubts = blocks_of(model, run.parallel.tp_size)
        blocks, more = verify_partition(model, found, [PartitionPlan(partial(_cut, mesh=mesh))], self.name, run)
        doubts += more
        if not blocks:
            raise ConfigurationError(
                f"tensor_parallel can cut no layer of this model among {run.parallel.tp_size} processes. It looked for {LOOKED_FOR}, of sizes that "
                f"{run.parallel.tp_size} divides; {'; '.join(doubts[:3]) or 'there are none'}"
            )
        if run.ranks.is_main_process:
            _tell(model, blocks, doubts)
        _cut(model, blocks, mesh)
        run.parallel.eval_needs_all_ranks = True
        return model

    def optimizer(self, make: OptimizerFactory, run: RunContext) -> OptimizerFactory:

        def of_parts(model):
            with _as_parts(model, get_device_mesh(run)["shards"]):
                return make(model)

        return of_parts

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        return reduce_over_replicas(grad_transform, run)

    def optimizer_step(self, optimizer_step: StepFn, run: RunContext) -> StepFn:
        parts = [part for group in run.optimizer.param_groups for part in group["params"] if hasattr(part, "whole")]

        def updated():
            for part in parts:
                part.grad = None if part.whole.grad is None else _replicated(part.whole.grad, part.device_mesh)
            optimizer_step()

        return updated

    def zero_grad(self, zero_grad: StepFn, run: RunContext) -> StepFn:

        def cleared():
            zero_grad()
            run.unwrapped_model.zero_grad()

        return cleared


def blocks_of(model: nn.Module, degree: int) -> tuple[list[Block], list[str]]:
    """The blocks of a model, as far as it can be traced, and why others are none."""
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    found, doubts, taken = [], [], set()
    for prefix, root, graph in _graphs(model):
        modules = dict(root.named_modules())
        calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        for node in graph.nodes:
            block = _ending_at(node, modules) if _is_linear(node, modules) else None
            if block is None:
                continue
            layers = [modules[name] for name in block.layers]
            named = Block(*_with(prefix, block))
            if shared := taken.intersection(named.layers):
                doubts.append(f"{named}: {min(shared)} is in the block before it")
            elif any(calls[name] > 1 for name in block.layers) or any(
                users[id(w)] > 1 for layer in layers for w in layer.parameters()
            ):
                doubts.append(f"{named}: a layer is used more than once")
            elif odd := [
                size
                for size in (*(layer.out_features for layer in layers[:-1]), layers[-1].in_features)
                if size % degree
            ]:
                doubts.append(f"{named}: {degree} does not divide {odd[0]}")
            else:
                found.append(named)
                taken.update(named.layers)
    return found, doubts


def _with(prefix: str, block: Block) -> tuple:
    def outer(names):
        return tuple(prefix + name for name in names)

    return outer(block.first), prefix + block.last, block.elementwise, outer(block.dropouts)


def _graphs(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, torch.fx.Graph]]:
    """The graphs of a model; of one that cannot be traced, those of its parts."""
    graph = try_trace(module)
    if graph is not None:
        yield prefix, module, graph
        return
    for name, child in module.named_children():
        yield from _graphs(child, f"{prefix}{name}.")


def _is_linear(node: torch.fx.Node, modules: dict) -> bool:
    module = modules.get(node.target) if node.op == "call_module" else None
    return type(module) is nn.Linear and not has_forward_hooks(module)


def _ending_at(last: torch.fx.Node, modules: dict) -> Block | None:
    """The block of which a Linear is the last layer, if it is one."""
    first, between, waiting = [], [], list(last.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in first or node in between or is_shape_value(node):
            continue
        if _is_linear(node, modules):
            first.append(node)
        elif (
            (node.op == "call_module" and _is_whole(modules[node.target]))
            or node.op not in COMPUTES
            or is_random_op(node)
        ):
            return None
        else:
            between.append(node)
            waiting += node.all_input_nodes
    inside = {*first, *between, last}
    elementwise = all(_what(node, modules) in ELEMENTWISE for node in between)
    known = inside if elementwise else inside | {user for node in inside for user in node.users if is_shape_value(user)}
    alike = len({modules[node.target].out_features for node in first} | {modules[last.target].in_features}) == 1
    if (
        not first
        or any(user not in known for node in (*first, *between) for user in node.users)
        or (elementwise and not alike)
    ):
        return None
    dropouts = [
        node.target for node in between if node.op == "call_module" and type(modules[node.target]) is nn.Dropout
    ]
    order = {name: place for place, name in enumerate(modules)}
    return Block(
        tuple(sorted((node.target for node in first), key=order.get)), last.target, elementwise, tuple(dropouts)
    )


def _is_whole(module: nn.Module) -> bool:
    """Whether a module between two layers has to see all of them: for its weights, or since it draws for each channel, or in a way of its own."""
    draws_otherwise = isinstance(module, (Dropout, nn.RReLU)) and type(module) is not nn.Dropout
    return draws_otherwise or any(True for _ in module.parameters())


def _what(node: torch.fx.Node, modules: dict):
    return type(modules[node.target]) if node.op == "call_module" else node.target


def _tell(model, blocks: list[Block], doubts: list[str]) -> None:
    total = sum(weight.numel() for weight in model.parameters())
    cut = sum(model.get_submodule(name).weight.numel() for block in blocks for name in block.layers)
    for line in [*blocks, *(f"left whole: {doubt}" for doubt in doubts), f"{cut / total:.0%} of the weights are cut"]:
        warnings.warn(f"tensor_parallel: {line}", ProgressWarning, stacklevel=4)


def _cut(model, blocks: list[Block], mesh) -> None:
    """Cuts the layers of the blocks, in place."""
    if mesh.device_type == "cpu" and not all(block.elementwise for block in blocks):
        _teach_attention_by_heads()
    for block in blocks:
        by_columns = ColwiseParallel(use_local_output=block.elementwise)
        by_rows = RowwiseParallel()
        parallelize_module(model, mesh, dict.fromkeys(block.first, by_columns) | {block.last: by_rows})
        for name in block.dropouts:
            dropout = model.get_submodule(name)
            dropout.forward = partial(_dropped, dropout, mesh)


def _dropped(dropout: nn.Dropout, mesh, cut: torch.Tensor) -> torch.Tensor:
    """Dropout of a tensor that is cut: every process draws for all of it, as one process would, and takes its part of what it drew."""
    if not dropout.training or not dropout.p:
        return cut
    dim = cut.placements[0].dim if isinstance(cut, DTensor) else cut.ndim - 1
    own = cut.to_local() if isinstance(cut, DTensor) else cut
    shape = [size * (mesh.size() if place == dim else 1) for place, size in enumerate(own.shape)]
    drawn = FUNCTIONS.dropout(own.new_ones(shape), dropout.p).chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return cut * (
        DTensor.from_local(drawn, mesh, cut.placements, run_check=False) if isinstance(cut, DTensor) else drawn
    )


@cache
def _teach_attention_by_heads() -> None:
    """Tells torch, which knows it of GPUs only, that its attention for the CPU computes every head by itself."""
    heads = Shard(1)
    forward_op, backward_op = cpu_attention_ops()

    @register_sharding(forward_op)
    def forward(query, key, value, dropout_p=0.0, is_causal=False, attn_mask=None, scale=None):
        return [([heads] * 2, [heads] * 3 + [None, None, None if attn_mask is None else Replicate(), None])]

    @register_sharding(backward_op)
    def backward(grad, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=None, scale=None):
        return [([heads] * 3, [heads] * 6 + [None, None, None if attn_mask is None else Replicate(), None])]


@contextmanager
def _as_parts(model, mesh):
    """Inside, weights that are not cut look as if they were, so that an optimizer sees weights of one kind; what it does to them it does to the weights."""
    parts, places = {}, []
    for module in model.modules():
        for name, weight in own_parameters(module).items():
            if weight is not None and not isinstance(weight, DTensor) and not weight.is_meta:
                part = parts.setdefault(
                    id(weight), nn.Parameter(_replicated(weight.detach(), mesh), weight.requires_grad)
                )
                part.whole = weight
                places.append((module, name, weight))
                own_parameters(module)[name] = part
    try:
        yield
    finally:
        for module, name, weight in places:
            own_parameters(module)[name] = weight


def _replicated(tensor, mesh):
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
