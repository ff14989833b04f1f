"""Batches on their way to a GPU: from page-locked memory, one ahead, while the step before goes on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hasten.utils.batch import batch_tensors, map_tensors


def prefetch_to_cuda(inner: Iterator, device: torch.device) -> Iterator:
    """The batches of ``inner``, on the device. While one is used, the next is on its way."""
    side = torch.cuda.Stream(device)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)

    def fetch():
        with torch.cuda.stream(side):
            for batch in inner:
                return map_tensors(copied, batch), side.record_event()
        return None

    coming = fetch()
    while coming is not None:
        (batch, arrived), coming = coming, fetch()
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        for tensor in batch_tensors(batch):
            tensor.record_stream(current)  # its memory was taken on the side stream: not to be used again too early
        yield batch
