"""Branch parallelism: where a model forks into branches that join again, each rank computes some of them.

A block is what lies between a fork and a join: the branches of an Inception module (Szegedy et al. 2014, arXiv
1409.4842), two towers for two inputs, the members of an ensemble, several heads on one trunk. torch.fx finds them; of
nested blocks, those that divide more weights are chosen. Each rank computes its branches, all ranks receive their
outputs, and the backward pass sums the gradients of their inputs. Everything else is replicated and computes the same
on every rank. Each block is checked on a sample batch: output and gradients must be those of the original model.

A rank keeps the weights of its branches and of all replicated layers; the others are on torch's meta device. If there
are more ranks than ``degree``, they hold further replicas, whose gradients are averaged. While the run is built every
rank holds the full model, and a copy of it for the check. A resumed run measures again and may assign the branches
differently: the same formula, but not the same bits, unless ``assignment`` fixes it.
"""

import copy
import inspect
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.fx
from torch import nn
from torch.fx import Node

from hasten import Card, ConfigurationError, Exactness, Method, ProgressWarning, RunContext, RunError, WrapOrder, option
from hasten._torch_compat import in_place_version, inside_backward
from hasten.core.types import StepFn
from hasten.distributed.collectives import broadcast_module, warn_local_batch_norm
from hasten.distributed.dtensor_state import move_to_meta
from hasten.distributed.fx.branch_finder import (
    BranchBlock,
    assign_branches,
    extract_branch,
    find_branch_blocks,
    graphs_of,
    key_of,
    nodes_of,
    outputs_of,
    replace_blocks,
    tensors_used_by,
)
from hasten.distributed.fx.equivalence import PartitionPlan, verify_partition
from hasten.distributed.mesh import assign_mesh_dim, get_device_mesh, reduce_over_replicas
from hasten.distributed.p2p_metadata import HEADER, decode_meta, empty_from_meta, encode_meta
from hasten.utils import batch as batches
from hasten.utils.observe_step import observe_collectives

EXPECTED = (
    "branches with trained weights that begin at one tensor, or at the inputs, and join again, "
    "in a forward() that torch.fx can trace; they share no weights and draw no random numbers"
)
MEASUREMENTS = 3

Graphs: TypeAlias = dict[str, torch.fx.Graph]  # by the name of the submodule
Assignment: TypeAlias = list[list[int]]  # for each block the rank of each branch, counted within the replica
BlockFn: TypeAlias = Callable[..., list[torch.Tensor]]  # inputs of a block -> outputs of all its branches
MakeBlockFn: TypeAlias = Callable[[BranchBlock, list[torch.fx.GraphModule]], BlockFn]


@dataclass(frozen=True)
class BranchParallel(Method):
    """Lets each rank of a model replica compute some branches of each block (model parallelism)."""

    card = Card(
        summary="computes the branches of a model side by side, some on each process",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Krizhevsky 2014, arXiv 1404.5997 (model parts on processes); Szegedy et al. 2014, arXiv 1409.4842",
        gain_when="the branches of a block take about equally long, and much longer than sending their outputs",
        accelerates={"forward", "backward", "optimizer_step"},
        applies_to={"distributed"},
        invalidates={"full_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
    )
    degree: int = option(0, at_least=0)  # ranks that hold one replica of the model between them; 0: all
    assignment: str = ""  # the rank of each branch, such as 0-1-1-0; by default the measured times are balanced

    def setup(self, run: RunContext) -> None:
        assign_mesh_dim(self, run, "tp")

    def parallelize(self, model: nn.Module, run: RunContext) -> nn.Module:
        assert run.parallel is not None
        size = run.parallel.model_parallel_size
        if size < run.ranks.world_size:
            warn_local_batch_norm(model)
        broadcast_module(model)
        graphs = dict(graphs_of(model))
        seconds, random_nodes = _profile_nodes(model, graphs, run)
        graphs = {name: graph for name, graph in graphs.items() if all(key_of(name, n) in seconds for n in graph.nodes)}
        candidates, rejected = find_branch_blocks(model, graphs, random_nodes, size)

        def compute_all(model: nn.Module, blocks: list[BranchBlock]) -> None:
            _replace_blocks(model, graphs, blocks, _compute_all)

        def divide(model: nn.Module, blocks: list[BranchBlock], assignment: Assignment) -> None:
            make = partial(_exchange_outputs, assignment=dict(zip(blocks, assignment, strict=True)), run=run)
            _replace_blocks(model, graphs, blocks, make)

        def exchange(model: nn.Module, blocks: list[BranchBlock]) -> None:
            divide(model, blocks, assign_branches([[1.0] * len(block.branches) for block in blocks], size))

        plans = [PartitionPlan(compute_all), PartitionPlan(exchange, everywhere=False)]
        blocks, more = verify_partition(model, candidates, plans, self.name, run)
        rejected += more
        if not blocks:
            raise ConfigurationError(
                f"branch_parallel finds no branches in this model for {size} processes. It looked for {EXPECTED}; "
                f"{'; '.join(rejected[:3]) or 'there are none'}"
            )
        costs = [[sum(seconds[key_of(block.part, n)] for n in branch) for branch in block.branches] for block in blocks]
        assignment = self._parse_assignment(blocks, size) if self.assignment else assign_branches(costs, size)
        run.tuned_settings[self.name] = {"assignment": "-".join(str(rank) for ranks in assignment for rank in ranks)}
        if run.ranks.is_main_process:
            _report(model, blocks, assignment, rejected, size)
        divide(model, blocks, assignment)
        _keep_local_branches(model, blocks, assignment, run)
        run.observe_effect(self, partial(observe_collectives, "broadcast_", "send", "recv_", "allgather_"))
        return model

    def _parse_assignment(self, blocks: list[BranchBlock], size: int) -> Assignment:
        """The option ``assignment`` ("0-1-1": a rank per branch) by block; ConfigurationError if it does not fit."""
        words, count = self.assignment.split("-"), sum(len(block.branches) for block in blocks)
        ranks = iter([int(word) if word.isdecimal() else size for word in words])
        assignment = [list(islice(ranks, len(block.branches))) for block in blocks]
        if len(words) != count or any(
            max(of_block, default=size) >= size or len(set(of_block)) < 2 for of_block in assignment
        ):
            example = "-".join(str(index % 2) for block in blocks for index in range(len(block.branches)))
            raise ConfigurationError(
                f"branch_parallel:assignment={self.assignment} must give each of {count} branches a rank "
                f"from 0 to {size - 1}, and each block two ranks or more, such as {example}"
            )
        return assignment

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        return reduce_over_replicas(grad_transform, run)


def _keep_local_branches(model: nn.Module, blocks: list[BranchBlock], assignment: Assignment, run: RunContext) -> None:
    """Moves the weights of branches that are assigned to other ranks to the meta device, in place.

    Records in ``run.parallel`` which parameters are replicated, and that evaluation needs all ranks.
    """
    parallel = run.parallel
    assert parallel is not None
    held: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(parallel.model_parallel_size)}
    for block, ranks in zip(blocks, assignment, strict=True):
        part = model.get_submodule(block.part)
        for rank, branch in zip(ranks, block.branches, strict=True):
            held[rank] += [tensor for node in branch for tensor in tensors_used_by(node, part)]
    position = run.ranks.rank % parallel.model_parallel_size
    move_to_meta(model, [tensor for rank, tensors in held.items() if rank != position for tensor in tensors])
    parallel.eval_needs_all_ranks, parallel.num_parameter_owners = True, parallel.tp_size
    local = {id(tensor) for tensor in held[position]}
    parallel.replicated_params = frozenset(p for p in model.parameters() if not p.is_meta and id(p) not in local)


def _profile_nodes(model: nn.Module, graphs: Graphs, run: RunContext) -> tuple[dict[str, float], set[str]]:
    """(seconds of each node, the shortest of several runs; nodes that draw random numbers), measured on rank 0.

    Nodes that were not computed, because the model does not call them or the traced graph fails, are missing.
    """
    message = b""
    if run.ranks.is_main_process:
        profiled, batch = copy.deepcopy(model), run.services.peek_batch()
        seconds: list[defaultdict[str, float]] = []
        random_nodes: set[str] = set()
        for name, graph in graphs.items():
            part = profiled.get_submodule(name)
            part.forward = _profiling_forward(part, graph, partial(key_of, name), seconds, random_nodes)
        devices = [run.device] if run.device.type == "cuda" else []
        with cast(Any, torch.random).fork_rng(devices), torch.no_grad():
            for _ in range(MEASUREMENTS):
                seconds.append(defaultdict(float))
                batches.call_model(profiled, batch, run.task.loss is None)
        shortest = {key: min(times[key] for times in seconds) for key in seconds[0]}
        message = json.dumps([shortest, sorted(random_nodes)]).encode()
    times, names = json.loads(run.ranks.broadcast(message))
    return times, set(names)


def _profiling_forward(
    part: nn.Module,
    graph: torch.fx.Graph,
    key: Callable[[Node], str],
    seconds: list[defaultdict[str, float]],
    random_nodes: set[str],
) -> Callable[..., Any]:
    """A forward of a module that interprets its graph node by node; if that fails, the original forward."""
    original, signature = part.forward, inspect.signature(part.forward)

    class Profiler(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            before, began = _rng_states(), perf_counter()
            value = super().run_node(n)
            after = _rng_states()  # synchronizes with a GPU
            seconds[-1][key(n)] += perf_counter() - began
            if not all(map(torch.equal, before, after)):
                random_nodes.add(key(n))
            return value

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return Profiler(part, graph=graph).run(*bound.args)
        except Exception:
            return original(*args, **kwargs)

    return forward


def _rng_states() -> list[torch.Tensor]:
    if not torch.cuda.is_initialized():
        return [torch.get_rng_state()]
    torch.cuda.synchronize()
    return [torch.get_rng_state(), torch.cuda.get_rng_state()]


def _report(
    model: nn.Module, blocks: list[BranchBlock], assignment: Assignment, rejected: list[str], size: int
) -> None:
    lines: list[str] = []
    for block, ranks in zip(blocks, assignment, strict=True):
        places = zip(block.branches, ranks, strict=True)
        branches = ", ".join(f"{block.describe(branch)} on rank {rank}" for branch, rank in places)
        lines.append(f"{branches}; they join in {block.outer(block.join.name)}")
    divided = {
        id(tensor): tensor.numel()
        for block in blocks
        for node in nodes_of(block)
        for tensor in tensors_used_by(node, model.get_submodule(block.part))
    }
    total = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    without_branch = size - len({rank for ranks in assignment for rank in ranks})
    lines += [f"not divided: {reason}" for reason in rejected]
    lines += [f"{without_branch} of {size} ranks have no branch"] if without_branch else []
    for line in [*lines, f"{sum(divided.values()) / total:.0%} of the weights are divided"]:
        warnings.warn(f"branch_parallel: {line}", ProgressWarning, stacklevel=4)


def _replace_blocks(model: nn.Module, graphs: Graphs, blocks: list[BranchBlock], make: MakeBlockFn) -> None:
    """Replaces, in place, the computation of each block by ``make(block, branches)``."""
    for name, graph in graphs.items():
        part = model.get_submodule(name)
        functions = {
            block: make(block, [extract_branch(part, block, branch) for branch in block.branches])
            for block in blocks
            if block.part == name
        }
        if functions:
            part.forward = replace_blocks(part, graph, functions).forward


def _compute_all(block: BranchBlock, branches: list[torch.fx.GraphModule]) -> BlockFn:
    """A function that computes all branches of a block on this rank, and raises RunError if different ranks could not:
    a branch changes its inputs in place, or has an output that cannot be sent or has no gradient.
    """

    def compute(*inputs: Any) -> list[torch.Tensor]:
        _check_not_recomputing()
        outputs: list[torch.Tensor] = []
        for branch, nodes in zip(branches, block.branches, strict=True):
            before = _versions(inputs)
            outputs += branch(*inputs)
            if _versions(inputs) != before:  # ranks with other branches would not see the change
                raise RunError(f"the branch {block.describe(nodes)} changes in place what other branches read")
        for output in outputs:
            encode_meta(output)  # refuses what cannot be sent
            if not output.requires_grad:
                raise RunError("a branch returns a tensor without a gradient")
        return outputs

    return compute


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    """Version counters of the tensors: how often each was changed in place."""
    return [in_place_version(tensor) for tensor in batches.batch_tensors(inputs)]


def _check_not_recomputing() -> None:
    """Raises ``RunError`` under activation checkpointing: recomputing ranks would call collectives out of order."""
    if inside_backward():
        raise RunError(
            "branch_parallel cannot recompute branches in the backward pass; leave out activation checkpointing"
        )


def _exchange_outputs(
    block: BranchBlock, branches: list[torch.fx.GraphModule], assignment: dict[BranchBlock, list[int]], run: RunContext
) -> BlockFn:
    """A function that computes this rank's branches of a block and broadcasts their outputs; a collective.

    The function returns the outputs of all branches; RunError if their shapes vary for inputs of one shape.
    Shapes and dtypes of the outputs are exchanged once for each kind of input.
    """
    assert run.parallel is not None
    group, position = get_device_mesh(run)["tp"].get_group(), run.ranks.rank % run.parallel.model_parallel_size
    ranks, counts = assignment[block], [len(outputs_of(branch)) for branch in block.branches]
    sources = [rank for rank, count in zip(ranks, counts, strict=True) for _ in range(count)]
    local = [branch if rank == position else None for rank, branch in zip(ranks, branches, strict=True)]
    edge = torch.zeros((), device=run.device, requires_grad=True)
    headers: dict[tuple[Any, ...], torch.Tensor] = {}

    def exchange(*inputs: Any) -> list[torch.Tensor]:
        _check_not_recomputing()
        token, inputs = _enter(inputs, edge, group)
        computed: list[torch.Tensor | None] = []
        for branch, count in zip(local, counts, strict=True):
            computed += branch(*inputs) if branch else [None] * count
        shapes = ((tensor.shape, tensor.dtype) for tensor in batches.batch_tensors(inputs))
        key = (torch.is_autocast_enabled(run.device.type), *shapes)
        if key not in headers:
            headers[key] = _exchange_headers(computed, run.device, group)
        outputs: list[torch.Tensor] = []
        pending: list[Any] = []
        for output, header, source in zip(computed, headers[key], sources, strict=True):
            tensor = empty_from_meta(header, run.device) if output is None else output.detach()
            if output is not None and (output.shape, output.dtype) != decode_meta(header):
                problem = f"outputs of {block} vary in shape for inputs of one shape"
                raise RunError(f"branch_parallel: {problem}; use another strategy")
            pending.append(dist.broadcast(tensor, group=group, group_src=source, async_op=True))
            outputs.append(cast(Any, ReceiveOutput).apply(token, [tensor]) if output is None else output)
        for work in pending:
            work.wait()
        return outputs

    return exchange


def _enter(
    inputs: tuple[Any, ...], edge: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """(token, inputs) of a block: the backward pass sums the gradients of the inputs over the ranks.

    The token is a tensor that connects inputs and outputs in the autograd graph on ranks without a branch.
    """
    trained = [tensor for tensor in batches.batch_tensors(inputs) if tensor.requires_grad]
    token, *entered = cast("tuple[torch.Tensor, ...]", cast(Any, EnterBlock).apply(group, edge, *trained))
    remaining = iter(entered)
    return token, batches.map_tensors(lambda tensor: next(remaining) if tensor.requires_grad else tensor, inputs)


def _exchange_headers(
    outputs: Sequence[torch.Tensor | None], device: torch.device, group: dist.ProcessGroup
) -> torch.Tensor:
    """Shape and dtype of all outputs, one ``encode_meta`` row each, in a CPU tensor that is the same on all ranks.

    A collective; ``outputs`` holds None for those that another rank computes.
    """
    empty = torch.zeros(HEADER, dtype=torch.int64, device=device)
    headers = torch.stack([empty if output is None else encode_meta(output) for output in outputs])
    dist.all_reduce(headers, group=group)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    return headers.cpu()


class EnterBlock(torch.autograd.Function):
    """Identity; the backward pass sums the gradients over the ranks, all of which must reach it."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, edge: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return edge.clone(), *inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = [grad.clone(memory_format=torch.contiguous_format) for grad in grad_outputs[1:]]
        for grad in grads:
            dist.all_reduce(grad, group=ctx.group)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        return None, None, *grads


class ReceiveOutput(torch.autograd.Function):
    """The output of another rank. Its gradient is used there; here only the token passes on the backward pass."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        return box[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad_outputs[0].new_zeros(()), None
