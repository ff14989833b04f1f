"""Finds branches of a model: subgraphs between a fork and a join that read nothing of each other; and extracts them.

The nodes of a torch.fx graph between fork and join are grouped into connected components. A node without parameters
that several components read, or that reads several, belongs to none. Of nested blocks, those that save more parameters
per process are taken.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from hasten._torch_compat import own_buffers, own_parameters
from hasten.distributed.fx.tracing import try_trace

Branch = tuple[Node, ...]


@dataclass(frozen=True)
class BranchBlock:
    """Branches that read nothing of each other and end in ``join``, in the graph of the submodule ``part``."""

    part: str
    branches: tuple[Branch, ...]
    join: Node

    @property
    def inputs(self) -> list[Node]:
        """Nodes outside the block whose values its branches read."""
        inside = nodes_of(self)
        read = dict.fromkeys(source for branch in self.branches for node in branch for source in _sources(node))
        return [node for node in read if node not in inside]

    def describe(self, branch: Sequence[Node]) -> str:
        """``first to last``: names of the first and the last module of a branch, for messages."""
        names = [str(node.target) for node in branch if node.op == "call_module"] or [node.name for node in branch]
        return self.outer(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")

    def outer(self, name: str) -> str:
        """The dotted name in the whole model of ``name``, which is relative to the submodule ``part``."""
        return f"{self.part}.{name}" if self.part else name

    def __str__(self) -> str:
        return f"the branches that meet in {self.outer(self.join.name)}"


def find_branch_blocks(
    model: nn.Module, graphs: dict[str, torch.fx.Graph], random_nodes: set[str], processes: int
) -> tuple[list[BranchBlock], list[str]]:
    """(blocks of a model whose branches ``processes`` can divide, reasons against other branches as messages).

    ``graphs``: name of a submodule -> its graph; ``random_nodes``: ``key_of`` the nodes that draw random numbers.
    """
    module_uses = Counter(
        id(tensor)
        for module in model.modules()
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
    )
    blocks: list[BranchBlock] = []
    problems: list[str] = []
    for name, graph in graphs.items():
        part = model.get_submodule(name)
        tensors = {node: tensors_used_by(node, part) for node in graph.nodes}
        trained = {node for node, used in tensors.items() if any(tensor.requires_grad for tensor in used)}
        node_uses = Counter(id(tensor) for used in tensors.values() for tensor in used)
        chosen: list[BranchBlock] = []
        forks = _forks(graph)
        for join in graph.nodes:  # inner blocks come before those around them
            branches = _branches_between(forks[join], join, trained) if len(_sources(join)) > 1 else []
            random_of = [[n for n in branch if key_of(name, n) in random_nodes] for branch in branches]
            pairs = zip(branches, random_of, strict=True)
            reasons = [_why_not(branch, tensors, node_uses, module_uses, random) for branch, random in pairs]
            accepted = [branch for branch, reason in zip(branches, reasons, strict=True) if reason is None]
            block = BranchBlock(name, tuple(map(tuple, accepted)), join)
            if len(branches) > 1:
                pairs = zip(branches, reasons, strict=True)
                problems += [f"{block.describe(branch)}: {reason}" for branch, reason in pairs if reason]
            inner = [other for other in chosen if nodes_of(other) & nodes_of(block)]
            saved_by_inner = sum(_saved_elements(other, tensors, processes) for other in inner)
            if len(accepted) > 1 and _saved_elements(block, tensors, processes) >= saved_by_inner:
                chosen = [other for other in chosen if other not in inner] + [block]
        blocks += chosen
    return blocks, list(dict.fromkeys(problems))


def nodes_of(block: BranchBlock) -> set[Node]:
    """The graph nodes of all branches of a block."""
    return {node for branch in block.branches for node in branch}


def _saved_elements(block: BranchBlock, tensors: dict[Node, list[torch.Tensor]], processes: int) -> int:
    """Elements of parameters and buffers that dividing the block saves on the process that holds most."""
    sizes = [sum(tensor.numel() for node in branch for tensor in tensors[node]) for branch in block.branches]
    (owners,) = assign_branches([sizes], processes)
    held = Counter[int]()
    for size, owner in zip(sizes, owners, strict=True):
        held[owner] += size
    return sum(sizes) - max(held.values())


def _why_not(
    branch: list[Node], tensors: dict[Node, list], node_uses: Counter, module_uses: Counter, random_nodes: list[Node]
) -> str | None:
    """Why a branch cannot be computed by one process only; None if it can."""
    if random_nodes:
        return f"{min(node.name for node in random_nodes)} draws random numbers"
    used = Counter(id(tensor) for node in branch for tensor in tensors[node])
    if any(node_uses[tensor] > count or module_uses[tensor] > 1 for tensor, count in used.items()):
        return "it shares weights with another part of the model"
    return None


def _forks(graph: torch.fx.Graph) -> dict[Node, Node | None]:
    """Node -> immediate dominator: the last node before it on all paths from the inputs; None if there is none."""
    forks: dict[Node, Node | None] = {}
    depth: dict[Node | None, int] = {None: 0}
    for node in graph.nodes:
        sources = _sources(node)
        fork: Any = sources[0] if sources else None
        other: Any
        for other in sources[1:]:
            while fork is not other:
                if depth[fork] >= depth[other]:
                    fork = forks[fork]
                else:
                    other = forks[other]
        forks[node], depth[node] = fork, depth[fork] + 1
    return forks


def _branches_between(fork: Node | None, join: Node, trained: set[Node]) -> list[list[Node]]:
    """Connected components between fork and join, in graph order; see the module for nodes without parameters."""
    region: set[Node] = set()
    pending = _sources(join)
    while pending:
        node = pending.pop()
        if node is not fork and node.op != "placeholder" and node not in region:
            region.add(node)
            pending += _sources(node)
    nodes = [node for node in join.graph.nodes if node in region]
    heads, tails = set[Node](), set[Node]()  # nodes without parameters that only such nodes precede, or follow
    for node in nodes:
        if node not in trained and all(source in heads for source in _sources(node) if source in region):
            heads.add(node)
    for node in reversed(nodes):
        if node not in trained and all(user in tails for user in node.users if user in region):
            tails.add(node)

    branch_of: dict[Node, list[Node]] = {}

    def merge(node: Node, neighbors: list[Node]) -> None:
        branches = {id(branch): branch for branch in (branch_of[neighbor] for neighbor in neighbors)}
        merged = [node, *(member for branch in branches.values() for member in branch)]
        branch_of.update(dict.fromkeys(merged, merged))

    def in_one_branch(neighbors: list[Node]) -> bool:
        return len({id(branch_of.get(neighbor)) for neighbor in neighbors}) == 1 and neighbors[0] in branch_of

    for node in nodes:
        if node not in heads and node not in tails:
            merge(node, [source for source in _sources(node) if source in branch_of])
    for node in reversed(nodes):
        readers = [user for user in node.users if user in region and user not in tails]
        if node in heads and in_one_branch(readers):
            merge(node, readers)
    for node in nodes:
        sources = [source for source in _sources(node) if source in region]
        if node in tails and node not in branch_of and in_one_branch(sources):
            merge(node, sources)
    position = {node: index for index, node in enumerate(nodes)}
    branches = {id(branch): sorted(branch, key=lambda node: position[node]) for branch in branch_of.values()}
    return sorted(branches.values(), key=lambda branch: position[branch[0]])


def assign_branches(costs: Sequence[Sequence[float]], processes: int) -> list[list[int]]:
    """[block][branch] -> process: the costliest branch first, to the process with the least load in the block."""
    totals, assignment = [0.0] * processes, list[list[int]]()
    for block_costs in costs:
        loads, owners = [0.0] * processes, [0] * len(block_costs)
        for index in sorted(range(len(block_costs)), key=lambda index: -block_costs[index]):
            owner = min(range(processes), key=lambda process: (loads[process], totals[process]))
            owners[index] = owner
            loads[owner] += block_costs[index] or 1e-9
        totals = [total + load for total, load in zip(totals, loads, strict=True)]
        assignment.append(owners)
    return assignment


def graphs_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.fx.Graph]]:
    """(name, graph) of a model, or of its submodules if it cannot be traced; skips modules wrapped by a method."""
    if _is_wrapped(module):
        return
    graph = try_trace(module, lambda part: _is_wrapped(part) or torch.fx.Tracer().is_leaf_module(part, ""))
    if graph is not None:
        for node in reversed(graph.nodes):  # unread items, such as the last state of a recurrent layer, seem outputs
            if node.target is operator.getitem and not node.users:
                graph.erase_node(node)
        yield prefix, graph
        return
    for name, child in module.named_children():
        yield from graphs_of(child, f"{prefix}.{name}" if prefix else name)


def _is_wrapped(module: nn.Module) -> bool:
    return "forward" in vars(module)


def _sources(node: Node) -> list[Node]:
    """The nodes that a node reads, without those that fetch parameters or buffers."""
    return [source for source in node.all_input_nodes if source.op != "get_attr"]


def tensors_used_by(node: Node, part: nn.Module) -> list[torch.Tensor]:
    """The parameters that a node of the graph uses, and the buffers of the layer that it calls."""
    attributes = [operator.attrgetter(str(each.target))(part) for each in node.all_input_nodes if each.op == "get_attr"]
    found: list[torch.Tensor] = [tensor for tensor in attributes if isinstance(tensor, nn.Parameter)]
    if node.op == "call_module":
        layer = part.get_submodule(str(node.target))
        found += [*layer.parameters(), *layer.buffers()]
    return found


def key_of(part: str, node: Node) -> str:
    """A text that identifies a node among all graphs of a model: "part:node"."""
    return f"{part}:{node.name}"


def outputs_of(branch: Branch) -> list[Node]:
    """The nodes of a branch whose values are read outside it."""
    inside = set(branch)
    return [node for node in branch if any(user not in inside for user in node.users)]


def extract_branch(part: nn.Module, block: BranchBlock, branch: Branch) -> torch.fx.GraphModule:
    """A branch as a module of its own, which shares the model's layers and returns a list of contiguous outputs."""
    graph = torch.fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in block.inputs}

    def copy_of(node: Node) -> Node:
        if node not in copies:
            copies[node] = graph.node_copy(node)  # a parameter or buffer
        return copies[node]

    for node in branch:
        copies[node] = graph.node_copy(node, copy_of)
    # contiguous, so that all ranks continue with the same memory layout, and so the same bits
    graph.output([graph.call_method("contiguous", (copies[node],)) for node in outputs_of(branch)])
    return torch.fx.GraphModule(part, graph)


def replace_blocks(
    part: nn.Module, graph: torch.fx.Graph, replacements: dict[BranchBlock, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """A submodule whose blocks are each replaced by one call ``function(*block inputs)`` -> outputs of all branches."""
    replaced, copies = torch.fx.Graph(), dict[Node, Node]()
    block_of = {node: block for block in replacements for node in nodes_of(block)}

    def copy_of(node: Node) -> Node:
        if node in block_of and node not in copies:
            block = block_of[node]
            call = replaced.call_function(replacements[block], tuple(map(copy_of, block.inputs)))
            for index, output in enumerate(output for branch in block.branches for output in outputs_of(branch)):
                copies[output] = replaced.call_function(operator.getitem, (call, index))
        elif node not in copies:
            copies[node] = replaced.node_copy(node, copy_of)
        return copies[node]

    for node in graph.nodes:
        if node not in block_of and node.op != "get_attr":  # parameters are copied with their readers; not of branches
            copy_of(node)
    return torch.fx.GraphModule(part, replaced)
