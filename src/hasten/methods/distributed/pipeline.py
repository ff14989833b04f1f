"""The model cut into stages one after the other, each on a process of its own; a batch goes through in pieces, so that all have work.

torch.distributed.pipelining runs the schedules: all pieces forward, then all backward (GPipe, Huang et al. 2018, arXiv 1811.06965); a backward pass as
soon as it can be (1f1b, Narayanan et al. 2019, arXiv 1806.03377); the same with two stages a process (interleaved, arXiv 2104.04473); and one where
gradients of weights fill the gaps (zero_bubble, Qi et al. 2023, arXiv 2401.10241). The cuts are where torch.fx sees one tensor go on and nothing else;
of these the ones are taken that share out the time measured on a batch as evenly as may be.

A process keeps the weights of its stages, the others are on torch's meta device. The loss is that of the whole batch, however it divides: pieces that
come out short are filled up with rows that the loss never sees. Batch normalisation would see them: for it a batch passes in fewer pieces, which divide
it and have two rows or more each. More processes than ``degree`` hold copies, whose gradients are averaged; or each stage is held by several that
tensor_parallel cuts its layers among, each of which sends to the one that has the same share of the next. A run that is gone on with measures anew, and
may be cut elsewhere: same formula, not the same bits, unless ``cuts`` says where.

While the run is being built every process has the whole model for a moment, in the host's memory. With ``place=memory`` none ever has: the model is
made on the meta device and cut by bytes, and each process makes its own weights, with the numbers that they have in one process. What counts are weights,
four times those that are trained, as for gradients and Adam, and what autograd keeps of the pieces that wait for their backward pass. Still whole are a
checkpoint that a run goes on from, in every host's memory, and the exported model, in that of the first process.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.errors import ConfigurationError, ProgressWarning
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext
from hasten.core.types import ForwardFn, LossFn, StepFn
from hasten.distributed.collectives import (
    assign_mesh_dim,
    broadcast_module,
    broadcast_tensors,
    get_device_mesh,
    has_local_batch_norm,
    reduce_over_replicas,
    warn_local_batch_norm,
)
from hasten.distributed.fx.pipeline_split import (
    check_no_shared_weights,
    extract_stage,
    find_split_points,
    materialize_local_stages,
    single_tensor_input,
)
from hasten.distributed.fx.stage_balance import (
    balance_on_main_process,
    estimate_segment_memory,
    parse_split_sizes,
    profile_segments,
)
from hasten.distributed.fx.tracing import eval_mode
from hasten.distributed.p2p_metadata import HEADER, empty_from_meta, encode_meta
from hasten.utils import batch as batches

SCHEDULES = {  # torch's name for it, and how many stages each process has
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero_bubble": ("ScheduleInterleavedZeroBubble", 2),
}
SHAPES_KEPT = 4  # schedules that are kept, each for batches of one shape


@dataclass(frozen=True)
class Pipeline(Method):
    card = Card(
        summary="the model cut into stages, one process after the other; the batch passes in pieces",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Huang et al. 2018, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473; torch.distributed.pipelining",
        gain_when="the model does not fit a device together with its gradients and optimizer, and what passes between two stages is little beside their arithmetic",
        accelerates={"forward", "backward", "optimizer_step"},
        applies_to={"distributed"},
        invalidates={"full_weights", "monolithic_forward"},
        order=WrapOrder.LAST,
        after=("tensor_parallel",),
        replaces={"parallelize", "forward_backward", "grad_transform"},
        presets=tuple({"schedule": schedule} for schedule in SCHEDULES),
    )
    schedule: str = option("1f1b", one_of=tuple(SCHEDULES))
    microbatches: int = option(0, at_least=0)  # pieces that a batch passes in; 0: twice the degree
    degree: int = option(
        0, at_least=0
    )  # processes one after the other, of one copy; 0: all, or as many as tensor_parallel leaves
    split_sizes: str = ""  # how many members of the chain each stage has, as 2-1-3; unless said, as ``place`` wants it
    balance: str = option(
        "time", one_of=("time", "memory")
    )  # what is shared out evenly; with memory nobody ever has the whole model

    def setup(self, run: RunContext) -> None:
        assign_mesh_dim(self, run, "stages")
        if "shards" not in run.parallel.mesh_dim_owner:
            run.parallel.init_device = "meta" if self.balance == "memory" else "cpu"
        elif self.balance == "memory":
            raise ConfigurationError(
                "pipeline:balance=memory does not go with tensor_parallel, which proves its cuts on the whole model; leave one of them out"
            )

    def parallelize(self, model: nn.Module, run: RunContext) -> nn.Module:
        pieces = self.microbatches or 2 * run.parallel.pp_size
        self._refuse_what_cannot_be(pieces, run)
        full = has_local_batch_norm(model)
        if pieces > 1:
            remedy = f"; a batch passes in the greatest number of pieces up to {pieces} that divides it"
            warn_local_batch_norm(model, remedy, "each piece of a batch")
        elif run.parallel.model_parallel_size < run.ranks.world_size:
            warn_local_batch_norm(model)
        if self.balance == "time" and run.parallel.tp_size == 1:  # else it was made alike before its layers were cut
            broadcast_module(model, run.device)
        count = run.parallel.pp_size * SCHEDULES[self.schedule][1]
        graph, members = find_split_points(model, count, run.services.peek_batch)
        ends, loads = self._ends(model, graph, members, count, pieces, run)
        run.tuned_settings[self.name] = {"cuts": "-".join(str(end - first) for first, end in pairwise([0, *ends]))}
        parts = [extract_stage(model, graph, members[first:end]) for first, end in pairwise([0, *ends])]
        check_no_shared_weights(model, parts)
        ring = get_device_mesh(run)["stages"]
        own = ring.get_local_rank()
        if run.ranks.is_main_process:
            _tell(parts, loads)
        stages = {number: part for number, part in enumerate(parts) if number % run.parallel.pp_size == own}
        kept = materialize_local_stages(model, list(stages.values()), parts, keeps_unused=own == 0, run=run)
        if self.balance == "memory":
            broadcast_tensors(kept, get_device_mesh(run)["copies"].get_group())
        run.parallel.eval_needs_all_ranks, run.parallel.num_parameter_owners = True, run.parallel.pp_size
        return Piped(model, stages, count, ring, SCHEDULES[self.schedule][0], pieces, full, run)

    def _ends(
        self, model, graph, members: list, count: int, pieces: int, run: RunContext
    ) -> tuple[list[int], list[int]]:
        """Where the stages end, and the bytes that each holds where these were counted."""
        if self.split_sizes:
            return parse_split_sizes(self.split_sizes, count, len(members), f"{self.name}:cuts"), []
        if self.balance == "time":
            return balance_on_main_process(
                lambda: [profile_segments(model, graph, members, run.services.peek_batch(), run.device)] * count, run
            )[0], []
        under_way = [pieces if self.schedule == "gpipe" else min(pieces, count - stage) for stage in range(count)]
        return balance_on_main_process(
            lambda: estimate_segment_memory(model, graph, members, run.services.peek_batch(), pieces, under_way), run
        )

    def _refuse_what_cannot_be(self, pieces: int, run: RunContext):
        if run.task.loss is None:
            raise ConfigurationError(
                "pipeline needs the loss apart from the model, on the last process; give Task(loss=)"
            )
        if self.schedule != "gpipe" and pieces < run.parallel.pp_size:
            raise ConfigurationError(
                f"pipeline:microbatches={pieces} leaves some of {run.parallel.pp_size} processes idle with schedule={self.schedule}; take {run.parallel.pp_size}"
            )
        rounds = max(1, pieces // run.parallel.pp_size)
        if SCHEDULES[self.schedule][1] > 1 and pieces % rounds:
            more = -(-pieces // run.parallel.pp_size) * run.parallel.pp_size
            raise ConfigurationError(
                f"pipeline:microbatches={pieces} does not fill rounds of schedule={self.schedule}; take {more}"
            )

    def loss(self, loss: LossFn, run: RunContext) -> LossFn:
        run.model.loss = loss
        return loss

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        return run.model.step

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        return (
            grad_transform if run.parallel.tp_size > 1 else reduce_over_replicas(grad_transform, run)
        )  # who cuts layers has it done

    def export(self, model: nn.Module, run: RunContext) -> nn.Module:
        return run.unwrapped_model


class Piped(nn.Module):
    """A model of which this process has some stages."""

    def __init__(
        self, module: nn.Module, stages: dict, count: int, ring, schedule: str, pieces: int, full: bool, run: RunContext
    ):
        super().__init__()
        self.module, self.progress, self.device = module, run.progress, run.device
        self.stages = stages.items()  # not registered: they are made of the module's parts
        self.count, self.schedule = count, schedule
        self.pieces, self.full = pieces, full  # the most that there are; whether they have to be full
        self.group, self.own, self.ranks = ring.get_group(), ring.get_local_rank(), ring.mesh.tolist()
        self.schedules: dict = {}
        self.loss = self.current = None
        module.forward = self.forward  # evaluation and whoever is given the model use it as it is, all ranks together

    @property
    def last(self) -> int:
        return self.ranks[(self.count - 1) % len(self.ranks)]

    def forward(self, *given, **named) -> torch.Tensor:
        """The output of a batch, on all ranks that hold this copy; forward only."""
        outputs = [output for _, _, output in self._relayed(single_tensor_input(given, named))]
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
        inputs, named, target = batches.split_inputs_target(batch)
        rows, given = batches.batch_size(batch), single_tensor_input(inputs, named)
        pieces = _most_full(rows, self.pieces, len(self.ranks)) if self.full else self.pieces
        places = _places(rows, pieces).to(self.device)
        weight = self.progress.microbatch_fraction * self.progress.loss_weight
        self.current, losses = (target, rows, weight), []
        filled = given if len(places) == rows else given[places.clamp(min=0)]
        schedule = self._schedule_for(filled, pieces)
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

    def _schedule_for(self, given: torch.Tensor, pieces: int):
        shape = given.shape
        if shape not in self.schedules:
            if len(self.schedules) == SHAPES_KEPT:
                del self.schedules[next(iter(self.schedules))]
            self.schedules[shape] = self._new_schedule(given[: len(given) // pieces], pieces)
        return self.schedules[shape]

    def _new_schedule(self, piece: torch.Tensor, pieces: int):
        from torch.distributed import pipelining  # half a second, which only a run that has stages should pay

        with torch.no_grad(), eval_mode(*(stage for _, stage in self.stages)):
            edges = {number: (_like(value), _like(output)) for number, value, output in self._relayed(piece)}
        stages = [
            pipelining.PipelineStage(
                stage,
                number,
                self.count,
                self.device,
                input_args=edges[number][0],
                output_args=edges[number][1],
                group=self.group,
            )
            for number, stage in self.stages
        ]
        options = {"n_microbatches": pieces, "loss_fn": self._loss_of_piece, "scale_grads": False}
        if len(stages) > 1:
            return getattr(pipelining, self.schedule)(stages, **options)
        schedule = self.schedule if pieces >= self.count else "ScheduleGPipe"  # 1f1b wants one for each stage
        return getattr(pipelining, schedule)(stages[0], **options)


def _tell(parts: list, loads: list[int]) -> None:
    total = sum(weight.numel() for part in parts for weight in part.parameters()) or 1
    for number, part in enumerate(parts, 1):
        names = [node.target for node in part.graph.nodes if node.op in ("call_module", "get_attr")]
        share = sum(weight.numel() for weight in part.parameters()) / total
        told = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        held = (
            f", {loads[number - 1] / 1e6:.3g} MB with gradients, an optimizer as Adam and the pieces under way"
            if loads
            else ""
        )
        warnings.warn(
            f"pipeline: stage {number} of {len(parts)} is {told}, {share:.0%} of the weights{held}",
            ProgressWarning,
            stacklevel=4,
        )


def _most_full(rows: int, most: int, degree: int) -> int:
    """The greatest number of pieces that divides the rows, leaves each two or more, and fills the rounds of a schedule; 1 if there is none."""
    return next((n for n in range(min(most, rows - 1), 1, -1) if rows % n == 0 and n % max(1, n // degree) == 0), 1)


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


def _send(tensor: torch.Tensor, to: int, group) -> None:
    dist.send(encode_meta(tensor), to, group=group)
    dist.send(tensor.detach().contiguous(), to, group=group)


def _received(source: int, group, device) -> torch.Tensor:
    header = torch.empty(HEADER, dtype=torch.int64, device=device)
    dist.recv(header, source, group=group)
    tensor = empty_from_meta(header, device)
    dist.recv(tensor, source, group=group)
    return tensor


def _broadcast(tensor: torch.Tensor | None, source: int, group, device) -> torch.Tensor:
    """What the rank ``source`` has, on all."""
    leads = dist.get_rank() == source
    header = encode_meta(tensor) if leads else torch.empty(HEADER, dtype=torch.int64, device=device)
    dist.broadcast(header, source, group=group)
    tensor = tensor.detach().contiguous() if leads else empty_from_meta(header, device)
    dist.broadcast(tensor, source, group=group)
    return tensor
