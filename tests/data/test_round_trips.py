"""Tables and records of random columns, nested and ragged: the written values come back, in any order and shard."""

import itertools

import numpy
import pytest
import torch

from hasten.data import feather, parquet, tfrecord
from hasten.data.formats.tf_example import encode_example
from hasten.data.formats.tfrecord import frame_records
from helpers.assertions import same

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
import pyarrow.feather as arrow_feather  # noqa: E402
import pyarrow.parquet as arrow_parquet  # noqa: E402

# tests exceed the memory budget on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*rows were decoded to give")
NUMBERS = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.float32(),
    pa.float64(),
    pa.bool_(),
]
LETTERS = numpy.array(list("aé日\n\0 "))
CASES = range(16)


def a_type(random, depth=0):
    """Returns a type of a column; deeper nesting gets simpler types."""
    simple = [*NUMBERS, pa.string(), pa.binary(), pa.large_string()]
    if depth == 3 or random.random() < 0.4:
        return simple[random.integers(len(simple))]
    kind = random.integers(5)
    if kind == 0:
        inner = NUMBERS[random.integers(len(NUMBERS))]
        return pa.list_(inner, int(random.integers(1, 4)))
    if kind == 1:
        return pa.list_(pa.list_(NUMBERS[random.integers(len(NUMBERS))], 2), int(random.integers(1, 3)))
    if kind == 2 and depth == 0:
        return pa.struct([(f"field{number}", a_type(random, depth + 1)) for number in range(random.integers(1, 4))])
    if kind == 3 and depth == 0:
        return pa.dictionary(pa.int8(), pa.string())
    return (pa.list_ if random.random() < 0.7 else pa.large_list)(a_type(random, depth + 1))


def a_value(random, kind):
    if pa.types.is_struct(kind):
        return {field.name: a_value(random, field.type) for field in kind}
    if pa.types.is_fixed_size_list(kind):
        return [a_value(random, kind.value_type) for _ in range(kind.list_size)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [a_value(random, kind.value_type) for _ in range(random.integers(0, 5))]
    if pa.types.is_boolean(kind):
        return bool(random.integers(2))
    if pa.types.is_integer(kind):
        about = numpy.iinfo(kind.to_pandas_dtype())
        return int(random.integers(about.min, about.max, endpoint=True, dtype=about.dtype))
    if pa.types.is_floating(kind):
        return float(numpy.float32(random.normal()))
    if pa.types.is_dictionary(kind):
        return f"word {random.integers(3)}"
    text = "".join(random.choice(LETTERS, random.integers(0, 6)))
    return text.encode() if pa.types.is_binary(kind) else text


def a_table(random, rows):
    kinds = {f"column{number}": a_type(random) for number in range(random.integers(1, 6))}
    columns = {name: pa.array([a_value(random, kind) for _ in range(rows)], kind) for name, kind in kinds.items()}
    return pa.table(columns)


def plainly(column):
    """Returns a column of a batch as a list of Python values, one per row."""
    if isinstance(column, torch.Tensor):
        return column.tolist()
    if isinstance(column, dict):
        parts = {name: plainly(part) for name, part in column.items()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in column]


def joined(parts):
    """Concatenates the columns of several batches."""
    if isinstance(parts[0], dict):
        return {name: joined([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [row for part in parts for row in part]


def stored(directory, random):
    """Returns (the pipeline over one to three files, the whole table)."""
    rows = int(random.integers(1, 120))
    table, form = a_table(random, rows), random.choice(["parquet", "feather"])
    edges = sorted({0, rows, *random.integers(0, rows, random.integers(0, 3)).tolist()})
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        part, run = table.slice(first, last - first), int(random.integers(1, 40))
        if form == "parquet":
            arrow_parquet.write_table(part, directory / f"{number}.parquet", row_group_size=run)
        else:
            arrow_feather.write_feather(
                part,
                directory / f"{number}.feather",
                chunksize=run,
                compression=str(random.choice(["lz4", "uncompressed"])),
            )
    budget = None if random.random() < 0.5 else 0
    return {"parquet": parquet, "feather": feather}[form](directory, gigabytes=budget), table


@pytest.mark.parametrize("case", CASES)
def test_tables_of_random_columns_are_read_in_any_order(tmp_path, case):
    random = numpy.random.default_rng(case)
    pipeline, table = stored(tmp_path, random)
    assert len(pipeline.source) == len(table)
    for _ in range(3):
        rows = random.integers(0, len(table), random.integers(1, 2 * len(table) + 1))
        batch, expected = pipeline.source.read(rows), table.take(rows)
        for name in table.column_names:
            assert plainly(batch[name]) == expected[name].to_pylist(), table.schema.field(name)


@pytest.mark.parametrize("case", CASES)
def test_shards_resumes_and_maps_give_the_same_batches(tmp_path, case):
    random = numpy.random.default_rng(1000 + case)
    pipeline, _ = stored(tmp_path, random)
    window = None if random.random() < 0.5 else int(random.integers(1, 4))
    rows = len(pipeline.source)
    world = int(random.integers(1, min(3, rows) + 1))
    shuffled, size = (
        pipeline.shuffle(seed=int(random.integers(99)), window=window),
        int(random.integers(world, min(30, rows + 1))),
    )
    pipeline = shuffled.batch(size, drop_last=True)
    expected = list(pipeline.epoch(1))
    assert len(expected) == rows // size > 0
    assert same(list(shuffled.map(lambda sample: sample).batch(size, drop_last=True).epoch(1)), expected)
    shares = [list(pipeline.shard(world, rank).epoch(1)) for rank in range(world)]
    assert same([joined(parts) for parts in zip(*shares, strict=True)], expected)
    begun = pipeline.batch(pipeline.batch_size, drop_last=True)
    begun.set_epoch(1)
    seen = int(random.integers(0, len(expected) + 1))
    list(itertools.islice(begun, seen))
    resumed = pipeline.batch(pipeline.batch_size, drop_last=True)
    resumed.load_state_dict(begun.state_dict())
    assert same(list(resumed), expected[seen:])


@pytest.mark.parametrize("case", CASES)
def test_records_of_random_features_are_read(tmp_path, case):
    random = numpy.random.default_rng(2000 + case)
    rows, features, columns = int(random.integers(1, 80)), {}, {}
    for number in range(random.integers(1, 5)):
        name, kind = f"f{number}", random.choice(["float", "int", "bytes"])
        length = None if random.random() < 0.5 else int(random.integers(1, 4))
        values = {
            "float": lambda count: numpy.float32(random.normal(size=count)).tolist(),
            "int": lambda count: random.integers(-(2**63), 2**63 - 1, count).tolist(),
            "bytes": lambda count: [random.bytes(int(random.integers(0, 200))) for _ in range(count)],
        }[kind]
        columns[name] = [values(random.integers(1, 6) if length is None else length) for _ in range(rows)]
        features[name] = None if length is None else (length,)
    messages = [encode_example({name: column[row] for name, column in columns.items()}) for row in range(rows)]
    cut = int(random.integers(0, rows))
    for number, part in enumerate((messages[:cut], messages[cut:])):
        if part:
            (tmp_path / f"{number}.tfrecord").write_bytes(frame_records(part))
    pipeline = tfrecord(tmp_path, features=features)
    order = random.integers(0, rows, 2 * rows)
    for _ in range(2):  # the second time the checksums are known to be right
        batch = pipeline.source.read(order)
        for name, column in columns.items():
            assert plainly(batch[name]) == [column[row] for row in order], features[name]
    shuffled = pipeline.shuffle(seed=1, window=1).batch(7)
    assert same(list(shuffled.map(lambda sample: sample).epoch(0)), list(shuffled.epoch(0)))
