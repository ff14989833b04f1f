"""The content hash: equal however the rows are divided into files, different for another value anywhere."""

from itertools import pairwise

import numpy
import pyarrow as pa
import pytest
import torch

from hasten.datatools.content_hash import ContentHash
from helpers.storages import mixed_table

ROWS = 200


def many():
    """The mixed table of the tests with additional nested columns."""
    lists = [
        None if row % 7 == 0 else [{"a": row, "b": None if row % 3 else "x"}, None][: row % 3] for row in range(ROWS)
    ]
    pairs = [None if row % 11 == 0 else [("k" * (row % 4), row)] for row in range(ROWS)]
    structs = [
        None if row % 5 == 0 else {"c": None if row % 4 == 0 else row, "d": [row] * (row % 3)} for row in range(ROWS)
    ]
    fixed = [None if row % 9 == 0 else [row, None] for row in range(ROWS)]
    columns = {
        "lists": lists,
        "pairs": pa.array(pairs, pa.map_(pa.string(), pa.int64())),
        "structs": structs,
        "fixed": pa.array(fixed, pa.list_(pa.int32(), 2)),
        "nothing": pa.nulls(ROWS),
        "time": pa.array(range(ROWS), pa.timestamp("us", "UTC")),
    }
    for name, column in columns.items():
        columns[name] = column if isinstance(column, pa.Array) else pa.array(column)
    return pa.table(columns | dict(zip(mixed_table(ROWS).column_names, mixed_table(ROWS).columns, strict=True)))


def of_table(content, cuts=()):
    digest = ContentHash()
    edges = [0, *cuts, len(content)]
    for first, last in pairwise(edges):
        digest.add_table(content.slice(first, last - first))
    assert digest.rows == len(content)
    return digest.hexdigest()


@pytest.mark.parametrize("cuts", [(1,), (100,), (7, 8, 150), tuple(range(3, 200, 3))])
def test_hash_is_independent_of_table_chunks(cuts):
    assert of_table(many()) == of_table(many(), cuts)


@pytest.mark.parametrize("name", [name for name in many().column_names if name != "nothing"])
def test_hash_differs_for_another_value(name):
    """Two rows are exchanged."""
    content = many()
    order = numpy.arange(ROWS)
    values = content.column(name).to_pylist()
    other = next(row for row in range(102, ROWS) if values[row] != values[101])
    order[[101, other]] = order[[other, 101]]
    changed = content.set_column(content.column_names.index(name), name, content.column(name).take(pa.array(order)))
    assert of_table(changed) != of_table(content)


def of_columns(content, cuts=()):
    digest = ContentHash()
    edges = [0, *cuts, len(content["x"])]
    for first, last in pairwise(edges):
        digest.add({name: column[first:last] for name, column in content.items()}, last - first)
    return digest.hexdigest()


def test_hash_of_batches_equals_that_of_columns():
    content = {
        "x": torch.arange(60.0).view(20, 3),
        "text": ["a" * (row % 4) for row in range(20)],
        "lists": [torch.arange(row % 3) for row in range(20)],
    }
    expected = of_columns(content)
    assert expected == of_columns(content, (1, 5, 19))
    assert expected != of_columns(content | {"x": content["x"].flip(0)})
    assert expected != of_columns(content | {"x": content["x"].view(20, 3, 1)})
    assert expected != of_columns(content | {"text": ["a" + content["text"][0][1:], *content["text"][1:]]})
