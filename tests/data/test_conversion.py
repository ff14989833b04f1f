"""Data stored in other ways: the same content, restartable, refused where it would not be the same."""

import json
import os
import subprocess
import sys

import numpy
import pytest
import torch
from storages import ROWS, numbers, pictures, table, written

from hasten import Failure, Refusal
from hasten.data import arrays, convert, feather, images, parquet, shards, tfrecord
from hasten.data.source import leaves_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def everything(pipeline):
    return pipeline.source.read(numpy.arange(len(pipeline.source)))


def assert_equal(columns, others):
    for one, other in zip(leaves_of(columns), leaves_of(others), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("to", ["parquet", "feather"])
def test_a_table_keeps_everything_also_what_is_missing(tmp_path, to):
    data = written(tmp_path / "in", content=table())
    result = convert(data, tmp_path / "out", to=to, shards=4)
    assert result["rows"] == result["written"] == ROWS and len(result["files"]) == 4
    fill = {"missing": -1.0, "word": "none"}
    read = {"parquet": parquet, "feather": feather}[to]
    assert_equal(everything(read(tmp_path / "out", fill=fill)), everything(parquet(data, fill=fill)))


def test_rows_are_matrices_that_arrays_maps(tmp_path):
    data = written(tmp_path / "in")
    result = convert(data, tmp_path / "out", to="rows", target="label")
    assert result["files"] == ["inputs.npy", "label.npy"]
    x, y = everything(arrays(*(tmp_path / "out" / name for name in result["files"])))
    assert_equal((x, y), everything(parquet(data, target="label")))
    assert result["gain"]["before"] > 0 and result["gain"]["after"] > 0


def test_records_are_what_tfrecord_reads(tmp_path):
    data = written(tmp_path / "in", content=table().drop_columns(["word"]))
    convert(data, tmp_path / "out", to="tfrecord", fill=0)
    read = everything(tfrecord(tmp_path / "out", features={"number": (), "small": (), "list": None, "inner.b": ()}))
    original = everything(parquet(data, fill=0))
    assert torch.equal(read["number"], original["number"])
    assert torch.equal(read["small"], original["small"].long())
    assert_equal(read["list"], [row.long() for row in original["list"]])
    assert read["inner.b"] == [text.encode() for text in original["inner"]["b"]]


def test_back_from_records_and_rows(tmp_path):
    data = written(tmp_path / "in")
    convert(data, tmp_path / "records", to="tfrecord")
    convert(tmp_path / "records", tmp_path / "rows", to="rows")
    convert(tmp_path / "rows", tmp_path / "back", to="parquet")
    assert_equal(everything(parquet(tmp_path / "back", columns=numbers().column_names)), everything(parquet(data)))


def test_csv_becomes_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,one\n2,two\n")
    (tmp_path / "b.csv").write_text("x,y\n2.5,half\n")
    convert(tmp_path / "*.csv", tmp_path / "out", to="parquet")
    read = everything(parquet(tmp_path / "out"))
    assert read["x"].tolist() == [1, 2, 2.5] and read["y"] == ["one", "two", "half"]


def test_pictures_become_smaller_ones_in_tars(tmp_path):
    data = pictures(tmp_path / "in")
    result = convert(data, tmp_path / "out", to="shards", resize=64, shards=3)
    assert len(result["files"]) == 3 and result["bytes"] < result["bytes_before"]
    read = everything(shards(tmp_path / "out", columns=["jpg"], target="cls", resize=64))
    there, labels = everything(images(data, resize=64))
    assert torch.equal(read[1], labels)
    assert (read[0].float() - there.float()).abs().mean() < 6  # of 255: JPEG loses a little


def test_pictures_that_are_not_resized_stay_the_same_bytes(tmp_path):
    data = pictures(tmp_path / "in")
    convert(data, tmp_path / "out", to="shards")
    read = everything(shards(tmp_path / "out"))["jpg"]
    assert_equal(read, everything(images(data, labels=None)))


def test_shards_are_made_smaller(tmp_path):
    convert(pictures(tmp_path / "in"), tmp_path / "big", to="shards")
    result = convert(tmp_path / "big", tmp_path / "out", to="shards", resize=32)
    read = everything(shards(tmp_path / "out", resize=32))
    assert result["rows"] == 12 and read["jpg"].shape == (12, 3, 32, 32) and read["cls"].sum() == 6
    convert(tmp_path / "big", tmp_path / "rows", to="rows", resize=32)
    assert numpy.load(tmp_path / "rows" / "jpg.npy").shape == (12, 3, 32, 32)


KILLED = """
import os, sys
from hasten.data import convert

calls = 0
def watch(what, done, left):
    global calls
    calls += 1
    if calls == 5:
        os._exit(9)

convert(sys.argv[1], sys.argv[2], to=sys.argv[3], shards=int(sys.argv[4]) or None, watch=watch)
"""


def test_a_killed_conversion_goes_on(tmp_path):
    data, to, parts = written(tmp_path / "in"), "feather", 6
    words = [sys.executable, "-c", KILLED, str(data), str(tmp_path / "out"), to, str(parts)]
    assert subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=60).returncode == 9
    assert any(name.endswith(".part") for name in os.listdir(tmp_path / "out"))
    result = convert(data, tmp_path / "out", to=to, shards=parts)
    assert result["written"] == 2 * ROWS // parts
    assert result["digest"] == convert(data, tmp_path / "again", to=to, shards=parts)["digest"]
    assert not any(name.endswith(".part") for name in os.listdir(tmp_path / "out"))
    assert convert(data, tmp_path / "out", to=to, shards=parts)["written"] == 0


def test_matrices_go_on_too(tmp_path, monkeypatch):
    """They are one file a column, in which each part has its place."""
    monkeypatch.setattr("hasten.data.storing.conversion.PART_BYTES", 10_000)
    data = written(tmp_path / "in")

    def stop(what, done, left):
        if done > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(data, tmp_path / "out", to="rows", target="label", watch=stop)
    assert not any(name.endswith(".npy") for name in os.listdir(tmp_path / "out"))
    result = convert(data, tmp_path / "out", to="rows", target="label")
    assert 0 < result["written"] < ROWS / 2
    assert numpy.array_equal(numpy.load(tmp_path / "out" / "label.npy"), everything(parquet(data))["label"])


def test_another_conversion_in_the_same_folder_is_refused(tmp_path):
    data = written(tmp_path / "in")
    convert(data, tmp_path / "out", to="feather", shards=2)
    with pytest.raises(Refusal, match=r"another conversion \(parts 2, not 3\)"):
        convert(data, tmp_path / "out", to="feather", shards=3)
    with pytest.raises(Refusal, match=r"another conversion \(to feather, not parquet\)"):
        convert(data, tmp_path / "out", to="parquet", shards=2)
    written(data, content=numbers(ROWS - 1))
    with pytest.raises(Refusal, match="the original has changed"):
        convert(data, tmp_path / "out", to="feather", shards=2)


def test_damage_while_writing_is_noticed(tmp_path, monkeypatch):
    """A bit that changes between writing and reading back: the file is changed behind the back of the conversion."""
    from hasten.data.storing import storages

    synced = storages.synced

    def damaged(file):
        synced(file)
        path, size = file.name, os.path.getsize(file.name)
        with open(path, "r+b") as again:
            again.seek(size // 4)
            byte = again.read(1)[0]
            again.seek(size // 4)
            again.write(bytes([byte ^ 1]))

    monkeypatch.setattr(storages, "synced", damaged)
    with pytest.raises(Failure, match=r"part 0 of .* is not what was written"):
        convert(written(tmp_path / "in"), tmp_path / "out", to="feather")
    assert [name for name in os.listdir(tmp_path / "out") if not name.endswith(".part")] == ["conversion.json"]


LIMITED = """
import resource, signal, sys
from hasten.data import convert
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for to in ("parquet", "feather", "tfrecord", "rows"):
    try:
        convert(sys.argv[1], sys.argv[2] + to, to=to)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_no_room(tmp_path):
    """A limit of the system on the size of files stands for a full disk."""
    words = [sys.executable, "-c", LIMITED, str(written(tmp_path / "in")), str(tmp_path / "out")]
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all(line.startswith("Failure cannot write") and "too large" in line for line in lines), done


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    data = pictures(tmp_path / "in")
    (data / "cat" / "3.jpg").write_bytes(b"no picture")
    with pytest.raises(Failure, match=r"cat/3.jpg.*mend it"):
        convert(data, tmp_path / "out", to="shards", resize=16)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"to": "fether"}, "did you mean feather"),
        ({"to": "shards"}, "Parquet cannot be stored as shards; they can become parquet or feather or tfrecord or rows"),
        ({"to": "feather", "resize": 3}, "--resize is for pictures"),
        ({"to": "feather", "target": "label"}, "--target"),
        ({"to": "rows", "target": "lable"}, "did you mean label"),
        ({"to": "rows", "shards": 3}, "leave --shards out"),
        ({"to": "feather", "shards": 0}, "shards must be a whole number of at least 1"),
    ],
)
def test_wrong_requests(tmp_path, settings, told):
    with pytest.raises(Refusal, match=told):
        convert(written(tmp_path / "in"), tmp_path / "out", **settings)


def test_wrong_folders(tmp_path):
    data = written(tmp_path / "in")
    (tmp_path / "file").touch()
    with pytest.raises(Failure, match=r"cannot write .*file"):
        convert(data, tmp_path / "file", to="feather")
    with pytest.raises(Refusal, match="is not empty and holds no conversion"):
        convert(data, data, to="feather")
    with pytest.raises(Refusal, match="there is no file"):
        convert(tmp_path / "nothing", tmp_path / "out", to="feather")
    with pytest.raises(Refusal, match=r"no file name of .* tells what it holds"):
        convert(tmp_path / "file", tmp_path / "out", to="feather")
    with pytest.raises(Refusal, match="text, bytes or rows of unequal shapes"):
        convert(written(tmp_path / "texts", content=table().drop_columns(["word"])), tmp_path / "out", to="rows", fill=0)


def test_the_manifest_says_what_is_there(tmp_path):
    convert(written(tmp_path / "in"), tmp_path / "out", to="feather", shards=2)
    note = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert note["finished"] and [rows for rows, _ in note["parts done"]] == [ROWS // 2] * 2
    assert note["settings"]["to"] == "feather" and note["files"] == sorted(note["files"])


def test_one_process_a_folder(tmp_path):
    import fcntl

    data = written(tmp_path / "in")
    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(Refusal, match="another process converts into"):
        convert(data, tmp_path / "out", to="feather")
    os.close(handle)
    assert convert(data, tmp_path / "out", to="feather")["open"] == f'feather("{tmp_path / "out"}")'
