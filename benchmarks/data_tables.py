"""A Parquet table, written with pyarrow's defaults, to shuffled batches of floats: (matrix of 15 columns, target).

*First epoch*: from opening to the end of one epoch, decoding included; the file is in the page cache. *From the cache*:
batches/s over successive epochs once everything is open.

"pyarrow + DataLoader" is what users write: ``read_table``, the columns as one tensor, ``TensorDataset``,
``DataLoader``. Beside it the same with whole batches (``__getitems__``), which is less known.

Figure: at least 3 times pyarrow + DataLoader in the first epoch and 10 times from the cache; at least tf.data and
datasets in both.
"""

from __future__ import annotations

import os
import sys

from _loaders import Loader, Passes, over, quiet, rates, scratch, seconds_of_a_pass, set_up, table, versions, words

quiet()

import numpy
import torch
from _common import finish, in_turns, interval, parser, print_line, show
from torch.utils.data import DataLoader, Dataset, TensorDataset

FIRST, CACHED = 3, 10  # required speedups
BATCH, FLOATS, INTEGERS, TARGET = 512, 12, 4, "i3"
OURS, ON_DISK, USUAL = "hasten", "hasten, disk cache", "pyarrow + DataLoader"
BOUND = "bound: gather"
ABREAST = ("tf.data", "datasets")


def write(path, rows: int) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    rng = numpy.random.default_rng(0)
    columns = {f"f{number}": rng.standard_normal(rows, numpy.float32) for number in range(FLOATS)}
    columns |= {f"i{number}": rng.integers(0, 10 ** (number + 1), rows, numpy.int32) for number in range(INTEGERS)}
    write_table(pyarrow.table(columns), path, row_group_size=1 << 17)


def hasten(path):
    from hasten.data import parquet

    return parquet(path, target=TARGET).shuffle(seed=0).batch(BATCH, drop_last=True)


def hasten_on_disk(path):
    from hasten.data import parquet

    return parquet(path, target=TARGET).cache("disk").shuffle(seed=0).batch(BATCH, drop_last=True)


def columns_of(path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the table as pyarrow reads it: the columns stacked into one float32 matrix, and the target."""
    from pyarrow.parquet import read_table

    read = read_table(path)
    arrays = [
        torch.from_numpy(read[name].to_numpy().astype(numpy.float32)) for name in read.column_names if name != TARGET
    ]
    return torch.stack(arrays, 1), torch.from_numpy(read[TARGET].to_numpy().astype(numpy.int64))


def usual(path):
    return DataLoader(TensorDataset(*columns_of(path)), batch_size=BATCH, shuffle=True, drop_last=True)


class Batched(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitems__(self, rows):
        index = torch.tensor(rows)
        return tuple(column[index] for column in self.columns)


def as_it_is(samples):
    return samples


def batched(path):
    return DataLoader(Batched(columns_of(path)), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=as_it_is)


def stateful(path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(
        Batched(columns_of(path)), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=as_it_is
    )


def tf_data(path):
    """tf.data cannot read Parquet; pyarrow does. Row numbers are shuffled and batched, followed by one gather per
    batch.
    """
    import tensorflow as tf

    matrix, target = (tf.constant(each.numpy()) for each in columns_of(path))
    rows = tf.data.Dataset.range(len(target)).shuffle(len(target)).batch(BATCH, drop_remainder=True)
    batches = rows.map(
        lambda index: (tf.gather(matrix, index), tf.gather(target, index)), num_parallel_calls=tf.data.AUTOTUNE
    )
    return Passes(batches.prefetch(tf.data.AUTOTUNE).as_numpy_iterator)


def hugging_face(path):
    """Its own reader with a new cache directory for every run; whole batches as tensors, as documented."""
    import datasets

    place = path.parent / f"datasets-{len(os.listdir(path.parent))}"
    read = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(place)).with_format(
        "torch"
    )

    def passes():
        for batch in read.shuffle(seed=0).iter(BATCH, drop_last_batch=True):
            target = batch.pop(TARGET)
            yield torch.stack([column.float() for column in batch.values()], 1), target.long()

    return Passes(passes)


class Bound:
    """The bound: rows gathered from a matrix in memory into memory that is already mapped."""

    def __init__(self, path):
        self.matrix, self.target = columns_of(path)
        self.into = torch.empty((BATCH, self.matrix.shape[1])), torch.empty(BATCH, dtype=torch.int64)

    def __iter__(self):
        for index in torch.randperm(len(self.target)).split(BATCH)[:-1]:
            yield (
                torch.index_select(self.matrix, 0, index, out=self.into[0]),
                torch.index_select(self.target, 0, index, out=self.into[1]),
            )


def fits(batch) -> bool:
    matrix, target = map(torch.as_tensor, batch)
    return matrix.shape == (BATCH, FLOATS + INTEGERS - 1) and matrix.dtype == torch.float32 and target.shape == (BATCH,)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=1.0, help="of each loader in a round, from the cache")
    options.add_argument("--rows", type=int, default=500_000)
    options.add_argument("--quick", action="store_true", help="fewer rows, three short rounds")
    options = options.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.rows = 3, 0.5, 100_000
    with scratch() as directory:
        path = directory / "table.parquet"
        write(path, options.rows)
        makers = {
            OURS: (hasten, None),
            USUAL: (usual, None),
            "pyarrow + DataLoader, __getitems__": (batched, None),
            "pyarrow + StatefulDataLoader, __getitems__": (stateful, "torchdata.stateful_dataloader"),
            "tf.data": (tf_data, "tensorflow"),
            "datasets": (hugging_face, "datasets"),
        }
        ready, missing = set_up(
            {name: Loader(lambda make=make: make(path), module) for name, (make, module) in makers.items()}, fits
        )
        extra = {ON_DISK: Loader(lambda: hasten_on_disk(path)), BOUND: Loader(lambda: Bound(path))}
        passes = {name: (lambda make=makers[name][0]: seconds_of_a_pass(lambda: make(path))) for name in ready}
        seconds = in_turns(passes, options.rounds)
        first = {name: [options.rows / each for each in taken] for name, taken in seconds.items()}
        cached = rates(ready | set_up(extra, fits)[0], options.rounds, options.seconds)
    print_line("First epoch, no caches:\n")
    table(first, missing, OURS, "rows/s", start_up=False)
    print_line("\nFrom the cache:\n")
    table(cached, missing, OURS, "rows/s")
    ratios = [over(first, OURS, USUAL), over(cached, OURS, USUAL)]
    peers = {
        f"{name}, {when}": over(taken, OURS, name)
        for when, taken in (("first pass", first), ("from the cache", cached))
        for name in ABREAST
    }
    print_line()
    show(("against", "times as fast"), [(name, words(ratio)) for name, ratio in peers.items()])
    reached = (
        ratios[0].median >= FIRST
        and ratios[1].median >= CACHED
        and all(ratio is None or ratio.median >= 1 for ratio in peers.values())
    )
    return finish(
        options,
        f"{FIRST}x {USUAL} on the first pass, {CACHED}x from the cache, at least tf.data and datasets; "
        f"measured {words(ratios[0])} and {words(ratios[1])} "
        f"(bound from the cache: {interval(cached[BOUND]).median:,.0f} rows/s)",
        reached if any(peers.values()) else None,
        {"first": first, "cached": cached, "missing": missing, "against": peers, "versions": versions()},
    )


if __name__ == "__main__":
    sys.exit(main())
