"""Copies batches to a GPU from page-locked memory, one batch ahead, while the current step runs."""

from collections.abc import Iterator

import torch

from hasten.core.types import Batch
from hasten.utils.batch import batch_tensors, copy_to_device


def prefetch_to_cuda(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields the batches on a CUDA device; the next one is copied while the current one is used."""
    side_stream = torch.cuda.Stream(device)

    def fetch() -> tuple[Batch, torch.Event] | None:
        with torch.cuda.stream(side_stream):
            for batch in batches:
                return copy_to_device(batch, device), side_stream.record_event()
        return None

    upcoming = fetch()
    while upcoming is not None:
        (batch, copied), upcoming = upcoming, fetch()
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)
        for tensor in batch_tensors(batch):
            tensor.record_stream(stream)  # allocated on the side stream: its memory must not be reused too early
        yield batch
