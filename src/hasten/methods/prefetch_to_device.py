"""Copies the next batch to the GPU while the current step runs."""

from collections.abc import Iterator
from dataclasses import dataclass

from hasten import Batch, BatchSource, Card, Exactness, Method, NoEffectError, RunContext, WrapOrder
from hasten.loading.cuda_prefetcher import prefetch_to_cuda


@dataclass(frozen=True)
class PrefetchToDevice(Method):
    """Copies the next batch from page-locked memory on its own CUDA stream while the current step runs."""

    card = Card(
        summary="copy the next batch to the GPU during the current step",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers",
        gain_when="batches are large, or the loop waits for the GPU in every step",
        accelerates={"copy", "input"},
        applies_to={"cuda"},
        order=WrapOrder.LAST,  # it wraps finished batches, wherever they come from
        script_edit={
            "by_hand": "copy the next batch with to(device, non_blocking=True) on a stream of its own during the step",
        },
    )

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if run.services.in_script and not batches.training:
            return batches  # an evaluation may read them on the host, as in y.numpy()
        if run.device.type != "cuda":
            if batches.training:
                run.report_no_effect(self, "the run is on the CPU: there is nothing to copy")
            return batches
        started: list[bool] = []

        def prefetch(iterator: Iterator[Batch]) -> Iterator[Batch]:
            started.append(True)
            return prefetch_to_cuda(iterator, run.device)

        def describe() -> str:
            if not started:
                raise NoEffectError("no epoch was read through the prefetcher")
            return "batches are copied one ahead on a stream of their own"

        if batches.training:
            run.observe_effect(self, describe)
        return batches.map_iterator(prefetch)
