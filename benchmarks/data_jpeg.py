"""A directory of photos (the 200 of HASTEN_DATA, copied) to batches of 64 at 224 x 224, uint8, on all cores.

Every loader may use as many threads or processes as there are cores. "Pillow + DataLoader" is the way of most
tutorials; "simplejpeg + DataLoader" is the same with the decoder that hasten uses, which also decodes large photos at a
fraction of their size, and is the harder one to beat. *Re-stored* is hasten with ``.cache("disk")`` after resizing:
decoded once, then gathered.

The files are in the page cache. Resampling filters differ between loaders, and so do the last bits; the shape, the
dtype and the brightness of the batches are checked.

Figure: at least 1.3 times Pillow + DataLoader, also with the same decoder; at least 20 times it after re-storing; at
least SPDL.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # every thread and process decodes its own images

from _loaders import Loader, Passes, best_of, data, over, quiet, rates, scratch, set_up, table, versions, words

quiet()

import numpy
import torch
from _common import finish, interval, parser, print_line
from torch.utils.data import DataLoader, Dataset

DECODING, STORED = 1.3, 20  # required speedups
BATCH, SIDE = 64, 224
CORES = len(os.sched_getaffinity(0))
OURS, RESTORED, SAME_DECODER, PILLOW = "hasten", "hasten, re-stored", "simplejpeg + DataLoader", "Pillow + DataLoader"
BOUND = "bound: decoding only, times cores"


def copied(photos, directory, copies: int) -> list[str]:
    """Copies the photos into one class directory and returns their sorted paths."""
    place = directory / "photos" / "all"
    place.mkdir(parents=True)
    for number in range(copies):
        for photo in photos:
            shutil.copy(photo, place / f"{photo.stem}-{number}.jpg")
    return sorted(map(str, place.iterdir()))


def hasten(directory):
    from hasten.data import images

    return (
        images(directory / "photos", resize=SIDE)
        .shuffle(seed=0)
        .batch(BATCH, drop_last=True)
        .prefetch(2, threads=CORES)
    )


def restored(directory):
    from hasten.data import images

    return images(directory / "photos", resize=SIDE).cache("disk").shuffle(seed=0).batch(BATCH, drop_last=True)


# ---- per-photo functions of the other loaders


def by_pillow(content: bytes) -> numpy.ndarray:
    """Decodes with Pillow without ``draft`` (libjpeg would decode large photos smaller): tutorials do not use it."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return _fitted(image.convert("RGB"))


def by_simplejpeg(content: bytes) -> numpy.ndarray:
    import simplejpeg
    from PIL import Image

    pixels = simplejpeg.decode_jpeg(content, fastupsample=True, min_height=2 * SIDE, min_width=2 * SIDE, min_factor=2)
    return _fitted(Image.fromarray(pixels))


def _fitted(image) -> numpy.ndarray:
    """Resizes the shorter side to 224 pixels and crops the center; shape (3, 224, 224)."""
    from PIL import Image

    scale = SIDE / min(image.size)
    image = image.resize([max(SIDE, round(side * scale)) for side in image.size], Image.Resampling.BILINEAR)
    left, top = ((side - SIDE) // 2 for side in image.size)
    return numpy.asarray(image.crop((left, top, left + SIDE, top + SIDE))).transpose(2, 0, 1)


class Photos(Dataset):
    def __init__(self, paths, decode):
        self.paths, self.decode = paths, decode

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, row):
        with open(self.paths[row], "rb") as file:
            return torch.from_numpy(numpy.ascontiguousarray(self.decode(file.read()))), 0


def loader(kind, paths, decode):
    return kind(
        Photos(paths, decode),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=CORES,
        persistent_workers=True,
    )


def stateful(paths):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return loader(StatefulDataLoader, paths, by_simplejpeg)


# ---- spdl


def spdl(paths, decode):
    """Spdl's pipeline with threads, its documented way for decoders that release the GIL."""
    from spdl.pipeline import PipelineBuilder

    photos = Photos(paths, decode)

    def stacked(samples):
        return torch.stack([picture for picture, _ in samples]), torch.zeros(len(samples))

    def passes():
        built = PipelineBuilder().add_source(torch.randperm(len(paths)).tolist())
        built = (
            built.pipe(photos.__getitem__, concurrency=CORES).aggregate(BATCH, drop_last=True).pipe(stacked).add_sink(2)
        )
        with (pipeline := built.build(num_threads=CORES)).auto_stop():
            yield from pipeline

    return Passes(passes)


def spdl_io(paths):
    """Spdl's own decoder and filters, based on FFmpeg, which must be installed on the system."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    shape = f"scale={SIDE}:{SIDE}:force_original_aspect_ratio=increase,crop={SIDE}:{SIDE}"
    spdl.io.demux_image(paths[0])  # fails here if FFmpeg is missing
    wanted = spdl.io.get_video_filter_desc(filter_desc=shape, pix_fmt="rgb24")

    def decoded(path):
        return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=wanted)

    def stacked(frames):
        pictures = spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)
        return pictures, torch.zeros(len(pictures))

    def passes():
        built = PipelineBuilder().add_source([paths[row] for row in torch.randperm(len(paths)).tolist()])
        built = built.pipe(decoded, concurrency=CORES).aggregate(BATCH, drop_last=True).pipe(stacked).add_sink(2)
        with (pipeline := built.build(num_threads=CORES)).auto_stop():
            yield from pipeline

    return Passes(passes)


# ---- others


def grain(paths):
    import grain

    photos = Photos(paths, by_simplejpeg)
    samples = grain.MapDataset.source(photos).seed(0).shuffle().map(lambda sample: (sample[0].numpy(), sample[1]))
    batches = samples.to_iter_dataset(grain.ReadOptions(num_threads=CORES, prefetch_buffer_size=2 * BATCH))
    return batches.batch(BATCH, drop_remainder=True)


def tf_data(paths):
    import tensorflow as tf

    def decoded(path):
        picture = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        size = tf.cast(tf.shape(picture)[:2], tf.float32)
        resized = tf.maximum(SIDE, tf.cast(tf.round(size * SIDE / tf.reduce_min(size)), tf.int32))
        picture = tf.image.resize_with_crop_or_pad(tf.image.resize(picture, resized, antialias=True), SIDE, SIDE)
        return tf.transpose(tf.cast(picture, tf.uint8), (2, 0, 1)), 0

    batches = (
        tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).map(decoded, num_parallel_calls=tf.data.AUTOTUNE)
    )
    return Passes(batches.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE).as_numpy_iterator)


class Decoding:
    """The bound: decoding on one core, without resizing, batching or reading, scaled to all cores."""

    def __init__(self, paths):
        self.contents = [Path(path).read_bytes() for path in paths[:: max(1, len(paths) // 200)]]

    def __iter__(self):
        import simplejpeg

        while True:
            for begin in range(0, len(self.contents), BATCH):
                for content in self.contents[begin : begin + BATCH]:
                    simplejpeg.decode_jpeg(
                        content, fastupsample=True, min_height=2 * SIDE, min_width=2 * SIDE, min_factor=2
                    )
                yield numpy.empty((len(self.contents[begin : begin + BATCH]) * CORES, 0))


def fits(batch) -> bool:
    if isinstance(batch, numpy.ndarray):
        return True  # the bound returns no images
    pictures = torch.as_tensor(batch[0])
    return (
        pictures.dtype == torch.uint8
        and pictures.shape == (BATCH, 3, SIDE, SIDE)
        and 60 < pictures.float().mean() < 190
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=2.5, help="of each loader in a round")
    options.add_argument("--copies", type=int, default=5, help="of the 200 photos")
    options.add_argument("--quick", action="store_true", help="three short rounds")
    options = options.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.copies = 3, 1.0, 2
    photos = data("imagenet-sample-jpeg")
    if photos is None:
        raise SystemExit("the photos are not here: HASTEN_DATA names the directory that imagenet-sample-jpeg is in")
    torch.set_num_threads(1)
    with scratch() as directory:
        paths = copied(
            sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")),
            directory,
            options.copies,
        )
        of_spdl = {
            "spdl, its decoder": Loader(lambda: spdl_io(paths), "spdl.io"),
            "spdl, Pillow": Loader(lambda: spdl(paths, by_pillow), "spdl.pipeline"),
            "spdl, simplejpeg": Loader(lambda: spdl(paths, by_simplejpeg), "spdl.pipeline"),
        }
        loaders = {
            OURS: Loader(lambda: hasten(directory)),
            RESTORED: Loader(lambda: restored(directory)),
            BOUND: Loader(lambda: Decoding(paths), "simplejpeg"),
            PILLOW: Loader(lambda: loader(DataLoader, paths, by_pillow)),
            SAME_DECODER: Loader(lambda: loader(DataLoader, paths, by_simplejpeg), "simplejpeg"),
            "simplejpeg + StatefulDataLoader": Loader(lambda: stateful(paths), "torchdata.stateful_dataloader"),
            **of_spdl,
            "grain, simplejpeg": Loader(lambda: grain(paths), "grain"),
            "tf.data": Loader(lambda: tf_data(paths), "tensorflow"),
        }
        ready, missing = set_up(loaders, fits)
        taken = rates(ready, options.rounds, options.seconds)
        del ready  # including its worker processes
    table(taken, missing, OURS, "photos/s")
    usual = best_of(taken, (PILLOW, SAME_DECODER))
    best = best_of(taken, of_spdl)
    decoding, stored = over(taken, OURS, usual), over(taken, RESTORED, usual)
    against = over(taken, OURS, best)
    ratios = (f"over {name}: {words(over(taken, OURS, name))}" for name in (PILLOW, SAME_DECODER))
    print_line("\n" + "; ".join(ratios))
    print_line(f"re-stored, over {usual}: {words(stored)}; decoding, over the best of spdl ({best}): {words(against)}")
    bound = interval(taken[BOUND]).median if BOUND in taken else float("nan")
    return finish(
        options,
        f"{DECODING}x DataLoader with the same decoder, {STORED}x after re-storing, at least SPDL; "
        f"measured {words(decoding)}, {words(stored)}, {words(against)} (bound of decoding: {bound:,.0f} photos/s)",
        None if against is None else decoding.median >= DECODING and stored.median >= STORED and against.median >= 1,
        {"rates": taken, "missing": missing, "versions": versions(), "over Pillow": over(taken, OURS, PILLOW)},
    )


if __name__ == "__main__":
    sys.exit(main())
