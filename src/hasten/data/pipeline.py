"""The pipeline: from rows to batches on the device.

    parquet("train/*.parquet", target="label").shuffle(seed=0).map(f).batch(512)

Its one idea: *a batch is a function of (seed, epoch, number)*. Who computes it, a thread, a process, another rank or a
run that was resumed, makes no difference; and the place in the data is three integers.

``map`` before ``batch`` gets one sample at a time, ``map`` after it a whole batch, which is faster. A function that wants
random numbers takes a parameter called ``chance``, a ``Chance``, whose numbers belong to the rows. The generators of torch, NumPy
and Python start every batch from a seed of its own; but threads share them, so there what a function draws from them is anybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from hasten.contract.data import Batches
from hasten.contract.errors import Refusal
from hasten.contract.watch import Watch
from hasten.data.faults import Faults
from hasten.data.making import Making, Map, wants_chance
from hasten.data.order import Order
from hasten.data.running import runners
from hasten.data.running.on_device import moved
from hasten.data.source import Source


@dataclass
class Place:
    """Where a pipeline stands: the pass, and how many rows of it were given out."""

    epoch: int = 0
    position: int = 0
    begun: bool = False  # that pass was iterated here; iterating again means the next one


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Rows, their order, and what becomes of them. Every method returns a new pipeline; nothing is read before iteration.

    Iterating makes one pass; iterating again the next one, in its own order, also when the first was left early. What does not change
    the batches (``prefetch``, ``share``, ``skip_bad``, ``to``) shares the place, so ``for batch in train.to(device)`` goes on, too.
    """

    source: Source
    batch_size: int | None = None
    seed: int = 0
    shuffled: bool = False
    window: int | None = None
    drop_last: bool = False
    sample_maps: tuple[Map, ...] = ()
    batch_maps: tuple[Map, ...] = ()
    collate_fn: Callable[[list], Any] | None = None
    runner: runners.Runner = field(default_factory=runners.Here)
    rank: int = 0
    world: int = 1
    device: torch.device | None = None
    faults: Faults = field(default_factory=Faults)
    place: Place = field(default_factory=Place, repr=False)

    # ---- what the user says

    def shuffle(self, seed: int = 0, window: int | None = None) -> Pipeline:
        """A new random order every pass, a function of (seed, epoch).

        Args:
            window: mixes only so many runs of rows (row groups, shards) at a time, for data that are too many to be read in any order.
        """
        _at_least("shuffle(window=)", window, 1, optional=True)
        _at_least("shuffle(seed=)", seed, 0)
        return self._anew(seed=seed, shuffled=True, window=window)

    def map(self, function: Callable) -> Pipeline:
        """Before ``batch``: ``function(sample)``; after it: ``function(batch)``; with ``chance=``, if it has a parameter of that name.

        Samples are stacked to a batch in the nesting that they have: a tuple of samples' parts becomes a tuple of tensors.

        Raises:
            Refusal: no function, or one that wants several other things.
        """
        if not callable(function):
            raise Refusal(f"map() wants a function, not a {type(function).__name__}")
        random_ones = sum(each.stage is not None for each in (*self.sample_maps, *self.batch_maps))
        made = Map(function, random_ones if wants_chance(function) else None)
        if self.batch_size is None:
            return self._anew(sample_maps=(*self.sample_maps, made))
        return self._anew(batch_maps=(*self.batch_maps, made))

    def batch(self, size: int, *, drop_last: bool = False, collate: Callable[[list], Any] | None = None) -> Pipeline:
        """Batches of ``size`` rows; with several ranks, that is what all of them see together in a step.

        Args:
            collate: ``(list of samples) -> batch``; as torch's default, but with tuples, where nobody says.
        """
        _at_least("batch(size)", size, 1)
        return self._anew(batch_size=size, drop_last=drop_last, collate_fn=collate)

    def cache(
        self, where: str = "memory", *, gigabytes: float | None = None, folder: str | Path | None = None, watch: Watch | None = None
    ) -> Pipeline:
        """Keeps the samples, as the maps so far leave them, so that they are read and decoded once; filled when first iterated.

        Args:
            where: "memory", for this pipeline alone, or "disk", for all processes and later runs; found again by the content of the
                data and of the maps, so that it is made anew when one of them changed.
            gigabytes: (10**9 bytes) that it may take; None: half of what is free.
            folder: of a disk cache; None: HASTEN_CACHE, or hasten's folder among the user's caches.
            watch: ``(what, done, seconds left)`` is told how far the filling is; None: a Notice when it takes long.

        Raises:
            Refusal: a map that wants random numbers comes before it, or whose function cannot be told from a changed one.
            Refusal: when first iterated, if the samples differ in shape or need more than was allowed.
        """
        from hasten.data.caching.cache import cached

        if self.batch_size is not None:
            raise Refusal("cache() keeps samples; it belongs before .batch()")
        source = cached(self.source, self.sample_maps, where, gigabytes, folder, watch)
        return self._anew(source=source, sample_maps=())

    def prefetch(self, batches: int = 2, *, threads: int = 0, processes: int = 0, timeout: float | None = 600.0) -> Pipeline:
        """Computes batches ahead of their use, in threads (for what leaves Python's lock) or processes (for what does not).

        Args:
            timeout: seconds that may be waited for a batch before it is told that somebody hangs; None: for ever.
        """
        for name, value in {"batches": batches, "threads": threads, "processes": processes}.items():
            _at_least(f"prefetch({name}=)", value, 0)
        if threads and processes:
            raise Refusal("prefetch() takes threads or processes, not both")
        if timeout is not None and not timeout > 0:
            raise Refusal(f"prefetch(timeout=) is in seconds, above 0, not {timeout!r}")
        return self._with(runner=_runner(batches, threads, processes, timeout))

    def share(self, rank: int, world: int) -> Pipeline:
        """This rank's part of every batch."""
        if not 0 <= rank < world:
            raise Refusal(f"share(rank={rank}, world={world}): a rank is from 0 to world - 1")
        return self._with(rank=rank, world=world)

    def skip_bad(self, at_most: int) -> Pipeline:
        """Leaves out rows that cannot be read, up to ``at_most`` of them; ``faults.found`` lists them."""
        _at_least("skip_bad(at_most)", at_most, 0)
        return self._with(faults=Faults(at_most))

    def to(self, device: str | torch.device) -> Pipeline:
        """Batches on a device; a GPU's are copied from page-locked memory while the step before goes on."""
        return self._with(device=torch.device(device))

    # ---- iterating, and the place

    def __iter__(self) -> Iterator:
        place = self.place
        if place.begun:
            place.epoch, place.position = place.epoch + 1, 0
        place.begun = True
        batches, rows = self.epoch(place.epoch, self._order().number_at(place.position)), len(self.source)
        for batch in batches:
            place.position = min(place.position + self.batch_size, rows)
            yield batch
            del batch  # or its memory could not be used again for the next one
        place.epoch, place.position, place.begun = place.epoch + 1, 0, False

    def __len__(self) -> int:
        """Batches a pass has; a TypeError as long as nobody has said how large they are."""
        if self.batch_size is None:
            raise TypeError("the pipeline has no length yet; end it with .batch(size)")
        return len(self._order())

    def state_dict(self) -> dict[str, int]:
        """The place: (seed, epoch, position). ``position`` counts rows, whatever the batch size and the number of ranks."""
        return {"seed": self.seed, "epoch": self.place.epoch, "position": self.place.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration goes on at that place.

        Raises:
            Refusal: the place of another order, or none at all; no batch begins there; the pipeline has no batch size yet.
        """
        if not {"seed", "epoch", "position"} <= state.keys():
            raise Refusal(f"a place has seed, epoch and position; this one has {', '.join(map(str, state)) or 'nothing'}")
        if state["seed"] != self.seed:
            raise Refusal(f"this place belongs to seed {state['seed']}, the pipeline has {self.seed}; say .shuffle(seed={state['seed']})")
        epoch, position = int(state["epoch"]), int(state["position"])
        self._order().number_at(position)
        self._go_to(epoch, position)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this pass: what trainers call on a DistributedSampler. A place that was loaded in this pass stays."""
        if self.place.begun or self.place.epoch != epoch:
            self._go_to(epoch, 0)

    # ---- what trainers expect of a DataLoader besides

    batch_sampler: ClassVar[None] = None  # as of a DataLoader over whole batches
    pin_memory: ClassVar[bool] = False

    @property
    def dataset(self) -> Source:
        return self.source

    @property
    def sampler(self) -> Pipeline:
        return self  # trainers call its set_epoch

    @property
    def num_workers(self) -> int:
        return getattr(self.runner, "processes", 0)

    # ---- what the engine calls

    def epoch(self, epoch: int, start: int = 0) -> Iterator:
        """The batches of one pass from number ``start`` on; the place is left alone."""
        self.source.prepare(self.runner, self.faults)
        order = self._order()
        make = Making(
            self.source, order.batches(epoch), self.seed, epoch, self.sample_maps, self.batch_maps, self.collate_fn,
            self.rank, self.world, self.faults, seeded=not isinstance(self.runner, runners.Threads),
        )  # fmt: skip
        noted = self._noted(self.runner(make, range(start, len(order))))
        return noted if self.device is None else moved(noted, self.device)

    def batches(self, batch_size: int, seed: int, training: bool) -> Batches:
        """This pipeline as the engine's Batches; for validation in its own batch size, if it has one, and never shuffled.

        Args:
            seed: the run's: another run, another order, other random numbers.
        """
        if training:
            pipeline = self._anew(batch_size=batch_size, seed=self.seed + seed)
        else:
            pipeline = self._anew(batch_size=self.batch_size or batch_size, shuffled=False)
        return Batches(epoch=pipeline.epoch, length=len(pipeline), training=training, seekable=True)

    def _noted(self, made: Iterator) -> Iterator:
        for batch, bad in made:
            for fault in bad:
                self.faults.note(fault)
            yield batch
            del batch

    def _with(self, **changes) -> Pipeline:
        """The same batches, at the same place."""
        return replace(self, **changes)

    def _anew(self, **changes) -> Pipeline:
        """Other batches, from the start."""
        return replace(self, place=Place(), **changes)

    def _go_to(self, epoch: int, position: int) -> None:
        self.place.epoch, self.place.position, self.place.begun = epoch, position, False

    def _order(self) -> Order:
        if self.batch_size is None:
            raise Refusal("the pipeline does not know its batch size; end it with .batch(size)")
        order = Order(
            len(self.source), self.batch_size, self.seed if self.shuffled else None, self.drop_last, self.window,
            None if self.window is None else self.source.edges(),
        )  # fmt: skip
        smallest = order.rows - (len(order) - 1) * self.batch_size if not self.drop_last else self.batch_size
        if len(order) and smallest < self.world:
            raise Refusal(f"{self.world} ranks cannot share a batch of {smallest} rows; take larger ones, or .batch(size, drop_last=True)")
        return order


def _runner(ahead: int, threads: int, processes: int, timeout: float | None) -> runners.Runner:
    if processes:
        from hasten.data.running.processes import Processes

        return Processes(processes, ahead, timeout)
    return runners.Threads(max(1, threads), ahead, timeout) if ahead or threads else runners.Here()


def _at_least(name: str, value, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Refusal(f"{name} must be a whole number of at least {least}, not {value!r}")
