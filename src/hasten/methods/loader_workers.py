"""Reads samples in processes of their own, so that the training process finds its batches ready."""

from dataclasses import dataclass, replace

from hasten.core.card import Card, Exactness, WrapOrder
from hasten.core.data import BatchSource, WorkerConfig
from hasten.core.method import Method, option
from hasten.core.run_context import RunContext


@dataclass(frozen=True)
class LoaderWorkers(Method):
    """torch's DataLoader with ``workers`` processes, each ``prefetch`` batches ahead.

    Random numbers that the dataset draws are a function of (seed, epoch, batch), so any number of workers
    gives the same bits. A ready DataLoader's dataset draws from its own stream, as torch's workers always do.
    ``pin`` puts batches into page-locked memory where the run is on a GPU; ``persistent`` keeps the processes
    from one pass to the next. A pipeline of hasten.data is computed by processes of its own, to which these two mean nothing.
    """

    num_workers: int = option(2, at_least=0, at_most=64)  # more only take memory and starting time
    prefetch_factor: int = option(2, at_least=1, at_most=1024)  # batches a worker
    pin_memory: bool = True
    persistent_workers: bool = True

    card = Card(
        summary="read samples in worker processes",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/data.html",
        gain_when="reading and decoding a sample takes longer than its share of the step, and cores are idle",
        accelerates={"input"},
        applies_to={"workers"},
        order=WrapOrder.EARLY,
        after=("in_memory_batches", "cache_dataset"),  # what is in memory already needs no workers
        presets=({"workers": 1}, {"workers": 2}, {"workers": 4}, {"workers": 8}),
        strong_baseline=True,
    )

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if batches.spec is None:
            return self._whole_batches(batches, run)
        wanted = replace(
            batches.spec,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self.pin_memory and run.device.type == "cuda",
            persistent_workers=self.persistent_workers and self.num_workers > 0,
        )
        if wanted == batches.spec:
            return self._idle(batches, run, "the data are read in this way already")
        return wanted.build(wanted)

    def _whole_batches(self, batches: BatchSource, run: RunContext) -> BatchSource:
        crew = WorkerConfig(processes=self.num_workers, prefetch=self.num_workers * (self.prefetch_factor - 1))
        if batches.with_workers is None:
            return self._idle(batches, run, "the data are not read sample by sample")
        return (
            self._idle(batches, run, "the batches are computed in this way already")
            if crew == batches.workers
            else batches.with_workers(crew)
        )

    def _idle(self, batches: BatchSource, run: RunContext, why: str) -> BatchSource:
        if batches.training:
            run.report_no_effect(self, why)
        return batches
