"""Copies batches to a device."""

from collections.abc import Iterator

import torch

from hasten.core.errors import ConfigurationError
from hasten.loading.cuda_prefetcher import prefetch_to_cuda
from hasten.utils.batch import map_tensors


def copy_to_device(batches: Iterator, device: torch.device) -> Iterator:
    """Yields the batches on ``device``; for CUDA the next batch is copied while the current one is used."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"there is no device {device} on this machine; use .to('cpu')")
    if device.type == "cuda":
        return prefetch_to_cuda(batches, device)
    return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)
