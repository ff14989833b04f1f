"""Divides the segments of a model into pipeline stages of nearly equal time or memory."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from time import perf_counter

import torch
import torch.fx
from torch import nn

from hasten.core.errors import ConfigurationError
from hasten.core.run_context import RunContext
from hasten.core.types import Batch
from hasten.distributed.deferred_init import replace_tensors, storage_of
from hasten.distributed.fx.pipeline_split import Segment, extract_stage, single_tensor_input
from hasten.distributed.fx.tracing import eval_mode
from hasten.utils import batch as batches

MEASUREMENTS = 3
TRAINED_COPIES = 4  # of a parameter: itself, its gradient, and two moments of an optimizer such as Adam


def parse_split_sizes(sizes: str, stages: int, segments: int, option: str) -> list[int]:
    """Segment index after each stage, from sizes such as "2-1-3"; ConfigurationError if they do not sum to all."""
    lengths = [int(word) if word.isdecimal() else 0 for word in sizes.split("-")]
    if len(lengths) != stages or not all(lengths) or sum(lengths) != segments:
        example = "-".join(["1"] * (stages - 1) + [str(segments - stages + 1)])
        chain = f"the chain of {segments}, such as {example}"
        raise ConfigurationError(f"{option}={sizes} must be {stages} lengths that make up {chain}")
    return list(accumulate(lengths))


def balance_on_main_process(measure: Callable[[], list[list[float]]], run: RunContext) -> tuple[list[int], list[float]]:
    """(segment index after each stage, cost of each stage), balanced by ``measure() -> costs[stage][segment]``.

    Only rank 0 and the other ranks of its stage measure; rank 0 broadcasts the result. All ranks must call it.
    """
    assert run.parallel is not None
    balance = None
    if run.ranks.rank < run.parallel.tp_size:
        costs = measure()
        ends = balance_stages(costs)
        bounds = pairwise([0, *ends])
        stage_totals = [sum(stage_costs[first:end]) for stage_costs, (first, end) in zip(costs, bounds, strict=True)]
        balance = ends, stage_totals
    return run.ranks.broadcast(balance)


def balance_stages(costs: list[list[float]]) -> list[int]:
    """Divides the segments into consecutive stages, none empty, so that the most expensive stage costs least.

    ``costs[stage][segment]`` is the cost if that stage runs it. Returns the index after each stage's last segment.
    """
    segments = len(costs[0])
    impossible: tuple[float, list[int]] = (float("inf"), [])
    best = [(0.0, list[int]())] + [impossible] * segments  # by number of first segments: (most expensive stage, ends)
    for stage, stage_costs in enumerate(costs, 1):
        best = [impossible] * stage + [
            min(
                (max(best[first][0], sum(stage_costs[first:end])), [*best[first][1], end])
                for first in range(stage - 1, end)
            )
            for end in range(stage, segments + 1)
        ]
    return best[-1][1]


def profile_segments(
    model: nn.Module, graph: torch.fx.Graph, segments: list[Segment], batch: Batch, device: torch.device
) -> list[float]:
    """Seconds of forward and backward of each segment, best of 3; moves one at a time to ``device`` and back."""
    args, kwargs, _ = batches.split_inputs_target(batch)
    value, costs = single_tensor_input(args, kwargs), []
    for segment in segments:
        module, times = extract_stage(model, graph, [segment]), []
        original_device = next(module.parameters()).device
        module.to(device)
        output = value
        with eval_mode(module):
            for _ in range(MEASUREMENTS):
                inputs = value.detach().requires_grad_(value.is_floating_point())
                start = perf_counter()
                output = module(inputs)
                output.sum().backward()
                if output.is_cuda:
                    torch.cuda.synchronize(output.device)
                times.append(perf_counter() - start)
        module.zero_grad()
        module.to(original_device)
        value = output.detach()
        costs.append(min(times))
    return costs


def estimate_segment_memory(
    model: nn.Module, graph: torch.fx.Graph, segments: list[Segment], batch: Batch, pieces: int, in_flight: list[int]
) -> list[list[float]]:
    """Bytes that every segment would hold in each stage, computed on the meta device. Shape (stages, segments).

    ``pieces``: microbatches of a batch; ``in_flight``: those that wait in each stage for their backward pass.
    """
    args, kwargs, _ = batches.split_inputs_target(batch)
    inputs = single_tensor_input(args, kwargs)
    value, held = inputs[: -(-len(inputs) // pieces)].to("meta"), []
    for segment in segments:
        module = extract_stage(model, graph, [segment])
        replace_tensors(module, lambda tensor: tensor.to("meta"))  # constants of the graph
        value, saved = _run_segment(module, value)
        params = sum(param.nbytes * (TRAINED_COPIES if param.requires_grad else 1) for param in module.parameters())
        held.append((params + sum(buffer.nbytes for buffer in module.buffers()), saved))
    return [[constant + count * saved for constant, saved in held] for count in in_flight]


def _run_segment(module: nn.Module, value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(output, bytes that autograd saves for the backward pass besides parameters and buffers)."""
    registered = {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[storage_of(tensor)] = tensor.detach()
        return tensor

    with eval_mode(module), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = module(value.requires_grad_(value.is_floating_point()))
    own = [tensor for storage, tensor in saved.items() if storage not in registered]
    return output.detach(), sum(tensor.untyped_storage().nbytes() for tensor in own)
