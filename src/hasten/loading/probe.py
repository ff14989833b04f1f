"""Reads a few samples before training, to see what they are and whether they are random."""

import dataclasses
from typing import Any

from hasten.core.data import LoaderSpec
from hasten.utils.tree import bitwise_equal

MAX_SAMPLES = 32


def probe_samples(spec: LoaderSpec, seed: int = 0) -> list[Any]:
    """Up to 32 samples, spread evenly over the dataset, read with every random generator started from ``seed``.

    None of an empty dataset.
    """
    samples = len(spec.dataset)
    if not samples:
        return []
    indices = list(range(0, samples, -(-samples // MAX_SAMPLES)))
    one_batch = dataclasses.replace(spec, batch_sampler=lambda epoch: [indices], length=1, collate=list, loader=None)
    in_this_process = dataclasses.replace(one_batch, num_workers=0, pin_memory=False)
    return next(iter(spec.build(in_this_process).epoch(seed, 0)))


def is_deterministic(spec: LoaderSpec) -> bool:
    """Whether the probed samples are equal under three random seeds, so that reading them once is enough."""
    first, *others = (probe_samples(spec, seed) for seed in range(3))
    return all(bitwise_equal(first, other) for other in others)
