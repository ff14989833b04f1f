"""Pipelines that draw, map and fail; defined at module level, so that processes can import them."""

import os
import signal
import time

import numpy
import torch

from hasten.data import Source, arrays
from hasten.data.source import BadRow

ROWS, BATCH = 101, 16


class Bad(Source):
    """Numbers, some of which cannot be read."""

    def __init__(self, bad, rows=ROWS):
        self.bad, self.rows = set(bad), rows

    def __len__(self):
        return self.rows

    def read(self, rows):
        for row in rows.tolist():
            if row in self.bad:
                raise BadRow(row, f"numbers.txt line {row + 1}", "no number")
        return torch.from_numpy(rows.copy())

    def fingerprint(self):
        return {"bad": sorted(self.bad)}


class Runs(Source):
    """Numbers in chunks of unequal length."""

    def __init__(self, edges):
        self.cuts = numpy.array(edges)

    def __len__(self):
        return int(self.cuts[-1])

    def read(self, rows):
        return torch.from_numpy(rows.copy())

    def fingerprint(self):
        return {}

    def chunk_offsets(self):
        return self.cuts


def scaled(sample, rng):
    number, label = sample
    return number * (1 + rng.uniform()), label


def doubled(sample):
    return sample[0] * 2, sample[1]


def shifted(batch, rng):
    return batch[0] + rng.uniform()[:, None], batch[1]


def random_pipeline(rows=ROWS):
    """Draws once for every sample and twice for every batch."""
    numbers = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    return (
        arrays(numbers, torch.arange(rows))
        .shuffle(seed=5)
        .map(doubled)
        .map(scaled)
        .batch(BATCH)
        .map(shifted)
        .map(shifted)
    )


def equal(batches, others):
    """Returns whether two lists of batches have the same bits."""
    flat = [
        [tensor for batch in each for tensor in (batch if isinstance(batch, tuple) else (batch,))]
        for each in (batches, others)
    ]
    return (
        len(batches) == len(others)
        and len(flat[0]) == len(flat[1])
        and all(torch.equal(a, b) for a, b in zip(*flat, strict=True))
    )


class Killing:
    """Kills its worker process at the batch with row 50, this many times; ``directory`` counts across processes."""

    def __init__(self, directory, times):
        self.directory, self.times, self.parent = directory, times, os.getpid()

    def __call__(self, batch):
        if 50 in batch.tolist() and os.getpid() != self.parent:
            done = len(list(self.directory.iterdir()))
            if done < self.times:
                (self.directory / str(done)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return batch


def hanging(batch):
    if 50 in batch.tolist():
        time.sleep(600)
    return batch
