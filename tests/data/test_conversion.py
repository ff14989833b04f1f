"""Data stored in other ways: the same content, restartable, refused where it would not be the same."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import numpy
import pytest
import torch
from storages import ROWS, numbers, pictures, table, written

from hasten import Failure, Refusal
from hasten.cli.main import main
from hasten.data import arrays, convert, feather, images, inspect, parquet, shards, tfrecord
from hasten.data.source import leaves_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    for name in ("COPY_SECONDS", "ENOUGH"):  # how fast it is read is measured for a moment only
        monkeypatch.setattr(f"hasten.data.storing.stages.{name}", 0.02)


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
        ({"to": "feather", "shards": ROWS + 1}, f"{ROWS} rows do not make {ROWS + 1} files; say --shards {ROWS} or fewer"),
        ({"to": "feather", "skip_bad": 0}, "skip_bad must be a whole number of at least 1"),
    ],
)
def test_wrong_requests(tmp_path, settings, told):
    with pytest.raises(Refusal, match=told):
        convert(written(tmp_path / "in"), tmp_path / "out", **settings)


def test_wrong_folders(tmp_path):
    data = written(tmp_path / "in")
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(Refusal, match=r"cannot write to .*file.*choose another --out"):
            convert(data, out, to="feather")
    for out in (data, data / "out"):
        with pytest.raises(Refusal, match="where it would be read as a part of the original"):
            convert(data, out, to="feather")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(Refusal, match="is not empty and holds no conversion"):
        convert(data, tmp_path / "full", to="feather")
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


def listed(folder):
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("to", "resize", "parts"), [("rows", 16, 1), ("shards", 16, 3), ("rows", None, 4)])
def test_bad_pictures_are_left_out_and_listed(tmp_path, monkeypatch, to, resize, parts):
    """The first one, too, by which the shape of all is known."""
    data = pictures(tmp_path / "in", sizes=((20, 30),))
    for name in ("cat/1.jpg", "dog/10.jpg", "dog/6.jpg"):
        (data / name).write_bytes(b"no picture")
    size = sum(path.stat().st_size for path in data.rglob("*.jpg"))
    monkeypatch.setattr("hasten.data.storing.conversion.PART_BYTES", size / parts)
    result = convert(data, tmp_path / "out", to=to, resize=resize, skip_bad=3)
    there = [each["where"] for each in listed(tmp_path / "out")]
    assert there == [str(data / name) for name in ("cat/1.jpg", "dog/10.jpg", "dog/6.jpg")]
    assert (result["rows"], result["skipped"], result["classes"]) == (9, 3, ["cat", "dog"])
    if to == "rows":
        read, labels = everything(arrays(*(tmp_path / "out" / name for name in result["files"])))
        assert read.shape == (9, 3, *((16, 16) if resize else (20, 30)))
    else:
        _, labels = everything(shards(tmp_path / "out", columns=["jpg"], target="cls", resize=16))
    assert labels.tolist() == [0] * 5 + [1] * 4
    assert inspect(tmp_path / "out", budget=0.5)["classes"] == ["cat", "dog"]
    with pytest.raises(Failure, match=r"dog/6.jpg.*bad row number 3, and 2 may be left out"):
        convert(data, tmp_path / "fewer", to=to, resize=resize, skip_bad=2)
    assert listed(tmp_path / "fewer")[0]["where"] == there[0]
    with pytest.raises(Refusal, match=r"another conversion \(skip bad 2, not 3\)"):
        convert(data, tmp_path / "fewer", to=to, resize=resize, skip_bad=3)


@pytest.mark.parametrize("to", ["feather", "parquet", "rows", "tfrecord"])
def test_a_bad_run_is_as_many_bad_rows(tmp_path, to):
    data = written(tmp_path / "in", runs=50)
    damage(data / "train.parquet", run=3)
    with pytest.raises(Failure, match=r"train.parquet, row group 3\).*let some be left out: --skip-bad 10"):
        convert(data, tmp_path / "none", to=to, shards=None if to == "rows" else 2)
    result = convert(data, tmp_path / "out", to=to, skip_bad=50, shards=None if to == "rows" else 2)
    assert (result["rows"], result["skipped"]) == (ROWS - 50, 50)
    assert [each["row"] for each in listed(tmp_path / "out")] == [*range(150, 200)]
    if to in ("feather", "parquet"):
        read = everything({"feather": feather, "parquet": parquet}[to](tmp_path / "out"))
        kept = numpy.r_[0:150, 200:ROWS]
        assert numpy.array_equal(read["label"], numbers()["label"].to_numpy()[kept])


def damage(path, run):
    """Wrong bytes where the pages of a row group lie."""
    import pyarrow.parquet

    column = pyarrow.parquet.read_metadata(path).row_group(run).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 8] = b"\xff" * 8
    path.write_bytes(content)


def test_a_killed_conversion_remembers_what_it_left_out(tmp_path):
    data = written(tmp_path / "in", runs=50)
    damage(data / "train.parquet", run=3)

    def stop(what, done, left):
        if done > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(data, tmp_path / "out", to="feather", shards=6, skip_bad=50, watch=stop)
    (tmp_path / "out" / "skipped.jsonl").unlink()  # as after kill -9
    result = convert(data, tmp_path / "out", to="feather", shards=6, skip_bad=50)
    whole = convert(data, tmp_path / "again", to="feather", shards=6, skip_bad=50)
    assert 0 < result["written"] <= ROWS / 2 and result["digest"] == whole["digest"]
    assert listed(tmp_path / "out") == listed(tmp_path / "again") and result["skipped"] == 50


def test_a_part_without_a_row_is_a_failure(tmp_path):
    data = pictures(tmp_path / "in", count=4)
    (data / "cat" / "1.jpg").write_bytes(b"no picture")
    with pytest.raises(Failure, match=r"no row of part 0 can be read, the first is .*cat/1.jpg; mend it, or take fewer --shards"):
        convert(data, tmp_path / "out", to="shards", resize=8, shards=4, skip_bad=2)


def test_words_of_classes_are_kept(tmp_path):
    words = table().select(["number", "small", "word"])
    data = written(tmp_path / "in", content=words.filter(words["word"].is_valid()))
    result = convert(data, tmp_path / "out", to="rows", target="word")
    assert result["classes"] == ["", "alpha", "beta", "gamma"]
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["classes"] == result["classes"]
    numbers_of = numpy.load(tmp_path / "out" / "word.npy")
    assert [result["classes"][number] for number in numbers_of] == parquet_words(data)
    assert convert(tmp_path / "out", tmp_path / "on", to="feather")["classes"] == result["classes"]


def parquet_words(data):
    import pyarrow.parquet

    return pyarrow.parquet.read_table(data)["word"].to_pylist()


def test_pictures_of_one_size_become_rows_as_they_are(tmp_path):
    data = pictures(tmp_path / "in", sizes=((32, 48),), ending="png")
    result = convert(data, tmp_path / "out", to="rows")
    read, _ = everything(arrays(*(tmp_path / "out" / name for name in result["files"])))
    assert torch.equal(read, torch.stack(everything(images(data))[0]))
    shards_of = convert(data, tmp_path / "shards", to="shards")
    assert convert(tmp_path / "shards", tmp_path / "again", to="rows")["rows"] == shards_of["rows"] == 12
    pictures(data, count=1, sizes=((20, 20),), ending="png")
    with pytest.raises(Refusal, match="pictures need --resize"):
        convert(data, tmp_path / "mixed", to="rows")
    assert not (tmp_path / "mixed").exists()


def test_an_unfinished_conversion_is_no_data(tmp_path):
    data = written(tmp_path / "in")

    def stop(what, done, left):
        if done > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(data, tmp_path / "out", to="feather", shards=6, watch=stop)
    for read in (lambda: inspect(tmp_path / "out"), lambda: convert(tmp_path / "out", tmp_path / "on", to="parquet")):
        with pytest.raises(Refusal, match="did not come to its end; start it again"):
            read()
    with pytest.raises(Refusal):
        feather(tmp_path / "out")


def test_what_it_gives_is_estimated_before_and_measured_after(tmp_path, capfd):
    data = written(tmp_path / "in", content=numbers(50_000))
    assert main(["data", "convert", str(data), "--to", "rows", "--out", str(tmp_path / "out"), "--target", "label"]) == 0
    told = re.search(r"gain +estimated ([\d.,]+)×, measured ([\d.,]+)×", capfd.readouterr().out)  # noqa: RUF001
    estimated, measured = (float(number.replace(",", "")) for number in told.groups())
    assert estimated > 1 and measured > 1
    noted = json.loads((tmp_path / "out" / "conversion.json").read_text())["estimated"]
    assert convert(data, tmp_path / "out", to="rows", target="label")["gain"]["estimated"] == noted


def test_ctrl_c_says_how_it_goes_on_and_leaves_no_half(tmp_path):
    data, out = written(tmp_path / "in"), tmp_path / "out"
    words = [sys.executable, "-m", "hasten", "data", "convert", str(data), "--to", "feather", "--shards", "300", "--out", str(out)]
    words += ["--json", "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background inherits that it is ignored
    process = subprocess.Popen(words, **pipes, env=environment, preexec_fn=heard)
    deadline = time.monotonic() + 60
    while len([*out.glob("*.feather.part")]) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said, told = process.communicate(timeout=60)
    assert process.returncode == 1, told
    assert f"go on with: hasten data convert {data} --to feather --shards 300 --out {out}" in json.loads(said)["error"]
    assert told.count("\n") == 1 and not [*out.glob("*.feather")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0 and 0 < json.loads(done.stdout)["written"] < ROWS
    assert not [*out.glob("*.part")] and len(feather(out).source) == ROWS


def test_an_original_that_changes_meanwhile_is_noticed(tmp_path):
    data = written(tmp_path / "in")

    def change(what, done, left):
        os.utime(data / "train.parquet", (1, 1))

    with pytest.raises(Failure, match="the original changed while it was converted"):
        convert(data, tmp_path / "out", to="rows", watch=change)
    assert not [*(tmp_path / "out").glob("*.npy")]
