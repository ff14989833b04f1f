"""Branches side by side: where a model forks into paths that meet again, each process computes some of them.

A block is what lies between a fork and a join: of an Inception network (Szegedy et al. 2014, arXiv 1409.4842), of two towers for two inputs, of the
members of an ensemble, of several heads on one trunk. torch.fx shows them; of blocks inside each other those are taken that share out more weights.
Each process computes its branches, their outputs are told to all, and backward the gradients of what they were given are summed. Everything else is
on every process, computes the same there, and stays alike. Each block has to prove on a sample that output and gradients are those of the model as
it was.

A process keeps the weights of its branches and of what all compute; the others are on torch's meta device. More processes than ``degree`` hold copies,
whose gradients are averaged. While the run is being built every process has the whole model, and a copy of it for the proof. A run that is gone on
with measures anew, and may share out the branches otherwise: same formula, not the same bits, unless ``places`` says where.
"""

import copy
import inspect
import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter

import torch
import torch.distributed as dist
import torch.fx
from torch import nn
from torch.fx import Node

from hasten._torch_compat import in_place_version, inside_backward
from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError, ProgressWarning, RunError
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import StepFn
from hasten.distributed.collectives import (
    assign_mesh_dim,
    broadcast_module,
    get_device_mesh,
    reduce_over_replicas,
    warn_local_batch_norm,
)
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
from hasten.distributed.fx.equivalence import PartitionPlan, call_traced_model, verify_partition
from hasten.distributed.p2p_metadata import HEADER, decode_meta, empty_from_meta, encode_meta
from hasten.utils import batch as batches

LOOKED_FOR = (
    "paths with trained weights that begin at one tensor, or at the inputs, and meet again, in a forward() that torch.fx can trace; "
    "they share no weights, and draw no random numbers"
)
MEASUREMENTS = 3


@dataclass(frozen=True)
class BranchParallel(Method):
    card = Card(
        summary="the branches of a model computed side by side, some on each process",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Krizhevsky 2014, arXiv 1404.5997 (parts of a model on processes of their own); Szegedy et al. 2014, arXiv 1409.4842 (branches)",
        gain_when="the branches of a block take about equally long, and much longer than their outputs take from one process to another",
        accelerates={"forward", "backward", "optimizer_step"},
        applies_to={"distributed"},
        invalidates={"full_weights"},
        order=WrapOrder.FIRST,
        replaces={"parallelize"},
    )
    degree: int = option(0, at_least=0)  # processes that hold one copy of the model between them; 0: all
    assignment: str = ""  # the process of each branch, as 0-1-1-0; unless said, as the measured times share out evenly

    def setup(self, run: RunContext) -> None:
        assign_mesh_dim(self, run, "shards")

    def parallelize(self, model: nn.Module, run: RunContext) -> nn.Module:
        if run.parallel.model_parallel_size < run.ranks.world_size:
            warn_local_batch_norm(model)
        broadcast_module(model)
        graphs = dict(graphs_of(model))
        seconds, drawing = _watched(model, graphs, run)
        graphs = {
            name: graph for name, graph in graphs.items() if all(key_of(name, node) in seconds for node in graph.nodes)
        }
        found, doubts = find_branch_blocks(model, graphs, drawing, run.parallel.model_parallel_size)
        by_itself = PartitionPlan(lambda model, blocks: _cut(model, graphs, blocks, _by_itself))
        exchanged = PartitionPlan(
            lambda model, blocks: _cut(model, graphs, blocks, _by_turns(blocks, run)), everywhere=False
        )
        blocks, more = verify_partition(model, found, [by_itself, exchanged], self.name, run)
        doubts += more
        if not blocks:
            raise ConfigurationError(
                f"branch_parallel finds no branches in this model for {run.parallel.model_parallel_size} processes. It looked for {LOOKED_FOR}; "
                f"{'; '.join(doubts[:3]) or 'there are none'}"
            )
        costs = [
            [sum(seconds[key_of(block.part, node)] for node in branch) for branch in block.branches] for block in blocks
        ]
        places = (
            self._asked(blocks, run.parallel.model_parallel_size)
            if self.assignment
            else assign_branches(costs, run.parallel.model_parallel_size)
        )
        run.tuned_settings[self.name] = {"places": "-".join(str(place) for each in places for place in each)}
        if run.ranks.is_main_process:
            _tell(model, blocks, places, doubts, run.parallel.model_parallel_size)
        _cut(model, graphs, blocks, partial(_exchanged, places=dict(zip(blocks, places, strict=True)), run=run))
        self._keep_own(model, blocks, places, run)
        return model

    def _asked(self, blocks: list[BranchBlock], processes: int) -> list[list[int]]:
        """The places that somebody asked for.

        Raises:
            Refusal: they are not so many, no processes, or leave a block to one of them.
        """
        words, count = self.assignment.split("-"), sum(len(block.branches) for block in blocks)
        rest = iter(int(word) if word.isdecimal() and int(word) < processes else None for word in words)
        places = [list(islice(rest, len(block.branches))) for block in blocks]
        if len(words) != count or any(None in each or len(set(each)) < 2 for each in places):
            usual = "-".join(str(number % 2) for block in blocks for number in range(len(block.branches)))
            raise ConfigurationError(
                f"branch_parallel:places={self.assignment} must be a process for each of {count} branches, from 0 to {processes - 1}, "
                f"and two or more for each block, such as {usual}"
            )
        return places

    def _keep_own(self, model, blocks: list[BranchBlock], places: list[list[int]], run: RunContext) -> None:
        """Forgets the branches of other processes. What all have the first one counts."""
        held = {place: [] for place in range(run.parallel.model_parallel_size)}
        for block, of_block in zip(blocks, places, strict=True):
            part = model.get_submodule(block.part)
            for place, branch in zip(of_block, block.branches, strict=True):
                held[place] += [tensor for node in branch for tensor in tensors_used_by(node, part)]
        own = run.ranks.rank % run.parallel.model_parallel_size
        move_to_meta(model, [tensor for place, tensors in held.items() if place != own for tensor in tensors])
        run.parallel.eval_needs_all_ranks, run.parallel.num_parameter_owners = True, run.parallel.tp_size
        ours = {id(tensor) for tensor in held[own]}
        run.parallel.replicated_params = frozenset(
            weight for weight in model.parameters() if not weight.is_meta and id(weight) not in ours
        )

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        return reduce_over_replicas(grad_transform, run)


def _watched(model: nn.Module, graphs: dict, run: RunContext) -> tuple[dict[str, float], set[str]]:
    """The seconds that each node of the graphs takes on a batch, the shortest of several tries, and which draw random numbers, as the first rank saw it.

    Nodes that were not computed, since nobody calls their part or their graph is not what it does, are not there.
    """
    told = b""
    if run.ranks.is_main_process:
        watched, batch = copy.deepcopy(model), run.services.peek_batch()
        tries, drawing = [], set()
        for name, graph in graphs.items():
            part = watched.get_submodule(name)
            part.forward = _watching(part, graph, partial(key_of, name), tries, drawing)
        with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []), torch.no_grad():
            for _ in range(MEASUREMENTS):
                tries.append(Counter())
                call_traced_model(watched, batch, run.task.loss is None)
        told = json.dumps([{key: min(each[key] for each in tries) for key in tries[0]}, sorted(drawing)]).encode()
    seconds, drawing = json.loads(run.ranks.broadcast(told))
    return seconds, set(drawing)


def _watching(
    part: nn.Module, graph: torch.fx.Graph, key: Callable, tries: list[Counter], drawing: set[str]
) -> Callable:
    """The forward of a part, node by node; of one that goes wrong so, the forward that it had."""
    as_it_was, signature = part.forward, inspect.signature(part.forward)

    class Watching(torch.fx.Interpreter):
        def run_node(self, node: Node):
            before, began = _random_states(), perf_counter()
            value = super().run_node(node)
            after = _random_states()  # of a GPU, which waits for it
            tries[-1][key(node)] += perf_counter() - began
            if not all(map(torch.equal, before, after)):
                drawing.add(key(node))
            return value

    def watched(*given, **named):
        try:
            bound = signature.bind(*given, **named)
            bound.apply_defaults()
            return Watching(part, graph=graph).run(*bound.args)
        except Exception:
            return as_it_was(*given, **named)

    return watched


def _random_states() -> list[torch.Tensor]:
    if not torch.cuda.is_initialized():
        return [torch.get_rng_state()]
    torch.cuda.synchronize()
    return [torch.get_rng_state(), torch.cuda.get_rng_state()]


def _tell(model, blocks: list[BranchBlock], places: list[list[int]], doubts: list[str], processes: int) -> None:
    lines = []
    for block, at in zip(blocks, places, strict=True):
        branches = (
            f"{block.describe(branch)} on process {place}" for branch, place in zip(block.branches, at, strict=True)
        )
        lines.append(f"{', '.join(branches)}; they meet in {block.outer(block.join.name)}")
    shared = {
        id(t): t.numel()
        for block in blocks
        for node in nodes_of(block)
        for t in tensors_used_by(node, model.get_submodule(block.part))
    }
    total = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    idle = processes - len({place for at in places for place in at})
    lines += [f"left whole: {doubt}" for doubt in doubts]
    lines += [f"{idle} of {processes} processes have no branch"] if idle else []
    for line in [*lines, f"{sum(shared.values()) / total:.0%} of the weights are shared out"]:
        warnings.warn(f"branch_parallel: {line}", ProgressWarning, stacklevel=4)


def _cut(
    model, graphs: dict, blocks: list[BranchBlock], how: Callable[[BranchBlock, list[torch.fx.GraphModule]], Callable]
) -> None:
    """Lets the parts of a model compute their blocks in another way, in place.

    Args:
        how: ``(block, branches) -> function`` from what the block is given to the outputs of all its branches.
    """
    for name, graph in graphs.items():
        of_part, part = [block for block in blocks if block.part == name], model.get_submodule(name)
        meetings = {
            block: how(block, [extract_branch(part, block, branch) for branch in block.branches]) for block in of_part
        }
        if meetings:
            part.forward = replace_blocks(part, graph, meetings).forward


def _by_itself(block: BranchBlock, branches: list[torch.fx.GraphModule]) -> Callable:
    """All branches on this process, which have to leave what they are given as it is, and to end in what can be told to others."""

    def computed(*given):
        _refuse_again()
        outputs = []
        for branch, nodes in zip(branches, block.branches, strict=True):
            before = _versions(given)
            outputs += branch(*given)
            if _versions(given) != before:  # a process that has another branch would not see it
                raise RunError(f"{block.describe(nodes)} changes in place what others read")
        for output in outputs:
            encode_meta(output)
            if not output.requires_grad:
                raise RunError("a branch ends in a tensor without a gradient")
        return outputs

    return computed


def _versions(given: tuple) -> list[int]:
    """How often each tensor was changed in place."""
    return [in_place_version(tensor) for tensor in batches.batch_tensors(given)]


def _refuse_again() -> None:
    """Refuses to compute branches once more in the backward pass, as checkpointing does: the processes would come there at different times."""
    if inside_backward():
        raise RunError(
            "branch_parallel cannot compute branches again in the backward pass; leave out activation checkpointing"
        )


def _by_turns(blocks: list[BranchBlock], run: RunContext) -> Callable:
    """Exchanged, with as many branches here as there."""
    places = assign_branches([[1.0] * len(block.branches) for block in blocks], run.parallel.model_parallel_size)
    return partial(_exchanged, places=dict(zip(blocks, places, strict=True)), run=run)


def _exchanged(
    block: BranchBlock, branches: list[torch.fx.GraphModule], places: dict[BranchBlock, list[int]], run: RunContext
) -> Callable:
    """The branches that are this process's own, and the outputs of the others from where they are computed.

    A process knows how large those will be: they were told when it was given the like for the first time.
    """
    group, own = get_device_mesh(run)["shards"].get_group(), run.ranks.rank % run.parallel.model_parallel_size
    sources = [place for place, branch in zip(places[block], block.branches, strict=True) for _ in outputs_of(branch)]
    mine = [branch if place == own else None for place, branch in zip(places[block], branches, strict=True)]
    counts = [len(outputs_of(branch)) for branch in block.branches]
    edge = torch.zeros((), device=run.device, requires_grad=True)
    headers: dict[tuple, torch.Tensor] = {}

    def met(*given):
        _refuse_again()
        way_back, given = _entered(given, edge, group)
        outputs = []
        for branch, count in zip(mine, counts, strict=True):
            outputs += branch(*given) if branch else [None] * count
        alike = (
            torch.is_autocast_enabled(run.device.type),
            *((tensor.shape, tensor.dtype) for tensor in batches.batch_tensors(given)),
        )
        if alike not in headers:
            headers[alike] = _told(outputs, run.device, group)
        waiting = []
        for number, (output, header, source) in enumerate(zip(outputs, headers[alike], sources, strict=True)):
            tensor = empty_from_meta(header, run.device) if output is None else output.detach()
            if output is not None and (output.shape, output.dtype) != decode_meta(header):
                raise RunError(
                    f"branch_parallel: {block} end in tensors of other sizes for inputs of the same; take another strategy"
                )
            waiting.append(dist.broadcast(tensor, group=group, group_src=source, async_op=True))
            outputs[number] = Received.apply(way_back, [tensor]) if output is None else output
        for each in waiting:
            each.wait()
        return outputs

    return met


def _entered(given: tuple, edge: torch.Tensor, group) -> tuple[torch.Tensor, tuple]:
    """What the branches are given, so that its gradients come from all of them, and a way back there for processes that have none."""
    way_back, *entered = Entered.apply(
        group, edge, *(tensor for tensor in batches.batch_tensors(given) if tensor.requires_grad)
    )
    rest = iter(entered)
    return way_back, batches.map_tensors(lambda tensor: next(rest) if tensor.requires_grad else tensor, given)


def _told(outputs: list[torch.Tensor | None], device, group) -> torch.Tensor:
    """The headers of all outputs, on the processor, for all who have some of them."""
    rows = [
        torch.zeros(HEADER, dtype=torch.int64, device=device) if output is None else encode_meta(output)
        for output in outputs
    ]
    headers = torch.stack(rows)
    dist.all_reduce(headers, group=group)
    return headers.cpu()


class Entered(torch.autograd.Function):
    """Forward as it is; backward the sum of the gradients of all processes, which all have to ask at once."""

    @staticmethod
    def forward(ctx, group, edge, *given):
        ctx.group = group
        return edge.clone(), *given

    @staticmethod
    def backward(ctx, _, *gradients):
        summed = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
        for gradient in summed:
            dist.all_reduce(gradient, group=ctx.group)
        return None, None, *summed


class Received(torch.autograd.Function):
    """What another process has computed. Nothing of its gradient is ours, but the way back is: there all sum up what they have."""

    @staticmethod
    def forward(ctx, way_back, box):
        return box[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_zeros(()), None
