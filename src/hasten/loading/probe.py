"""Reads a few samples: whether they are random, and whether a script has changed its dataset since it was read."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from hasten.core.data import BatchSource, LoaderSpec
from hasten.core.errors import HastenWarning
from hasten.core.run_context import RunContext
from hasten.utils.rng import get_rng_state, preserve_rng_state
from hasten.utils.tree import bitwise_equal

MAX_SAMPLES = 32
WORKER_OPTIONS = "worker_init_fn", "multiprocessing_context", "timeout", "in_order"


def probed(indices: Sequence[int]) -> list[int]:
    """Up to 32 of the indices, spread evenly."""
    return list(indices[:: max(1, -(-len(indices) // MAX_SAMPLES))])


def probe_samples(spec: LoaderSpec, indices: list[int] | None = None, in_worker: bool = False) -> list[Any]:
    """The samples with these indices. Without ``indices``: up to 32, spread evenly over the dataset, if it has any.

    ``in_worker``: in a worker process, where the spec has any. What a dataset opens when it is first read, such as a
    file, would otherwise be inherited by workers that start later, which then read from one position.
    """
    (samples,) = _probe(spec, 1, indices, in_worker)
    return samples


def _probe(
    spec: LoaderSpec, times: int, indices: list[int] | None = None, in_worker: bool = True
) -> Iterator[list[Any]]:
    """The result of ``probe_samples``, so many times, each with other random seeds."""
    wanted = probed(range(len(spec.dataset))) if indices is None else indices
    if not wanted:
        yield from [list[Any]()] * times
        return
    own = {name: getattr(spec.loader, name, None) for name in WORKER_OPTIONS}  # no DataLoader: samples are seeded
    batches = dataclasses.replace(
        spec,
        batch_sampler=lambda epoch: [wanted] * times,
        length=times,
        collate=list,
        num_workers=min(1, spec.num_workers) if in_worker else 0,
        prefetch_factor=1,
        pin_memory=False,
        persistent_workers=False,
        loader=None if spec.loader is None else SimpleNamespace(**own),
    )
    yield from spec.build(batches).epoch(0, 0)


def is_deterministic(spec: LoaderSpec) -> bool:
    """Whether the probed samples are equal under three random seeds, so that reading them once is enough.

    A script that reads them in its own process must not draw random numbers for them either: it draws the order of the
    samples and its dropout from the same generators.
    """
    batches = _probe(spec, times=3)
    first = next(batches)
    equal = [bitwise_equal(first, other) for other in batches]  # to the end, so that the worker ends
    return all(equal) and (spec.loader is None or spec.num_workers > 0 or not _draws_random_numbers(spec.dataset))


def _draws_random_numbers(dataset: Any) -> bool:
    with preserve_rng_state():
        before = get_rng_state()
        for index in probed(range(len(dataset))):
            dataset[index]
        return not bitwise_equal(before, get_rng_state())


def script_may_change(spec: LoaderSpec | None, run: RunContext) -> bool:
    """Whether a script may change the dataset between two epochs, so that samples of an earlier epoch may be outdated.

    Persistent workers of the script's own DataLoader read the dataset as it was at their first epoch.
    """
    return run.services.in_script and spec is not None and not getattr(spec.loader, "persistent_workers", False)


def reread_samples(batches: BatchSource, run: RunContext, stored: Sequence[int]) -> dict[int, Any]:
    """Returns {index: sample}, read anew from the dataset, of up to 32 of the ``stored`` indices.

    Empty if no script can have changed the dataset (such as its negative samples or its transform) since they were
    stored. Restores the random generators.
    """
    spec = batches.spec
    if spec is None or not script_may_change(spec, run):
        return {}
    indices = probed([index for index in stored if index < len(spec.dataset)])
    if not indices:
        return {}
    with preserve_rng_state(*batches.generators):
        return dict(zip(indices, probe_samples(spec, indices, in_worker=True), strict=True))


def warn_of_changed_dataset(method: str) -> None:
    """Issues a HastenWarning that the samples ``method`` stored are read anew. Python shows the same warning once."""
    message = f"{method}: the script has changed its dataset since the last epoch; the stored samples are read anew"
    warnings.warn(message, HastenWarning, stacklevel=2)
