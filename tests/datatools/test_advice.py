"""Storage advice is measured on the data."""

import os

import numpy
import pytest

from hasten.core.progress import no_progress
from hasten.datatools.advice import better_storages, limit_by_disk
from hasten.datatools.format_detection import formats_at
from hasten.datatools.row_reader import RowReader
from hasten.datatools.stage_throughput import stage_rates
from helpers.storages import mixed_table, write_images, write_table


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_advice_on_a_slow_disk_recommends_small_files(tmp_path):
    """Rows of raw pixels are read fast from memory, but much later than small JPEGs from a slow disk."""
    data = write_images(tmp_path / "in", count=24)
    kind, files = formats_at(data)[0]
    reading = RowReader(kind, str(data), files, resize=256)
    before = stage_rates(reading, 0.5)["batches"]
    fast = better_storages(reading, [before], 1000, None, 4.0, no_progress)
    assert fast[0]["to"] == "rows" and fast[0]["bytes"] == pytest.approx(1000 * 3 * 256 * 256, rel=0.01)
    disk = 200_000.0  # bytes per second
    before = limit_by_disk(before, sum(map(os.path.getsize, files)) / len(files), disk)
    slow = better_storages(reading, [before], 1000, disk, 4.0, no_progress)
    assert "rows" not in [each["to"] for each in slow]


def test_advice_for_the_fastest_format_is_none(tmp_path):
    numpy.save(tmp_path / "x.npy", numpy.zeros((100, 3), numpy.float32))
    kind, files = formats_at(tmp_path / "x.npy")[0]
    assert better_storages(RowReader(kind, files, files), [1e6], 100, None, 1.0, no_progress) == []


def test_advice_skips_formats_that_cannot_store_the_data(tmp_path):
    data = write_table(tmp_path / "in", content=mixed_table().drop_columns(["word"]))
    kind, files = formats_at(data)[0]
    found = better_storages(RowReader(kind, files, files, fill=0), [1.0], 3000, None, 2.0, no_progress)
    assert [each["to"] for each in found] == ["feather"]
