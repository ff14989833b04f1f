"""Input benchmark of ``hasten diagnose``: throughput of the input pipeline's stages against the training step's.

``step_throughput`` is measured by training on one batch again and again: an input pipeline that is faster gains
nothing.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from inspect import ismethod
from itertools import count
from statistics import median
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from hasten.core.data import BatchSource, LoaderSpec
from hasten.core.errors import RunError
from hasten.core.types import Batch
from hasten.data.pipeline import Pipeline
from hasten.data.source import Source
from hasten.data.workers.runners import InlineRunner
from hasten.engine.devices import synchronize
from hasten.engine.error_messages import explain_error
from hasten.engine.plan import Program
from hasten.reporting.result_schema import InputThroughput
from hasten.utils.batch import batch_size, map_tensors
from hasten.utils.graph_batch import sampling_and_fetch

BUDGET_SHARES = {"step_throughput": 0.25, "stages": 0.3, "copy": 0.1, "end_to_end": 0.35}
WARM_UP_STEPS = 3
MEASUREMENTS = 5  # their median is reported
FAST_ENOUGH = 0.97  # of step_throughput: a prefetched input pipeline that reaches it is no bottleneck
STAGES = ("read", "decode", "map", "batch", "copy")
_END = object()


def measure_input(program: Program, budget: float) -> InputThroughput:
    """Measures the input pipeline of a built run. Trains the model while doing so: call it last.

    Never raises: ``not_measured`` holds the reason for what cannot be measured.

    Args:
        program: the run; ``program.train`` is the source of its batches.
        budget: seconds to spend, exceeded by at most one batch or one step per measurement.
    """
    data, batch_size = program.task.train_data, program.plan.batch_size
    not_measured: dict[str, str] = {}

    def attempt(name: str, measure: Callable, *args: Any) -> Any:
        try:
            return measure(*args)
        except Exception as error:
            not_measured[name] = str(explain_error(error, f"measuring {name}", batch_size))
            return None

    seconds = {name: share * budget for name, share in BUDGET_SHARES.items()}
    batch = attempt("first_batch", _first_batch, program.train)
    step = rate = first = None
    stages = dict.fromkeys(STAGES)
    if batch is not None:
        step = attempt("step_throughput", _step_throughput, program, batch, seconds["step_throughput"])
        stages |= attempt("stages", _stage_throughput, program, seconds["stages"], not_measured) or {}
        stages["copy"] = attempt("copy", _copy_throughput, program, batch, seconds["copy"])
        rate, first = attempt("end_to_end", _end_to_end, program, seconds["end_to_end"]) or (None, None)
    prefetched = _is_prefetched(program)
    wait = bottleneck = None
    if prefetched is None:
        not_measured["prefetched"] = "a method of the recipe reads the samples in a way of its own"
    elif step and rate:
        wait = max(0.0, 1 - rate / step) if prefetched else step / (step + rate)
        bottleneck = _bottleneck(stages, rate, step, prefetched)
    measured: Any = {
        "stages": stages,
        "step_throughput": step,
        "end_to_end": rate,
        "first_batch_seconds": first,
        "prefetched": prefetched,
        "data_wait_fraction": wait,
        "bottleneck": bottleneck,
        "skipped_rows": data.faults.listed() if isinstance(data, Pipeline) else [],
        "not_measured": not_measured,
    }
    return measured


def _bottleneck(stages: dict, end_to_end: float, step: float, prefetched: bool) -> str:
    if prefetched and end_to_end >= FAST_ENOUGH * step:
        return "step"
    rates = {name: rate for name, rate in stages.items() if rate}
    slowest = min(rates, key=rates.__getitem__, default="input")
    return slowest if prefetched or not rates or rates[slowest] < step else "step"


def _is_prefetched(program: Program) -> bool | None:
    """Whether batches are computed while the step runs; None if a method reads the samples in a way of its own."""
    data, batches = program.task.train_data, program.train
    if batches.spec is not None:
        return batches.spec.num_workers > 0
    if batches.with_workers is not None:
        return batches.workers.num_workers > 0
    dataset = data if isinstance(data, Pipeline) else getattr(data, "dataset", data)
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    return getattr(data, "num_workers", 0) > 0 if is_stream and not isinstance(data, Pipeline) else None


# ---- the training step and the whole input pipeline


def _first_batch(batches: BatchSource) -> Batch:
    for batch in batches.epoch(0, 0):
        return batch
    raise RunError("the training data gave no batch")


def _step_throughput(program: Program, batch: Batch, seconds: float) -> float:
    """Samples/s of training steps on one batch that is used again and again: no input is read."""
    batch = program.to_device(batch)

    def step() -> None:
        program.forward_backward(batch)
        program.grad_transform()
        program.optimizer_step()
        program.zero_grad()

    deadline = time.perf_counter() + seconds
    for _ in range(WARM_UP_STEPS):
        step()
        if time.perf_counter() > deadline:
            break
    return batch_size(batch) * _calls_per_second(program, step, seconds)


def _copy_throughput(program: Program, batch: Batch, seconds: float) -> float | None:
    """Samples/s copied to the device; None on the CPU, where nothing is copied."""
    if program.run.device.type == "cpu":
        return None
    device = program.run.device
    copy_batch = partial(map_tensors, lambda tensor: tensor.to(device), batch)
    return batch_size(batch) * _calls_per_second(program, copy_batch, seconds)


def _calls_per_second(program: Program, work: Callable[[], object], seconds: float) -> float:
    """Calls of ``work`` per second: the median of several measurements within ``seconds``."""
    deadline, rates = time.perf_counter() + seconds, []
    while not rates or (len(rates) < MEASUREMENTS and time.perf_counter() < deadline):
        synchronize(program.run.device)
        began, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - began < seconds / MEASUREMENTS:
            work()
            calls += 1
        synchronize(program.run.device)
        rates.append(calls / (time.perf_counter() - began))
    return median(rates)


def _end_to_end(program: Program, seconds: float) -> tuple[float, float]:
    """(samples/s as the training loop gets them, seconds until the first batch)."""
    began = time.perf_counter()
    batches = (program.to_device(batch) for epoch in count() for batch in program.train.epoch(epoch, 0))
    next(batches)
    synchronize(program.run.device)
    first = time.perf_counter() - began
    samples, _ = _draw(batches, seconds)
    synchronize(program.run.device)
    return samples / (time.perf_counter() - began - first), first


# ---- each stage alone, in one thread


def _stage_throughput(program: Program, seconds: float, not_measured: dict[str, str]) -> dict:
    data, samples = program.task.train_data, program.train.spec
    if isinstance(data, Pipeline):
        return _pipeline_stages(data, program.plan.batch_size, seconds, not_measured)
    if samples is None:
        why = "the batches are not read sample by sample from a map-style dataset"
        not_measured["stages"] = f"{why}; end_to_end measures them"
        return {}
    graph_parts = sampling_and_fetch(samples.collate)
    if graph_parts is not None:
        not_measured["decode"] = "a graph in memory is not decoded: its batches are sampled, and their features fetched"
        return _timed_stages(samples, seconds, dict(zip(("sampling", "features"), graph_parts, strict=True)))
    not_measured["decode"] = "read includes it, and the dataset's own transforms"
    dataset = samples.dataset
    read = getattr(dataset, "__getitems__", None) or (lambda indices: [dataset[index] for index in indices])
    return _timed_stages(samples, seconds, {"read": read, "batch": samples.collate or default_collate})


def _pipeline_stages(pipeline: Pipeline, batch_size: int, seconds: float, not_measured: dict[str, str]) -> dict:
    read, fetch, maps_watch = Stopwatch(), Stopwatch(), Stopwatch()
    has_raw = _has_raw(pipeline.source)
    if not has_raw:
        not_measured["decode"] = "read includes it: the source has no method raw() that only fetches the bytes"
    maps = {
        name: tuple(replace(each, function=maps_watch.time_calls(each.function)) for each in getattr(pipeline, name))
        for name in ("sample_maps", "batch_maps")
    }
    source = time_source(pipeline.source, read, fetch)
    timed = replace(pipeline, source=source, batch_size=batch_size, runner=InlineRunner(), device=None, **maps)
    samples, total = _draw((batch for epoch in count() for batch in timed.epoch(epoch)), seconds)
    spent = {"read": fetch.seconds, "decode": read.seconds - fetch.seconds} if has_raw else {"read": read.seconds}
    spent |= {"map": maps_watch.seconds}
    if pipeline.sample_maps or pipeline.collate_fn:
        spent["batch"] = total - sum(spent.values())
    return {name: samples / each if each else None for name, each in spent.items()}


def _timed_stages(samples: LoaderSpec, seconds: float, stages: dict[str, Callable]) -> dict:
    """Samples/s of each of two functions, the second of which gets what the first one makes of a batch's indices."""
    watches = {name: Stopwatch() for name in stages}
    first, second = (watches[name].time_calls(function) for name, function in stages.items())
    batches = (second(first(indices)) for epoch in count() for indices in samples.batch_sampler(epoch))
    drawn, _ = _draw(batches, seconds)
    return {name: drawn / watch.seconds for name, watch in watches.items()}


def _draw(batches: Iterator[Batch], seconds: float) -> tuple[int, float]:
    """Draws batches, of which there is no end, for about ``seconds``: (samples in them, seconds that it took)."""
    began, samples = time.perf_counter(), 0
    for batch in batches:
        samples += batch_size(batch)
        if time.perf_counter() - began > seconds:
            break
    return samples, time.perf_counter() - began


class Stopwatch:
    """Adds up the seconds spent in functions that ``time_calls`` wrapped."""

    def __init__(self):
        self.seconds = 0.0

    def time_calls(self, function: Callable) -> Callable:
        """Wraps a function so that its calls are timed; of a generator function, the computation of each item."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                result = function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
            return self._time_items(result) if isinstance(result, Generator) else result

        return timed

    def _time_items(self, generator: Generator) -> Iterator:
        ask = self.time_calls(partial(next, generator, _END))
        while (item := ask()) is not _END:
            yield item


def time_source(source: Source, read: Stopwatch, fetch: Stopwatch) -> Source:
    """A copy of a source whose ``read`` is timed by ``read``, and its ``raw``, which fetches bytes, by ``fetch``."""
    timed: Any = object.__new__(type(source))  # copy() would drop what a source leaves out when it is pickled
    vars(timed).update(vars(source))
    if _has_raw(source):
        vars(timed)["raw"] = fetch.time_calls(timed.raw)
    vars(timed)["read"] = read.time_calls(timed.read)
    return timed


def _has_raw(source: Source) -> bool:
    return ismethod(getattr(source, "raw", None))
