"""Batches on their way to a device: from page-locked memory, one ahead, while the step before goes on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hasten.contract.batch import map_tensors, tensors


def moved(batches: Iterator, device: torch.device) -> Iterator:
    """The same batches on ``device``."""
    if device.type == "cuda":
        return _one_ahead(batches, device)
    return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)


def _one_ahead(batches: Iterator, device: torch.device) -> Iterator:
    side = torch.cuda.Stream(device)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)

    def fetch():
        with torch.cuda.stream(side):
            for batch in batches:
                return map_tensors(copied, batch), side.record_event()
        return None

    coming = fetch()
    while coming is not None:
        (batch, arrived), coming = coming, fetch()
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        for tensor in tensors(batch):
            tensor.record_stream(current)  # its memory was taken on the side stream: not to be used again too early
        yield batch
