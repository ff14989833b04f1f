"""``hasten data bench``: what each stage of a task's input gives, alone and together, and what the training step would eat.

The step's appetite is what it takes when one batch is given to it again and again: as much as any input can be worth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from inspect import ismethod
from itertools import count
from statistics import median

import numpy
import torch
from torch.utils.data import default_collate

from hasten.contract.batch import map_tensors, size
from hasten.contract.data import Batches, Samples
from hasten.contract.errors import Failure
from hasten.contract.watch import Watch, silent
from hasten.data.pipeline import Pipeline
from hasten.data.running.runners import Here
from hasten.data.source import BadRow, Source
from hasten.engine.devices import pick_device
from hasten.engine.failures import explained
from hasten.engine.plan import Program, build
from hasten.engine.seeds import undisturbed
from hasten.engine.skipping import tolerant
from hasten.engine.tasks import TaskRef

SHARES = {"appetite": 0.25, "stages": 0.3, "copy": 0.1, "together": 0.35}  # of the budget
WARM_UP = 3  # steps
READINGS = 5
ENOUGH = 0.97  # of the appetite is as good as all of it
_END = object()


def bench(
    task, *, skip_bad: int | None = None, budget: float = 20.0, device: str | None = None, seed: int = 0, watch: Watch = silent
) -> dict:
    """Samples a second of each stage of a task's input, alone and together, and of its training step on a batch that is there.

    Args:
        task: whatever names a task; its training data may be a dataset, a DataLoader, a stream or a ``Pipeline``.
        skip_bad: so many rows that cannot be read are left out, of a ``Pipeline``, as in ``train``.
        budget: seconds, about.

    Returns:
        "task", "device", "batch_size", "stages" ({"read", "decode", "transform", "batch", "copy": samples a second of one thread, None
        where there is nothing to do or where it cannot be told apart; without "decode", "read" holds it, and a dataset's its transforms,
        too}), "together" (as the training would get them, workers included), "first_batch_seconds", "appetite" (samples a second that
        the training step would eat if the next batch were always there), "ahead" (whether batches are computed during the step), "waits"
        (the share of a step spent waiting), "limit" (the slowest stage, or "step"), "left_out" ({"row", "where", "why"} of what could
        not be read, and was met), "seconds".

    Raises:
        Refusal, Failure: the task cannot be built, its data not read, or its model not be trained.
    """
    began, device = time.perf_counter(), pick_device(device)
    ref = TaskRef.of(task)
    task = ref.load() if skip_bad is None else tolerant(ref.load(), skip_bad)
    watch("building the task", 0.0, budget)
    with undisturbed():
        with _explaining("building the run", task.batch_size):
            program = build(task, device=device, seed=seed)
        with program.process_context():
            data = program.task.train_data
            batches = data.batches(program.plan.batch_size, seed, training=True) if isinstance(data, Pipeline) else program.train
            watch("the step's appetite", 0.05, 0.95 * budget)
            with _explaining("reading the first batch", program.plan.batch_size):
                batch = _first(batches)
            with _explaining("the training step", program.plan.batch_size):
                appetite = _appetite(program, batch, SHARES["appetite"] * budget)
            watch("each stage alone", 0.3, 0.7 * budget)
            with _explaining("reading the data", program.plan.batch_size):
                stages = _alone(program, data, batches, budget)
                stages["copy"] = _copying(program, batch, SHARES["copy"] * budget)
                watch("all stages together", 0.65, 0.35 * budget)
                together, first = _together(program, batches, SHARES["together"] * budget)
    ahead = _works_ahead(data)
    return {
        "task": str(ref), "device": device, "batch_size": size(batch), "stages": stages, "together": together,
        "first_batch_seconds": first, "appetite": appetite, "ahead": ahead, "waits": _waits(together, appetite, ahead),
        "limit": _limit(stages, together, appetite, ahead), "left_out": data.faults.listed() if isinstance(data, Pipeline) else [],
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


@contextmanager
def _explaining(where: str, batch_size: int | None) -> Iterator[None]:
    """What the task's own code raises inside, in one line."""
    try:
        yield
    except Exception as error:
        raise explained(error, where, batch_size or 0) from error


def _waits(together: float, appetite: float, ahead: bool) -> float:
    """The share of the time that the step waits; batches that are computed ahead cost only what they come too late."""
    return max(0.0, 1 - together / appetite) if ahead else appetite / (appetite + together)


def _limit(stages: dict, together: float, appetite: float, ahead: bool) -> str:
    if ahead and together >= ENOUGH * appetite:
        return "step"
    told = {name: rate for name, rate in stages.items() if rate}
    slowest = min(told, key=told.get, default="input")
    return slowest if ahead or not told or told[slowest] < appetite else "step"


def _works_ahead(data) -> bool:
    """Whether batches are computed while the step goes on."""
    return not isinstance(data.runner, Here) if isinstance(data, Pipeline) else getattr(data, "num_workers", 0) > 0


# ---- the step, and the input as a whole


def _first(batches: Batches):
    for batch in batches.epoch(0, 0):
        return batch
    raise Failure("the training data gave no batch")


def _appetite(program: Program, batch, seconds: float) -> float:
    """Samples a second of training steps on one batch."""
    batch = program.to_device(batch)

    def step() -> None:
        program.forward_backward(batch)
        program.grad_transform()
        program.optimizer_step()
        program.zero_grad()

    for _ in range(WARM_UP):
        step()
    return size(batch) * _rate(program, step, seconds)


def _copying(program: Program, batch, seconds: float) -> float | None:
    """Samples a second that are copied to the device; None where they stay in the computer's memory."""
    if program.run.device.type == "cpu":
        return None
    return size(batch) * _rate(program, lambda: map_tensors(lambda tensor: tensor.to(program.run.device), batch), seconds)


def _rate(program: Program, work: Callable[[], object], seconds: float) -> float:
    """How often a second something can be done: the median of some readings, so that a moment of a busy machine does not count."""
    until, rates = time.perf_counter() + seconds, []
    while not rates or (len(rates) < READINGS and time.perf_counter() < until):
        rates.append(_once(program, work, seconds / READINGS))
    return median(rates)


def _once(program: Program, work: Callable[[], object], seconds: float) -> float:
    _synchronise(program)
    began, done = time.perf_counter(), 0
    while not done or time.perf_counter() - began < seconds:
        work()
        done += 1
    _synchronise(program)
    return done / (time.perf_counter() - began)


def _together(program: Program, batches: Batches, seconds: float) -> tuple[float, float]:
    """(samples a second as the training would get them, seconds until the first batch)."""
    began, samples, first = time.perf_counter(), 0, None
    for batch in _endless(batches):
        program.to_device(batch)
        if first is None:
            _synchronise(program)
            first = time.perf_counter() - began
            continue
        samples += size(batch)
        if time.perf_counter() - began - first > seconds:
            break
    _synchronise(program)
    return samples / (time.perf_counter() - began - first), first


def _endless(batches: Batches) -> Iterator:
    for epoch in count():
        yield from batches.epoch(epoch, 0)


def _synchronise(program: Program) -> None:
    if program.run.device.type == "cuda":
        torch.cuda.synchronize(program.run.device)


# ---- each stage alone, in one thread


def _alone(program: Program, data, batches: Batches, budget: float) -> dict:
    stages = dict.fromkeys(("read", "decode", "transform", "batch"))
    if isinstance(data, Pipeline):
        return stages | _of_pipeline(data, program.plan.batch_size, SHARES["stages"] * budget)
    return stages | ({} if batches.samples is None else _of_samples(batches.samples, SHARES["stages"] * budget))


def _of_pipeline(pipeline: Pipeline, batch_size: int, seconds: float) -> dict:
    source, transform = _Timed(pipeline.source), _Stopwatch()
    maps = {
        name: tuple(replace(each, function=transform.around(each.function)) for each in getattr(pipeline, name))
        for name in ("sample_maps", "batch_maps")
    }
    timed = replace(pipeline, source=source, batch_size=batch_size, runner=Here(), device=None, **maps)
    epochs = (timed.epoch(epoch) for epoch in count())
    samples, whole = _drawn(epochs, seconds)
    spent = source.spent() | {"transform": transform.seconds}
    if pipeline.sample_maps or pipeline.collate_fn:
        spent["batch"] = whole - sum(spent.values())
    return {name: samples / each if each else None for name, each in spent.items()}


def _of_samples(samples: Samples, seconds: float) -> dict:
    watches = {"read": _Stopwatch(), "batch": _Stopwatch()}
    dataset = samples.dataset
    read = getattr(dataset, "__getitems__", None) or (lambda indices: [dataset[index] for index in indices])
    read, collate = watches["read"].around(read), watches["batch"].around(samples.collate or default_collate)
    epochs = (map(collate, map(read, samples.order(epoch))) for epoch in count())
    drawn, _ = _drawn(epochs, seconds)
    return {name: drawn / stopwatch.seconds for name, stopwatch in watches.items()}


def _drawn(epochs: Iterator[Iterator], seconds: float) -> tuple[int, float]:
    """(samples of the batches that were drawn, the seconds it took)."""
    samples, whole = 0, 0.0
    for epoch in epochs:
        began = time.perf_counter()
        for batch in epoch:
            samples += size(batch)
            if whole + time.perf_counter() - began > seconds:
                return samples, whole + time.perf_counter() - began
        whole += time.perf_counter() - began
    raise AssertionError("passes never end")


class _Stopwatch:
    """The seconds that were spent in some functions."""

    def __init__(self):
        self.seconds = 0.0

    def around(self, function: Callable) -> Callable:
        def timed(*arguments, **named):
            began = time.perf_counter()
            try:
                result = function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began
            return self._over(result) if isinstance(result, Generator) else result

        return timed

    def _over(self, made: Generator) -> Iterator:
        """What comes one by one, each timed when it is asked for."""
        ask = self.around(partial(next, made, _END))
        while (each := ask()) is not _END:
            yield each


class _Timed(Source):
    """A source that is timed while it reads; one that gets its bytes through ``raw`` is timed there, too: what is left is decoding."""

    def __init__(self, source: Source):
        self.source, self._whole, self._bytes = source, _Stopwatch(), _Stopwatch()
        self._decodes = ismethod(getattr(source, "raw", None))
        if self._decodes:
            source = copy(source)
            source.raw = self._bytes.around(source.raw)
        self._timed = self._whole.around(source.read)

    def spent(self) -> dict[str, float]:
        """The seconds of each stage."""
        if not self._decodes:
            return {"read": self._whole.seconds}
        return {"read": self._bytes.seconds, "decode": self._whole.seconds - self._bytes.seconds}

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: numpy.ndarray):
        return self._timed(rows)

    def identity(self) -> dict:
        return self.source.identity()

    def edges(self) -> numpy.ndarray:
        return self.source.edges()

    def known_bad(self) -> list[BadRow]:
        return self.source.known_bad()

    def prepare(self, runner, faults) -> None:
        self.source.prepare(runner, faults)
