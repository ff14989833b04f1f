"""Copies the next batch to the GPU while the current step runs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hasten.contract.batch import map_tensors, tensors
from hasten.contract.card import Card, Exactness, Order
from hasten.contract.data import Batches
from hasten.contract.method import Method, Run


@dataclass(frozen=True)
class PrefetchToDevice(Method):
    """One batch ahead, from page-locked memory, on a stream of its own: no threads, and the same batches in the same order."""

    card = Card(
        summary="copy the next batch to the GPU during the current step",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers",
        gain_when="batches are large, or the loop waits for the GPU in every step",
        speeds={"copy", "input"},
        applies_to={"cuda"},
        order=Order.LAST,  # it wraps finished batches, wherever they come from
    )

    def data(self, batches: Batches, run: Run) -> Batches:
        if run.device.type != "cuda":
            if batches.training:
                run.nothing_to_do(self, "the run is on the CPU: there is nothing to copy")
            return batches
        return batches.mapped(lambda inner: one_ahead(inner, run.device))


def one_ahead(inner: Iterator, device: torch.device) -> Iterator:
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
        for tensor in tensors(batch):
            tensor.record_stream(current)  # its memory was taken on the side stream: not to be used again too early
        yield batch
