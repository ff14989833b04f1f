"""Images: decoded and resized as Pillow does, labeled by directory, and every kind of bad image."""

import io
import os
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from hasten import Task
from hasten.core.errors import ConfigurationError, RunError
from hasten.data import images
from hasten.data.formats import decoding
from hasten.data.io import file_list
from hasten.data.io.file_list import list_directory
from hasten.data.source import BadRow
from hasten.engine.data_adapters import load_data


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    else:
        monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    return request.param


def smooth(height, width, seed=0):
    """A photo-like image without hard edges, which JPEG and resizing treat in different ways."""
    coarse = numpy.random.default_rng(seed).integers(0, 256, (6, 6, 3), numpy.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.BICUBIC)


def directory_of(path, sizes=((40, 60), (60, 40), (50, 50)), classes=("cat", "dog"), kind="png"):
    for number, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for place, (height, width) in enumerate(sizes):
            smooth(height, width, seed=10 * number + place).save(path / name / f"{place}.{kind}")
    return path


def as_pillow_resizes(picture, height, width):
    scale = max(height / picture.height, width / picture.width)
    resized = max(width, int(picture.width * scale)), max(height, int(picture.height * scale))
    left, top = round((resized[0] - width) / 2), round((resized[1] - height) / 2)
    return numpy.asarray(
        picture.resize(resized, Image.BILINEAR).crop((left, top, left + width, top + height))
    ).transpose(2, 0, 1)


def test_png_is_decoded_bit_for_bit(tmp_path):
    source = images(directory_of(tmp_path / "set")).source
    pictures, labels = source.read(numpy.arange(6))
    assert source.classes == ["cat", "dog"] and labels.tolist() == [0, 0, 0, 1, 1, 1]
    for picture, path in zip(pictures, sorted((tmp_path / "set").rglob("*.png")), strict=True):
        assert picture.dtype == torch.uint8 and numpy.array_equal(
            picture, numpy.asarray(Image.open(path)).transpose(2, 0, 1)
        )


@pytest.mark.parametrize("resize", [32, (24, 30), 80], ids=str)
def test_resize_equals_pillow(tmp_path, resize):
    pictures, labels = images(directory_of(tmp_path / "set"), resize=resize).source.read(numpy.array([4, 0, 2]))
    height, width = (resize, resize) if isinstance(resize, int) else resize
    assert pictures.shape == (3, 3, height, width) and pictures.is_contiguous() and labels.tolist() == [1, 0, 0]
    for picture, name in zip(pictures, ["dog/1.png", "cat/0.png", "cat/2.png"], strict=True):
        expected = as_pillow_resizes(Image.open(tmp_path / "set" / name), height, width)
        assert numpy.abs(picture.numpy().astype(int) - expected).max() <= 1


def test_real_photos_are_decoded_as_by_pillow(decoder):
    photos = Path(os.environ.get("HASTEN_DATA", "")) / "imagenet-sample-jpeg"
    if not photos.is_dir():
        pytest.skip("no photos: HASTEN_DATA names no directory with imagenet-sample-jpeg")
    source = images(photos, resize=224, labels=None).source
    rows = numpy.arange(0, 200, 7)
    pictures, originals = source.read(rows), images(photos, labels=None).source.read(rows)
    for row, small, picture in zip(rows, pictures, originals, strict=True):
        expected = Image.open(source.files.path(row)).convert("RGB")
        assert numpy.abs(picture.numpy().astype(int) - numpy.asarray(expected).transpose(2, 0, 1)).mean() < 1
        if min(expected.size) < 4 * 224:  # larger ones are decoded at half their size
            assert numpy.abs(small.numpy().astype(int) - as_pillow_resizes(expected, 224, 224)).mean() < 1


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "jpg"), ("CMYK", "jpg"), ("L", "png"), ("P", "png"), ("RGBA", "png"), ("1", "png")]
)
def test_every_color_mode_becomes_three_channels(tmp_path, decoder, mode, kind):
    picture = smooth(33, 47).convert(mode)
    picture.save(tmp_path / f"a.{kind}")
    (original,) = images(tmp_path, labels=None).source.read(numpy.array([0]))
    expected = numpy.asarray(Image.open(tmp_path / f"a.{kind}").convert("RGB")).transpose(2, 0, 1)
    assert original.shape == (3, 33, 47) and numpy.abs(original.numpy().astype(int) - expected).mean() < 1
    assert images(tmp_path, resize=16, labels=None).source.read(numpy.array([0])).shape == (1, 3, 16, 16)


def test_large_jpeg_decoded_at_reduced_size_looks_the_same(tmp_path, decoder):
    smooth(1600, 2400).save(tmp_path / "a.jpg", quality=90)
    small = decoding.decode_image((tmp_path / "a.jpg").read_bytes(), size=(100, 100))
    assert 200 <= small.shape[0] < 420
    picture = images(tmp_path, resize=100, labels=None).source.read(numpy.array([0]))[0]
    assert (
        numpy.abs(picture.numpy().astype(int) - as_pillow_resizes(Image.open(tmp_path / "a.jpg"), 100, 100)).mean() < 1
    )


def test_image_runners_give_the_same_images(tmp_path):
    source = images(
        directory_of(tmp_path / "set", sizes=[(30 + i, 70 - i) for i in range(20)], kind="jpg"), resize=24
    ).source
    batches = numpy.array_split(numpy.random.default_rng(0).permutation(40), 10)
    one_by_one = [source.read(batch)[0] for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(one_by_one, pool.map(lambda batch: source.read(batch)[0], batches), strict=True):
            assert torch.equal(one, other)


def bomb(height, width):
    """A PNG file of a hundred bytes whose header states a huge size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg_bomb():
    """A small JPEG whose header is changed to 65000 x 65000."""
    file = io.BytesIO()
    smooth(16, 16).save(file, "JPEG")
    data = bytearray(file.getvalue())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bomb.png", bomb(8000, 8000), "8000 x 8000 pixels, more than the"),
        ("bomb2.png", bomb(60000, 60000), "60000 x 60000 pixels, more than the"),
        ("bomb.jpg", jpeg_bomb(), "65000 x 65000 pixels, more than the"),
        ("text.jpg", b"this is no picture", "not a JPEG or PNG"),
        ("empty.png", b"", "not a JPEG or PNG"),
        ("start.jpg", b"\xff\xd8\xff", "not a JPEG or PNG|cannot be decoded"),
    ],
)
@pytest.mark.parametrize("resize", [None, 16])
def test_bad_image_is_named(tmp_path, decoder, name, content, message, resize):
    for other in ("a", "z"):
        smooth(20, 20).save(tmp_path / f"{other}.png")
    (tmp_path / name).write_bytes(content)
    source = images(tmp_path, resize=resize, labels=None).source
    with pytest.raises(BadRow, match=message) as caught:
        source.read(numpy.array([2, 1, 0]))
    assert caught.value.row == 1 and caught.value.where.endswith(name)
    assert len(source.read(numpy.array([2, 0]))) == 2


@pytest.mark.parametrize(("height", "width", "resized"), [(1, 65000, "224 x 14560000"), (65000, 1, "14560000 x 224")])
def test_narrow_image_after_resize_beyond_memory_is_refused(tmp_path, height, width, resized):
    smooth(height, width).save(tmp_path / "a.png")
    with pytest.raises(
        BadRow,
        match=rf"it has {resized} pixels when its shorter side is scaled to fit, more than the \d+ allowed",
    ):
        images(tmp_path, resize=224, labels=None).source.read(numpy.array([0]))
    assert images(tmp_path, labels=None).source.read(numpy.array([0]))[0].shape == (3, height, width)
    assert images(tmp_path, resize=8, labels=None).source.read(numpy.array([0])).shape == (1, 3, 8, 8)


def test_truncated_jpeg_is_bad(tmp_path, decoder):
    smooth(200, 200).save(tmp_path / "a.jpg")
    content = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(content[: len(content) // 2])
    with pytest.raises(BadRow, match=r"a\.jpg.*truncated"):
        images(tmp_path, resize=32, labels=None).source.read(numpy.array([0]))


def test_deleted_file_is_a_bad_row(tmp_path):
    source = images(directory_of(tmp_path / "set"), resize=8).source
    (tmp_path / "set" / "cat" / "1.png").unlink()
    with pytest.raises(BadRow, match=r"cannot read .*cat/1\.png"):
        source.read(numpy.arange(6))


@pytest.mark.parametrize("way", [{"batches": 0}, {"processes": 1}], ids=str)
def test_image_replaced_between_epochs_raises(tmp_path, way):
    root = directory_of(tmp_path / "set")
    pictures = images(root, resize=8).batch(3).prefetch(**way)
    first, second = list(pictures), list(pictures)
    assert all(torch.equal(one, other) for one, other in zip(first[0], second[0], strict=True))
    smooth(11, 13, seed=99).save(root / "cat" / "1.png")
    with pytest.raises(RunError, match=r"cat/1\.png changed since it was first read"):
        list(pictures)
    assert len(list(images(root, resize=8).batch(3))) == 2


def test_cache_of_replaced_images_is_rebuilt(tmp_path):
    root = directory_of(tmp_path / "set")
    pictures = images(root, resize=8).cache().batch(6)
    ((before, _),) = pictures
    smooth(11, 13, seed=99).save(root / "cat" / "1.png")
    ((after, _),) = pictures
    assert not torch.equal(before[1], after[1]) and torch.equal(before[0], after[0])


def test_labels_by_directory_name_and_pattern(tmp_path):
    directory_of(tmp_path / "set")
    by_pattern = images(str(tmp_path / "set" / "*" / "*.png"))
    assert by_pattern.source.classes == ["cat", "dog"] and by_pattern.source.labels.tolist() == [0, 0, 0, 1, 1, 1]
    names = {f"{name}/{i}.png": 10 * i for name in ("cat", "dog") for i in range(3)}
    assert images(tmp_path / "set", labels=names).source.labels.tolist() == [0, 10, 20, 0, 10, 20]
    with pytest.raises(ConfigurationError, match=r"dog/2\.png has no label"):
        images(tmp_path / "set", labels={name: 1 for name in names if name != "dog/2.png"})
    with pytest.raises(ConfigurationError, match=r"0\.png is in no directory"):
        images(tmp_path / "set" / "cat")


@pytest.mark.parametrize("resize", [0, -3, (1, 2, 3), "big", (4, 0)])
def test_invalid_size_is_refused(tmp_path, resize):
    with pytest.raises(ConfigurationError, match="resize must be"):
        images(directory_of(tmp_path / "set"), resize=resize)


def test_invalid_image_files_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ConfigurationError, match="holds no file that ends in"):
        images(tmp_path)


def test_directory_listing_is_cached_until_the_directory_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(file_list, "MIN_FILES", 1)
    root = directory_of(tmp_path / "set")
    long_ago = time.time() - 3600
    for directory in (root, root / "cat", root / "dog"):
        os.utime(directory, (long_ago, long_ago))
    first = list_directory(root, (".png",))
    walks = []
    walk = file_list.walk
    monkeypatch.setattr(file_list, "walk", lambda *args: walks.append(1) or walk(*args))
    again = list_directory(root, (".png",))
    assert not walks and [again.path(i) for i in range(6)] == [first.path(i) for i in range(6)]
    smooth(9, 9).save(root / "dog" / "new.png")
    assert len(list_directory(root, (".png",))) == 7 and walks
    (listing,) = Path(os.environ["HASTEN_CACHE"], "manifests").iterdir()
    listing.write_bytes(listing.read_bytes()[:100])  # a damaged list is ignored
    assert len(list_directory(root, (".png",))) == 7


def test_directory_that_just_changed_is_not_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(file_list, "MIN_FILES", 1)
    monkeypatch.setattr(file_list, "TIMESTAMP_GRANULARITY_NS", 3600 * 10**9)  # however long the machine takes
    list_directory(directory_of(tmp_path / "set"), (".png",))
    assert not Path(os.environ["HASTEN_CACHE"], "manifests").exists()


def test_cyclic_links_end(tmp_path):
    root = directory_of(tmp_path / "set")
    (root / "cat" / "around").symlink_to(root)
    assert len(list_directory(root, (".png",))) == 6


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_dangling_link_is_a_bad_row_of_a_cache(tmp_path, where):
    root = directory_of(tmp_path / "set")
    (root / "cat" / "1.png").unlink()
    (root / "cat" / "1.png").symlink_to(tmp_path / "later.png")
    pictures = images(root, resize=8)
    with pytest.raises(RunError, match=r"row 1 \(.*cat/1\.png\): cannot read .*; repair it"):
        list(pictures.cache(where).batch(4))
    cached = pictures.skip_bad_rows(1).cache(where).batch(4)
    for _ in range(2):
        assert sum(len(labels) for _, labels in cached) == 5
    assert list(cached.faults.found) == [1]
    smooth(11, 13, seed=99).save(tmp_path / "later.png")
    assert sum(len(labels) for _, labels in cached) == 6 and not cached.faults.found, (
        "it exists now, so the cache is rebuilt"
    )


def test_fingerprint_follows_the_files(tmp_path):
    root = directory_of(tmp_path / "set")
    before = images(root, resize=8).source.fingerprint()
    assert before != images(root, resize=8, pixels=9000).source.fingerprint()
    assert before == images(root, resize=8).source.fingerprint() != images(root, resize=9).source.fingerprint()
    smooth(11, 13, seed=99).save(root / "cat" / "1.png")
    assert before != images(root, resize=8).source.fingerprint()


def test_fingerprint_follows_the_decoders(tmp_path, decoder, monkeypatch):
    root = directory_of(tmp_path / "set")
    before = images(root, resize=8).source.fingerprint()
    monkeypatch.setattr(decoding.metadata, "version", lambda package: f"{package} of tomorrow")
    now = images(root, resize=8).source.fingerprint()
    assert now != before and now["decoders"][decoder] == f"{decoder} of tomorrow"


def test_validation_images_of_other_classes_are_refused(tmp_path):
    """Each pipeline numbers its own directories: one that is missing would shift all later numbers."""
    train, same = (directory_of(tmp_path / name, classes=("ant", "cat", "dog")) for name in ("train", "same"))
    other = directory_of(tmp_path / "other", classes=("cat", "dog"))
    pipelines = {path: images(path, resize=8).batch(2) for path in (train, same, other)}
    for validation, is_refused in ((same, False), (other, True)):
        task = Task(
            model=lambda: torch.nn.Flatten(),
            train_data=pipelines[train],
            validation_data=pipelines[validation],
            loss=torch.nn.functional.cross_entropy,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        with (
            pytest.raises(ConfigurationError, match="classes differently: cat is 1 and 0")
            if is_refused
            else nullcontext()
        ):
            load_data(task)


def test_classes_of_nested_directories_are_those_of_a_local_and_a_remote_directory(tmp_path):
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
    root, system = (
        directory_of(tmp_path / "set", classes=("cat/big", "cat/small", "dog/big")),
        fsspec.filesystem("memory"),
    )
    for file in root.rglob("*.png"):
        system.pipe_file(f"/nested/{file.relative_to(root)}", file.read_bytes())
    local, remote = images(root).source, images("memory://nested").source
    assert local.classes == remote.classes == ["cat", "dog"]
    assert remote.labels.tolist() == local.labels.tolist() == [0] * 6 + [1] * 3


@pytest.mark.parametrize("labels", [numpy.arange(500), list(range(500))], ids=["array", "list"])
def test_labels_without_names_are_refused_in_one_line(tmp_path, labels):
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    with pytest.raises(ConfigurationError, match=r"labels= must be \"directory\", a dict .{0,140}$"):
        images(tmp_path, labels=labels)
