"""How fast each stage of reading goes: from the disk, decoding, copying into batches."""

import time

import pytest

from hasten.data.bad_rows import BadRowPolicy
from hasten.data.source import BadRow
from hasten.datatools import stage_throughput
from hasten.datatools.format_detection import detect_format
from hasten.datatools.row_reader import RowReader
from hasten.datatools.stage_throughput import stage_rates, repeated_stage_rates, read_rates
from helpers.storages import ROWS, damage, written


def test_paces(tmp_path):
    kind, files = detect_format(written(tmp_path / "in"))
    speed = stage_rates(RowReader(kind, files, files), 0.2)
    assert speed["batches"] < min(speed["decode"], speed["copy"])
    assert speed["decode"] > ROWS
    assert min(read_rates(files)["page_cache"]) > 0


def test_readings_share_the_time_and_the_files(tmp_path, monkeypatch):
    """What is read from the disk is read once, in parts of as many bytes; small files are no part for themselves."""
    for number in range(30):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes(10))
    (tmp_path / "big.bin").write_bytes(bytes(6 * stage_throughput.BLOCK))
    files = sorted(map(str, tmp_path.iterdir()))
    read, blocks = [], stage_throughput._blocks
    monkeypatch.setattr(
        stage_throughput, "_blocks", lambda *arguments: (read.append(block) or block for block in blocks(*arguments))
    )
    rates = stage_throughput._bytes_a_second(files, 5.0)
    assert len(rates) == stage_throughput.READINGS and min(rates) > 0 and sum(read) == 300 + 6 * stage_throughput.BLOCK
    assert len(stage_throughput._bytes_a_second(files[:1], 5.0)) == 1 and stage_throughput._bytes_a_second([], 5.0) == [
        0.0
    ]


def test_a_reading_that_takes_long_is_the_only_one(tmp_path, monkeypatch):
    kind, files = detect_format(written(tmp_path / "in"))
    reading = RowReader(kind, files, files)
    assert {name: len(each) for name, each in repeated_stage_rates(reading, 3.0).items()} == dict.fromkeys(
        ("decode", "copy", "batches"), stage_throughput.READINGS
    )
    opened = RowReader.opened
    monkeypatch.setattr(RowReader, "opened", lambda each: (time.sleep(0.5), opened(each))[1])
    assert {len(each) for each in repeated_stage_rates(reading, 0.1).values()} == {1}


def test_decoding_only_some_rows_takes_no_longer_for_more_files(tmp_path):
    """Reading.most holds for the stages, too: the rows of one run are decoded, not of twenty."""
    kind, files = detect_format(written(tmp_path / "in", runs=ROWS // 20))
    reading = RowReader(kind, files, files, most=10)
    assert reading.rows == 10 and stage_rates(reading, 5.0)["decode"] > 0


def test_paces_without_the_runs_that_cannot_be_read(tmp_path):
    """The last one among them, which would be held while copying is timed."""
    data = written(tmp_path / "in", runs=ROWS // 4)
    for run in (1, 3):
        damage(data / "train.parquet", run)
    kind, files = detect_format(data)
    with pytest.raises(BadRow, match="row group 1"):
        stage_rates(RowReader(kind, files, files), 5.0)
    reading = RowReader(kind, files, files, faults=BadRowPolicy(ROWS))
    speed = stage_rates(reading, 5.0)
    assert 0 < speed["batches"] < min(speed["decode"], speed["copy"])
    assert {fault.where for fault in reading.faults.found.values()} == {
        f"{files[0]}, row group {run}" for run in (1, 3)
    }
