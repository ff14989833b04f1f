"""A cache whose first rows are bad: it probes readable rows, counts the others, and reports if there are none."""

import pytest
import torch

from hasten import ConfigurationError, RunError
from hasten.data import Pipeline, images
from helpers.pipelines import BATCH, ROWS, Bad, equal
from helpers.tar_files import png

KINDS = ["memory", "disk"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bad", "rows"),
    [([0, 1, 2, 3], ROWS), ([0], ROWS), (range(0, ROWS, 4), ROWS), ([1], 3), (range(9), 10), ([2, 5, 9], 10)],
    ids=str,
)
def test_cache_first_bad_rows_are_skipped_and_counted(kind, bad, rows):
    plain = Pipeline(Bad(bad, rows)).skip_bad_rows(len(bad)).batch(max(BATCH, rows if len(bad) > rows / 2 else 0))
    expected = list(plain)
    for _ in range(2):  # the second time from the disk
        cached = Pipeline(Bad(bad, rows)).cache(kind).skip_bad_rows(len(bad)).batch(plain.batch_size)
        assert equal(list(cached), expected) and sorted(cached.faults.found) == list(bad)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_bad_rows_above_the_limit_are_named(kind):
    with pytest.raises(RunError, match=r"row 0 \(numbers.txt line 1\): no number; repair it, or allow bad rows"):
        list(Pipeline(Bad([0, 1, 2, 3])).cache(kind).batch(BATCH))
    with pytest.raises(RunError, match=r"row 2 .*bad row number 3, and max_rows=2 may be skipped"):
        list(Pipeline(Bad([0, 1, 2, 3])).cache(kind).skip_bad_rows(2).batch(BATCH))
    with pytest.raises(RunError, match="bad row number 3, and max_rows=2 may be skipped"):
        list(Pipeline(Bad([0, 4, 8], rows=9)).cache(kind).skip_bad_rows(2).batch(3))


@pytest.mark.parametrize("kind", KINDS)
def test_cache_without_a_readable_row_raises(kind):
    with pytest.raises(ConfigurationError, match="all rows are bad, or there are none"):
        list(Pipeline(Bad(range(6), rows=6)).cache(kind).skip_bad_rows(100).batch(3))


@pytest.mark.parametrize("kind", KINDS)
def test_cache_of_images_with_bad_first_rows(tmp_path, kind):
    for row in range(8):
        (tmp_path / f"{row}.png").write_bytes(b"no picture" if row < 5 else png(row)[0])
    plain = images(tmp_path, labels=None, resize=16).skip_bad_rows(5).batch(8)
    cached = images(tmp_path, labels=None, resize=16).skip_bad_rows(5).cache(kind).batch(8)
    assert torch.equal(*plain, *cached) and len(*cached) == 3
