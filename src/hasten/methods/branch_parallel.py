"""Branches side by side: where a model forks into paths that meet again, each process computes some of them (Krizhevsky 2014, arXiv 1404.5997, has
the idea of cutting a model by what suits each part of it; Szegedy et al. 2014, arXiv 1409.4842, the model with such branches).

A block is what lies between a fork and a join: the blocks of an Inception network, two towers for two inputs, the members of an ensemble, several
heads on one trunk. torch.fx shows them. Each process computes its branches, their outputs are told to all, and backward the gradients of what
they were given are summed. Everything else is on every process, computes the same there, and stays alike. Of blocks inside each other those are
taken that share out more weights. Each has to prove on a sample that output and gradients are those of the model as it was.

A process keeps the weights of its branches and of what all compute; the others are on torch's meta device. More processes than ``degree`` hold copies,
whose gradients are averaged. While the run is being built every process has the whole model, and a copy of it for the proof. A run that is gone on
with measures anew, and may share out the branches otherwise: same formula, not the same bits, unless ``places`` says where.
"""

import copy
import inspect
import json
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter

import torch
import torch.distributed as dist
import torch.fx
from torch import nn
from torch.fx import Node

from hasten.contract import batch as batches
from hasten.contract.card import Card, Exactness, Order
from hasten.contract.errors import Failure, Progress, Refusal, one_line
from hasten.contract.headers import HEADER, header_of, room_for
from hasten.contract.method import Method, setting
from hasten.contract.proof import SAMPLES, called, differing, outcome
from hasten.contract.replicas import averaged_over_copies, hold_between, make_alike, mesh_of, notice_batch_norm
from hasten.contract.sharded import forget
from hasten.contract.tracing import traced

LOOKED_FOR = (
    "paths with trained weights that begin at one tensor, or at the inputs, and meet again, in a forward() that torch.fx can trace; "
    "they share no weights, and draw no random numbers"
)
MEASUREMENTS = 3


@dataclass(frozen=True)
class Block:
    """Branches that know nothing of each other: all that they read is there before them, and they are read after all of them."""

    part: str  # of the model, whose graph it lies in
    branches: tuple[tuple[Node, ...], ...]
    join: Node

    @property
    def given(self) -> list[Node]:
        """What the branches read."""
        inside = {node for branch in self.branches for node in branch}
        read = dict.fromkeys(source for branch in self.branches for node in branch for source in _sources(node))
        return [node for node in read if node not in inside]

    def told(self, branch: tuple[Node, ...]) -> str:
        names = [node.target for node in branch if node.op == "call_module"] or [node.name for node in branch]
        return self._outer(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")

    def _outer(self, name: str) -> str:
        return f"{self.part}.{name}" if self.part else name

    def __str__(self) -> str:
        return f"the branches that meet in {self._outer(self.join.name)}"


@dataclass(frozen=True)
class BranchParallel(Method):
    card = Card(
        summary="the branches of a model computed side by side, some on each process",
        exactness=Exactness.SAME_MATHS,
        source="Szegedy et al. 2014, arXiv 1409.4842 (models with branches); Krizhevsky 2014, arXiv 1404.5997; torch.distributed",
        gain_when="the branches of a block take about equally long, and much longer than their outputs take from one process to another",
        speeds={"forward", "backward", "update"},
        applies_to={"several processes"},
        breaks={"whole weights"},
        order=Order.FIRST,
        replaces={"shard"},
    )
    degree: int = setting(0, at_least=0)  # processes that hold one copy of the model between them; 0: all
    places: str = ""  # the process of each branch, as 0-1-1-0; unless said, as the measured times share out evenly

    def loop(self, loop, run):
        if not run.ranks.alone:
            hold_between(self, run, "shards")
        return loop

    def shard(self, model, run):
        if run.ranks.alone:
            run.nothing_to_do(self, "there is one process only; say --processes")
            return model
        if run.replica < run.ranks.world:
            notice_batch_norm(model)
        make_alike(model)
        graphs = dict(_graphs(model))
        seconds, drawing = _watched(model, graphs, run)
        graphs = {name: graph for name, graph in graphs.items() if all(_key(name, node) in seconds for node in graph.nodes)}
        found, doubts = blocks_of(model, graphs, drawing, run.replica)
        blocks, more = _proven(model, graphs, found, run)
        doubts += more
        if not blocks:
            raise Refusal(
                f"branch_parallel finds no branches in this model for {run.replica} processes. It looked for {LOOKED_FOR}; "
                f"{'; '.join(doubts[:3]) or 'there are none'}"
            )
        costs = [[sum(seconds[_key(block.part, node)] for node in branch) for branch in block.branches] for block in blocks]
        places = self._asked(blocks, run.replica) if self.places else shared_out(costs, run.replica)
        run.chosen[self.name] = {"places": "-".join(str(place) for each in places for place in each)}
        if run.ranks.leads:
            _tell(model, blocks, places, doubts, run.replica)
        _cut(model, graphs, blocks, partial(_exchanged, places=dict(zip(blocks, places, strict=True)), run=run))
        self._keep_own(model, blocks, places, run)
        return model

    def _asked(self, blocks: list[Block], processes: int) -> list[list[int]]:
        """The places that somebody asked for.

        Raises:
            Refusal: they are not so many, no processes, or leave a block to one of them.
        """
        words, count = self.places.split("-"), sum(len(block.branches) for block in blocks)
        rest = iter(int(word) if word.isdecimal() and int(word) < processes else None for word in words)
        places = [list(islice(rest, len(block.branches))) for block in blocks]
        if len(words) != count or any(None in each or len(set(each)) < 2 for each in places):
            usual = "-".join(str(number % 2) for block in blocks for number in range(len(block.branches)))
            raise Refusal(
                f"branch_parallel:places={self.places} must be a process for each of {count} branches, from 0 to {processes - 1}, "
                f"and two or more for each block, such as {usual}"
            )
        return places

    def _keep_own(self, model, blocks: list[Block], places: list[list[int]], run) -> None:
        """Forgets the branches of other processes. What all have the first one counts."""
        held = {place: [] for place in range(run.replica)}
        for block, of_block in zip(blocks, places, strict=True):
            part = model.get_submodule(block.part)
            for place, branch in zip(of_block, block.branches, strict=True):
                held[place] += [tensor for node in branch for tensor in _held(node, part)]
        own = run.ranks.rank % run.replica
        forget(model, [tensor for place, tensors in held.items() if place != own for tensor in tensors])
        run.joint, run.owners = True, run.shards
        ours = {id(tensor) for tensor in held[own]}
        run.twins = frozenset(weight for weight in model.parameters() if own and not weight.is_meta and id(weight) not in ours)

    def gradients(self, gradients, run):
        return averaged_over_copies(gradients, run)


def _graphs(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.fx.Graph]]:
    """The graph of a model; of one that cannot be traced, those of its parts."""
    graph = traced(module)
    if graph is not None:
        yield prefix, graph
        return
    for name, child in module.named_children():
        yield from _graphs(child, f"{prefix}.{name}" if prefix else name)


def _sources(node: Node) -> list[Node]:
    """What a node reads and others have computed."""
    return [each for each in node.all_input_nodes if each.op != "get_attr"]


def _held(node: Node, part: nn.Module) -> list[torch.Tensor]:
    """The weights that a node uses, and the buffers of its layer."""
    found = [operator.attrgetter(each.target)(part) for each in node.all_input_nodes if each.op == "get_attr"]
    found = [tensor for tensor in found if isinstance(tensor, nn.Parameter)]
    if node.op == "call_module":
        layer = part.get_submodule(node.target)
        found += [*layer.parameters(), *layer.buffers()]
    return found


def _key(part: str, node: Node) -> str:
    return f"{part}:{node.name}"


def blocks_of(model: nn.Module, graphs: dict[str, torch.fx.Graph], drawing: set[str], processes: int) -> tuple[list[Block], list[str]]:
    """The blocks of a model, and why other branches are none.

    Args:
        drawing: keys of the nodes that draw random numbers.
    """
    users = Counter(id(tensor) for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values()))
    taken, doubts = [], []
    for name, graph in graphs.items():
        part = model.get_submodule(name)
        held = {node: _held(node, part) for node in graph.nodes}
        trained = {node for node, tensors in held.items() if any(tensor.requires_grad for tensor in tensors)}
        uses = Counter(id(tensor) for tensors in held.values() for tensor in tensors)
        chosen: list[Block] = []
        forks = _forks(graph)
        for join in graph.nodes:  # inner blocks come before those around them
            branches = _between(forks[join], join, trained) if len(_sources(join)) > 1 else []
            whys = [_why_not(branch, held, uses, users, {node for node in branch if _key(name, node) in drawing}) for branch in branches]
            block = Block(name, tuple(tuple(branch) for branch, why in zip(branches, whys, strict=True) if why is None), join)
            if len(branches) > 1:
                doubts += [f"{block.told(branch)}: {why}" for branch, why in zip(branches, whys, strict=True) if why]
            inner = [other for other in chosen if _nodes(other) & _nodes(block)]
            spared = partial(_spared, held=held, processes=processes)
            if len(block.branches) > 1 and spared(block) >= sum(map(spared, inner)):
                chosen = [other for other in chosen if other not in inner] + [block]
        taken += chosen
    return taken, list(dict.fromkeys(doubts))


def _nodes(block: Block) -> set[Node]:
    return {node for branch in block.branches for node in branch}


def _spared(block: Block, held: dict, processes: int) -> int:
    """Weights that the fullest process has not to have."""
    sizes = [sum(tensor.numel() for node in branch for tensor in held[node]) for branch in block.branches]
    (places,) = shared_out([sizes], processes)
    return sum(sizes) - max(sum(size for size, at in zip(sizes, places, strict=True) if at == place) for place in places)


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
        if node in tails and node not in branch_of and in_one(read := [source for source in _sources(node) if source in region]):
            put(node, read)
    branches = {id(branch): branch for branch in branch_of.values()}.values()
    order = {node: place for place, node in enumerate(nodes)}
    return sorted((sorted(branch, key=order.get) for branch in branches), key=lambda branch: order[branch[0]])


def _watched(model: nn.Module, graphs: dict, run) -> tuple[dict[str, float], set[str]]:
    """The seconds that each node of the graphs takes on a batch, the shortest of several tries, and which draw random numbers, as the first rank saw it.

    Nodes that were not computed, since nobody calls their part or their graph is not what it does, are not there.
    """
    told = b""
    if run.ranks.leads:
        watched, batch = copy.deepcopy(model), run.sample()
        tries, drawing = [], set()
        for name, graph in graphs.items():
            part = watched.get_submodule(name)
            part.forward = _watching(part, graph, partial(_key, name), tries, drawing)
        with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []), torch.no_grad():
            for _ in range(MEASUREMENTS):
                tries.append(Counter())
                called(watched, batch, run.task.loss is None)
        told = json.dumps([{key: min(each[key] for each in tries) for key in tries[0]}, sorted(drawing)]).encode()
    seconds, drawing = json.loads(run.ranks.first(told))
    return seconds, set(drawing)


def _watching(part: nn.Module, graph: torch.fx.Graph, key: Callable, tries: list[Counter], drawing: set[str]) -> Callable:
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


def shared_out(costs: list[list[float]], processes: int) -> list[list[int]]:
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


def _proven(model, graphs: dict, found: list[Block], run) -> tuple[list[Block], list[str]]:
    """The blocks that compute what the model computes; of those that do not, why. All together first, else each by itself."""
    if not found:
        return [], []
    batch, own = run.sample(), run.task.loss is None
    few = batches.pieces(batch, max(1, batches.size(batch) // SAMPLES))[0]
    right = outcome(copy.deepcopy(model), few, own)
    doubt = partial(_doubt, model=model, graphs=graphs, batch=few, own=own, right=right, run=run)
    if doubt(found) is None:
        return found, []
    doubts = {block: doubt([block]) for block in found}
    proven = [block for block, why in doubts.items() if why is None]
    if proven and (why := doubt(proven)):
        raise Refusal(f"branch_parallel finds each block right by itself and all together wrong: {why}")
    return proven, [f"{block}: {why}" for block, why in doubts.items() if why]


def _doubt(blocks: list[Block], model, graphs: dict, batch, own: bool, right: tuple, run) -> str | None:
    """Why the model with these blocks is not the same, on one process, then on several; None where it is."""
    places = dict(zip(blocks, shared_out([[1.0] * len(block.branches) for block in blocks], run.replica), strict=True))
    for how in (_by_itself, partial(_exchanged, places=places, run=run)):
        parallel, why = copy.deepcopy(model), None
        try:
            _cut(parallel, graphs, blocks, how)
            outputs, gradients = outcome(parallel, batch, own)
            theirs = right if how is _by_itself else (right[0], {name: right[1][name] for name in gradients if name in right[1]})
            odd = differing(outputs, theirs[0]) or differing(gradients, theirs[1])
            why = odd and f"{odd if odd.startswith('output') else f'the gradient of {odd}'} is another"
        except Exception as error:
            why = f"its branches cannot be taken out ({one_line(error, 100)})"
        if run.agree(why is not None):
            return why or "it goes wrong on another process"
    return None


def _tell(model, blocks: list[Block], places: list[list[int]], doubts: list[str], processes: int) -> None:
    lines = []
    for block, at in zip(blocks, places, strict=True):
        branches = (f"{block.told(branch)} on process {place}" for branch, place in zip(block.branches, at, strict=True))
        lines.append(f"{', '.join(branches)}; they meet in {block._outer(block.join.name)}")
    shared = {id(t): t.numel() for block in blocks for node in _nodes(block) for t in _held(node, model.get_submodule(block.part))}
    total = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    idle = processes - len({place for at in places for place in at})
    lines += [f"left whole: {doubt}" for doubt in doubts]
    lines += [f"{idle} of {processes} processes have no branch"] if idle else []
    for line in [*lines, f"{sum(shared.values()) / total:.0%} of the weights are shared out"]:
        warnings.warn(f"branch_parallel: {line}", Progress, stacklevel=4)


def _cut(model, graphs: dict, blocks: list[Block], how: Callable[[Block, list[torch.fx.GraphModule]], Callable]) -> None:
    """Lets the parts of a model compute their blocks in another way, in place.

    Args:
        how: ``(block, branches) -> function`` from what the block is given to the outputs of all its branches.
    """
    for name, graph in graphs.items():
        of_part, part = [block for block in blocks if block.part == name], model.get_submodule(name)
        meetings = {block: how(block, [_taken_out(part, block, branch) for branch in block.branches]) for block in of_part}
        if meetings:
            part.forward = _rewritten(part, graph, meetings).forward


def _outputs(branch: tuple[Node, ...]) -> list[Node]:
    inside = set(branch)
    return [node for node in branch if any(user not in inside for user in node.users)]


def _taken_out(part: nn.Module, block: Block, branch: tuple[Node, ...]) -> torch.fx.GraphModule:
    """A branch as a module of its own, which shares the layers of the model."""
    copied = torch.fx.Graph()
    new = {node: copied.placeholder(node.name) for node in block.given}

    def known(node: Node) -> Node:
        if node not in new:
            new[node] = copied.node_copy(node)  # a weight or buffer
        return new[node]

    for node in branch:
        new[node] = copied.node_copy(node, known)
    copied.output([copied.call_method("contiguous", (new[node],)) for node in _outputs(branch)])  # all go on with the same bits
    return torch.fx.GraphModule(part, copied)


def _rewritten(part: nn.Module, graph: torch.fx.Graph, meetings: dict[Block, Callable]) -> torch.fx.GraphModule:
    """The graph of a part, in which each block is one call."""
    copied, new = torch.fx.Graph(), {}
    block_of = {node: block for block in meetings for node in _nodes(block)}

    def known(node: Node) -> Node:
        if node in block_of and node not in new:
            block = block_of[node]
            met = copied.call_function(meetings[block], tuple(map(known, block.given)))
            for number, output in enumerate(output for branch in block.branches for output in _outputs(branch)):
                new[output] = copied.call_function(operator.getitem, (met, number))
        elif node not in new:
            new[node] = copied.node_copy(node, known)
        return new[node]

    for node in graph.nodes:
        if node not in block_of:
            known(node)
    return torch.fx.GraphModule(part, copied)


def _by_itself(block: Block, branches: list[torch.fx.GraphModule]) -> Callable:
    """All branches on this process, which have to end in what can be told to others."""

    def computed(*given):
        _refuse_again()
        outputs = [output for branch in branches for output in branch(*given)]
        for output in outputs:
            header_of(output)
            if not output.requires_grad:
                raise Failure("a branch ends in a tensor without a gradient")
        return outputs

    return computed


def _refuse_again() -> None:
    """Refuses to compute branches once more in the backward pass, as checkpointing does: the processes would come there at different times."""
    if torch._C._current_graph_task_id() != -1:
        raise Failure("branch_parallel cannot compute branches again in the backward pass; leave out activation checkpointing")


def _exchanged(block: Block, branches: list[torch.fx.GraphModule], places: dict[Block, list[int]], run) -> Callable:
    """The branches that are this process's own, and the outputs of the others from where they are computed.

    A process knows how large those will be: they were told when it was given the like for the first time.
    """
    group, own = mesh_of(run)["shards"].get_group(), run.ranks.rank % run.replica
    sources = [place for place, branch in zip(places[block], block.branches, strict=True) for _ in _outputs(branch)]
    mine = [branch if place == own else None for place, branch in zip(places[block], branches, strict=True)]
    counts = [len(_outputs(branch)) for branch in block.branches]
    edge = torch.zeros((), device=run.device, requires_grad=True)
    headers: dict[tuple, torch.Tensor] = {}

    def met(*given):
        _refuse_again()
        way_back, given = _entered(given, edge, group)
        outputs = []
        for branch, count in zip(mine, counts, strict=True):
            outputs += branch(*given) if branch else [None] * count
        alike = torch.is_autocast_enabled(run.device.type), *((tensor.shape, tensor.dtype) for tensor in batches.tensors(given))
        if alike not in headers:
            headers[alike] = _told(outputs, run.device, group)
        waiting = []
        for number, (output, header, source) in enumerate(zip(outputs, headers[alike], sources, strict=True)):
            tensor = room_for(header, run.device) if output is None else output.detach()
            if output is not None and header_of(output).tolist() != header.tolist():
                raise Failure(f"branch_parallel: {block} end in tensors of other sizes for inputs of the same; take another strategy")
            waiting.append(dist.broadcast(tensor, group=group, group_src=source, async_op=True))
            outputs[number] = Received.apply(way_back, [tensor]) if output is None else output
        for each in waiting:
            each.wait()
        return outputs

    return met


def _entered(given: tuple, edge: torch.Tensor, group) -> tuple[torch.Tensor, tuple]:
    """What the branches are given, so that its gradients come from all of them, and a way back there for processes that have none."""
    way_back, *entered = Entered.apply(group, edge, *(tensor for tensor in batches.tensors(given) if tensor.requires_grad))
    rest = iter(entered)
    return way_back, batches.map_tensors(lambda tensor: next(rest) if tensor.requires_grad else tensor, given)


def _told(outputs: list[torch.Tensor | None], device, group) -> torch.Tensor:
    """The headers of all outputs, on the processor, for all who have some of them."""
    rows = [torch.zeros(HEADER, dtype=torch.int64, device=device) if output is None else header_of(output) for output in outputs]
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
