"""Reads a few samples: whether they are random, and whether a script has changed its dataset since it was read."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from hasten.core.data import BatchSource, LoaderSpec
from hasten.core.errors import HastenWarning
from hasten.core.run_context import RunContext
from hasten.utils.rng import get_rng_state, preserve_rng_state
from hasten.utils.tree import bitwise_equal

MAX_SAMPLES = 32


def probed(indices: Sequence[int]) -> list[int]:
    """Up to 32 of the indices, spread evenly."""
    return list(indices[:: max(1, -(-len(indices) // MAX_SAMPLES))])


def probe_samples(spec: LoaderSpec, seed: int = 0, indices: list[int] | None = None) -> list[Any]:
    """The samples with these indices, read in this process with every random generator started from ``seed``.

    Without ``indices`` up to 32, spread evenly over the dataset; none of an empty one.
    """
    wanted = probed(range(len(spec.dataset))) if indices is None else indices
    if not wanted:
        return []
    one_batch = dataclasses.replace(spec, batch_sampler=lambda epoch: [wanted], length=1, collate=list, loader=None)
    in_this_process = dataclasses.replace(one_batch, num_workers=0, pin_memory=False)
    return next(iter(spec.build(in_this_process).epoch(seed, 0)))


def is_deterministic(spec: LoaderSpec) -> bool:
    """Whether the probed samples are equal under three random seeds, so that reading them once is enough.

    A script that reads them in its own process must not draw random numbers for them either: it draws the order of the
    samples and its dropout from the same generators.
    """
    first, *others = (probe_samples(spec, seed) for seed in range(3))
    is_equal = all(bitwise_equal(first, other) for other in others)
    return is_equal and (spec.loader is None or spec.num_workers > 0 or not _draws_random_numbers(spec.dataset))


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
        return dict(zip(indices, probe_samples(spec, indices=indices), strict=True))


def warn_of_changed_dataset(method: str) -> None:
    """Issues a HastenWarning that the samples ``method`` stored are read anew. Python shows the same warning once."""
    message = f"{method}: the script has changed its dataset since the last epoch; the stored samples are read anew"
    warnings.warn(message, HastenWarning, stacklevel=2)
