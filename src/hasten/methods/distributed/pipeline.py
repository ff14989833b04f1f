"""Pipeline parallelism: splits the model into consecutive stages, one or two per rank; a batch passes them as
microbatches.

torch.distributed.pipelining runs the schedules: all microbatches forward, then all backward (gpipe, Huang et al. 2018,
arXiv 1811.06965); each backward pass as early as possible (1f1b, Narayanan et al. 2019, arXiv 1806.03377); the same
with two stages per rank (interleaved, arXiv 2104.04473); and one where weight gradients fill the gaps (zero_bubble, Qi
et al. 2023, arXiv 2401.10241). The model can be split where torch.fx sees that only one tensor is passed on; the split
points are chosen so that the stages take equally long on a sample batch.

A rank keeps the weights of its stages; the others are on torch's meta device. The loss is that of the whole batch for
any batch size: microbatches that come out short are padded with rows that the loss ignores. Batch normalization would
see the padding: with it, a batch passes in fewer microbatches, which divide it and have two rows or more each. If there
are more ranks than ``degree``, they hold further replicas, whose gradients are averaged; or several ranks hold each
stage, over which tensor_parallel shards its layers, and each sends to the rank with the same shard of the next stage. A
resumed run measures again and may be split elsewhere: the same formula, but not the same bits, unless ``split_sizes``
fixes the split.

While the run is built every rank holds the full model for a moment, in host memory, but not with ``balance=memory``:
the model is created on the meta device and split by memory, and each rank initializes its own weights, with the values
that they have in a single process. Counted are weights, four times if they are trained (gradients and Adam), and the
activations that autograd keeps for the microbatches that wait for their backward pass. Full models remain: a checkpoint
that is resumed, in the memory of every host, and the exported model on rank 0.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.fx
from torch import nn

from hasten import (
    Card,
    ConfigurationError,
    Exactness,
    Method,
    ProgressWarning,
    RunContext,
    RunError,
    WrapOrder,
    option,
)
from hasten.core.types import Batch, ForwardFn, LossFn, StepFn
from hasten.distributed import collectives
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
from hasten.distributed.mesh import assign_mesh_dim, get_device_mesh, reduce_over_replicas
from hasten.distributed.p2p_metadata import HEADER, empty_from_meta, encode_meta
from hasten.utils import batch as batches
from hasten.utils.observe_step import observe_collectives

SCHEDULES = {  # torch's class, and the number of stages per rank
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero_bubble": ("ScheduleInterleavedZeroBubble", 2),
}
MAX_CACHED_SCHEDULES = 4  # one per shape of a batch

Segments: TypeAlias = list[list[torch.fx.Node]]  # smallest parts that a stage can consist of


@dataclass(frozen=True)
class PipelineParallel(Method):
    """Splits the model into ``degree`` stages, or twice as many for schedules with two stages per rank."""

    card = Card(
        summary="splits the model into stages on consecutive processes, which a batch passes as microbatches",
        exactness=Exactness.EQUIVALENT_MATH,
        source="Huang et al. 2018, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473; torch pipelining",
        gain_when="model, gradients and optimizer do not fit one device, and stages send little for their computation",
        accelerates={"forward", "backward", "optimizer_step"},
        applies_to={"distributed"},
        invalidates={"full_weights", "monolithic_forward"},
        order=WrapOrder.LAST,
        after=("tensor_parallel",),
        replaces={"parallelize", "forward_backward", "grad_transform"},
        presets=tuple({"schedule": schedule} for schedule in SCHEDULES),
    )
    schedule: str = option("1f1b", one_of=tuple(SCHEDULES))
    microbatches: int = option(0, at_least=0)  # per batch; 0: twice the degree
    degree: int = option(0, at_least=0)  # ranks of one replica in a row; 0: all, or as many as tensor_parallel leaves
    split_sizes: str = ""  # segments of each stage, such as 2-1-3; by default as ``balance`` finds them
    balance: str = option("time", one_of=("time", "memory"))  # with memory no rank ever holds the full model

    def setup(self, run: RunContext) -> None:
        assert run.parallel is not None
        assign_mesh_dim(self, run, "pp")
        if "tp" not in run.parallel.mesh_dim_owner:
            run.parallel.init_device = "meta" if self.balance == "memory" else "cpu"
        elif self.balance == "memory":
            problem = "cannot be combined with tensor_parallel, which needs the full model"
            raise ConfigurationError(f"pipeline:balance=memory {problem}")

    def parallelize(self, model: nn.Module, run: RunContext) -> nn.Module:
        parallel = run.parallel
        assert parallel is not None
        microbatches = self.microbatches or 2 * parallel.pp_size
        self._check_options(microbatches, parallel.pp_size, run)
        has_batch_norm = collectives.has_local_batch_norm(model)
        if microbatches > 1:
            remedy = f"; a batch passes in as many microbatches, up to {microbatches}, as divide it"
            collectives.warn_local_batch_norm(model, remedy, "each microbatch")
        elif parallel.model_parallel_size < run.ranks.world_size:
            collectives.warn_local_batch_norm(model)
        if self.balance == "time" and parallel.tp_size == 1:  # else tensor_parallel has broadcast it
            collectives.broadcast_module(model, run.device)
        num_stages = parallel.pp_size * SCHEDULES[self.schedule][1]
        graph, segments = find_split_points(model, num_stages, run.services.peek_batch)
        ends, loads = self._stage_ends(model, graph, segments, num_stages, microbatches, run)
        bounds = list(pairwise([0, *ends]))
        run.tuned_settings[self.name] = {"split_sizes": "-".join(str(end - first) for first, end in bounds)}
        stages = [extract_stage(model, graph, segments[first:end]) for first, end in bounds]
        check_no_shared_weights(model, stages)
        position = get_device_mesh(run)["pp"].get_local_rank()
        if run.ranks.is_main_process:
            _report(stages, loads)
        local = dict[int, nn.Module]((i, stage) for i, stage in enumerate(stages) if i % parallel.pp_size == position)
        local_tensors = materialize_local_stages(model, [*local.values()], stages, keeps_unused=position == 0, run=run)
        if self.balance == "memory":
            collectives.broadcast_tensors(local_tensors, get_device_mesh(run)["dp"].get_group())
        run.observe_effect(self, partial(observe_collectives, "send", "recv_"))
        parallel.eval_needs_all_ranks, parallel.num_parameter_owners = True, parallel.pp_size
        schedule = SCHEDULES[self.schedule][0]
        return PipelinedModel(model, local, num_stages, schedule, microbatches, not has_batch_norm, run)

    def _stage_ends(
        self,
        model: nn.Module,
        graph: torch.fx.Graph,
        segments: Segments,
        num_stages: int,
        microbatches: int,
        run: RunContext,
    ) -> tuple[list[int], list[float]]:
        """For each stage, the index after its last segment, and its bytes ([] unless balance=memory)."""
        if self.split_sizes:
            return parse_split_sizes(self.split_sizes, num_stages, len(segments), f"{self.name}:split_sizes"), []

        def costs() -> list[list[float]]:
            batch = run.services.peek_batch()
            if self.balance == "time":
                return [profile_segments(model, graph, segments, batch, run.device)] * num_stages
            most = [microbatches if self.schedule == "gpipe" else num_stages - stage for stage in range(num_stages)]
            in_flight = [min(microbatches, count) for count in most]
            return estimate_segment_memory(model, graph, segments, batch, microbatches, in_flight)

        ends, loads = balance_on_main_process(costs, run)
        return ends, loads if self.balance == "memory" else []

    def _check_options(self, microbatches: int, pp_size: int, run: RunContext) -> None:
        setting = f"pipeline:microbatches={microbatches}"
        if run.task.loss is None:
            advice = "pass Task(loss=)"
            raise ConfigurationError(f"pipeline computes the loss apart from the model, on the last stage; {advice}")
        if self.schedule != "gpipe" and microbatches < pp_size:
            problem = f"{setting} leaves some of {pp_size} processes idle with schedule={self.schedule}"
            raise ConfigurationError(f"{problem}; take {pp_size}")
        if SCHEDULES[self.schedule][1] > 1 and microbatches % max(1, microbatches // pp_size):
            multiple = -(-microbatches // pp_size) * pp_size
            raise ConfigurationError(f"{setting} does not fill the rounds of schedule={self.schedule}; take {multiple}")

    def loss(self, loss: LossFn, run: RunContext) -> LossFn:
        cast(PipelinedModel, run.model).loss = loss
        return loss

    def forward_backward(self, forward_backward: ForwardFn, run: RunContext) -> ForwardFn:
        return cast(PipelinedModel, run.model).step

    def grad_transform(self, grad_transform: StepFn, run: RunContext) -> StepFn:
        assert run.parallel is not None
        # tensor_parallel reduces over the replicas itself
        return grad_transform if run.parallel.tp_size > 1 else reduce_over_replicas(grad_transform, run)

    def export(self, model: nn.Module, run: RunContext) -> nn.Module:
        return run.unwrapped_model


class PipelinedModel(nn.Module):
    """A model of which this rank holds some stages, given as index -> module.

    The forward of ``module``, the full model, is replaced by that of the pipeline. ``schedule`` names torch's schedule
    class; ``pads``: short microbatches may be padded.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: dict[int, nn.Module],
        num_stages: int,
        schedule: str,
        microbatches: int,
        pads: bool,
        run: RunContext,
    ):
        super().__init__()
        self.module, self.progress, self.device = module, run.progress, run.device
        self.stages = stages.items()  # not registered as submodules, because they share those of the module
        self.num_stages, self.schedule, self.microbatches, self.pads = num_stages, schedule, microbatches, pads
        mesh = get_device_mesh(run)["pp"]
        self.group, self.ranks = mesh.get_group(), cast("list[int]", cast(Any, mesh).mesh.tolist())
        self.last_rank = self.ranks[(num_stages - 1) % len(self.ranks)]
        self.schedules: dict[torch.Size, Any] = {}
        self.loss: LossFn | None = None
        self.current: tuple[Any, int, float] = (None, 0, 1.0)  # target, rows and loss weight of the current batch
        module.forward = self.forward  # for evaluation, by all ranks together

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's output for a batch, on all ranks of this replica (for evaluation; no backward pass)."""
        outputs = [output for _, _, output in self._forward_stages(single_tensor_input(args, kwargs))]
        return _broadcast(outputs[-1], self.last_rank, self.group, self.device)

    def _forward_stages(self, value: Any) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Runs all stages in order, each on its rank. Yields (index, input, output) of this rank's stages."""
        local = dict(self.stages)
        for index in range(self.num_stages):
            rank, next_rank = self.ranks[index % len(self.ranks)], self.ranks[(index + 1) % len(self.ranks)]
            if index in local:
                output = local[index](value)
                yield index, value, output
                if index + 1 < self.num_stages and next_rank != rank:
                    _send(output, next_rank, self.group)
                value = output
            elif index + 1 in local and index + 1 < self.num_stages:
                value = _recv(rank, self.group, self.device)

    def step(self, batch: Batch) -> torch.Tensor:
        """Forward and backward passes of a batch, in microbatches. Returns the loss of the batch, on all ranks."""
        inputs, kwargs, target = batches.split_inputs_target(batch)
        rows, value = batches.batch_size(batch), single_tensor_input(inputs, kwargs)
        if value.shape[0] != rows:
            raise RunError(
                f"the input of the batch has {value.shape[0]} rows for {rows} samples, as where time comes first, so "
                "that pipeline cannot cut it into microbatches; take another strategy"
            )
        count = self.microbatches if self.pads else _max_even_microbatches(rows, self.microbatches, len(self.ranks))
        indices = _row_indices(rows, count).to(self.device)
        weight = self.progress.microbatch_fraction * self.progress.loss_weight
        self.current = (target, rows, weight)
        padded = value if len(indices) == rows else value[indices.clamp(min=0)]
        schedule = self._schedule_for(padded, count)
        local, losses = [index for index, _ in self.stages], cast(list[torch.Tensor], [])
        is_first, is_last = 0 in local, self.num_stages - 1 in local
        schedule.step(
            *([padded] if is_first else []),
            target=indices if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if losses:
            loss += torch.stack([each.detach() for each in losses]).sum() / weight
        dist.broadcast(loss, self.last_rank, group=self.group)
        return loss

    def _microbatch_loss(self, output: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Loss of a microbatch, weighted by its fraction of the batch; rows with index -1 are padding and left out."""
        target, rows, weight = self.current
        real = indices[indices >= 0]
        if not len(real):
            return output.sum() * 0
        assert self.loss is not None
        part = batches.map_tensors(lambda t: t[real] if t.ndim and t.shape[0] == rows else t, target)
        return self.loss(output[: len(real)], part) * (len(real) / rows * weight)

    def _schedule_for(self, value: torch.Tensor, microbatches: int) -> Any:
        from torch.distributed import pipelining  # takes half a second

        if value.shape in self.schedules:
            return self.schedules[value.shape]
        if len(self.schedules) == MAX_CACHED_SCHEDULES:
            del self.schedules[next(iter(self.schedules))]
        microbatch = value[: len(value) // microbatches]
        with torch.no_grad(), eval_mode(*(stage for _, stage in self.stages)):
            shapes = {index: (_like(value), _like(out)) for index, value, out in self._forward_stages(microbatch)}
        stages = [
            pipelining.PipelineStage(stage, index, self.num_stages, self.device, *shapes[index], group=self.group)
            for index, stage in self.stages
        ]
        # 1f1b needs a microbatch for each stage
        name = self.schedule if len(stages) > 1 or microbatches >= self.num_stages else "ScheduleGPipe"
        options = {"n_microbatches": microbatches, "loss_fn": self._microbatch_loss, "scale_grads": False}
        schedule = getattr(pipelining, name)(stages if len(stages) > 1 else stages[0], **options)
        self.schedules[value.shape] = schedule
        return schedule


def _report(stages: list[torch.fx.GraphModule], loads: list[float]) -> None:
    sizes = [sum(weight.numel() for weight in stage.parameters()) for stage in stages]
    total = sum(sizes) or 1
    for index, (stage, size) in enumerate(zip(stages, sizes, strict=True)):
        names = [node.target for node in stage.graph.nodes if node.op in ("call_module", "get_attr")]
        layers = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        memory = f", {loads[index] / 1e6:.3g} MB with gradients, Adam state and activations" if loads else ""
        warnings.warn(
            f"pipeline: stage {index + 1} of {len(stages)} is {layers}, {size / total:.0%} of the weights{memory}",
            ProgressWarning,
            stacklevel=4,
        )


def _max_even_microbatches(rows: int, most: int, degree: int) -> int:
    """Largest number up to ``most`` of equal microbatches, of 2 rows or more, that fills the schedule; else 1."""
    return next((n for n in range(min(most, rows - 1), 1, -1) if rows % n == 0 and n % max(1, n // degree) == 0), 1)


def _row_indices(rows: int, microbatches: int) -> torch.Tensor:
    """Row indices of a batch, padded with -1 so that it splits into ``microbatches`` of equal length. 1-d."""
    parts = torch.arange(rows).tensor_split([rows * index // microbatches for index in range(1, microbatches)])
    return nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=-1).flatten()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype on the meta device."""
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.is_floating_point())


def _send(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    dist.send(encode_meta(tensor), rank, group=group)
    dist.send(tensor.detach().contiguous(), rank, group=group)


def _recv(rank: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    header = torch.empty(HEADER, dtype=torch.int64, device=device)
    dist.recv(header, rank, group=group)
    tensor = empty_from_meta(header, device)
    dist.recv(tensor, rank, group=group)
    return tensor


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Broadcasts ``tensor`` of rank ``source``; other ranks receive shape and dtype first, their own is ignored."""
    is_source = dist.get_rank() == source
    header = encode_meta(tensor) if is_source else torch.empty(HEADER, dtype=torch.int64, device=device)
    dist.broadcast(header, source, group=group)
    result = tensor.detach().contiguous() if is_source else empty_from_meta(header, device)
    dist.broadcast(result, source, group=group)
    return result
