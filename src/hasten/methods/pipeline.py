"""The model cut into stages one after the other, each on a process of its own; a batch goes through in pieces, so that all have work.

torch.distributed.pipelining runs the schedules: all pieces forward, then all backward (GPipe, Huang et al. 2018, arXiv 1811.06965); a backward pass as
soon as it can be (1f1b, Narayanan et al. 2019, arXiv 1806.03377); the same with two stages a process (interleaved, arXiv 2104.04473); and one where
gradients of weights fill the gaps (zero_bubble, Qi et al. 2023, arXiv 2401.10241). The cuts are where torch.fx sees one tensor go on and nothing else;
of these the ones are taken that share out the time measured on a batch as evenly as may be.

A process keeps the weights of its stages, the others are on torch's meta device. The loss is that of the whole batch, however it divides: pieces that
come out short are filled up with rows that the loss never sees. More processes than ``degree`` hold copies, whose gradients are averaged. While the run
is being built every process has the whole model for a moment. A run that is gone on with measures anew, and may be cut elsewhere: same formula, not
the same bits, unless ``cuts`` says where.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import perf_counter

import torch
import torch.distributed as dist
import torch.fx
from torch import nn

from hasten.contract import batch as batches
from hasten.contract.card import Card, Exactness, Order
from hasten.contract.errors import Failure, Progress, Refusal
from hasten.contract.method import Method, setting
from hasten.contract.replicas import averaged_over_copies, degree_of, make_alike, mesh_of, notice_batch_norm
from hasten.contract.tracing import draws, evaluating, is_number, traced

SCHEDULES = {  # torch's name for it, and how many stages each process has
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero_bubble": ("ScheduleInterleavedZeroBubble", 2),
}
LOOKED_FOR = "an nn.Sequential, or a forward() that torch.fx can trace, with places where one tensor goes on and nothing else"
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)  # that stages can hand on
MOST_DIMENSIONS = 8
SHAPES_KEPT = 4  # schedules that are kept, each for batches of one shape
MEASUREMENTS = 3


@dataclass(frozen=True)
class Pipeline(Method):
    card = Card(
        summary="the model cut into stages, one process after the other; the batch passes in pieces",
        exactness=Exactness.SAME_MATHS,
        source="Huang et al. 2018, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473; torch.distributed.pipelining",
        gain_when="the model does not fit a device together with its gradients and optimizer, and what passes between two stages is little beside their arithmetic",
        speeds={"forward", "backward", "update"},
        applies_to={"several processes"},
        breaks={"whole weights", "whole forward pass"},
        order=Order.LAST,
        replaces={"shard", "micro"},
        tries=tuple({"schedule": schedule} for schedule in SCHEDULES),
    )
    schedule: str = setting("1f1b", one_of=tuple(SCHEDULES))
    microbatches: int = setting(0, at_least=0)  # pieces that a batch passes in; 0: twice as many as processes hold one copy
    degree: int = setting(0, at_least=0)  # processes that hold one copy of the model between them; 0: all
    cuts: str = ""  # how many members of the chain each stage has, as 2-1-3; unless said, as the measured times share out evenly

    def loop(self, loop, run):
        if not run.ranks.alone:
            run.replica = degree_of(self, run.ranks.world)
        return loop

    def shard(self, model, run):
        if run.ranks.alone:
            run.nothing_to_do(self, "there is one process only; say --processes")
            return model
        pieces = self.microbatches or 2 * run.replica
        self._refuse_what_cannot_be(pieces, run)
        if pieces > 1 or run.replica < run.ranks.world:
            notice_batch_norm(model)
        make_alike(model)
        count = run.replica * SCHEDULES[self.schedule][1]
        graph, members = _chain(model, count)
        ends = _ends_of(self.cuts, count, len(members)) if self.cuts else _agreed_cuts(model, graph, members, count, run)
        run.chosen[self.name] = {"cuts": "-".join(str(end - first) for first, end in pairwise([0, *ends]))}
        ring, own = mesh_of(run)["shards"], run.ranks.rank % run.replica
        parts = [_part(model, graph, members[first:end]) for first, end in pairwise([0, *ends])]
        _refuse_shared_weights(model, parts)
        if run.ranks.leads:
            _tell(parts)
        stages = {number: part for number, part in enumerate(parts) if number % run.replica == own}
        _forget_all_but(model, list(stages.values()), parts, keeps_unused=own == 0)
        run.joint = run.apart = True
        return Piped(model, stages, count, ring, SCHEDULES[self.schedule][0], pieces, run)

    def _refuse_what_cannot_be(self, pieces: int, run):
        if run.task.loss is None:
            raise Refusal("pipeline needs the loss apart from the model, on the last process; give Task(loss=)")
        if self.schedule != "gpipe" and pieces < run.replica:
            raise Refusal(
                f"pipeline:microbatches={pieces} leaves some of {run.replica} processes idle with schedule={self.schedule}; take {run.replica}"
            )
        rounds = max(1, pieces // run.replica)
        if SCHEDULES[self.schedule][1] > 1 and pieces % rounds:
            more = -(-pieces // run.replica) * run.replica
            raise Refusal(f"pipeline:microbatches={pieces} does not fill rounds of schedule={self.schedule}; take {more}")

    def loss(self, loss, run):
        if not run.ranks.alone:
            run.model.loss = loss
        return loss

    def micro(self, micro, run):
        return micro if run.ranks.alone else run.model.step

    def gradients(self, gradients, run):
        return averaged_over_copies(gradients, run)

    def export(self, model, run):
        return model if run.ranks.alone else run.module


class Piped(nn.Module):
    """A model of which this process has some stages."""

    def __init__(self, module: nn.Module, stages: dict, count: int, ring, schedule: str, pieces: int, run):
        super().__init__()
        self.module, self.clock, self.device = module, run.clock, run.device
        self.stages = stages.items()  # not registered: they are made of the module's parts
        self.count, self.schedule, self.pieces = count, schedule, pieces
        self.group, self.own, self.ranks = ring.get_group(), ring.get_local_rank(), ring.mesh.tolist()
        self.schedules: dict = {}
        self.loss = self.current = None
        module.forward = self.forward  # evaluation and whoever is given the model use it as it is, all ranks together

    @property
    def last(self) -> int:
        return self.ranks[(self.count - 1) % len(self.ranks)]

    def forward(self, *given, **named) -> torch.Tensor:
        """The output of a batch, on all ranks that hold this copy; forward only."""
        outputs = [output for _, _, output in self._relayed(_only_input(given, named))]
        return _broadcast(outputs[-1], self.last, self.group, self.device)

    def _relayed(self, value) -> Iterator[tuple]:
        """(number, input, output) of each of this rank's stages, one stage after the other."""
        own = dict(self.stages)
        for number in range(self.count):
            here, after = self.ranks[number % len(self.ranks)], self.ranks[(number + 1) % len(self.ranks)]
            if number in own:
                output = own[number](value)
                yield number, value, output
                if number + 1 < self.count and after != here:
                    _send(output, after, self.group)
                value = output
            elif number + 1 in own and number + 1 < self.count:
                value = _received(here, self.group, self.device)

    def step(self, batch) -> torch.Tensor:
        """Forward and backward of a batch, in pieces; the loss of it all."""
        inputs, named, target = batches.split(batch)
        rows, given = batches.size(batch), _only_input(inputs, named)
        places = _places(rows, self.pieces).to(self.device)
        weight = self.clock.share * self.clock.weight
        self.current, losses = (target, rows, weight), []
        filled = given if len(places) == rows else given[places.clamp(min=0)]
        schedule = self._schedule_for(filled)
        numbers = [number for number, _ in self.stages]
        schedule.step(
            *([filled] if 0 in numbers else []),
            target=places if self.count - 1 in numbers else None,
            losses=losses if self.count - 1 in numbers else None,
            return_outputs=False,
        )
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if losses:
            loss += torch.stack([each.detach() for each in losses]).sum() / weight
        dist.broadcast(loss, self.last, group=self.group)
        return loss

    def _loss_of_piece(self, output: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Its part of the batch's loss; of rows that only fill a piece up, none."""
        target, rows, weight = self.current
        real = places[places >= 0]
        if not len(real):
            return output.sum() * 0
        own = batches.map_tensors(lambda t: t[real] if t.ndim and t.shape[0] == rows else t, target)
        return self.loss(output[: len(real)], own) * (len(real) / rows * weight)

    def _schedule_for(self, given: torch.Tensor):
        shape = given.shape
        if shape not in self.schedules:
            if len(self.schedules) == SHAPES_KEPT:
                del self.schedules[next(iter(self.schedules))]
            self.schedules[shape] = self._new_schedule(given[: len(given) // self.pieces])
        return self.schedules[shape]

    def _new_schedule(self, piece: torch.Tensor):
        from torch.distributed import pipelining  # half a second, which only a run that has stages should pay

        with torch.no_grad(), evaluating(*(stage for _, stage in self.stages)):
            edges = {number: (_like(value), _like(output)) for number, value, output in self._relayed(piece)}
        stages = [
            pipelining.PipelineStage(
                stage, number, self.count, self.device, input_args=edges[number][0], output_args=edges[number][1], group=self.group
            )
            for number, stage in self.stages
        ]
        options = {"n_microbatches": self.pieces, "loss_fn": self._loss_of_piece, "scale_grads": False}
        return getattr(pipelining, self.schedule)(stages if len(stages) > 1 else stages[0], **options)


def _chain(model: nn.Module, stages: int) -> tuple[torch.fx.Graph, list]:
    """The graph of a model, and its members: lists of nodes, each with weights, between which one tensor goes on.

    Raises:
        Refusal: there are fewer than stages.
    """
    found = []
    for is_leaf in (lambda part: type(part) is not nn.Sequential, None):
        graph = traced(model, is_leaf)
        if graph is None or any(map(draws, graph.nodes)):
            continue
        given = [node for node in graph.nodes if node.op == "placeholder" and node.users]
        if len(given) == 1:
            found = max(found, members := _members(model, graph), key=len)
            if len(members) >= stages:
                return graph, members
    told = f"a chain of {len(found)} that have weights" if found else "no such chain"
    raise Refusal(f"pipeline has {stages} stages to fill and found {told} in this model; it looked for {LOOKED_FOR}")


def _members(model: nn.Module, graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    after = {node: place for place, node in enumerate([*nodes, *(node for node in graph.nodes if node.op == "output")])}
    trained = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad}
    start = next((node for node in graph.nodes if node.op == "placeholder" and node.users), None)
    members, begun = [], 0
    for place, node in enumerate(nodes):
        living = {each for each in (start, *nodes[: place + 1]) if any(after[user] > place for user in each.users if user in after)}
        if place + 1 == len(nodes) or (living == {node} and not is_number(node)):
            member = nodes[begun : place + 1]
            if members and not (_weights_of(member, trained) and _weights_of(members[-1], trained)):
                members[-1] += member  # a stage has something to train
            else:
                members.append(member)
            begun = place + 1
    return members


def _weights_of(nodes, trained: set[str]) -> bool:
    used = [node.target for node in nodes if node.op == "call_module"]
    used_directly = {each.target for node in nodes for each in node.all_input_nodes if each.op == "get_attr"}
    return bool(used_directly & trained) or any(name.startswith(f"{target}.") for target in used for name in trained)


def _part(model: nn.Module, graph: torch.fx.Graph, members: list) -> torch.fx.GraphModule:
    """Some neighbouring members as a module of their own, which shares the model's parts."""
    nodes = [node for member in members for node in member]
    copied, new = torch.fx.Graph(), {}
    given = copied.placeholder("given")

    def known(node: torch.fx.Node) -> torch.fx.Node:
        if node not in new:
            new[node] = copied.node_copy(node) if node.op == "get_attr" else given
        return new[node]

    for node in nodes:
        new[node] = copied.node_copy(node, known)
    result = new[nodes[-1]]
    copied.output(copied.call_method("contiguous", (result,)))  # as it has to be to be sent
    return torch.fx.GraphModule(model, copied)


def _ends_of(asked: str, stages: int, members: int) -> list[int]:
    """Where the stages end that somebody asked for by their lengths.

    Raises:
        Refusal: they are not so many, or do not make up the chain.
    """
    lengths = [int(word) if word.isdecimal() else 0 for word in asked.split("-")]
    if len(lengths) != stages or not all(lengths) or sum(lengths) != members:
        raise Refusal(
            f"pipeline:cuts={asked} must be {stages} lengths that make up the chain of {members}, such as {'-'.join(['1'] * (stages - 1) + [str(members - stages + 1)])}"
        )
    return list(accumulate(lengths))


def _agreed_cuts(model, graph, members: list, stages: int, run) -> list[int]:
    """Where the stages end, as the first rank measured it."""
    told = json.dumps(cuts(_costs(model, graph, members, run.sample()), stages)).encode() if run.ranks.leads else b""
    return json.loads(run.ranks.first(told))


def cuts(costs: list[float], stages: int) -> list[int]:
    """Where so many neighbouring stages end, none of them empty, so that the dearest is as cheap as may be."""
    best = [(0.0, [])] + [(float("inf"), [])] * len(costs)  # of the first so many members: the dearest stage, and the ends
    for stage in range(1, stages + 1):
        best = [(float("inf"), [])] * stage + [
            min((max(best[first][0], sum(costs[first:end])), [*best[first][1], end]) for first in range(stage - 1, end))
            for end in range(stage, len(costs) + 1)
        ]
    return best[-1][1]


def _costs(model, graph, members: list, batch) -> list[float]:
    """Seconds that each member takes forward and backward on some rows of a batch, the shortest of several tries."""
    inputs, named, _ = batches.split(batch)
    value, costs = _only_input(inputs, named), []
    for member in members:
        part, tries = _part(model, graph, [member]), []
        with evaluating(part):
            for _ in range(MEASUREMENTS):
                given = value.detach().requires_grad_(value.is_floating_point())
                began = perf_counter()
                output = part(given)
                output.sum().backward()
                if output.is_cuda:
                    torch.cuda.synchronize(output.device)
                tries.append(perf_counter() - began)
        value = output.detach()
        costs.append(min(tries))
    model.zero_grad()
    return costs


def _refuse_shared_weights(model: nn.Module, parts: list) -> None:
    owner: dict[int, int] = {}
    names = {id(weight): name for name, weight in model.named_parameters()}
    for number, part in enumerate(parts):
        for weight in part.parameters():
            if (other := owner.setdefault(id(weight), number)) != number:
                raise Refusal(f"pipeline cannot cut this model: stages {other + 1} and {number + 1} both use {names[id(weight)]}; untie it")


def _forget_all_but(model: nn.Module, own: list, parts: list, keeps_unused: bool) -> None:
    """Moves the weights and buffers of the parts that are not our own to the meta device, which holds nothing; one process keeps what no part uses."""
    of_own, used = ({id(tensor) for part in some for tensor in (*part.parameters(), *part.buffers())} for some in (own, parts))
    unused = {id(tensor) for tensor in (*model.parameters(), *model.buffers())} - used
    kept = of_own | unused if keeps_unused else of_own
    gone: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) not in kept:
                module._parameters[name] = gone.setdefault(id(weight), nn.Parameter(weight.to("meta"), weight.requires_grad))
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in kept:
                module._buffers[name] = buffer.to("meta")


def _tell(parts: list) -> None:
    total = sum(weight.numel() for part in parts for weight in part.parameters()) or 1
    for number, part in enumerate(parts, 1):
        names = [node.target for node in part.graph.nodes if node.op in ("call_module", "get_attr")]
        share = sum(weight.numel() for weight in part.parameters()) / total
        told = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        warnings.warn(f"pipeline: stage {number} of {len(parts)} is {told}, {share:.0%} of the weights", Progress, stacklevel=4)


def _only_input(inputs: tuple, named: dict) -> torch.Tensor:
    given = [*inputs, *named.values()]
    if len(given) != 1 or not isinstance(given[0], torch.Tensor):
        raise Failure(f"pipeline passes one tensor through its stages, and this model is given {len(given)} things; take another strategy")
    return given[0]


def _places(rows: int, pieces: int) -> torch.Tensor:
    """The rows of a batch in pieces of one length, -1 where there is none to fill a piece up."""
    length = -(-rows // pieces)
    places = torch.full((pieces, length), -1)
    for number, (first, end) in enumerate(pairwise([rows * number // pieces for number in range(pieces + 1)])):
        places[number, : end - first] = torch.arange(first, end)
    return places.flatten()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Its shape and type, without numbers."""
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.is_floating_point())


def _header(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in TYPES or tensor.ndim > MOST_DIMENSIONS:
        raise Failure(f"pipeline cannot hand on a tensor of {tensor.dtype} with {tensor.ndim} dimensions")
    told = [TYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(told + [0] * (MOST_DIMENSIONS + 2 - len(told)), device=tensor.device)


def _room_for(header: torch.Tensor, device) -> torch.Tensor:
    kind, dimensions, *shape = header.tolist()
    return torch.empty(shape[:dimensions], dtype=TYPES[kind], device=device)


def _send(tensor: torch.Tensor, to: int, group) -> None:
    dist.send(_header(tensor), to, group=group)
    dist.send(tensor.detach().contiguous(), to, group=group)


def _received(source: int, group, device) -> torch.Tensor:
    header = torch.empty(MOST_DIMENSIONS + 2, dtype=torch.int64, device=device)
    dist.recv(header, source, group=group)
    tensor = _room_for(header, device)
    dist.recv(tensor, source, group=group)
    return tensor


def _broadcast(tensor: torch.Tensor | None, source: int, group, device) -> torch.Tensor:
    """What the rank ``source`` has, on all."""
    leads = dist.get_rank() == source
    header = _header(tensor) if leads else torch.empty(MOST_DIMENSIONS + 2, dtype=torch.int64, device=device)
    dist.broadcast(header, source, group=group)
    tensor = tensor.detach().contiguous() if leads else _room_for(header, device)
    dist.broadcast(tensor, source, group=group)
    return tensor
