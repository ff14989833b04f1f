"""Where a chain of members is cut into stages: so that the stages take equally long, or equally much memory, as nearly as may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate, pairwise
from time import perf_counter

import torch
from torch import nn

from hasten.core.errors import ConfigurationError
from hasten.core.run_context import RunContext
from hasten.distributed.deferred_init import replace_tensors, storage_of
from hasten.distributed.fx.pipeline_split import extract_stage, single_tensor_input
from hasten.distributed.fx.tracing import eval_mode
from hasten.utils import batch as batches

MEASUREMENTS = 3
TRAINED = (
    4  # times its own bytes that a weight takes: itself, its gradient, and two numbers of an optimizer such as Adam
)


def parse_split_sizes(asked: str, stages: int, members: int, option: str) -> list[int]:
    """Where the stages end whose lengths ``option`` of a method gives.

    Raises:
        Refusal: they are not so many, or do not make up the chain.
    """
    lengths = [int(word) if word.isdecimal() else 0 for word in asked.split("-")]
    if len(lengths) != stages or not all(lengths) or sum(lengths) != members:
        raise ConfigurationError(
            f"{option}={asked} must be {stages} lengths that make up the chain of {members}, such as {'-'.join(['1'] * (stages - 1) + [str(members - stages + 1)])}"
        )
    return list(accumulate(lengths))


def balance_on_main_process(
    measured: Callable[[], list[list[float]]], run: RunContext
) -> tuple[list[int], list[float]]:
    """Where the stages end, and what each costs, as the first rank measured it, and those that compute every layer with it."""
    told = b""
    if run.ranks.rank < run.parallel.tp_size:
        costs = measured()
        ends = balance_stages(costs)
        of_stages = [
            sum(of_stage[first:end]) for of_stage, (first, end) in zip(costs, pairwise([0, *ends]), strict=True)
        ]
        told = json.dumps([ends, of_stages]).encode()
    return tuple(json.loads(run.ranks.broadcast(told)))


def balance_stages(costs: list[list[float]]) -> list[int]:
    """Where neighbouring stages end, none of them empty, so that the dearest is as cheap as may be.

    Args:
        costs: of each stage, what every member would cost in it.
    """
    members = len(costs[0])
    best = [(0.0, [])] + [(float("inf"), [])] * members  # of the first so many members: the dearest stage, and the ends
    for stage, of_stage in enumerate(costs, 1):
        best = [(float("inf"), [])] * stage + [
            min(
                (max(best[first][0], sum(of_stage[first:end])), [*best[first][1], end])
                for first in range(stage - 1, end)
            )
            for end in range(stage, members + 1)
        ]
    return best[-1][1]


def profile_segments(model: nn.Module, graph, members: list, batch, device: torch.device) -> list[float]:
    """That each member takes forward and backward on some rows of a batch, the shortest of several tries; one at a time is on the device."""
    inputs, named, _ = batches.split_inputs_target(batch)
    value, costs = single_tensor_input(inputs, named), []
    for member in members:
        part, tries = extract_stage(model, graph, [member]), []
        home = next(part.parameters()).device
        part.to(device)
        with eval_mode(part):
            for _ in range(MEASUREMENTS):
                given = value.detach().requires_grad_(value.is_floating_point())
                began = perf_counter()
                output = part(given)
                output.sum().backward()
                if output.is_cuda:
                    torch.cuda.synchronize(output.device)
                tries.append(perf_counter() - began)
        part.zero_grad()
        part.to(home)
        value = output.detach()
        costs.append(min(tries))
    return costs


def estimate_segment_memory(
    model: nn.Module, graph, members: list, batch, pieces: int, under_way: list[int]
) -> list[list[int]]:
    """Of each stage, what every member would hold in it between forward and backward passes; computed on the meta device.

    Args:
        under_way: of each stage, the pieces of a batch that wait there for their backward pass at once.
    """
    inputs, named, _ = batches.split_inputs_target(batch)
    given = single_tensor_input(inputs, named)
    value, held = given[: -(-len(given) // pieces)].to("meta"), []
    for member in members:
        part = extract_stage(model, graph, [member])
        replace_tensors(part, lambda tensor: tensor.to("meta"))  # constants of the graph
        value, left = _run_segment(part, value)
        weights = sum(weight.nbytes * (TRAINED if weight.requires_grad else 1) for weight in part.parameters())
        held.append((weights + sum(buffer.nbytes for buffer in part.buffers()), left))
    return [[rests + waiting * left for rests, left in held] for waiting in under_way]


def _run_segment(part: nn.Module, value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The output of a part, and how many bytes autograd keeps for its backward pass beside weights and buffers."""
    own = {storage_of(tensor) for tensor in (*part.parameters(), *part.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_of(tensor)] = tensor.detach()
        return tensor

    with eval_mode(part), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = part(value.requires_grad_(value.is_floating_point()))
    return output.detach(), sum(
        tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in own
    )
