"""Conversions of data with unreadable rows: the first bad row ends them, or up to a limit are skipped, counted and
listed."""

import json
import tarfile

import numpy
import pytest

from hasten import ConfigurationError, RunError
from hasten.cli.main import main
from hasten.data import arrays, convert, feather, inspect, parquet, webdataset
from helpers.storages import ROWS, damage, numeric_table, read_all, write_images, write_table

pytestmark = pytest.mark.usefixtures("brief_measurements")


@pytest.mark.parametrize(("to", "resize"), [("webdataset", 16), ("webdataset", None), ("rows", None)])
@pytest.mark.parametrize(
    ("damage", "why"),
    [("no picture", "the file is not a JPEG or PNG image"), ("cut off", "the image cannot be decoded")],
)
def test_convert_unreadable_row_is_named(tmp_path, to, resize, damage, why):
    """Also if its bytes could be copied unread: converted data are readable."""
    data = write_images(tmp_path / "in", sizes=((200, 300),))
    file = data / "cat" / "3.jpg"
    file.write_bytes(b"no picture" if damage == "no picture" else file.read_bytes()[:-2000])
    with pytest.raises(RunError, match=rf"cat/3.jpg\): {why}.*; repair it"):
        convert(data, tmp_path / "out", to=to, resize=resize)


def test_convert_readable_images_copies_their_bytes(tmp_path):
    data = write_images(tmp_path / "in")
    convert(data, tmp_path / "out", to="webdataset")
    with tarfile.open(tmp_path / "out" / "00000-of-00001.tar") as tar:
        stored = [tar.extractfile(member).read() for member in tar if member.name.endswith(".jpg")]
    assert stored == [path.read_bytes() for path in sorted(data.rglob("*.jpg"))]


def listed(directory):
    return [json.loads(line) for line in (directory / "skipped.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("to", "resize", "parts"), [("rows", 16, 1), ("webdataset", 16, 3), ("webdataset", None, 3), ("rows", None, 4)]
)
def test_convert_max_bad_rows_skips_and_lists_bad_images(tmp_path, monkeypatch, to, resize, parts):
    """Including the first, which determines the shape of all."""
    data = write_images(tmp_path / "in", sizes=((20, 30),))
    for name in ("cat/1.jpg", "dog/10.jpg", "dog/6.jpg"):
        (data / name).write_bytes(b"no picture")
    size = sum(path.stat().st_size for path in data.rglob("*.jpg"))
    monkeypatch.setattr("hasten.datatools.conversion.PART_BYTES", size / parts)
    result = convert(data, tmp_path / "out", to=to, resize=resize, max_bad_rows=3)
    skipped = [each["where"] for each in listed(tmp_path / "out")]
    assert skipped == [str(data / name) for name in ("cat/1.jpg", "dog/10.jpg", "dog/6.jpg")]
    assert (result["rows"], result["skipped_rows"], result["classes"]) == (9, 3, ["cat", "dog"])
    if to == "rows":
        read, labels = read_all(arrays(*(tmp_path / "out" / name for name in result["files"])))
        assert read.shape == (9, 3, *((16, 16) if resize else (20, 30)))
    else:
        _, labels = read_all(webdataset(tmp_path / "out", columns=["jpg"], target="cls", resize=16))
    assert labels.tolist() == [0] * 5 + [1] * 4
    assert inspect(tmp_path / "out", budget=0.5)["classes"] == ["cat", "dog"]
    with pytest.raises(RunError, match=r"dog/6.jpg.*bad row number 3, and max_rows=2 may be skipped"):
        convert(data, tmp_path / "fewer", to=to, resize=resize, max_bad_rows=2)
    assert listed(tmp_path / "fewer")[0]["where"] == skipped[0]
    with pytest.raises(ConfigurationError, match=r"another conversion \(max bad rows 2, not 3\)"):
        convert(data, tmp_path / "fewer", to=to, resize=resize, max_bad_rows=3)


@pytest.mark.parametrize("to", ["feather", "parquet", "rows", "tfrecord"])
def test_convert_bad_row_group_counts_all_its_rows(tmp_path, to):
    data = write_table(tmp_path / "in", runs=50)
    damage(data / "train.parquet", run=3)
    with pytest.raises(RunError, match=r"train.parquet, row group 3\).*skip some bad rows: --max-bad-rows 10"):
        convert(data, tmp_path / "none", to=to, shards=None if to == "rows" else 2)
    result = convert(data, tmp_path / "out", to=to, max_bad_rows=50, shards=None if to == "rows" else 2)
    assert (result["rows"], result["skipped_rows"]) == (ROWS - 50, 50)
    assert [each["row"] for each in listed(tmp_path / "out")] == [*range(150, 200)]
    if to in ("feather", "parquet"):
        read = read_all({"feather": feather, "parquet": parquet}[to](tmp_path / "out"))
        readable = numpy.r_[0:150, 200:ROWS]
        assert numpy.array_equal(read["label"], numeric_table()["label"].to_numpy()[readable])


@pytest.mark.parametrize("to", ["feather", "rows", "tfrecord"])
def test_convert_bad_csv_line_is_one_bad_row(tmp_path, to):
    (tmp_path / "in").mkdir()
    lines = [f"{row},{row / 2}" for row in range(40)]
    lines[7], lines[30] = "7", "30,15,15"
    (tmp_path / "in" / "t.csv").write_text("\n".join(["n,half", *lines]))
    with pytest.raises(RunError, match=r"row 7 \(.*t\.csv\): row 7 of the file, '7', has 1 field, not 2; repair it"):
        convert(tmp_path / "in", tmp_path / "out", to=to)
    result = convert(tmp_path / "in", tmp_path / "out", to=to, max_bad_rows=2)  # as the error advises
    assert (result["rows"], result["skipped_rows"], result["skipped_files"]) == (38, 2, 0)
    assert [(each["row"], each["why"]) for each in listed(tmp_path / "out")] == [
        (7, "row 7 of the file, '7', has 1 field, not 2"),
        (30, "row 30 of the file, '30,15,15', has 3 fields, not 2"),
    ]
    if to == "feather":
        assert read_all(feather(tmp_path / "out"))["n"].tolist() == [row for row in range(40) if row not in (7, 30)]
    read = inspect(tmp_path / "in", max_bad_rows=2, budget=0.5)
    assert read["trouble"] is None and read["rows"] == 40


def test_convert_csv_with_another_delimiter_is_not_a_bad_file(tmp_path):
    (tmp_path / "in").mkdir()
    for name, line in {"a": "1,0", "b": "1;0"}.items():
        (tmp_path / "in" / f"{name}.csv").write_text("n,half\n" + f"{line}\n" * 40)
    with pytest.raises(ConfigurationError, match=r"b\.csv has no more good lines than bad ones"):
        convert(tmp_path / "in", tmp_path / "out", to="feather", max_bad_rows=1)


def test_convert_killed_remembers_skipped_rows(tmp_path):
    data = write_table(tmp_path / "in", runs=50)
    damage(data / "train.parquet", run=3)

    def stop(what, done, left):
        if done > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(data, tmp_path / "out", to="feather", shards=6, max_bad_rows=50, on_progress=stop)
    (tmp_path / "out" / "skipped.jsonl").unlink()  # as after kill -9
    result = convert(data, tmp_path / "out", to="feather", shards=6, max_bad_rows=50)
    undisturbed = convert(data, tmp_path / "again", to="feather", shards=6, max_bad_rows=50)
    assert 0 < result["written"] <= ROWS / 2 and result["digest"] == undisturbed["digest"]
    assert listed(tmp_path / "out") == listed(tmp_path / "again") and result["skipped_rows"] == 50


def test_convert_shard_without_a_row_raises(tmp_path):
    data = write_images(tmp_path / "in", count=4)
    (data / "cat" / "1.jpg").write_bytes(b"no picture")
    with pytest.raises(
        RunError, match=r"no row of part 0 can be read, the first is .*cat/1.jpg; repair it, or use fewer --shards"
    ):
        convert(data, tmp_path / "out", to="webdataset", resize=8, shards=4, max_bad_rows=2)


@pytest.mark.parametrize(("to", "resize"), [("rows", 16), ("webdataset", 16), ("webdataset", None)])
def test_convert_unopenable_images_are_bad_rows(tmp_path, to, resize):
    """Links to a missing file, and cyclic links."""
    data = write_images(tmp_path / "in")
    lost = [data / "cat" / "1.jpg", data / "dog" / "6.jpg"]
    for link in lost:
        link.unlink()
        link.symlink_to("gone" if link.name == "1.jpg" else link.name)
    with pytest.raises(ConfigurationError, match=r"^cannot read .*cat/1.jpg: No such file"):
        convert(data, tmp_path / "out", to=to, resize=resize)
    with pytest.raises(RunError, match=r"dog/6.jpg.*bad row number 2, and max_rows=1 may be skipped"):
        convert(data, tmp_path / "fewer", to=to, resize=resize, max_bad_rows=1)
    result = convert(data, tmp_path / "out", to=to, resize=resize, max_bad_rows=2)
    assert (result["rows"], result["skipped_rows"], result["skipped_files"]) == (10, 2, 0)
    assert [each["where"] for each in listed(tmp_path / "out")] == list(map(str, lost))
    if to == "rows":
        labels = read_all(arrays(*(tmp_path / "out" / name for name in result["files"])))[1]
    else:
        labels = read_all(webdataset(tmp_path / "out", columns=["jpg"], target="cls", resize=16))[1]
    assert labels.tolist() == [0] * 5 + [1] * 5
    assert convert(data, tmp_path / "out", to=to, resize=resize, max_bad_rows=2)["written"] == 0


@pytest.mark.parametrize(
    ("form", "to"), [("feather", "parquet"), ("parquet", "rows"), ("tfrecord", "parquet"), ("webdataset", "webdataset")]
)
def test_convert_unopenable_files_are_skipped(tmp_path, form, to, capfd):
    data, resize = tmp_path / "data", 8 if form == "webdataset" else None
    original = write_images(tmp_path / "in") if form == "webdataset" else write_table(tmp_path / "in")
    first, second, third = (data / name for name in convert(original, data, to=form, shards=3)["files"])
    first.unlink()
    first.symlink_to("gone")
    third.write_bytes(third.read_bytes()[: third.stat().st_size // 2 - 7])
    with pytest.raises(ConfigurationError, match=rf"{first}|{third}"):
        convert(data, tmp_path / "out", to=to, resize=resize)
    with pytest.raises(ConfigurationError, match=rf"{third.name}.*; this is bad file 2, and at most 1 may be skipped"):
        convert(data, tmp_path / "out", to=to, resize=resize, max_bad_rows=1)
    argv = ["--max-bad-rows", "2", *(["--resize", "8"] if resize else [])]
    assert main(["data", "convert", str(data), "--to", to, "--out", str(tmp_path / "out"), *argv]) == 0
    assert "skipped 2 files that could not be read; skipped.jsonl lists them" in " ".join(
        capfd.readouterr().out.split()
    )
    assert [(each["row"], each["where"]) for each in listed(tmp_path / "out")] == [
        (None, str(first)),
        (None, str(third)),
    ]
    assert str(first) in listed(tmp_path / "out")[0]["why"]
    result = convert(data, tmp_path / "out", to=to, resize=resize, max_bad_rows=2)
    assert (result["written"], result["skipped_files"], result["skipped_rows"]) == (0, 2, 0)
    assert result["rows"] == (4 if form == "webdataset" else ROWS // 3)
    second.unlink()
    second.symlink_to("gone")
    with pytest.raises(ConfigurationError, match="no file can be opened"):
        convert(data, tmp_path / "none", to=to, resize=resize, max_bad_rows=3)


def test_convert_files_with_other_columns_are_refused_not_skipped(tmp_path):
    data = write_table(tmp_path / "in")
    write_table(data, "other.parquet", numeric_table().drop_columns(["x0"]))
    with pytest.raises(ConfigurationError, match=r"the files differ: .* has a column 'x0'"):
        convert(data, tmp_path / "out", to="feather", max_bad_rows=1)
