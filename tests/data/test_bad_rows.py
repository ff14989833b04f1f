"""Bad rows: counted once, up to a limit, and always reported."""

import pytest
import torch

from hasten import RunError
from hasten.data import Pipeline, Source
from hasten.data.cache.cache import Mapped, MemoryCache
from hasten.data.source import BadRow
from helpers.pipelines import Bad


class Known(Bad):
    """A source that reports its bad rows before they are read."""

    def known_bad_rows(self):
        return [BadRow(row, "numbers.txt", "no number") for row in sorted(self.bad)]


class Subset(Source):
    """A user's own source: the first rows of another source."""

    def __init__(self, source, count):
        self.source, self.count = source, count

    def __len__(self):
        return self.count

    def read(self, rows):
        return self.source.read(rows)

    def fingerprint(self):
        return {}


def rows(pipeline):
    return torch.cat(list(pipeline)).tolist()


def test_bad_rows_one_above_the_limit_raises_with_count():
    pipeline = Pipeline(Bad([3, 20, 40])).skip_bad_rows(2).batch(10)
    with pytest.raises(RunError, match=r"row 40 .*bad row number 3, and max_rows=2 may be skipped"):
        rows(pipeline)
    assert sorted(pipeline.faults.found) == [3, 20, 40]


def test_bad_rows_above_the_limit_in_one_batch_raises():
    with pytest.raises(RunError, match="bad row number 3, and max_rows=2 may be skipped"):
        rows(Pipeline(Bad([1, 2, 3])).skip_bad_rows(2).batch(10))


def test_bad_rows_that_fill_a_batch_raise():
    with pytest.raises(RunError, match="batch 1 of the epoch has no good row"):
        rows(Pipeline(Bad([2, 3], rows=6)).skip_bad_rows(2).batch(2))


def test_bad_rows_known_before_are_not_read():
    asked = []

    class Counting(Bad):
        def read(self, rows):
            asked.append(len(rows))
            return super().read(rows)

    pipeline = Pipeline(Counting([3, 4, 20], rows=40)).skip_bad_rows(3).batch(10)
    first = rows(pipeline)
    assert asked == [10, 9, 8, 10, 10, 9, 10]
    asked.clear()
    assert rows(pipeline) == first and asked == [8, 10, 9, 10]
    known = Pipeline(Bad([2, 3], rows=6)).skip_bad_rows(2).batch(3)
    assert rows(known) == [0, 1, 4, 5]
    with pytest.raises(RunError, match=r"batch 1 of the epoch has no good row.* row 2 "):
        rows(known.batch(2))


def test_bad_rows_error_advises_the_present_api():
    with pytest.raises(
        RunError,
        match=r": .skip_bad_rows\(max_rows=10\) in the pipeline, or --max-bad-rows 10 with hasten train and "
        r"hasten data$",
    ):
        rows(Pipeline(Bad([3])).batch(10))


def test_bad_rows_list_states_row_and_reason():
    pipeline = Pipeline(Bad([3])).skip_bad_rows(1).batch(10)
    rows(pipeline)
    assert (pipeline.faults.found[3].where, pipeline.faults.found[3].why) == ("numbers.txt line 4", "no number")
    assert "row 3" in str(pipeline.faults.found[3])


@pytest.mark.parametrize(
    "around",
    [lambda source: Mapped(source, ()), lambda source: MemoryCache(source, None)],
    ids=["mapped", "cached"],
)
def test_known_bad_rows_pass_through_wrapping_sources(around):
    with pytest.raises(RunError, match=r"row 3 \(numbers.txt\): no number"):
        Pipeline(around(Known([3]))).batches(10, seed=0, training=False)


def test_known_bad_rows_are_asked_of_the_innermost_source_only():
    """An attribute of a user's source may be anything, so only the innermost source is asked."""
    named = Bad([], rows=20)
    named.source = "numbers.txt"
    assert rows(Pipeline(named).batch(10)) == [*range(20)]
    assert rows(Pipeline(Subset(Known([30]), 20)).batch(10)) == [*range(20)]


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("short", [0, 1])
def test_source_that_returns_fewer_rows_than_asked_is_an_error(short, cache):
    class Short(Subset):
        def read(self, rows):
            columns = [torch.as_tensor(rows), torch.as_tensor(rows)]
            columns[short] = columns[short][: len(rows) - 1]
            return tuple(columns)

    pipeline = Pipeline(Short(None, 64))
    with pytest.raises(RunError, match=r"Short.read returned \d+ rows for the \d+ asked for; raise BadRow"):
        list((pipeline.cache(cache) if cache else pipeline).batch(16))
