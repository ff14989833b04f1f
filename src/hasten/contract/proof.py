"""Whether a model that was cut apart computes what it computed before, on a few samples."""

from __future__ import annotations

import torch

from hasten.contract import batch as batches
from hasten.contract.errors import Refusal

SAMPLES = 8  # that are enough
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}  # to the model as it was, relative; of lower precisions 3e-2


def called(model: torch.nn.Module, batch, own: bool):
    """The output for a batch; ``own``: the model gets the whole batch and returns its own loss."""
    if own:
        return model(**batch) if hasattr(batch, "keys") else model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    inputs, named, _ = batches.split(batch)
    return model(*inputs, **named)


def outcome(model: torch.nn.Module, batch, own: bool) -> tuple[dict, dict]:
    """The outputs for a batch, and the gradients of the mean of their squares."""
    model.eval()
    outputs = [tensor for tensor in batches.tensors(called(model, batch, own)) if tensor.is_floating_point()]
    compared = [tensor.square().mean() for tensor in outputs if tensor.requires_grad]
    if not compared:
        raise Refusal("the model returns no tensor that its weights have a part in, so nothing can be compared; take another strategy")
    sum(compared).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}, gradients


def differing(ours: dict, right: dict) -> str | None:
    """The first tensor that is another, held against the greatest of all: some gradients are rounding alone."""
    if odd := ours.keys() ^ right.keys():
        return min(odd)
    greatest = max((tensor.abs().max() for tensor in right.values()), default=0.0)
    for name, tensor in right.items():
        if ours[name].shape != tensor.shape or not (ours[name] - tensor).abs().max() <= CLOSE.get(tensor.dtype, 3e-2) * greatest:
            return name
    return None
