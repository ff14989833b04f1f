"""Whether a model that was cut apart computes what it computed before, on a few samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hasten.core.errors import ConfigurationError, format_error
from hasten.core.run_context import RunContext
from hasten.distributed.dtensor_state import gather_full_state
from hasten.utils import batch as batches

SAMPLES = 8  # that are enough
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # to the model as it was, relative; of lower precisions 3e-2


class PartitionPlan(NamedTuple):
    """One way to cut blocks of a model apart, in place."""

    partition: Callable[[torch.nn.Module, list], None]
    everywhere: bool = True  # each process gets the gradients of all weights


def verify_partition(
    model: torch.nn.Module, found: list, ways: Sequence[PartitionPlan], name: str, run: RunContext
) -> tuple[list, list[str]]:
    """The blocks that compute what the model computes, in each of the ways; of those that do not, why. All together first, else each by itself.

    Args:
        name: of the method that cuts them.

    Raises:
        Refusal: each is right by itself, and all together are wrong.
    """
    if not found:
        return [], []
    batch, own = run.services.peek_batch(), run.task.loss is None
    few = batches.chunk_batch(batch, max(1, batches.batch_size(batch) // SAMPLES))[0]
    right = outputs_and_grads(copy.deepcopy(model), few, own)

    def doubt(blocks: list) -> str | None:
        for way in ways:
            why = _why_unverified(copy.deepcopy(model), blocks, way, few, own, right)
            if run.any_rank(why is not None):
                return why or "it goes wrong on another process"
        return None

    if doubt(found) is None:
        return found, []
    doubts = {block: doubt([block]) for block in found}
    sound = [block for block, why in doubts.items() if why is None]
    if sound and (why := doubt(sound)):
        raise ConfigurationError(f"{name} finds each block right by itself and all together wrong: {why}")
    return sound, [f"{block}: {why}" for block, why in doubts.items() if why]


def _why_unverified(model, blocks: list, way: PartitionPlan, batch, own: bool, right: tuple[dict, dict]) -> str | None:
    """Why the model is not the same once these blocks are cut; None where it is."""
    try:
        way.partition(model, blocks)
        outputs, gradients = gather_full_state(outputs_and_grads(model, batch, own))
    except Exception as error:
        return f"it cannot be cut ({format_error(error, 100)})"
    if odd := first_mismatch(outputs, right[0]):
        return f"{odd} is another"
    expected = right[1] if way.everywhere else {name: right[1][name] for name in gradients if name in right[1]}
    if odd := first_mismatch(gradients, expected):
        return f"the gradient of {odd} is another"
    return None


def call_traced_model(model: torch.nn.Module, batch, own: bool):
    """The output for a batch; ``own``: the model gets the whole batch and returns its own loss."""
    if own:
        return (
            model(**batch)
            if hasattr(batch, "keys")
            else model(*batch)
            if isinstance(batch, (tuple, list))
            else model(batch)
        )
    inputs, named, _ = batches.split_inputs_target(batch)
    return model(*inputs, **named)


def outputs_and_grads(model: torch.nn.Module, batch, own: bool) -> tuple[dict, dict]:
    """The outputs for a batch, and the gradients of the mean of their squares."""
    model.eval()
    outputs = [
        tensor for tensor in batches.batch_tensors(call_traced_model(model, batch, own)) if tensor.is_floating_point()
    ]
    compared = [tensor.square().mean() for tensor in outputs if tensor.requires_grad]
    if not compared:
        raise ConfigurationError(
            "the model returns no tensor that its weights have a part in, so nothing can be compared; take another strategy"
        )
    sum(compared).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}, gradients


def first_mismatch(ours: dict, right: dict) -> str | None:
    """The first tensor that is another, held against the greatest of all: some gradients are rounding alone."""
    if odd := ours.keys() ^ right.keys():
        return min(odd)
    greatest = max((tensor.abs().max() for tensor in right.values()), default=0.0)
    for name, tensor in right.items():
        if (
            ours[name].shape != tensor.shape
            or not (ours[name] - tensor).abs().max() <= TOLERANCE.get(tensor.dtype, 3e-2) * greatest
        ):
            return name
    return None
