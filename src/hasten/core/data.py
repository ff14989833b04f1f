"""Where batches come from, as plain data that methods can read and exchange.

``Samples`` describes a set of samples that can be read by index and how they become batches;
``Batches`` is what the loop draws from. A method that changes how samples are read builds new
``Batches`` from ``batches.samples``; one that only changes what happens to a finished batch wraps
``batches.epoch``. Who computes them, a ``Crew``, is no part of what they are.

The position is the state: the batches of a pass are a function of (seed, epoch), so a run can be
taken up at any batch without replaying the ones before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class WorkerConfig:
    """Who computes batches before they are asked for. Another crew gives the same batches, sooner or later.

    Attributes:
        threads, processes: how many; of one kind only. None of either: whoever asks for a batch computes it.
        ahead: batches that may wait to be asked for, beside the one that each is computing.
    """

    threads: int = 0
    processes: int = 0
    prefetch: int = 0

    @property
    def num_workers(self) -> int:
        return self.threads + self.processes

    @property
    def prefetch_factor(self) -> int:
        """Batches that each of them is asked for at a time: torch's ``prefetch_factor``."""
        return 1 + -(-self.prefetch // max(1, self.num_workers))

    def __str__(self) -> str:
        if not self.num_workers:
            return "no workers"
        kind = "thread" if self.threads else "process"
        plural = "" if self.num_workers == 1 else "s" if self.threads else "es"
        return f"{self.num_workers} {kind}{plural}, {self.prefetch} ahead"


@dataclass(frozen=True)
class LoaderSpec:
    """Samples that can be read by index.

    Attributes:
        dataset: anything with ``__getitem__`` and ``__len__`` (``__getitems__`` is used where it exists).
        order: ``(epoch) -> lists of indices``, one list a batch, made anew for every pass.
        length: batches a pass has.
        collate: ``(list of samples) -> batch``; None for torch's default.
        training: False for the validation data.
        seed: what the random numbers drawn by the dataset itself are derived from.
        workers, prefetch, pin, persistent: as in ``torch.utils.data.DataLoader``.
        loader: the task's own DataLoader, where it brought one.
        build: the engine's way from samples to batches.
    """

    dataset: Any
    batch_sampler: Callable[[int], Iterable[list[int]]]
    length: int
    collate: Callable[[list], Any] | None = None
    training: bool = True
    seed: int = 0
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    persistent_workers: bool = False
    loader: Any = None
    build: Callable[[LoaderSpec], BatchSource] | None = None

    @property
    def workers_config(self) -> WorkerConfig:
        return WorkerConfig(processes=self.num_workers, prefetch=self.num_workers * (self.prefetch_factor - 1))

    def probe(self, seed: int = 0) -> list:
        """Up to 32 samples, spread evenly over the dataset, read while every random generator starts from ``seed``."""
        spread = range(0, len(self.dataset), -(-len(self.dataset) // 32))
        reading = dataclasses.replace(
            self,
            batch_sampler=lambda epoch: [list(spread)],
            length=1,
            collate=list,
            num_workers=0,
            pin_memory=False,
            loader=None,
        )
        return next(iter(self.build(reading).epoch(seed, 0)))

    def is_deterministic(self) -> bool:
        """Whether some samples come out the same under three random seeds, so that reading them once is enough."""
        first, *others = (self.probe(seed) for seed in range(3))
        return all(bitwise_equal(first, other) for other in others)


@dataclass
class BatchSource:
    """What the loop draws from.

    Attributes:
        epoch: ``(epoch, start) -> iterator`` over the batches of a pass, from batch number ``start`` on.
        length: batches a pass has, or None where nobody knows.
        samples: the samples underneath, as long as they can still be read by index; else None.
        training: False for the validation data.
        seekable: whether ``start`` is reached without replaying what comes before.
        generators: the task's own random generators that these batches draw from; their state travels in checkpoints.
        crew: who computes them, where that is known.
        by: the same batches computed by others: by a crew, or by whomever a climber finds while the run goes on; None where
            ``samples`` tell how to read them, or nobody else can.
    """

    epoch: Callable[[int, int], Iterator]
    length: int | None = None
    spec: LoaderSpec | None = None
    training: bool = True
    seekable: bool = True
    generators: tuple = ()
    workers: WorkerConfig = WorkerConfig()
    with_workers: Callable[[Any], BatchSource] | None = (
        None  # takes a Crew, or an autotuner of loaders, which this module does not know
    )
    position: tuple[int, int] = field(default=(0, 0), compare=False)

    def __iter__(self) -> Iterator:
        """The batches of the pass that ``position`` points at: lets a method wrap with a plain ``for``."""
        return iter(self.epoch(*self.position))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("these batches have no known length")
        return self.length

    def with_spec(self, **changes) -> BatchSource:
        """Batches of the same samples, read in another way: ``changes`` are fields of Samples."""
        return self.spec.build(dataclasses.replace(self.spec, **changes))

    def map_iterator(self, function: Callable[[Iterator], Iterator]) -> BatchSource:
        """The same batches, each pass's iterator wrapped by ``function``."""
        return dataclasses.replace(
            self, epoch=lambda epoch, start: function(self.epoch(epoch, start)), spec=None, with_workers=None
        )


def bitwise_equal(a, b) -> bool:
    """Whether two samples hold the same bits, whatever their nesting."""
    if isinstance(a, (torch.Tensor, numpy.ndarray)) and type(a) is type(b):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(bitwise_equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(bitwise_equal, a, b))
    return a is b or bool(a == b) or (a != a and b != b)  # a missing number equals itself here


def _bits(array: torch.Tensor | numpy.ndarray) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()
