"""Throughput of each stage of reading: from disk, decoding, copying into batches."""

import time

import pyarrow
import pytest

from hasten.data.formats.table_source import Table
from hasten.data.source import BadRow, BadRowPolicy
from hasten.datatools import stage_throughput
from hasten.datatools.format_detection import formats_at
from hasten.datatools.row_reader import RowReader
from hasten.datatools.stage_throughput import read_rates, repeated_stage_rates, stage_rates
from helpers.storages import ROWS, damage, numeric_table, write_table


def test_stage_rates_of_parquet_batches_are_slower_than_each_stage(tmp_path):
    kind, files = formats_at(write_table(tmp_path / "in"))[0]
    speed = stage_rates(RowReader(kind, files, files), 0.2)
    assert speed["batches"] < min(speed["decode"], speed["copy"])
    assert speed["decode"] > ROWS
    assert min(read_rates(files)["page_cache"]) > 0


def test_read_rates_of_many_files_read_each_byte_once(tmp_path, monkeypatch):
    """The bytes are measured in parts of equal size; small files do not become parts of their own."""
    for number in range(30):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes(10))
    (tmp_path / "big.bin").write_bytes(bytes(6 * stage_throughput.BLOCK))
    files = sorted(map(str, tmp_path.iterdir()))
    read, blocks = [], stage_throughput._read_blocks
    monkeypatch.setattr(
        stage_throughput,
        "_read_blocks",
        lambda *arguments: (read.append(block) or block for block in blocks(*arguments)),
    )
    rates = stage_throughput._bytes_per_second(files, 5.0)
    assert len(rates) == stage_throughput.REPEATS and min(rates) > 0 and sum(read) == 300 + 6 * stage_throughput.BLOCK
    assert len(stage_throughput._bytes_per_second(files[:1], 5.0)) == 1 and stage_throughput._bytes_per_second(
        [], 5.0
    ) == [0.0]


def test_stage_rates_are_measured_once_if_opening_is_slow(tmp_path, monkeypatch):
    kind, files = formats_at(write_table(tmp_path / "in"))[0]
    reader = RowReader(kind, files, files)
    assert {name: len(each) for name, each in repeated_stage_rates(reader, 3.0).items()} == dict.fromkeys(
        ("decode", "copy", "batches"), stage_throughput.REPEATS
    )
    open_source = RowReader.open
    monkeypatch.setattr(RowReader, "open", lambda reader: (time.sleep(0.5), open_source(reader))[1])
    assert {len(each) for each in repeated_stage_rates(reader, 0.1).values()} == {1}


def test_stage_rates_with_max_rows_decode_one_chunk_only(tmp_path):
    """``RowReader.max_rows`` limits the stages, too: the rows of one row group are decoded, not of twenty."""
    kind, files = formats_at(write_table(tmp_path / "in", runs=ROWS // 20))[0]
    reader = RowReader(kind, files, files, max_rows=10)
    assert reader.rows == 10 and stage_rates(reader, 5.0)["decode"] > 0


def test_stage_rates_do_not_read_a_text_target_again(tmp_path, monkeypatch):
    """Reading it takes all files, and only a few row groups are measured."""
    words = pyarrow.array([f"word {row % 7}" for row in range(ROWS)])
    content = numeric_table().append_column("word", words)
    kind, files = formats_at(write_table(tmp_path / "in", content=content, runs=ROWS // 20))[0]
    reader = RowReader(kind, files, files, target="word")
    assert len(reader.source.classes) == 7
    decoded, decode = [], Table._decode
    monkeypatch.setattr(Table, "_decode", lambda table, *chunk: (decoded.append(chunk), decode(table, *chunk))[1])
    assert stage_rates(reader, 0.0)["decode"] > 0
    assert len(decoded) <= 2


def test_stage_rates_with_unreadable_row_groups_skip_them(tmp_path):
    """The last row group is one of them: copying must be timed on the last readable one."""
    data = write_table(tmp_path / "in", runs=ROWS // 4)
    for run in (1, 3):
        damage(data / "train.parquet", run)
    kind, files = formats_at(data)[0]
    with pytest.raises(BadRow, match="row group 1"):
        stage_rates(RowReader(kind, files, files), 5.0)
    reader = RowReader(kind, files, files, faults=BadRowPolicy(ROWS))
    speed = stage_rates(reader, 5.0)
    assert 0 < speed["batches"] < min(speed["decode"], speed["copy"])
    assert {fault.where for fault in reader.faults.found.values()} == {f"{files[0]}, row group {run}" for run in (1, 3)}
