"""Small images in memory: 50,000 of CIFAR-10's shape, uint8, shuffled, cropped, flipped, normalized, batches of 512.

All loaders have one core, and yield float32 batches of the same shape. Where a peer accepts whole batches, it runs the
whole-batch function that a careful user would write (``Batched``): windows of a padded store by one advanced index, a
``where`` for the flip, one conversion. ``Bound`` gathers rows and converts them with torch's fastest operations only.

Figure: at least 500,000 images/s; at least 10 times a per-sample DataLoader; at least the best of the others.
"""

from __future__ import annotations

import sys
from functools import cache, partial

from _loaders import Loader, Passes, best_of, on_one_core, over, quiet, rates, scratch, set_up, table, versions, words

on_one_core()
quiet()

import numpy
import torch
from _common import finish, interval, parser, print_line
from torch.utils.data import DataLoader, Dataset

FIGURE, TIMES = 500_000, 10
BATCH, SIDE, PADDING = 512, 32, 4
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # normalization of pixels from 0 to 1
OURS, BOUND, ONE_BY_ONE = "hasten", "bound: gather, convert", "DataLoader, sample by sample"


def hasten(images, labels):
    from hasten.data import augmented_images

    return (
        augmented_images(images, labels, padding=PADDING, mean=MEAN, std=STD)
        .shuffle(seed=0)
        .batch(BATCH, drop_last=True)
    )


class Bound:
    """The lower bound: every image is read once and every number written once, into memory that is already mapped."""

    def __init__(self, images, labels):
        self.images, self.labels = torch.from_numpy(numpy.empty(images.shape, numpy.uint8)).copy_(images), labels
        self.rows = torch.empty((BATCH, *images.shape[1:]), dtype=torch.uint8)
        self.floats = torch.from_numpy(numpy.empty(self.rows.shape, numpy.float32))  # NumPy requests huge pages

    def __iter__(self):
        for index in shuffled_batches(len(self.images)):
            torch.index_select(self.images, 0, index, out=self.rows)
            yield self.floats.copy_(self.rows), self.labels[index]


class Samples(Dataset):
    """Per-sample augmentation as in most tutorials, on tensors."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        self.mean, self.std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        return self.augment(self.images[row]), self.labels[row]

    def augment(self, image):
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        top, left = torch.randint(2 * PADDING + 1, (2,)).tolist()
        image = torch.nn.functional.pad(image, (PADDING,) * 4)[:, top : top + SIDE, left : left + SIDE]
        return image.float().div_(255).sub_(self.mean).div_(self.std)


class Batched(Dataset):
    """The same for whole batches: ``__getitems__`` for DataLoader, ``of`` for loaders that pass an index tensor."""

    def __init__(self, images, labels):
        self.labels = labels
        self.windows = torch.nn.functional.pad(images, (PADDING,) * 4).unfold(2, SIDE, 1).unfold(3, SIDE, 1)
        self.scale = torch.tensor(STD).mul(255).reciprocal().view(3, 1, 1)
        self.shift = -torch.tensor(MEAN).div(torch.tensor(STD)).view(3, 1, 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.__getitems__([row])

    def __getitems__(self, rows):
        return self.of(torch.tensor(rows))

    def of(self, index):
        top, left = torch.randint(2 * PADDING + 1, (2, len(index)))
        images = self.windows[index, :, top, left]
        images = torch.where((torch.rand(len(index)) < 0.5)[:, None, None, None], images.flip(3), images)
        return images.float().mul_(self.scale).add_(self.shift), self.labels[index]


def shuffled_batches(rows: int):
    return torch.randperm(rows)[: rows // BATCH * BATCH].split(BATCH)


def identity(samples):
    return samples


def batched_loader(kind, images, labels):
    return kind(Batched(images, labels), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=identity)


def stateful(images, labels):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return batched_loader(StatefulDataLoader, images, labels)


def spdl(images, labels):
    """The pipeline of spdl, with as many threads as cores."""
    from spdl.pipeline import PipelineBuilder

    batched = Batched(images, labels)

    def passes():
        source = shuffled_batches(len(labels))
        pipeline = PipelineBuilder().add_source(source).pipe(batched.of, concurrency=1).add_sink(2).build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline

    return Passes(passes)


def grain(images, labels):
    import grain

    batched = Batched(images, labels)
    rows = grain.MapDataset.range(len(labels)).seed(0).shuffle().batch(BATCH, drop_remainder=True)
    return rows.map(lambda index: batched.of(torch.from_numpy(index))).to_iter_dataset(
        grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    )


def tf_data(images, labels):
    """Row indices are shuffled and batched, then one gather and one map per batch; channels are last."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    store = tf.constant(numpy.pad(images.permute(0, 2, 3, 1).numpy(), ((0, 0), (PADDING,) * 2, (PADDING,) * 2, (0, 0))))
    targets, mean, std = tf.constant(labels.numpy()), tf.constant(MEAN), tf.constant(STD)

    def augment(index):
        places = tf.range(SIDE)[None] + tf.random.uniform((2, BATCH, 1), 0, 2 * PADDING + 1, tf.int32)
        down, across = places[0], tf.where(tf.random.uniform((BATCH, 1)) < 0.5, places[1][:, ::-1], places[1])
        rows = tf.gather(tf.gather(store, index), down, axis=1, batch_dims=1)
        batch = tf.gather(rows, across, axis=2, batch_dims=1)
        return (tf.cast(batch, tf.float32) / 255.0 - mean) / std, tf.gather(targets, index)

    rows = tf.data.Dataset.range(len(labels)).shuffle(len(labels)).batch(BATCH, drop_remainder=True)
    batches = rows.map(augment, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return Passes(batches.as_numpy_iterator)


def litdata(directory, images, labels):
    """Reads litdata's own chunks, sample by sample; litdata has no batched reading."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    numpy.savez(directory / "all.npz", images=images.numpy(), labels=labels.numpy())
    optimize(
        partial(sample_of, directory / "all.npz"),
        list(range(len(labels))),
        str(directory / "litdata"),
        chunk_bytes="64MB",
        num_workers=1,
    )
    one = Samples(images, labels)

    class Streamed(StreamingDataset):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return one.augment(torch.as_tensor(sample["image"])), sample["label"]

    return StreamingDataLoader(
        Streamed(str(directory / "litdata"), shuffle=True), batch_size=BATCH, num_workers=0, drop_last=True
    )


@cache
def stored(path):
    with numpy.load(path) as file:
        return file["images"], file["labels"]


def sample_of(path, row):
    images, labels = stored(path)
    return {"image": images[row], "label": int(labels[row])}


def webdataset(directory, images, labels):
    """One shard, the shuffle buffer, and the whole-batch function after batching."""
    import webdataset

    shard = str(directory / "images.tar")
    with webdataset.TarWriter(shard) as writer:
        for row, image in enumerate(images.numpy()):
            writer.write({"__key__": f"{row:06d}", "bin": image.tobytes(), "cls": str(int(labels[row]))})

    def decoded(sample):
        return numpy.frombuffer(sample["bin"], numpy.uint8).reshape(3, SIDE, SIDE), int(sample["cls"])

    def augment(batch):
        batched = Batched(torch.from_numpy(batch[0]), torch.as_tensor(batch[1]))
        return batched.of(torch.arange(len(batch[0])))

    dataset = webdataset.WebDataset(shard, shardshuffle=False).shuffle(1000).map(decoded)
    return dataset.batched(BATCH, partial=False).map(augment)


def fits(batch) -> bool:
    images = torch.as_tensor(batch[0])
    return (
        images.dtype == torch.float32
        and sorted(images.shape) == sorted((BATCH, 3, SIDE, SIDE))
        and -3 < images.min() < images.max() <= 255
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=1.5, help="per loader and round")
    options.add_argument("--images", type=int, default=50_000)
    options.add_argument("--quick", action="store_true", help="fewer images, three short rounds")
    options = options.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.images = 3, 0.5, 10_000
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = (
        torch.randint(0, 256, (options.images, 3, SIDE, SIDE), dtype=torch.uint8),
        torch.randint(0, 10, (options.images,)),
    )
    with scratch() as directory:
        peers = {
            "DataLoader, __getitems__": Loader(lambda: batched_loader(DataLoader, images, labels)),
            "StatefulDataLoader, __getitems__": Loader(
                lambda: stateful(images, labels), "torchdata.stateful_dataloader"
            ),
            "spdl": Loader(lambda: spdl(images, labels), "spdl.pipeline"),
            "grain": Loader(lambda: grain(images, labels), "grain"),
            "tf.data": Loader(lambda: tf_data(images, labels), "tensorflow"),
            "litdata": Loader(lambda: litdata(directory, images, labels), "litdata"),
            "webdataset": Loader(lambda: webdataset(directory, images, labels), "webdataset"),
        }
        loaders = {
            OURS: Loader(lambda: hasten(images, labels)),
            BOUND: Loader(lambda: Bound(images, labels)),
            ONE_BY_ONE: Loader(
                lambda: DataLoader(Samples(images, labels), batch_size=BATCH, shuffle=True, drop_last=True)
            ),
            **peers,
        }
        ready, missing = set_up(loaders, fits)
        taken = rates(ready, options.rounds, options.seconds)
    table(taken, missing, OURS, "images/s")
    ours, best = interval(taken[OURS]), best_of(taken, peers)
    over_samples, over_best = over(taken, OURS, ONE_BY_ONE), over(taken, OURS, best)
    print_line(
        f"\nof the bound: {over(taken, OURS, BOUND):.2f}; over the best of the others ({best}): {words(over_best)}"
    )
    reached = ours.median >= FIGURE and over_samples.median >= TIMES and over_best.median >= 1
    # without any peer the figure cannot be measured
    others = [name for name in taken if name in peers and peers[name].module]
    return finish(
        options,
        f"{FIGURE:,} images/s on one core, {TIMES}x a per-sample DataLoader, the best of the others; "
        f"measured {ours:,.0f}, {words(over_samples)}, {words(over_best)} "
        f"(bound: {interval(taken[BOUND]).median:,.0f})",
        reached if others else None,
        {"rates": taken, "missing": missing, "versions": versions()},
    )


if __name__ == "__main__":
    sys.exit(main())
