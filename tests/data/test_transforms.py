"""Batch transforms of images equal per-image transforms with the same random numbers, in every runner."""

import pickle

import numpy
import pytest
import torch

from hasten import ConfigurationError
from hasten.data import arrays, augmented_images, normalize, random_crop, random_horizontal_flip
from hasten.data.rng import SampleRng
from hasten.data.transforms import crop_on_device, flip_on_device
from helpers.pipelines import equal

SHAPES = [(3, 32, 32), (1, 28, 28), (28, 28), (3, 7, 5), (2, 1, 9)]
KEY = 4, 2, 0  # seed, epoch, stage


def pictures(shape, kind=torch.uint8, rows=40):
    drawn = torch.randint(0, 256, (rows, *shape), generator=torch.Generator().manual_seed(0))
    return drawn.to(kind) if not kind.is_floating_point else drawn.to(kind) - 100.5


def rng(rows):
    return SampleRng(numpy.arange(rows), *KEY)


def cropped(picture, one, padding, mirror=False):
    sides = 2 * padding + 1
    number = int(one.integers(0, 2 * sides**2))
    top, left = divmod(number // 2, sides)
    height, width = picture.shape[-2:]
    window = torch.nn.functional.pad(picture, (padding,) * 4)[..., top : top + height, left : left + width]
    return mirrored(window) if mirror and number % 2 else window


def flipped(picture, one):
    return mirrored(picture) if one.bernoulli() else picture


def mirrored(picture):  # torch flips no unsigned integers but bytes
    return picture.view(torch.int16).flip(-1).view(torch.uint16) if picture.dtype == torch.uint16 else picture.flip(-1)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padding", [1, 4, 9])
def test_random_crop_equals_one_by_one(shape, kind, padding, mirror):
    batch = pictures(shape, kind)
    expected = [cropped(picture, one, padding, mirror) for picture, one in zip(batch, rng(len(batch)), strict=True)]
    assert torch.equal(random_crop(padding, mirror)(batch, rng(len(batch))), torch.stack(expected))


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_crop_and_flip_for_any_device_equal_those_for_the_cpu(shape, kind):
    batch, padding = pictures(shape, kind), 4
    choices = rng(len(batch)).integers(0, 2 * 9**2)
    cropped = crop_on_device(batch, choices // 2 // 9, choices // 2 % 9, padding)
    assert torch.equal(flip_on_device(cropped, choices % 2 == 1), random_crop(padding, mirror=True)(batch, rng(40)))
    flipped = flip_on_device(batch, rng(len(batch)).bernoulli())
    assert torch.equal(flipped, random_horizontal_flip()(batch, rng(len(batch))))


def augmented(shape=(3, 8, 8)):
    data = pictures(shape), torch.arange(40)
    maps = random_crop(2, mirror=True), random_horizontal_flip(), normalize(0.5, 0.25)
    pipeline = arrays(data).shuffle(seed=3).batch(16)
    for function in maps:
        pipeline = pipeline.map(function)
    return pipeline


def test_batches_on_a_device_have_the_bits_of_those_on_the_host():
    host = augmented().batches(16, seed=1, training=True)
    nbytes, on_device = host.on_device
    device = on_device(torch.device("cpu"))
    assert nbytes == 40 * (3 * 8 * 8 + 8) and device.length == host.length
    for epoch, start in ((0, 0), (1, 0), (1, 2)):
        assert equal(list(host.epoch(epoch, start)), list(device.epoch(epoch, start)))


def test_transforms_on_a_device_touch_no_memory_of_the_host():
    """The meta device has shapes only: an operation of NumPy or of a CPU tensor raises."""
    _, on_device = augmented().batches(16, 0, True).on_device
    for images, numbers in on_device(torch.device("meta")).epoch(0, 0):
        assert images.is_meta and images.dtype == torch.float32 and images.shape[1:] == (3, 8, 8)
        assert numbers.is_meta and len(numbers) == len(images)


@pytest.mark.parametrize(
    "change",
    [
        lambda pipeline: pipeline.map(lambda batch: batch),
        lambda pipeline: pipeline.skip_bad_rows(1),
        lambda pipeline: arrays(torch.arange(8).to(torch.uint16)).batch(2),
        lambda pipeline: arrays(torch.arange(8)).map(abs).batch(2),
    ],
    ids=["function of the user", "bad rows", "unsigned integers", "function of samples"],
)
def test_pipeline_with_other_parts_stays_on_the_host(change):
    assert change(augmented()).batches(2, 0, True).on_device is None


def test_random_crop_and_flip_draw_uniformly():
    spot = torch.zeros(20_000, 5, 5, dtype=torch.uint8)
    spot[:, 2, 1] = 1
    seen = random_crop(1, mirror=True)(spot, rng(len(spot))).sum(0)
    assert (
        seen.sum() == len(spot)
        and (seen[1:4, 0:5] > 0.8 * len(spot) / 18).all()
        and seen[0].sum() == seen[4].sum() == 0
    )


@pytest.mark.parametrize("mirror", [False, True])
def test_augmented_images_equals_maps(mirror):
    images, labels = pictures((3, 32, 32), rows=70), torch.arange(70)
    mean, std = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)
    maps = arrays(images, labels).shuffle(seed=2).batch(16).map(random_crop(3, mirror)).map(normalize(mean, std))
    made = augmented_images(images, labels, padding=3, mirror=mirror, mean=mean, std=std).shuffle(seed=2).batch(16)
    for epoch in (0, 1):
        assert equal(list(maps.epoch(epoch)), list(made.prefetch(2, threads=2).epoch(epoch)))
    alone = augmented_images(images, padding=3, mirror=mirror, mean=mean, std=std).shuffle(seed=2).batch(16)
    assert equal([batch for batch, _ in made.epoch(0)], list(alone.epoch(0)))


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_flip_equals_one_by_one(shape, kind):
    batch = pictures(shape, kind)
    expected = [flipped(picture, one) for picture, one in zip(batch, rng(len(batch)), strict=True)]
    assert torch.equal(random_horizontal_flip()(batch, rng(len(batch))), torch.stack(expected))


@pytest.mark.parametrize("rows", [1, 2, 33, 130])
def test_normalize_equals_one_by_one_in_any_batch(rows):
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    batch = pictures((3, 32, 31), rows=rows)
    made = normalize(mean, std)(batch)
    assert made.dtype == torch.float32
    assert torch.equal(made, torch.stack([normalize(mean, std)(picture[None])[0] for picture in batch]))
    shaped = [torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (mean, std)]
    assert torch.allclose(made.double(), (batch.double() / 255 - shaped[0]) / shaped[1], atol=1e-6)


def test_normalize_with_one_mean_and_float_images():
    batch = pictures((5, 4), torch.float64)
    made = normalize(0.5, 2.0)(batch)
    assert made.dtype == torch.float32 and torch.allclose(made.double(), (batch - 0.5) / 2, atol=1e-6)


def test_transforms_do_not_modify_their_input():
    batch = pictures((3, 8, 8))
    before = batch.clone()
    for transform in (random_crop(2), random_horizontal_flip()):
        transform(batch, rng(len(batch)))
    normalize(0.5, 0.5)(batch)
    assert torch.equal(batch, before)


def test_transforms_of_image_label_batch_keep_labels():
    batch = pictures((3, 8, 8)), torch.arange(40)
    images, labels = random_crop(2)(batch, rng(40))
    assert images.shape == batch[0].shape and labels is batch[1]


def pipeline():
    images = pictures((3, 32, 32), rows=300)
    made = arrays(images, torch.arange(300)).shuffle(seed=9).batch(64)
    return (
        made.map(random_horizontal_flip())
        .map(random_crop(4, mirror=True))
        .map(normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    )


@pytest.mark.parametrize("way", [{"threads": 2}, {"processes": 2}], ids=str)
def test_transforms_are_equal_in_every_runner(way):
    assert equal(list(pipeline().epoch(1)), list(pipeline().prefetch(3, **way).epoch(1)))


def test_transforms_are_equal_for_two_ranks_and_after_resume():
    expected = list(pipeline().epoch(1))
    halves = zip(*[pipeline().shard(2, rank).epoch(1) for rank in (0, 1)], strict=True)
    assert equal(expected, [tuple(map(torch.cat, zip(*both, strict=True))) for both in halves])
    assert equal(expected[3:], list(pipeline().epoch(1, 3)))


def test_transforms_differ_between_epochs():
    images = pictures((3, 32, 32), rows=64)
    first, second = (next(iter(arrays(images).batch(64).map(random_crop(4)).epoch(epoch))) for epoch in (0, 1))
    assert not torch.equal(first, second)


def test_transforms_can_be_pickled():
    batch = pictures((3, 8, 8))
    for made, rows in (
        (random_crop(2, mirror=True), [40]),
        (random_horizontal_flip(), [40]),
        (normalize(0.5, 0.2), []),
    ):
        again = pickle.loads(pickle.dumps(made))
        assert torch.equal(made(batch, *map(rng, rows)), again(batch, *map(rng, rows)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: random_crop(0), "padding"),
        (lambda: random_crop(-1), "padding"),
        (lambda: normalize((0.5, 0.5), (0.5,)), "as many"),
        (lambda: normalize(0.5, 0.0), "above 0"),
        (lambda: normalize(0.5, float("nan")), "above 0, not nan"),
        (lambda: normalize((0.5, 0.5), (0.5, float("inf"))), "must be finite"),
        (lambda: normalize((0.5, float("nan")), (0.5, 0.5)), "finite numbers as mean"),
        (lambda: random_crop(True), "padding"),
        (lambda: normalize((0.5, 0.5), (0.5, 0.5))(pictures((3, 4, 4))), "3 channels"),
        (lambda: random_horizontal_flip()([torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)], rng(2)), "resize"),
        (lambda: random_horizontal_flip()({"image": torch.zeros(2, 3, 4, 4)}, rng(2)), "dict"),
        (lambda: random_horizontal_flip()(torch.zeros(2, 4), rng(2)), "height"),
        (lambda: augmented_images(torch.zeros(2, 4)), "height"),
        (lambda: augmented_images(pictures((3, 4, 4)), padding=0), "padding"),
        (lambda: augmented_images(pictures((3, 4, 4)), torch.arange(3)), "unequal lengths"),
    ],
)
def test_transforms_invalid_requests_are_refused(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        wrong()
