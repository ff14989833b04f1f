"""Reading parts of files that are truncated, or too many to be open at once."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from hasten.core.errors import RunError
from hasten.data import tfrecord
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import frame_records
from helpers.process import run_script
from helpers.tar_files import pack

CUT_OFF_AFTER_THE_CHECK = """
import os, sys, numpy
from hasten import data
from hasten.core.errors import RunError
from hasten.data.io import range_reader
path = sys.argv[3]
source = getattr(data, sys.argv[1])(sys.argv[2]).source
rows, check = numpy.arange(len(source)), range_reader.check_unchanged
source.read(rows)
def check_and_cut(*which):
    check(*which)
    os.truncate(path, 0)
range_reader.check_unchanged = check_and_cut
try:
    source.read(rows)
except RunError as error:
    print(error)
"""
CUT_OFF_WHEN_HELD = """
import os, sys, numpy
from hasten.data import feather
source = feather(sys.argv[1]).source
source.read(numpy.arange(1))
os.truncate(sys.argv[1], 0)
print(source.read(numpy.array([len(source) - 1])))
"""
FEW_OPEN_FILES = """
import resource, sys, numpy
from hasten.data import webdataset, tfrecord
resource.setrlimit(resource.RLIMIT_NOFILE, (160, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for make in (webdataset, tfrecord):
    source = make(sys.argv[1]).source
    for row in (*range(len(source)), *range(len(source))):
        source.read(numpy.array([row]))
    print(len(source.read(numpy.arange(len(source)))["txt"]))
"""


def tfrecord_file(path, rows=200):
    path.write_bytes(frame_records([encode_example({"txt": f"row {row}"}) for row in range(rows)]))
    return path


def tar_file(path, rows=200):
    return pack(path, [(f"{row}.txt", b"row") for row in range(rows)])


@pytest.mark.parametrize(("maker", "write"), [("tfrecord", tfrecord_file), ("webdataset", tar_file)])
def test_file_truncated_after_opening_does_not_end_the_process(tmp_path, maker, write):
    ending = {"tfrecord": "tfrecord", "webdataset": "tar"}[maker]
    path = write(tmp_path / f"a.{ending}")
    write(tmp_path / f"b.{ending}")
    assert run_script(CUT_OFF_AFTER_THE_CHECK, maker, tmp_path, path).startswith(f"{path} is shorter than it was")


def test_text_in_memory_outlives_its_file(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
    from pyarrow.feather import write_feather

    write_feather(
        pa.table({"words": [f"word {row}" for row in range(50_000)]}),
        tmp_path / "a.feather",
        compression="uncompressed",
    )
    assert run_script(CUT_OFF_WHEN_HELD, tmp_path / "a.feather") == "{'words': ['word 49999']}"


@pytest.mark.slow
def test_more_files_than_may_be_open_are_read(tmp_path):
    for number in range(200):
        tar_file(tmp_path / f"{number}.tar", rows=1)
        tfrecord_file(tmp_path / f"{number}.tfrecord", rows=1)
    done = subprocess.run(
        [sys.executable, "-c", FEW_OPEN_FILES, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.split() == ["200"] * 2, done.stderr  # a fresh process: a forked one inherits all open files


def test_remote_file_that_became_shorter_raises():
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
    system, content = (
        fsspec.filesystem("memory"),
        frame_records([encode_example({"txt": f"row {row}"}) for row in range(50)]),
    )
    system.pipe_file("/cut/a.tfrecord", content)
    source = tfrecord("memory://cut/a.tfrecord").source
    system.pipe_file("/cut/a.tfrecord", content[:-30])
    with (
        ThreadPoolExecutor(1) as another,
        pytest.raises(RunError, match=r"memory://.*a\.tfrecord changed while it was being read"),
    ):
        another.submit(source.read, numpy.array([0, 49])).result()  # this thread still has the old file open
