"""Conversions between storage formats: the same content in every format."""

import gzip
import json
import os

import numpy
import pyarrow as pa
import pytest
import torch

from hasten import ConfigurationError
from hasten.data import arrays, convert, csv, feather, images, inspect, parquet, tfrecord, webdataset
from hasten.data.io.paths import resolve_paths
from hasten.data.source import column_leaves
from hasten.datatools.format_detection import formats_at
from helpers.storages import ROWS, mixed_table, numeric_table, read_all, write_images, write_table

pytestmark = pytest.mark.usefixtures("brief_measurements")


def assert_equal(columns, others):
    for one, other in zip(column_leaves(columns), column_leaves(others), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert all(
                torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
            )


@pytest.mark.parametrize("to", ["parquet", "feather"])
def test_convert_table_keeps_everything_including_missing_values(tmp_path, to):
    data = write_table(tmp_path / "in", content=mixed_table())
    result = convert(data, tmp_path / "out", to=to, shards=4)
    assert result["rows"] == result["written"] == ROWS and len(result["files"]) == 4
    fill = {"missing": -1.0, "word": "none"}
    read = {"parquet": parquet, "feather": feather}[to]
    assert_equal(read_all(read(tmp_path / "out", fill=fill)), read_all(parquet(data, fill=fill)))


def test_convert_rows_to_matrices_that_arrays_reads(tmp_path):
    data = write_table(tmp_path / "in")
    result = convert(data, tmp_path / "out", to="rows", target="label")
    assert result["files"] == ["inputs.npy", "label.npy"]
    x, y = read_all(arrays(*(tmp_path / "out" / name for name in result["files"])))
    assert_equal((x, y), read_all(parquet(data, target="label")))


def test_convert_rows_gives_each_column_a_visible_file_of_its_own(tmp_path):
    names = ["?", ".x", "a b", "a_b", "a_b-3"]
    (tmp_path / "data.csv").write_text(",".join(names) + "\n" + "0,1,2,3,4\n" * 3)
    files = convert(tmp_path / "data.csv", tmp_path / "out", to="rows")["files"]
    assert len(set(files)) == len(names) and not any(file.startswith(".") for file in files)
    read = read_all(arrays({name: tmp_path / "out" / file for name, file in zip(names, files, strict=True)}))
    assert [read[name].tolist() for name in names] == [[value] * 3 for value in range(5)]


def test_convert_to_records_that_tfrecord_reads(tmp_path):
    data = write_table(tmp_path / "in", content=mixed_table().drop_columns(["word"]))
    convert(data, tmp_path / "out", to="tfrecord", fill=0)
    read = read_all(tfrecord(tmp_path / "out", features={"number": (), "small": (), "list": None, "inner.b": ()}))
    original = read_all(parquet(data, fill=0))
    assert torch.equal(read["number"], original["number"])
    assert torch.equal(read["small"], original["small"].long())
    assert_equal(read["list"], [row.long() for row in original["list"]])
    assert read["inner.b"] == [text.encode() for text in original["inner"]["b"]]


def test_convert_back_from_records_and_rows(tmp_path):
    data = write_table(tmp_path / "in")
    convert(data, tmp_path / "records", to="tfrecord")
    convert(tmp_path / "records", tmp_path / "rows", to="rows")
    convert(tmp_path / "rows", tmp_path / "back", to="parquet")
    assert_equal(read_all(parquet(tmp_path / "back", columns=numeric_table().column_names)), read_all(parquet(data)))


def test_convert_csv_to_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,one\n2,two\n")
    (tmp_path / "b.csv").write_text("x,y\n2.5,half\n")
    convert(tmp_path / "*.csv", tmp_path / "out", to="parquet")
    read = read_all(parquet(tmp_path / "out"))
    assert read["x"].tolist() == [1, 2, 2.5] and read["y"] == ["one", "two", "half"]


def test_convert_csv_whose_integers_are_fractions_in_another_file(tmp_path):
    large = 2**53 + 1
    (tmp_path / "a.csv").write_text(f"x\n1\n{large}\n")
    (tmp_path / "b.csv").write_text("x\n1.5\n2.5\n")
    for to in ("parquet", "feather"):
        convert(tmp_path / "*.csv", tmp_path / to, to=to)
        read = {"parquet": parquet, "feather": feather}[to](tmp_path / to)
        assert (
            read_all(read)["x"].tolist() == read_all(csv(tmp_path / "*.csv"))["x"].tolist() == [1, large - 1, 1.5, 2.5]
        )


@pytest.mark.parametrize("name", ["X.TSV", "X.TSV.GZ", "X.CSV.GZ"])
def test_convert_csv_with_an_upper_case_name(tmp_path, name):
    text = ("a\tb\n1\t2\n" if "TSV" in name else "a,b\n1,2\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".GZ") else text)
    convert(tmp_path / name, tmp_path / "out", to="feather")
    assert {column: values.tolist() for column, values in read_all(feather(tmp_path / "out")).items()} == {
        "a": [1],
        "b": [2],
    }


def test_convert_fill_as_a_number_of_numpy(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n,4\n")
    convert(tmp_path / "a.csv", tmp_path / "out", to="rows", fill=numpy.float32(7))
    assert convert(tmp_path / "a.csv", tmp_path / "out", to="rows", fill=7)["written"] == 0
    assert numpy.load(tmp_path / "out" / "x.npy").tolist() == [1, 7]


def test_convert_resizes_images_into_tars(tmp_path):
    data = write_images(tmp_path / "in")
    result = convert(data, tmp_path / "out", to="webdataset", resize=64, shards=3)
    assert len(result["files"]) == 3 and result["bytes"] < result["bytes_before"]
    read = read_all(webdataset(tmp_path / "out", columns=["jpg"], target="cls", resize=64))
    converted, labels = read_all(images(data, resize=64))
    assert torch.equal(read[1], labels)
    assert (read[0].float() - converted.float()).abs().mean() < 6  # of 255: JPEG loses a little


def test_convert_without_resize_copies_image_bytes(tmp_path):
    data = write_images(tmp_path / "in")
    convert(data, tmp_path / "out", to="webdataset")
    read = read_all(webdataset(tmp_path / "out"))["jpg"]
    assert_equal(read, read_all(images(data, labels=None)))


def test_convert_makes_smaller_shards(tmp_path):
    convert(write_images(tmp_path / "in"), tmp_path / "big", to="webdataset")
    result = convert(tmp_path / "big", tmp_path / "out", to="webdataset", resize=32)
    read = read_all(webdataset(tmp_path / "out", resize=32))
    assert result["rows"] == 12 and read["jpg"].shape == (12, 3, 32, 32) and read["cls"].sum() == 6
    convert(tmp_path / "big", tmp_path / "rows", to="rows", resize=32)
    assert numpy.load(tmp_path / "rows" / "jpg.npy").shape == (12, 3, 32, 32)


def test_manifest_describes_the_output(tmp_path):
    convert(write_table(tmp_path / "in"), tmp_path / "out", to="feather", shards=2)
    note = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert note["finished"] and [rows for rows, _ in note["parts done"]] == [ROWS // 2] * 2
    assert note["settings"]["to"] == "feather" and note["files"] == sorted(note["files"])


def test_convert_keeps_class_names(tmp_path):
    table = mixed_table().select(["number", "small", "word"])
    data = write_table(tmp_path / "in", content=table.filter(table["word"].is_valid()))
    result = convert(data, tmp_path / "out", to="rows", target="word")
    assert result["classes"] == ["", "alpha", "beta", "gamma"]
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["classes"] == result["classes"]
    numbers_of = numpy.load(tmp_path / "out" / "word.npy")
    assert [result["classes"][number] for number in numbers_of] == parquet_words(data)
    assert convert(tmp_path / "out", tmp_path / "on", to="feather")["classes"] == result["classes"]


def parquet_words(data):
    import pyarrow.parquet

    return pyarrow.parquet.read_table(data)["word"].to_pylist()


def test_convert_images_of_one_size_to_rows(tmp_path):
    data = write_images(tmp_path / "in", sizes=((32, 48),), ending="png")
    result = convert(data, tmp_path / "out", to="rows")
    read, _ = read_all(arrays(*(tmp_path / "out" / name for name in result["files"])))
    assert torch.equal(read, torch.stack(read_all(images(data))[0]))
    shards_of = convert(data, tmp_path / "shards", to="webdataset")
    assert convert(tmp_path / "shards", tmp_path / "again", to="rows")["rows"] == shards_of["rows"] == 12
    write_images(data, count=1, sizes=((20, 20),), ending="png")
    with pytest.raises(ConfigurationError, match="resize images with --resize"):
        convert(data, tmp_path / "mixed", to="rows")
    assert not (tmp_path / "mixed").exists()


def test_convert_lists_of_strings_some_of_which_are_empty(tmp_path):
    words = [["a", "b"], [], ["c"], []]
    data = write_table(tmp_path / "in", content=pa.table({"words": words, "number": range(4)}))
    convert(data, tmp_path / "out", to="tfrecord")
    read = read_all(tfrecord(tmp_path / "out"))
    assert read["words"] == [[word.encode() for word in row] for row in words] and read["number"].tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_convert_and_inspect_patterns_that_match_other_files(tmp_path):
    write_images(tmp_path / "in", sizes=((16, 16),))
    (tmp_path / "in" / "cat" / "notes.txt").touch()
    (tmp_path / "in" / "notes.txt").touch()
    for pattern, others in (("in/*/*", 1), ("in/*", 2)):
        result = convert(tmp_path / pattern, tmp_path / "out", to="webdataset", shards=1)
        assert (result["rows"], result["others"], result["classes"]) == (12, {"CSV": others}, ["cat", "dog"])
        result = inspect(tmp_path / pattern, budget=0.1)
        assert (result["rows"], result["trouble"], result["classes"]) == (12, None, ["cat", "dog"])


def test_convert_expands_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "in" / "set", sizes=((16, 16),))
    result = convert("~/in", "~/out", to="webdataset")
    assert result["out"] == str(tmp_path / "out") and result["classes"] == ["set"] and not (tmp_path / "~").exists()
    for out in ("~/in/out", tmp_path / "in" / "out"):
        with pytest.raises(ConfigurationError, match="where it would be read as a part of the original"):
            convert("~/in", out, to="webdataset")


def test_stray_image_does_not_cost_all_labels(tmp_path):
    data = write_images(tmp_path / "in", 4)
    (data / "preview.jpg").write_bytes(next((data / "cat").iterdir()).read_bytes())
    with pytest.raises(ConfigurationError, match=r"preview\.jpg is in no directory"):
        convert(data, tmp_path / "out", to="webdataset")
    assert not (tmp_path / "out").exists()


def test_records_with_the_number_of_the_shard_behind_the_suffix_are_found(tmp_path):
    """As TensorFlow Datasets names them, beside a list of the labels."""
    convert(write_table(tmp_path / "in"), tmp_path / "out", to="tfrecord")
    data = tmp_path / "tfds"
    data.mkdir()
    os.replace(next((tmp_path / "out").glob("*.tfrecord")), data / "x-train.tfrecord-00000-of-00001")
    (data / "label.labels.txt").write_text("cat\ndog\n")
    (kind, files), *_ = formats_at(data)
    assert kind.name == "tfrecord" and resolve_paths(data, (".tfrecord",)) == files
