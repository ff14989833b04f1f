"""The branches of a model: paths that begin at one fork, know nothing of each other, and meet again in one join; and how to take them out of it.

What lies between two nodes of a torch.fx graph falls apart into what hangs together there. A part without weights that several read, or that reads
several, is in no branch. Of blocks inside each other those are taken that share out more weights.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from hasten._torch_compat import own_buffers, own_parameters
from hasten.distributed.fx.tracing import try_trace


@dataclass(frozen=True)
class BranchBlock:
    """Branches that know nothing of each other: all that they read is there before them, and they are read after all of them."""

    part: str  # of the model, whose graph it lies in
    branches: tuple[tuple[Node, ...], ...]
    join: Node

    @property
    def inputs(self) -> list[Node]:
        """What the branches read."""
        inside = {node for branch in self.branches for node in branch}
        read = dict.fromkeys(source for branch in self.branches for node in branch for source in _sources(node))
        return [node for node in read if node not in inside]

    def describe(self, branch: tuple[Node, ...]) -> str:
        names = [node.target for node in branch if node.op == "call_module"] or [node.name for node in branch]
        return self.outer(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")

    def outer(self, name: str) -> str:
        return f"{self.part}.{name}" if self.part else name

    def __str__(self) -> str:
        return f"the branches that meet in {self.outer(self.join.name)}"


def find_branch_blocks(
    model: nn.Module, graphs: dict[str, torch.fx.Graph], drawing: set[str], processes: int
) -> tuple[list[BranchBlock], list[str]]:
    """The blocks of a model, and why other branches are none.

    Args:
        drawing: keys of the nodes that draw random numbers.
    """
    users = Counter(
        id(tensor)
        for module in model.modules()
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
    )
    taken, doubts = [], []
    for name, graph in graphs.items():
        part = model.get_submodule(name)
        held = {node: tensors_used_by(node, part) for node in graph.nodes}
        trained = {node for node, tensors in held.items() if any(tensor.requires_grad for tensor in tensors)}
        uses = Counter(id(tensor) for tensors in held.values() for tensor in tensors)
        chosen: list[BranchBlock] = []
        forks = _forks(graph)
        for join in graph.nodes:  # inner blocks come before those around them
            branches = _between(forks[join], join, trained) if len(_sources(join)) > 1 else []
            whys = [
                _why_not(branch, held, uses, users, {node for node in branch if key_of(name, node) in drawing})
                for branch in branches
            ]
            block = BranchBlock(
                name, tuple(tuple(branch) for branch, why in zip(branches, whys, strict=True) if why is None), join
            )
            if len(branches) > 1:
                doubts += [
                    f"{block.describe(branch)}: {why}" for branch, why in zip(branches, whys, strict=True) if why
                ]
            inner = [other for other in chosen if nodes_of(other) & nodes_of(block)]
            spared = partial(_spared, held=held, processes=processes)
            if len(block.branches) > 1 and spared(block) >= sum(map(spared, inner)):
                chosen = [other for other in chosen if other not in inner] + [block]
        taken += chosen
    return taken, list(dict.fromkeys(doubts))


def nodes_of(block: BranchBlock) -> set[Node]:
    return {node for branch in block.branches for node in branch}


def _spared(block: BranchBlock, held: dict, processes: int) -> int:
    """Weights that the fullest process has not to have."""
    sizes = [sum(tensor.numel() for node in branch for tensor in held[node]) for branch in block.branches]
    (places,) = assign_branches([sizes], processes)
    return sum(sizes) - max(
        sum(size for size, at in zip(sizes, places, strict=True) if at == place) for place in places
    )


def _why_not(branch: list[Node], held: dict, uses: Counter, users: Counter, drawing: set[Node]) -> str | None:
    """Why a branch has to be computed by all."""
    if drawing:
        return f"{min(node.name for node in drawing)} draws random numbers"
    own = Counter(id(tensor) for node in branch for tensor in held[node])
    if any(uses[tensor] > count or users[tensor] > 1 for tensor, count in own.items()):
        return "it shares weights with another part of the model"
    return None


def _forks(graph: torch.fx.Graph) -> dict[Node, Node | None]:
    """For each node the last one that every way from the inputs to it goes through; None: the inputs together are the fork."""
    forks: dict[Node, Node | None] = {}
    depth: dict[Node | None, int] = {None: 0}
    for node in graph.nodes:
        sources = _sources(node)
        fork = sources[0] if sources else None
        for other in sources[1:]:
            while fork is not other:
                if depth[fork] >= depth[other]:
                    fork = forks[fork]
                else:
                    other = forks[other]
        forks[node], depth[node] = fork, depth[fork] + 1
    return forks


def _between(fork: Node | None, join: Node, trained: set[Node]) -> list[list[Node]]:
    """The branches between a fork and a join: what hangs together there. Nodes without weights that several read, or that read several, are in none."""
    region, waiting = set(), _sources(join)
    while waiting:
        node = waiting.pop()
        if node is not fork and node.op != "placeholder" and node not in region:
            region.add(node)
            waiting += _sources(node)
    nodes = [node for node in join.graph.nodes if node in region]
    heads, tails = set(), set()
    for node in nodes:
        if node not in trained and all(source in heads for source in _sources(node) if source in region):
            heads.add(node)
    for node in reversed(nodes):
        if node not in trained and all(user in tails for user in node.users if user in region):
            tails.add(node)

    branch_of: dict[Node, list[Node]] = {}

    def put(node: Node, neighbours: list[Node]) -> None:
        beside = {id(branch): branch for branch in (branch_of[each] for each in neighbours)}
        together = [node, *(member for branch in beside.values() for member in branch)]
        branch_of.update(dict.fromkeys(together, together))

    def in_one(neighbours: list[Node]) -> bool:
        return len({id(branch_of.get(each)) for each in neighbours}) == 1 and neighbours[0] in branch_of

    for node in nodes:
        if node not in heads and node not in tails:
            put(node, [source for source in _sources(node) if source in branch_of])
    for node in reversed(nodes):
        if node in heads and in_one(readers := [user for user in node.users if user in region and user not in tails]):
            put(node, readers)
    for node in nodes:
        if (
            node in tails
            and node not in branch_of
            and in_one(read := [source for source in _sources(node) if source in region])
        ):
            put(node, read)
    branches = {id(branch): branch for branch in branch_of.values()}.values()
    order = {node: place for place, node in enumerate(nodes)}
    return sorted((sorted(branch, key=order.get) for branch in branches), key=lambda branch: order[branch[0]])


def assign_branches(costs: list[list[float]], processes: int) -> list[list[int]]:
    """A process for each branch of each block: the dearest first, each to the one that has least to do in this block, then in those before it."""
    held, places = [0.0] * processes, []
    for of_block in costs:
        loads, at = [0.0] * processes, [0] * len(of_block)
        for number in sorted(range(len(of_block)), key=lambda number: -of_block[number]):
            place = at[number] = min(range(processes), key=lambda each: (loads[each], held[each]))
            loads[place] += of_block[number] or 1e-9
        held = [before + now for before, now in zip(held, loads, strict=True)]
        places.append(at)
    return places


def graphs_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.fx.Graph]]:
    """The graph of a model; of one that cannot be traced, those of its parts. What another method has wrapped stays as it is."""
    if _is_wrapped(module):
        return
    graph = try_trace(module, lambda part: _is_wrapped(part) or torch.fx.Tracer().is_leaf_module(part, ""))
    if graph is not None:
        _forget_unread(graph)
        yield prefix, graph
        return
    for name, child in module.named_children():
        yield from graphs_of(child, f"{prefix}.{name}" if prefix else name)


def _forget_unread(graph: torch.fx.Graph) -> None:
    """Takes away what is unpacked and not read, such as the last state of a recurrent layer: its layer would seem to be read from elsewhere."""
    for node in reversed(graph.nodes):
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)


def _is_wrapped(module: nn.Module) -> bool:
    return "forward" in vars(module)


def _sources(node: Node) -> list[Node]:
    """What a node reads and others have computed."""
    return [each for each in node.all_input_nodes if each.op != "get_attr"]


def tensors_used_by(node: Node, part: nn.Module) -> list[torch.Tensor]:
    """The weights that a node uses, and the buffers of its layer."""
    found = [operator.attrgetter(each.target)(part) for each in node.all_input_nodes if each.op == "get_attr"]
    found = [tensor for tensor in found if isinstance(tensor, nn.Parameter)]
    if node.op == "call_module":
        layer = part.get_submodule(node.target)
        found += [*layer.parameters(), *layer.buffers()]
    return found


def key_of(part: str, node: Node) -> str:
    return f"{part}:{node.name}"


def outputs_of(branch: tuple[Node, ...]) -> list[Node]:
    inside = set(branch)
    return [node for node in branch if any(user not in inside for user in node.users)]


def extract_branch(part: nn.Module, block: BranchBlock, branch: tuple[Node, ...]) -> torch.fx.GraphModule:
    """A branch as a module of its own, which shares the layers of the model."""
    copied = torch.fx.Graph()
    new = {node: copied.placeholder(node.name) for node in block.inputs}

    def known(node: Node) -> Node:
        if node not in new:
            new[node] = copied.node_copy(node)  # a weight or buffer
        return new[node]

    for node in branch:
        new[node] = copied.node_copy(node, known)
    copied.output(
        [copied.call_method("contiguous", (new[node],)) for node in outputs_of(branch)]
    )  # all go on with the same bits
    return torch.fx.GraphModule(part, copied)


def replace_blocks(
    part: nn.Module, graph: torch.fx.Graph, meetings: dict[BranchBlock, Callable]
) -> torch.fx.GraphModule:
    """The graph of a part, in which each block is one call."""
    copied, new = torch.fx.Graph(), {}
    block_of = {node: block for block in meetings for node in nodes_of(block)}

    def known(node: Node) -> Node:
        if node in block_of and node not in new:
            block = block_of[node]
            met = copied.call_function(meetings[block], tuple(map(known, block.inputs)))
            for number, output in enumerate(output for branch in block.branches for output in outputs_of(branch)):
                new[output] = copied.call_function(operator.getitem, (met, number))
        elif node not in new:
            new[node] = copied.node_copy(node, known)
        return new[node]

    for node in graph.nodes:
        if (
            node not in block_of and node.op != "get_attr"
        ):  # weights come with who reads them, and those of branches stay outside
            known(node)
    return torch.fx.GraphModule(part, copied)
