"""Ragged and nested values: the same batches without a map, with a map that changes nothing, and from a cache."""

import random

import numpy
import pytest
import torch

from hasten import ConfigurationError
from hasten.data import Pipeline, Source, images, parquet, tfrecord, webdataset
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import frame_records
from hasten.data.source import BadRow
from helpers.assertions import same
from helpers.tar_files import npy, pack, png

ROWS, BATCH = 24, 5  # the last batch is shorter


def table(directory):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
    from pyarrow.parquet import write_table

    count = range(ROWS)
    columns = {
        "number": list(count),
        "pair": pa.array([[row, -row] for row in count], pa.list_(pa.float32(), 2)),
        "some": pa.array([list(range(row % 4)) for row in count], pa.list_(pa.int64())),
        "equal": pa.array([[row, row] for row in count], pa.list_(pa.int64())),
        "words": [["x", "y"][: row % 3] for row in count],
        "pairs": [["x", "y"] for _ in count],
        "deep": pa.array([[[row], [1, 2]] for row in count], pa.list_(pa.list_(pa.int64()))),
        "text": [str(row) for row in count],
        "point": [{"x": float(row), "tags": ["t"] * (row % 2)} for row in count],
    }
    write_table(pa.table(columns), directory / "t.parquet", row_group_size=7)
    return parquet(directory / "t.parquet", gigabytes=0)


def records(directory):
    messages = [
        encode_example({"one": row, "some": list(range(1 + row % 4)), "words": [b"w"] * (1 + row % 2)})
        for row in range(ROWS)
    ]
    (directory / "t.tfrecord").write_bytes(frame_records(messages))
    return tfrecord(directory / "t.tfrecord", features={"one": (), "some": None, "words": None})


def tar(directory):
    files = []
    for row in range(ROWS):
        content = {
            "cls": str(row).encode(),
            "json": b'{"of": [1, 2], "row": %d}' % row,
            "txt": b"text",
            "npy": npy(numpy.arange(row % 3 + 1)),
        }
        files += [(f"{row:03}.{ending}", part) for ending, part in content.items()] + [(f"{row:03}.png", png(row)[0])]
    pack(directory / "t.tar", files)
    return webdataset(directory / "t.tar", target="cls")


def image_folder(directory, sizes=((20, 30), (30, 20))):
    for row in range(ROWS):
        path = directory / "image_folder" / "ab"[row % 2] / f"{row:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(row, sizes[row % len(sizes)])[0])
    return images(directory / "image_folder")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def unchanged(sample):
    return sample


def rebuilt(sample):
    """Rebuilds the same values in another dict or tuple."""
    if isinstance(sample, dict):
        return {name: rebuilt(part) if name == "point" else part for name, part in sample.items()}
    return tuple(part for part in sample)


@pytest.mark.parametrize("way", [{"batches": 0}, {"threads": 2}, {"processes": 2}], ids=str)
@pytest.mark.parametrize("build", [table, records, tar, image_folder])
def test_map_that_changes_nothing_keeps_batches(tmp_path, build, way):
    plain = build(tmp_path).shuffle(seed=3, window=2)
    expected = list(plain.batch(BATCH))
    for function in (unchanged, rebuilt):
        assert same(list(plain.map(function).batch(BATCH).prefetch(**way)), expected)


def test_batch_of_one_row_has_the_usual_nesting(tmp_path):
    """Rows of equal length by chance, as in a batch of one row, are not stacked to a tensor."""
    plain = table(tmp_path)
    one, same_one = next(iter(plain.batch(1))), next(iter(plain.map(unchanged).batch(1)))
    assert isinstance(one["some"], list) and isinstance(one["equal"], list) and same(one, same_one)


def test_map_results_are_stacked(tmp_path):
    def made(sample):
        return {
            "padded": torch.zeros(4).index_fill(0, sample["some"], 1.0),
            "some": sample["some"],
            "twice": sample["equal"] * 2,
            "n": 3,
        }

    batch = next(iter(table(tmp_path).map(made).batch(4)))
    assert batch["padded"].shape == (4, 4) and batch["twice"].shape == (4, 2) and batch["n"].tolist() == [3] * 4
    assert [len(row) for row in batch["some"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda sample: sample["some"] + 1,
            r"cannot be stacked: sample is int64 \(0,\) and int64 \(1,\).*\.map\(\).*collate=",
        ),
        (lambda sample: {"x": (1, sample["some"] + 1)}, r"sample\['x'\]\[1\] is int64 \(0,\) and int64 \(1,\)"),
        (lambda sample: {"x": None}, r"sample\['x'\] is NoneType"),
        (lambda sample: [1] * int(sample["number"]), "sample is list of 0 and list of 1"),
        (lambda sample: {"a": 1} if sample["number"] < 2 else {"b": 1}, "sample is dict of a and dict of b"),
        (
            lambda sample: {"a": 1} if sample["number"] < 2 else {"a": 1, "b": 1},
            "sample is dict of a and dict of a, b .*the names in the samples differ",
        ),
        (lambda sample: (1, 2) if sample["number"] < 2 else "text", "sample is tuple of 2 and str"),
    ],
)
def test_map_results_that_cannot_be_stacked_are_one_line(tmp_path, function, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        list(table(tmp_path).map(function).batch(4))
    assert "\n" not in str(refused.value)


def test_collate_function_of_the_user_replaces_stacking(tmp_path):
    (batch,) = table(tmp_path).map(lambda sample: sample["some"] + 1).batch(ROWS, collate=list)
    assert [row.tolist() for row in batch] == [[n + 1 for n in range(row % 4)] for row in range(ROWS)]


class Numbers(Source):
    """Rows of small integers, which Python interns: identity cannot distinguish them."""

    def __len__(self):
        return 6

    def read(self, rows):
        return {"ones": [1] * len(rows), "lists": [[1]] * len(rows)}

    def fingerprint(self):
        return {}


def test_map_result_of_a_number_is_not_taken_for_a_list_item():
    (batch,) = Pipeline(Numbers()).map(lambda sample: {"lists": sample["lists"], "new": 1}).batch(6)
    assert batch["new"].tolist() == [1] * 6 and batch["lists"] == [[1]] * 6


# ---- maps that change some rows only


class Resizing:
    """Changes the images of every third row, or of all but these; the others are passed through or copied."""

    def __init__(self, when, copies=False):
        self.when, self.copies = when, copies

    def __call__(self, sample):
        picture, row = sample["picture"], int(sample["row"])
        changed = picture + 1 if row % 3 in self.when else picture.clone() if self.copies else picture
        return {"deep": (row, changed), "as it was": picture}


class ImagesInList(Source):
    """Images of one size in a list, as if not resized; ``bad`` makes the first unreadable."""

    def __init__(self, bad=False):
        self.bad = bad

    def __len__(self):
        return ROWS

    def read(self, rows):
        if self.bad and 0 in rows:
            raise BadRow(0, "here", "no picture")
        return {"picture": [torch.full((3, 2, 2), row) for row in rows.tolist()], "row": torch.from_numpy(rows)}

    def fingerprint(self):
        return {"bad": self.bad}


def batches_of_ranks(pipeline, size, world):
    """Returns the batches of all ranks up to the error, and the error or None."""
    batches, why = [], []
    for rank in range(world):
        try:
            for batch in pipeline.batch(size).shard(world, rank):
                batches.append(batch)
        except ConfigurationError as refused:
            why.append(str(refused))
    return batches, why


@pytest.mark.parametrize("cache", [None, "memory", "disk"])
@pytest.mark.parametrize(("size", "world"), [(1, 1), (2, 2), (3, 3), (4, 1), (ROWS, 2)])
@pytest.mark.parametrize("when", [(0,), (1,), (1, 2)], ids=str)
def test_nesting_does_not_depend_on_the_rows_of_a_batch(when, size, world, cache):
    def built(**settings):
        mapped = Pipeline(ImagesInList()).map(Resizing(when, **settings))
        return mapped.cache(cache) if cache else mapped

    batches, why = batches_of_ranks(built(), size, world)
    assert why and all("returns sample['deep'][1] unchanged for some rows" in each and "\n" not in each for each in why)
    expected = torch.Tensor if 0 in when else list  # the nesting that the first row has
    assert all(isinstance(batch["deep"][1], expected) and isinstance(batch["as it was"], list) for batch in batches)
    batches, why = batches_of_ranks(built(copies=True), size, world)
    assert not why and all(
        isinstance(batch["deep"][1], torch.Tensor) and isinstance(batch["as it was"], list) for batch in batches
    )


def test_bad_first_row_does_not_determine_the_nesting():
    pipeline = Pipeline(ImagesInList(bad=True)).map(Resizing((0, 1, 2))).skip_bad_rows(1).batch(5)
    assert all(isinstance(batch["deep"][1], torch.Tensor) for batch in pipeline)
    with pytest.raises(ConfigurationError, match="unchanged for some rows"):
        list(Pipeline(ImagesInList(bad=True)).map(Resizing((0,))).skip_bad_rows(1).batch(2))


def drawing(sample):
    return {"picture": sample["picture"], "drawn": torch.rand(2), "normal": numpy.random.normal()}


def drawing_more(batch):
    return batch | {"more": (torch.rand(1), numpy.random.normal(), random.random())}


@pytest.mark.parametrize("way", [{"batches": 0}, {"processes": 3}], ids=str)
def test_probe_of_the_first_row_draws_no_numbers(way):
    """A probe of the first row must not advance the numbers of any batch."""
    pipeline = Pipeline(ImagesInList()).map(drawing).batch(4).map(drawing_more)
    expected = list(pipeline.prefetch(**way).epoch(0))
    for start in range(len(expected)):
        assert same(list(pipeline.epoch(0, start)), expected[start:])
    torch.manual_seed(1)
    numpy.random.seed(1)
    before = torch.rand(1), numpy.random.normal()
    torch.manual_seed(1)
    numpy.random.seed(1)
    list(pipeline.epoch(0))
    assert before == (torch.rand(1), numpy.random.normal())


# ---- caches


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("maps", [[], [unchanged]], ids=["plain", "mapped"])
def test_cached_images_of_one_size_are_stacked(tmp_path, kind, maps):
    plain = image_folder(tmp_path, sizes=[(20, 30)]).shuffle(seed=1)
    expected = list(plain.batch(BATCH))
    assert isinstance(expected[0][0], list)
    for _ in range(2):  # the second time from the disk
        cached = plain
        for function in maps:
            cached = cached.map(function)
        cached = cached.cache(kind).batch(BATCH)
        assert same(list(cached), expected)
        assert cached.source.columns is not None


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("sizes", [[(20, 30), (30, 20)], [(20, 30)] * (ROWS - 1) + [(20, 31)]], ids=["all", "the last"])
def test_images_of_two_sizes_are_refused_with_and_without_cache(tmp_path, kind, sizes):
    with pytest.raises(
        ConfigurationError, match=r"\(3, 20, 30\).*\(3, (30, 20|20, 31)\).*images\(resize=\)"
    ) as refused:
        list(image_folder(tmp_path, sizes).cache(kind).batch(BATCH))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_cached_lists_of_one_length_keep_their_type(tmp_path, kind):
    plain = table(tmp_path).map(lambda sample: {"equal": sample["equal"], "inner": (sample["number"], sample["equal"])})
    expected = list(plain.batch(BATCH))
    assert same(list(plain.cache(kind).batch(BATCH)), expected)
    assert isinstance(expected[0]["inner"][1], list) and isinstance(expected[0]["inner"][0], torch.Tensor)


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize(
    ("name", "message"),
    [("some", r"rows of int64 \(0,\) and of int64 \(1,\)"), ("words", "holds lists"), ("text", "holds strs")],
)
def test_cached_ragged_values_are_refused(tmp_path, kind, name, message):
    with pytest.raises(ConfigurationError, match=message):
        list(table(tmp_path).map(lambda sample: sample[name]).cache(kind).batch(BATCH))
