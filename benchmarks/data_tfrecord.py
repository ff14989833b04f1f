"""TFRecord files of ``Example`` messages, read and parsed by hasten and tf.data, unshuffled, in batches of 512.

Two kinds of records: small images (784 bytes and a label) and a click log (13 floats, 26 integers, a label). tf.data
parses whole batches with autotuning, in three ways: file after file, several files record by record (its documented
``num_parallel_reads``), or several files batch by batch; the fastest counts. hasten computes in the caller's thread,
because other threads would mostly wait for the GIL. All arms must return the same numbers, which is checked first.

*First epoch*: from opening to the end; hasten's caches of earlier epochs are deleted, the files are in the page cache.
*Later*: batches/s when both run. tf.data verifies checksums in every epoch, hasten when a record is first read.

Figure: at least tf.data, for both kinds, in the first epoch and later.
"""

from __future__ import annotations

import os
import shutil
import sys

from _loaders import (
    Loader,
    Passes,
    best_of,
    on_one_core,
    over,
    quiet,
    rates,
    scratch,
    seconds_of_a_pass,
    set_up,
    table,
    versions,
    words,
)

if "--one-core" in sys.argv:
    on_one_core()
quiet()

from functools import partial

import numpy
import torch
from _common import finish, in_turns, interval, parser, print_line, print_progress

BATCH, FILES = 512, 4
OURS, SINGLE = "hasten", "hasten, shuffled"
BOUND = "bound: copying the bytes"
KINDS = {"pictures": "images", "clicks": "clicks"}  # key in published records: printed name


def record(kind: str, rng: numpy.random.Generator) -> dict:
    label = int(rng.integers(10))
    if kind == "pictures":
        return {"image": [rng.bytes(28 * 28)], "label": [label]}
    return {
        "dense": rng.standard_normal(13).astype("float32").tolist(),
        "ids": rng.integers(0, 100_000, 26).tolist(),
        "label": [label],
    }


def write(directory, kind: str, records: int) -> list[str]:
    from hasten.data.formats.tf_example import encode_example
    from hasten.data.formats.tfrecord import frame_records

    print_progress(f"write {records} {KINDS[kind]}")
    rng, paths = numpy.random.default_rng(0), []
    for number in range(FILES):
        path = directory / f"{kind}-{number}.tfrecord"
        path.write_bytes(frame_records(encode_example(record(kind, rng)) for _ in range(records // FILES)))
        paths.append(str(path))
    return paths


def hasten(kind, paths):
    from hasten.data import tfrecord

    features = {
        "pictures": {"image": (torch.uint8, (28, 28)), "label": ()},
        "clicks": {"dense": (13,), "ids": (26,), "label": ()},
    }[kind]
    return tfrecord(paths, features).batch(BATCH)


def shuffled(kind, paths):
    return hasten(kind, paths).shuffle(seed=0)


def tf_data(read, kind, paths):
    import tensorflow as tf

    spec = {
        "pictures": {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)},
        "clicks": {
            "dense": tf.io.FixedLenFeature((13,), tf.float32),
            "ids": tf.io.FixedLenFeature((26,), tf.int64),
            "label": tf.io.FixedLenFeature((), tf.int64),
        },
    }[kind]

    def parsed(batch):
        columns = tf.io.parse_example(batch, spec)
        if kind == "pictures":
            columns["image"] = tf.reshape(tf.io.decode_raw(columns["image"], tf.uint8), (-1, 28, 28))
        return columns

    return Passes(
        read(tf, paths).map(parsed, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE).as_numpy_iterator
    )


def file_after_file(tf, paths):
    return tf.data.TFRecordDataset(paths).batch(BATCH)


def record_by_record(tf, paths):
    return tf.data.TFRecordDataset(paths, num_parallel_reads=tf.data.AUTOTUNE).batch(BATCH)


def batch_by_batch(tf, paths):
    files = tf.data.Dataset.from_tensor_slices(paths)
    return files.interleave(
        lambda path: tf.data.TFRecordDataset(path).batch(BATCH), num_parallel_calls=tf.data.AUTOTUNE
    )


THEIRS = {
    "tf.data": file_after_file,
    "tf.data, parallel reads": record_by_record,
    "tf.data, parallel batches": batch_by_batch,
}


class Bound:
    """The bound: the bytes of as many records, copied into memory that is already mapped."""

    def __init__(self, paths, records: int):
        self.bytes = numpy.concatenate([numpy.fromfile(path, numpy.uint8) for path in paths])
        self.size = len(self.bytes) // records * BATCH
        self.into = numpy.empty(self.size, numpy.uint8)

    def __iter__(self):
        empty = torch.empty(BATCH, 0)
        for begin in range(0, len(self.bytes) - self.size, self.size):
            numpy.copyto(self.into, self.bytes[begin : begin + self.size])
            yield empty


def fits(batch) -> bool:
    return torch.is_tensor(batch) or all(len(column) == BATCH for column in batch.values())


def sums(made) -> dict[str, float]:
    """Returns the sum of each column over an epoch; it is the same for any order of the records."""
    total: dict[str, float] = {}
    for batch in made:
        for name, column in batch.items():
            total[name] = total.get(name, 0.0) + float(numpy.asarray(column).sum(dtype=numpy.float64))
    return total


def check_equal_values(kind: str, ready: dict) -> None:
    """Checks that all loaders read the same values."""
    print_progress(f"compare what they give of {KINDS[kind]}")
    all_of_them = {name: sums(made) for name, made in ready.items()}
    for name, theirs in all_of_them.items():
        ours = all_of_them[OURS]
        if theirs.keys() != ours.keys() or not all(numpy.isclose(theirs[column], ours[column]) for column in ours):
            raise SystemExit(f"{name} gives {theirs} of {kind}, {OURS} {ours}: the loaders are not compared")


def first_epoch_rate(loader: Loader, records: int) -> float:
    """Returns records per second of a first epoch, without the caches of earlier epochs."""
    shutil.rmtree(os.environ["HASTEN_CACHE"], ignore_errors=True)
    return records / seconds_of_a_pass(loader.make)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--one-core", action="store_true", help="leaves all of them a single core")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--seconds", type=float, default=1.5, help="of each loader in a round, later")
    arguments.add_argument("--records", type=int, default=100_000, help="of each kind")
    arguments.add_argument("--quick", action="store_true", help="fewer records, three short rounds")
    options = arguments.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.records = 3, 0.5, 20_000
    numbers, ratios = {}, {}
    # full batches in every file, for any way of reading
    options.records = -(-options.records // (FILES * BATCH)) * FILES * BATCH
    with scratch() as directory:
        for kind in KINDS:
            paths = write(directory, kind, options.records)
            loaders = {OURS: Loader(partial(hasten, kind, paths), None)}
            loaders |= {
                name: Loader(partial(tf_data, read, kind, paths), "tensorflow") for name, read in THEIRS.items()
            }
            ready, missing = set_up(loaders, fits)
            check_equal_values(kind, ready)
            passes = {name: (lambda loader=loaders[name]: first_epoch_rate(loader, options.records)) for name in ready}
            first = in_turns(passes, options.rounds)
            ready |= {SINGLE: shuffled(kind, paths), BOUND: Bound(paths, options.records)}
            later = rates(ready, options.rounds, options.seconds)
            for when, taken in (("first epoch, no caches", first), ("later", later)):
                print_line(f"\n{KINDS[kind]}, {when}:\n")
                loaded = {name: values for name, values in taken.items() if name != BOUND}
                table(loaded, missing, OURS, "records/s", start_up=taken is later)
                numbers[f"{kind}, {when}"], ratios[f"{kind}, {when}"] = taken, over(taken, OURS, best_of(taken, THEIRS))
            print_line(f"{BOUND}: {interval(later[BOUND]):,.0f} records/s")
    print()
    speedups = ", ".join(f"{words(ratio)} ({name})" for name, ratio in ratios.items())
    later = {name: interval(numbers[f"{kind}, later"][BOUND]).median for kind, name in KINDS.items()}
    bounds = ", ".join(f"{rate:,.0f} {name}/s" for name, rate in later.items())
    return finish(
        options,
        f"at least tf.data on the same files; it is {speedups} (bound, later: {bounds})",
        None if None in ratios.values() else all(ratio.median >= 1 for ratio in ratios.values()),
        {"rates": numbers, "ratios": ratios, "missing": missing, "versions": versions()},
    )


if __name__ == "__main__":
    sys.exit(main())
