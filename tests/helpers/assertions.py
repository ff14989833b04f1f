"""What tests compare: batches bit by bit, the weights and the losses of runs."""

import json

import torch
from safetensors.torch import load_file

CLOSE = 1e-9  # relative, in float64


def same(one, other):
    """Tensors by type, shape and content; dicts, tuples and lists by what is in them, and never one for the other."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return (
            both and one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def _bytes(tensor):
    """So that -0 is not 0, and NaN is itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def farthest(a, b) -> float:
    """The greatest difference of two runs' weights, against the greatest weight."""
    a, b = (load_file(out / "model.safetensors") for out in (a, b))
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in a)


def losses(out) -> list[float]:
    return [
        record["loss"]
        for line in (out / "log.jsonl").read_text().splitlines()
        if "loss" in (record := json.loads(line))
    ]
