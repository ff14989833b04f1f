"""Bytes damaged after they were written: the damage is reported, and never ends the process."""

import os
import pickle
import re
import subprocess
import sys

import numpy
import pytest

from hasten.core.errors import ConfigurationError, RunError
from hasten.data import feather, parquet, tfrecord
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import frame_records
from hasten.data.source import BadRow
from helpers.markers import slow
from helpers.process import run_script

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
import pyarrow.feather as arrow_feather  # noqa: E402
import pyarrow.parquet as arrow_parquet  # noqa: E402

ROWS, RUN = 300, 100
WHOLE, BY_RUN = None, 0  # gigabytes
TABLE = pa.table({"n": numpy.arange(ROWS) + 7_000_000, "words": [f"word number {row}" for row in range(ROWS)]})


def replace_bytes(path, old, new):
    """Replaces bytes of the file that must occur in it exactly once."""
    content = path.read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    return path


def write_damaged_parquet(path):
    """Writes TABLE with page checksums and changes a value in row group 1."""
    arrow_parquet.write_table(
        TABLE, path, row_group_size=RUN, compression="none", use_dictionary=False, write_page_checksum=True
    )
    replace_bytes(path, (7_000_150).to_bytes(8, "little"), (8_000_150).to_bytes(8, "little"))


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_parquet_page_with_wrong_checksum_is_bad(tmp_path, gigabytes):
    write_damaged_parquet(tmp_path / "t.parquet")
    table = parquet(tmp_path / "t.parquet", columns=["n"], gigabytes=gigabytes).batch(RUN)
    with pytest.raises(RunError, match=r"row 100 .*t\.parquet, row group 1\).*(CRC|checksum)"):
        list(table)
    rows_left = [n for batch in table.shuffle(seed=0).skip_bad_rows(RUN) for n in batch["n"].tolist()]
    assert sorted(rows_left) == [7_000_000 + row for row in range(ROWS) if not RUN <= row < 2 * RUN]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_parquet_damaged_row_group_is_decoded_once_for_all_rows(tmp_path, gigabytes):
    write_damaged_parquet(tmp_path / "t.parquet")
    pipeline = (
        parquet(tmp_path / "t.parquet", columns=["n"], gigabytes=gigabytes)
        .shuffle(seed=0)
        .skip_bad_rows(RUN)
        .batch(ROWS)
    )
    form, decoded = pipeline.source._format, []
    chunk = form.chunk
    form.chunk = lambda file, index, columns: decoded.append(index) or chunk(file, index, columns)
    for _ in range(2):
        (batch,) = pipeline
        assert len(batch["n"]) == ROWS - RUN and len(pipeline.faults.found) == RUN
    assert decoded.count(1) == 1 and len(decoded) <= (ROWS // RUN if gigabytes is WHOLE else 6)
    with pytest.raises(BadRow, match=r"row 120 .*row group 1") as error:
        pipeline.source.read(numpy.array([2, 120, 101, 250]))
    assert pickle.loads(pickle.dumps(error.value)).rows == [120, 101] and decoded.count(1) == 1


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
@pytest.mark.parametrize("where", ["offset", "letter"])
def test_feather_text_offset_out_of_bounds_is_bad(tmp_path, where, gigabytes):
    """An offset far out of its column: following it would end the process."""
    arrow_feather.write_feather(TABLE, tmp_path / "t.feather", compression="uncompressed", chunksize=RUN)
    if where == "offset":
        lengths = [len(f"word number {row}") for row in range(RUN, RUN + 3)]
        begin = numpy.cumsum([0, *lengths], dtype="i4").tobytes()
        content = (tmp_path / "t.feather").read_bytes()
        place = content.index(begin)  # of the second batch, the first whose numbers have three digits
        damaged = content[: place + 4] + numpy.array([2**30], "i4").tobytes() + content[place + 8 :]
        (tmp_path / "t.feather").write_bytes(damaged)
    else:
        replace_bytes(tmp_path / "t.feather", b"word number 150", b"word \xff\xfe\xffber 150")
    source = feather(tmp_path / "t.feather", gigabytes=gigabytes).source
    with pytest.raises(BadRow, match=r"t\.feather, record batch 1"):
        source.read(numpy.array([RUN + 50]))
    assert source.read(numpy.array([2 * RUN]))["words"] == ["word number 200"]


READ_WITHOUT_RESOURCES = """
import os, re, resource, sys, numpy
from hasten.core.errors import RunError
from hasten.data import parquet
source = parquet(sys.argv[2], gigabytes=0).source
rows = numpy.array([len(source) - 1])
source.read(numpy.array([0]))
if sys.argv[1] == "memory":
    used = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1])
    resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000, resource.RLIM_INFINITY))
else:
    for each in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{each}") == os.path.realpath(sys.argv[2]):
            os.close(int(each))
try:
    source.read(rows)
except (MemoryError, RunError) as error:
    print("MemoryError" if isinstance(error, MemoryError) else error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="this system reports neither the memory nor the files of a process"
)
@pytest.mark.parametrize(
    ("lacking", "message"),
    [("memory", "MemoryError"), slow("files", "cannot read .*row group 1: OSError: .*[Bb]ad file")],
)
def test_out_of_memory_is_not_a_bad_row(tmp_path, lacking, message):
    long = pa.table({"n": numpy.zeros(15_000_000, numpy.int64)})  # 120 MB decoded, some kilobytes in the file
    with arrow_parquet.ParquetWriter(tmp_path / "t.parquet", long.schema) as writer:
        writer.write_table(long.slice(0, 10), row_group_size=10)
        writer.write_table(long, row_group_size=len(long))
    command = [sys.executable, "-c", READ_WITHOUT_RESOURCES, lacking, tmp_path / "t.parquet"]
    at_once = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # other allocators keep a gigabyte in reserve
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | at_once)
    assert re.match(message, done.stdout), done.stdout + done.stderr


READ_ALL = """
import sys, numpy
from hasten.core.errors import RunError, ConfigurationError
from hasten.data import feather, parquet
from hasten.data.source import BadRow
for path in sys.argv[2:]:
    try:
        source = {"feather": feather, "parquet": parquet}[sys.argv[1]](path).source
        source.read(numpy.arange(min(len(source), 1000)))
        print("read")
    except (ConfigurationError, BadRow, RunError) as error:
        print("refused" if "\\n" not in str(error) else "many lines")
"""


@pytest.mark.parametrize("form", ["feather", "parquet"])
def test_any_damaged_bytes_end_in_an_error_of_hasten(tmp_path, form):
    """Changed bytes anywhere in the file, and files truncated anywhere."""
    random, paths = numpy.random.default_rng(0), []
    texts = pa.array(["some", "words"] * 50).dictionary_encode()
    table = pa.table({"n": numpy.arange(100), "words": TABLE["words"][:100], "lists": [[1, 2]] * 100, "kinds": texts})
    for number, compression in enumerate(("uncompressed", "lz4", "zstd")):
        intact = tmp_path / f"whole{number}.{form}"
        if form == "feather":
            arrow_feather.write_feather(table, intact, compression=compression)
        else:
            arrow_parquet.write_table(
                table, intact, compression="none" if compression == "uncompressed" else compression
            )
        content = intact.read_bytes()
        for each in range(60):
            damaged = bytearray(content)
            for place in random.integers(0, len(content), 1 + each % 4):
                damaged[place] = random.integers(0, 256)
            if each % 10 == 9:
                del damaged[random.integers(0, len(content)) :]
            paths.append(tmp_path / f"{number}-{each}.{form}")
            paths[-1].write_bytes(damaged)
    outcomes = run_script(READ_ALL, form, *paths).split()
    assert len(outcomes) == len(paths) and set(outcomes) == {"read", "refused"} and outcomes.count("refused") > 30


@pytest.mark.parametrize("form", ["feather", "parquet"])
def test_invalid_utf8_is_a_bad_row(tmp_path, form):
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(numpy.array([0, 1, 2], "i4").tobytes()), pa.py_buffer(b"a\xff"))
    table, path = pa.table({"words": texts}), tmp_path / f"t.{form}"
    arrow_feather.write_feather(table, path) if form == "feather" else arrow_parquet.write_table(table, path)
    with pytest.raises(BadRow, match="UTF8"):
        {"feather": feather, "parquet": parquet}[form](path).source.read(numpy.arange(2))


def test_feather_wrong_row_count_is_bad(tmp_path):
    """The heads of the record batches state the number of rows; here it differs from that of the columns."""
    arrow_feather.write_feather(
        pa.table({"n": numpy.arange(1_000_003)}),
        tmp_path / "t.feather",
        compression="uncompressed",
        chunksize=2_000_000,
    )
    path, old = tmp_path / "t.feather", (1_000_003).to_bytes(8, "little")
    content = bytearray(path.read_bytes())
    assert content.count(old) >= 2  # of the batch, and of its column
    first = content.index(old)
    content[first : first + 8] = (900_000).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises((BadRow, ConfigurationError)) as error:
        source = feather(path).source
        source.read(numpy.array([0]))
    assert "t.feather" in str(error.value) and "\n" not in str(error.value)


def test_tfrecord_wrong_checksum_is_skipped_and_counted(tmp_path):
    records = [encode_example({"text": f"row {row}", "n": row}) for row in range(20)]
    (tmp_path / "t.tfrecord").write_bytes(frame_records(records))
    replace_bytes(tmp_path / "t.tfrecord", b"row 13", b"row 31")
    with pytest.raises(RunError, match=r"row 13 .*t\.tfrecord, record 13, byte \d+\): its checksum is wrong"):
        list(tfrecord(tmp_path).batch(4))
    pipeline = tfrecord(tmp_path).skip_bad_rows(1).batch(4)
    assert [n for batch in pipeline for n in batch["n"].tolist()] == [n for n in range(20) if n != 13]
    assert list(pipeline.faults.found) == [13]
