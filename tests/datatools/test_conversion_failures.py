"""Conversions that are killed, stopped or refused, or whose disk fails: no data are lost or incomplete."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count

import numpy
import pyarrow
import pytest

from hasten import ConfigurationError, RunError
from hasten.cli.main import main
from hasten.data import convert, feather, inspect, parquet
from helpers.process import FORK, join_process, start_process
from helpers.storages import ROWS, mixed_table, numeric_table, read_all, write_table

pytestmark = pytest.mark.usefixtures("brief_measurements")


TIMEOUT_S = 120  # seconds, for a busy machine; mostly unused


def killed(data, out, **how):
    """Starts a conversion whose process ends in the middle."""
    calls = count(1)
    convert(data, out, **how, on_progress=lambda *progress: next(calls) == 5 and os._exit(9))


def test_convert_killed_resumes(tmp_path):
    data, to, parts = write_table(tmp_path / "in"), "feather", 6
    assert join_process(start_process(killed, data, tmp_path / "out", to=to, shards=parts)) == 9
    assert any(name.endswith(".part") for name in os.listdir(tmp_path / "out"))
    result = convert(data, tmp_path / "out", to=to, shards=parts)
    assert result["written"] == 2 * ROWS // parts
    assert result["digest"] == convert(data, tmp_path / "again", to=to, shards=parts)["digest"]
    assert not any(name.endswith(".part") for name in os.listdir(tmp_path / "out"))
    assert convert(data, tmp_path / "out", to=to, shards=parts)["written"] == 0


def test_convert_killed_matrices_resume(tmp_path, monkeypatch):
    """Each column is one file, in which every part has its place."""
    monkeypatch.setattr("hasten.datatools.conversion.PART_BYTES", 10_000)
    data = write_table(tmp_path / "in")

    def stop(what, done, left):
        if done > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(data, tmp_path / "out", to="rows", target="label", on_progress=stop)
    assert not any(name.endswith(".npy") for name in os.listdir(tmp_path / "out"))
    result = convert(data, tmp_path / "out", to="rows", target="label")
    assert 0 < result["written"] < ROWS / 2
    assert numpy.array_equal(numpy.load(tmp_path / "out" / "label.npy"), read_all(parquet(data))["label"])


def test_convert_another_request_in_the_directory_is_refused(tmp_path):
    data = write_table(tmp_path / "in")
    convert(data, tmp_path / "out", to="feather", shards=2)
    with pytest.raises(ConfigurationError, match=r"another conversion \(parts 2, not 3\)"):
        convert(data, tmp_path / "out", to="feather", shards=3)
    with pytest.raises(ConfigurationError, match=r"another conversion \(to feather, not parquet\)"):
        convert(data, tmp_path / "out", to="parquet", shards=2)
    write_table(data, content=numeric_table(ROWS - 1))
    with pytest.raises(ConfigurationError, match="the original has changed"):
        convert(data, tmp_path / "out", to="feather", shards=2)


def test_convert_damage_while_writing_is_detected(tmp_path, monkeypatch):
    """A bit changes between writing and reading back: the test changes the file meanwhile."""
    from hasten.datatools import writers

    synced = writers.fsync

    def damaged(file):
        synced(file)
        path, size = file.name, os.path.getsize(file.name)
        with open(path, "r+b") as again:
            again.seek(size // 4)
            byte = again.read(1)[0]
            again.seek(size // 4)
            again.write(bytes([byte ^ 1]))

    monkeypatch.setattr(writers, "fsync", damaged)
    with pytest.raises(RunError, match=r"part 0 of .* differs from what was written"):
        convert(write_table(tmp_path / "in"), tmp_path / "out", to="feather")
    assert [name for name in os.listdir(tmp_path / "out") if not name.endswith(".part")] == ["conversion.json"]


def limited(data, out, results):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for to in ("parquet", "feather", "tfrecord", "rows"):
        with pytest.raises(RunError) as failure:
            convert(data, out / to, to=to)
        results.put(str(failure.value))


def test_convert_full_disk_is_one_line(tmp_path):
    """A limit on file sizes stands in for a full disk."""
    results = FORK.SimpleQueue()
    assert join_process(start_process(limited, write_table(tmp_path / "in"), tmp_path, results)) == 0
    for _ in range(4):
        assert "cannot write" in (line := results.get()) and "too large" in line and "\n" not in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "fether"}, "did you mean feather"),
        (
            {"to": "webdataset"},
            "Parquet cannot be stored as webdataset; possible are parquet and feather and tfrecord and rows",
        ),
        ({"to": "feather", "resize": 3}, "--resize applies to images"),
        ({"to": "feather", "target": "label"}, "--target"),
        ({"to": "rows", "target": "lable"}, "did you mean label"),
        ({"to": "rows", "shards": 3}, "remove --shards"),
        ({"to": "feather", "shards": 0}, "shards must be an integer of at least 1"),
        (
            {"to": "feather", "shards": ROWS + 1},
            f"cannot write {ROWS} rows to {ROWS + 1} files; use --shards {ROWS} or fewer",
        ),
        ({"to": "feather", "max_bad_rows": 0}, "max_bad_rows must be an integer of at least 1"),
    ],
)
def test_convert_invalid_request_is_refused(tmp_path, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        convert(write_table(tmp_path / "in"), tmp_path / "out", **settings)


def test_convert_invalid_directory_is_refused(tmp_path):
    data = write_table(tmp_path / "in")
    (tmp_path / "file").touch()
    (tmp_path / "file loop").symlink_to("file loop")
    for out in (tmp_path / "file", tmp_path / "file" / "inside", tmp_path / "file loop"):
        with pytest.raises(ConfigurationError, match=r"cannot write to .*file.*choose another --out"):
            convert(data, out, to="feather")
    for out in (data, data / "out"):
        with pytest.raises(ConfigurationError, match="where it would be read as a part of the original"):
            convert(data, out, to="feather")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ConfigurationError, match="is not empty and contains no conversion"):
        convert(data, tmp_path / "full", to="feather")
    with pytest.raises(ConfigurationError, match="there is no file"):
        convert(tmp_path / "nothing", tmp_path / "out", to="feather")
    with pytest.raises(ConfigurationError, match=r"no file name of .* has a known suffix"):
        convert(tmp_path / "file", tmp_path / "out", to="feather")
    with pytest.raises(ConfigurationError, match="text, bytes or rows of unequal shapes"):
        convert(
            write_table(tmp_path / "texts", content=mixed_table().drop_columns(["word"])),
            tmp_path / "out",
            to="rows",
            fill=0,
        )


def test_convert_keeps_other_files_that_end_in_part(tmp_path):
    """Such as unfinished downloads: neither before a conversion, nor when one is refused after it began."""
    data, out = write_table(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    (out / "film.mp4.part").write_text("mine")
    with pytest.raises(ConfigurationError, match="is not empty and contains no conversion"):
        convert(data, out, to="feather")
    (out / "film.mp4.part").rename(tmp_path / "film.mp4.part")
    (out / "conversion.json.part").touch()  # left by a conversion that was killed while it began

    def interrupt(what, done, left):
        (tmp_path / "film.mp4.part").rename(out / "film.mp4.part")
        raise ConfigurationError("refused")

    with pytest.raises(ConfigurationError, match="refused"):
        convert(data, out, to="feather", on_progress=interrupt)
    assert os.listdir(out) == ["film.mp4.part"]


def test_convert_one_process_per_directory(tmp_path):
    import fcntl

    data = write_table(tmp_path / "in")
    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ConfigurationError, match="another process converts into"):
        convert(data, tmp_path / "out", to="feather")
    os.close(handle)
    assert convert(data, tmp_path / "out", to="feather")["open"] == f'feather("{tmp_path / "out"}")'


def test_unfinished_conversion_is_refused_as_data(tmp_path):
    data = write_table(tmp_path / "in")

    def stop(what, done, left):
        if done > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(data, tmp_path / "out", to="feather", shards=6, on_progress=stop)
    for read in (lambda: inspect(tmp_path / "out"), lambda: convert(tmp_path / "out", tmp_path / "on", to="parquet")):
        with pytest.raises(ConfigurationError, match="is incomplete; start it again"):
            read()
    with pytest.raises(ConfigurationError):
        feather(tmp_path / "out")


SLOWLY = """
import sys, time
from hasten.cli.main import main
from hasten.datatools import writers
synced = writers.fsync
writers.fsync = lambda file: (time.sleep(0.5), synced(file))  # or it may be done before it is interrupted
sys.exit(main())
"""


@pytest.mark.slow
def test_convert_interrupted_states_how_to_resume_and_removes_partial_files(tmp_path, capfd):
    data, out = write_table(tmp_path / "in"), tmp_path / "out"
    argv = ["data", "convert", str(data), "--to", "feather", "--shards", "30", "--out", str(out), "--json", "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a job in the background inherits SIGINT as ignored
    prepare = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, *argv], **pipes, env=environment, preexec_fn=prepare)
    deadline = time.monotonic() + TIMEOUT_S
    while len([*out.glob("*.feather.part")]) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, error
    assert (
        f"to continue: hasten data convert {data} --to feather --shards 30 --out {out}" in json.loads(output)["error"]
    )
    assert error.count("\n") == 1 and not [*out.glob("*.feather")]
    assert main(argv) == 0 and 0 < json.loads(capfd.readouterr().out)["written"] < ROWS
    assert not [*out.glob("*.part")] and len(feather(out).source) == ROWS


def test_convert_original_that_changes_is_detected(tmp_path):
    data = write_table(tmp_path / "in")

    def change(what, done, left):
        os.utime(data / "train.parquet", (1, 1))

    with pytest.raises(RunError, match="the original changed while it was converted"):
        convert(data, tmp_path / "out", to="rows", on_progress=change)
    assert not [*(tmp_path / "out").glob("*.npy")]


def test_npy_files_of_one_name_are_refused(tmp_path):
    for directory in ("a", "b"):
        (tmp_path / "in" / directory).mkdir(parents=True)
        numpy.save(tmp_path / "in" / directory / "x.npy", numpy.arange(3))
    with pytest.raises(ConfigurationError, match=r"a/x\.npy and .*b/x\.npy would both be the column 'x'; pass one"):
        convert(tmp_path / "in", tmp_path / "out", to="parquet")
    assert convert(tmp_path / "in" / "a", tmp_path / "out", to="parquet")["rows"] == 3


def test_convert_resumes_after_a_backup_and_other_permissions(tmp_path):
    """Both change the change time of the original, not its content."""
    data = write_table(tmp_path / "in")
    changes = iter([lambda: (data / "train.parquet").chmod(0o600), lambda: None])
    convert(data, tmp_path / "out", to="feather", on_progress=lambda *progress: next(changes, lambda: None)())
    os.link(data / "train.parquet", tmp_path / "backup.parquet")
    assert convert(data, tmp_path / "out", to="feather")["written"] == 0


def test_convert_strings_that_an_example_cannot_hold_are_refused(tmp_path):
    for name, rows, message in (
        ("missing", [["a", None], ["b"]], "'x' holds a NoneType among strings"),
        ("ragged", [[[1], [1, 2]], [[3]]], "'x' holds lists of unequal lengths"),
    ):
        data = write_table(tmp_path / name, content=pyarrow.table({"x": rows}))
        with pytest.raises(ConfigurationError, match=message):
            convert(data, tmp_path / "out", to="tfrecord")
