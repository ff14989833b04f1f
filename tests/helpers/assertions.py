"""Comparisons: batches bit by bit, weights and losses of runs."""

import json

import torch
from safetensors.torch import load_file

CLOSE = 1e-9  # relative, in float64


def same(one, other):
    """Returns whether tensors are equal in dtype, shape and bits, and containers in type and content."""
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
    """Returns the bytes, by which -0 differs from 0, and NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def farthest(a, b) -> float:
    """Returns the largest difference between the weights of two runs, relative to the largest weight."""
    a, b = (load_file(out / "model.safetensors") for out in (a, b))
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in a)


def losses(out) -> list[float]:
    return [
        record["loss"]
        for line in (out / "log.jsonl").read_text().splitlines()
        if "loss" in (record := json.loads(line))
    ]
