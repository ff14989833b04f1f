"""Worker processes that read samples, so that the training process finds its batches ready."""

from dataclasses import dataclass, replace
from functools import partial

from hasten import BatchSource, Card, Exactness, Method, RunContext, WorkerConfig, WrapOrder, option
from hasten.loading.probe import script_may_change
from hasten.loading.read_all import SHARED_FILE, shares_open_file
from hasten.utils.observe_step import observe_workers


@dataclass(frozen=True)
class LoaderWorkers(Method):
    """Reads samples with the worker processes of torch's DataLoader; its options have the same names and meanings.

    Random numbers that the dataset draws are a function of (seed, epoch, batch), so any number of workers gives the
    same bits. The dataset of a task's own DataLoader draws from a stream per worker, as always in torch. A hasten.data
    pipeline is computed by its own processes, to which ``pin_memory`` and ``persistent_workers`` do not apply. In a
    script, workers outlive an epoch only if those of its own DataLoader do, because persistent workers do not see what
    the script changes in its dataset between two epochs.
    """

    card = Card(
        summary="read samples in worker processes",
        exactness=Exactness.BIT_EXACT,
        source="https://docs.pytorch.org/docs/stable/data.html",
        gain_when="reading and decoding a sample takes longer than its share of the step, and cores are idle",
        accelerates={"input"},
        applies_to={"workers"},
        order=WrapOrder.EARLY,
        after=("in_memory_batches", "cache_dataset"),  # samples in memory need no workers
        presets=({"num_workers": 1}, {"num_workers": 2}, {"num_workers": 4}, {"num_workers": 8}),
        strong_baseline=True,
        script_edit={
            "loader": "num_workers={num_workers}[, prefetch_factor={prefetch_factor}]",
            "by_hand": "on a GPU pass pin_memory=True, too; persistent_workers=True starts the workers once, not in"
            " each epoch, but changes the random numbers",
        },
    )

    num_workers: int = option(2, at_least=0, at_most=64)  # processes; more only cost memory and start-up time
    prefetch_factor: int = option(2, at_least=1, at_most=1024)  # batches per worker
    pin_memory: bool = True  # page-locked batches, in runs on a GPU only
    persistent_workers: bool = True  # processes that live longer than an epoch

    def data(self, batches: BatchSource, run: RunContext) -> BatchSource:
        if batches.spec is None:
            return self._pipeline(batches, run)
        persistent = self.persistent_workers and self.num_workers > 0 and not script_may_change(batches.spec, run)
        spec = replace(
            batches.spec,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self.pin_memory and run.device.type == "cuda",
            persistent_workers=persistent,
        )
        if spec == batches.spec:
            return self._unchanged(batches, run, "the data are already read with these options")
        if self.num_workers and not batches.spec.num_workers and shares_open_file(batches.spec):
            return self._unchanged(batches, run, SHARED_FILE)
        self._observe(batches, run)
        return spec.build(spec)

    def _pipeline(self, batches: BatchSource, run: RunContext) -> BatchSource:
        workers = WorkerConfig(processes=self.num_workers, prefetch=self.num_workers * (self.prefetch_factor - 1))
        if batches.with_workers is None:
            return self._unchanged(batches, run, "the data cannot be read sample by sample")
        if workers == batches.workers:
            return self._unchanged(batches, run, "the batches are already computed by these workers")
        self._observe(batches, run)
        return batches.with_workers(workers)

    def _observe(self, batches: BatchSource, run: RunContext) -> None:
        if batches.training:
            run.observe_effect(self, partial(observe_workers, self.num_workers))

    def _unchanged(self, batches: BatchSource, run: RunContext, reason: str) -> BatchSource:
        if batches.training:
            run.report_no_effect(self, reason)
        return batches
