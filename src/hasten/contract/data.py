"""Where batches come from, as plain data that methods can read and exchange.

``Samples`` describes a set of samples that can be read by index and how they become batches;
``Batches`` is what the loop draws from. A method that changes how samples are read builds new
``Batches`` from ``batches.samples``; one that only changes what happens to a finished batch wraps
``batches.epoch``.

The position is the state: the batches of a pass are a function of (seed, epoch), so a run can be
taken up at any batch without replaying the ones before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Samples:
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
    """

    dataset: Any
    order: Callable[[int], Iterable[list[int]]]
    length: int
    collate: Callable[[list], Any] | None = None
    training: bool = True
    seed: int = 0
    workers: int = 0
    prefetch: int = 2
    pin: bool = False
    persistent: bool = False
    loader: Any = None


@dataclass
class Batches:
    """What the loop draws from.

    Attributes:
        epoch: ``(epoch, start) -> iterator`` over the batches of a pass, from batch number ``start`` on.
        length: batches a pass has, or None where nobody knows.
        samples: the samples underneath, as long as they can still be read by index; else None.
        training: False for the validation data.
        seekable: whether ``start`` is reached without replaying what comes before.
        generators: the task's own random generators that these batches draw from; their state travels in checkpoints.
    """

    epoch: Callable[[int, int], Iterator]
    length: int | None = None
    samples: Samples | None = None
    training: bool = True
    seekable: bool = True
    generators: tuple = ()
    position: tuple[int, int] = field(default=(0, 0), compare=False)

    def __iter__(self) -> Iterator:
        """The batches of the pass that ``position`` points at: lets a method wrap with a plain ``for``."""
        return iter(self.epoch(*self.position))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("these batches have no known length")
        return self.length

    def mapped(self, function: Callable[[Iterator], Iterator]) -> Batches:
        """The same batches, each pass's iterator wrapped by ``function``."""
        return dataclasses.replace(self, epoch=lambda epoch, start: function(self.epoch(epoch, start)), samples=None)
