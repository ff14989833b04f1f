"""Where batches come from, as plain data that methods read and exchange.

``LoaderSpec`` describes samples that can be read by index and how they become batches; ``BatchSource`` is what the
training loop draws from. A method that changes how samples are read calls ``batches.with_spec(...)``; one that only
changes finished batches wraps ``batches.epoch``. ``WorkerConfig`` changes when batches are ready, never the batches.

The batches of a ``seekable`` source are a function of (seed, epoch): a run resumes at any batch without replaying
earlier ones. Others, such as the task's own DataLoader, are replayed from their stored random state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorkerConfig:
    """The workers that compute batches ahead of time; without workers, the process that requests a batch computes it.

    Attributes:
        threads: Number of threads; 0 where there are processes.
        processes: Number of processes; 0 where there are threads.
        prefetch: Finished batches that may wait, besides the one that each worker computes.
    """

    threads: int = 0
    processes: int = 0
    prefetch: int = 0

    @property
    def num_workers(self) -> int:
        return self.threads + self.processes

    @property
    def prefetch_factor(self) -> int:
        """Batches requested from each worker at a time: ``prefetch_factor`` of ``torch.utils.data.DataLoader``."""
        return 1 + -(-self.prefetch // max(1, self.num_workers))

    def __str__(self) -> str:
        if not self.num_workers:
            return "no workers"
        kind = "thread" if self.threads else "process"
        plural = "" if self.num_workers == 1 else "s" if self.threads else "es"
        return f"{self.num_workers} {kind}{plural}, {self.prefetch} ahead"


@dataclass(frozen=True)
class LoaderSpec:
    """Samples that can be read by index, and how they become batches.

    Attributes:
        dataset: Has ``__getitem__`` and ``__len__``, optionally ``__getitems__``.
        batch_sampler: ``(epoch) -> lists of indices``, one list a batch, computed anew for every epoch.
        length: Batches of an epoch.
        collate: ``(list of samples) -> batch``; None for torch's ``default_collate``.
        training: False for validation data.
        seed: Seed of the random numbers that the dataset draws.
        num_workers, prefetch_factor, pin_memory, persistent_workers: As in ``torch.utils.data.DataLoader``.
        loader: The task's own DataLoader, if it gave one.
        build: Builds the batches that a spec describes; set by the engine.
    """

    dataset: Any
    batch_sampler: Callable[[int], Iterable[list[int]]]
    length: int
    collate: Callable[[list[Any]], Any] | None = None
    training: bool = True
    seed: int = 0
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    persistent_workers: bool = False
    loader: Any = None
    build: Callable[[LoaderSpec], BatchSource] = None  # pyright: ignore[reportAssignmentType]  # the engine sets it

    @property
    def workers(self) -> WorkerConfig:
        return WorkerConfig(processes=self.num_workers, prefetch=self.num_workers * (self.prefetch_factor - 1))


@dataclass
class BatchSource:
    """What the training loop draws from.

    Attributes:
        epoch: ``(epoch, start) -> iterator`` over the batches of an epoch, from batch index ``start`` on.
        length: Batches of an epoch; None if unknown.
        spec: The samples, while they can still be read by index; else None.
        training: False for validation data.
        seekable: Whether ``start`` is reached without replaying the batches before it.
        generators: The task's own random generators that these batches draw from; checkpoints store their state.
        workers: The workers that compute the batches, if known.
        with_workers: ``(WorkerConfig or LoaderAutotuner) -> BatchSource``: the same batches, computed by these workers;
            None where ``spec`` describes how to read them, or only the current workers can compute them.
        on_device: (bytes of all samples, ``(device) -> BatchSource``: the same batches of samples there), or None.
        position: (epoch, start) of the epoch that ``__iter__`` returns.
    """

    epoch: Callable[[int, int], Iterator[Any]]
    length: int | None = None
    spec: LoaderSpec | None = None
    training: bool = True
    seekable: bool = True
    generators: tuple[Any, ...] = ()
    workers: WorkerConfig = WorkerConfig()
    with_workers: Callable[[Any], BatchSource] | None = None
    on_device: tuple[int, Callable[[Any], BatchSource]] | None = None
    position: tuple[int, int] = field(default=(0, 0), compare=False)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch at ``position``; lets a method wrap with a plain ``for``."""
        return iter(self.epoch(*self.position))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the number of batches of this BatchSource is unknown")
        return self.length

    def with_spec(self, **changes: Any) -> BatchSource:
        """Batches of the same samples, read in another way: ``changes`` are fields of ``LoaderSpec``."""
        assert self.spec is not None, "only samples that can be read by index have a spec"
        return self.spec.build(dataclasses.replace(self.spec, **changes))

    def map_iterator(self, function: Callable[[Iterator[Any]], Iterator[Any]]) -> BatchSource:
        """A copy whose epochs are ``function(iterator of the epoch)``; it has no ``spec`` and no ``with_workers``."""

        def mapped(epoch: int, start: int = 0) -> Iterator[Any]:
            return function(self.epoch(epoch, start))

        return dataclasses.replace(self, epoch=mapped, spec=None, with_workers=None, on_device=None)
