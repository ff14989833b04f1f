"""Bad rows: counted once, up to a number, and never in silence."""

import pytest
import torch
from pipelines import Bad

from hasten import Failure
from hasten.data import Pipeline


def rows(pipeline):
    return torch.cat(list(pipeline)).tolist()


def test_one_too_many_is_a_failure_that_counts():
    pipeline = Pipeline(Bad([3, 20, 40])).skip_bad(2).batch(10)
    with pytest.raises(Failure, match=r"row 40 .*bad row number 3, and 2 may be left out"):
        rows(pipeline)
    assert sorted(pipeline.faults.found) == [3, 20, 40]


def test_too_many_in_one_batch_too():
    with pytest.raises(Failure, match="bad row number 3, and 2 may be left out"):
        rows(Pipeline(Bad([1, 2, 3])).skip_bad(2).batch(10))


def test_a_batch_of_bad_rows_only_is_a_failure():
    with pytest.raises(Failure, match="nothing is left of batch 1 of the pass"):
        rows(Pipeline(Bad([2, 3], rows=6)).skip_bad(2).batch(2))


def test_rows_that_are_known_as_bad_are_not_met_again():
    asked = []

    class Counting(Bad):
        def read(self, rows):
            asked.append(len(rows))
            return super().read(rows)

    pipeline = Pipeline(Counting([3, 4, 20], rows=40)).skip_bad(3).batch(10)
    first = rows(pipeline)
    assert asked == [10, 9, 8, 10, 10, 9, 10]
    asked.clear()
    assert rows(pipeline) == first and asked == [8, 10, 9, 10]
    known = Pipeline(Bad([2, 3], rows=6)).skip_bad(2).batch(3)
    assert rows(known) == [0, 1, 4, 5]
    with pytest.raises(Failure, match=r"nothing is left of batch 1 of the pass.* row 2 "):
        rows(known.batch(2))


def test_the_advice_is_what_there_is():
    with pytest.raises(Failure, match=r"let some be left out: .skip_bad\(10\), or hasten train --skip-bad 10$"):
        rows(Pipeline(Bad([3])).batch(10))


def test_the_found_rows_say_where_and_why():
    pipeline = Pipeline(Bad([3])).skip_bad(1).batch(10)
    rows(pipeline)
    assert (pipeline.faults.found[3].where, pipeline.faults.found[3].why) == ("numbers.txt line 4", "no number")
    assert "row 3" in str(pipeline.faults.found[3])
