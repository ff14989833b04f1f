"""Parquet, Feather and CSV: their batches, from memory and by row group, and the warnings about them."""

import datetime
import os
import pickle
import warnings
from itertools import product

import numpy
import pytest
import torch

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.data import csv, feather, parquet
from hasten.utils.batch import split_inputs_target

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
import pyarrow.feather as arrow_feather  # noqa: E402
import pyarrow.parquet as arrow_parquet  # noqa: E402

from helpers.arrow_tables import ANY_ORDER, BY_RUN, READERS, ROWS, RUN, WHOLE, nested, numbers, write  # noqa: E402

# some tests exceed the memory budget on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*rows were decoded to give")


@pytest.mark.parametrize(
    ("form", "gigabytes"), [("csv", WHOLE), *product(("parquet", "uncompressed", "lz4", "zstd"), (WHOLE, BY_RUN))]
)
def test_table_as_matrix_and_target(tmp_path, form, gigabytes):
    table = numbers()
    path = write(table, tmp_path / f"t.{form}", form)
    source = READERS[form](path, target="label", **({} if form == "csv" else {"gigabytes": gigabytes})).source
    x, y = source.read(ANY_ORDER)
    assert x.dtype == torch.float32 and x.shape == (300, 3) and y.dtype == torch.int64
    for number, name in enumerate(("a", "b", "yes")):
        assert numpy.array_equal(x[:, number].numpy(), table[name].to_numpy()[ANY_ORDER].astype("f4"))
    assert numpy.array_equal(y.numpy(), table["label"].to_numpy()[ANY_ORDER])
    assert source.chunk_offsets().tolist() == ([0, ROWS] if form == "csv" else [*range(0, ROWS, RUN), ROWS])
    assert len(source) == ROWS


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
@pytest.mark.parametrize("form", ["parquet", "lz4"])
def test_table_columns_of_every_type(tmp_path, form, gigabytes):
    table = nested()
    batch = READERS[form](write(table, tmp_path / "t", form), gigabytes=gigabytes).source.read(ANY_ORDER)
    rows = table.take(ANY_ORDER).to_pylist()
    assert batch["id"].dtype == torch.int32 and batch["id"].tolist() == [row["id"] for row in rows]
    assert batch["pair"].dtype == torch.float32 and batch["pair"].tolist() == [row["pair"] for row in rows]
    assert batch["grid"].shape == (300, 2, 3) and batch["grid"].tolist() == [row["grid"] for row in rows]
    assert [row.tolist() for row in batch["some"]] == [row["some"] for row in rows] and batch["some"][
        0
    ].dtype == torch.int64
    for name in ("words", "raw", "names", "kind"):
        assert batch[name] == [row[name] for row in rows]
    assert batch["point"]["x"].tolist() == [row["point"]["x"] for row in rows]
    assert batch["point"]["tag"] == [row["point"]["tag"] for row in rows]
    assert batch["when"].tolist() == [int(row["when"].replace(tzinfo=datetime.UTC).timestamp() * 1000) for row in rows]
    assert batch["price"].dtype == torch.float64 and batch["price"].tolist() == [float(row["price"]) for row in rows]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_table_text_target_is_the_index_of_its_class(tmp_path, gigabytes):
    table = numbers().set_column(
        3, "label", pa.array([("dog", "cat", "eel")[i % 3] for i in range(ROWS)]).dictionary_encode()
    )
    path = write(table, tmp_path / "t.parquet", "parquet")
    source = parquet(path, target="label", gigabytes=gigabytes).source
    assert source.classes == ["cat", "dog", "eel"]
    assert source.read(numpy.arange(4))[1].tolist() == [1, 0, 2, 1]
    chosen = parquet(path, target="label", classes=["eel", "dog", "cat"], gigabytes=gigabytes).source
    assert chosen.read(numpy.arange(4))[1].tolist() == [1, 2, 0, 1]
    with pytest.raises(
        ConfigurationError, match=r"column 'label' holds 'dog' in .*, which is not one of its classes: cat, eel"
    ):
        parquet(path, target="label", classes=["cat", "eel"], gigabytes=gigabytes).source.read(numpy.arange(4))


def test_table_float_and_text_targets(tmp_path):
    table = pa.table({"words": ["a", "b"], "size": [0.5, 1.5]})
    batch = parquet(write(table, tmp_path / "t.parquet", "parquet"), target="size").source.read(numpy.array([1, 0]))
    inputs, size = batch
    assert inputs == {"words": ["b", "a"]} and size.dtype == torch.float32 and size.tolist() == [1.5, 0.5]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_table_target_beside_columns_is_found_by_a_task(tmp_path, gigabytes):
    path = write(nested().append_column("label", pa.array(range(ROWS))), tmp_path / "t.parquet", "parquet")
    (inputs,), _, label = split_inputs_target(
        parquet(path, columns=["id", "words", "point"], target="label", gigabytes=gigabytes).source.read(ANY_ORDER)
    )
    assert label.tolist() == inputs["id"].tolist() == inputs["point"]["x"].tolist() == ANY_ORDER.tolist()


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
@pytest.mark.parametrize("kind", ["i4", "u4", "i8", "u8"])
def test_table_integers_rounded_by_a_matrix_warn_once(tmp_path, kind, gigabytes):
    # the last number exceeds the exact range of float32
    names = (numpy.arange(ROWS) + (1 << 24) - ROWS + 2).astype(kind)
    table = pa.table({"name": names, "right": names - 1, "label": names})
    path = write(table, tmp_path / "t.parquet", "parquet")
    with pytest.warns(HastenWarning) as caught:
        list(parquet(path, target="label", gigabytes=gigabytes).batch(100))
    (notice,) = (str(one.message) for one in caught if "rounds" in str(one.message))
    assert notice.startswith("column 'name' holds integers up to 16777217;") and "no target=" in notice
    with warnings.catch_warnings(action="error", category=HastenWarning):
        list(parquet(path, columns=["right"], target="label").batch(100))
        assert parquet(path).source.read(numpy.array([ROWS - 1]))["name"].tolist() == [16777217]


def test_table_selected_columns_of_several_files(tmp_path):
    for number in range(3):
        write(numbers(100, 100 * number), tmp_path / f"{number}.parquet", "parquet")
    write(numbers(100, 300).rename_columns(["a", "b", "other", "label"]), tmp_path / "3.parquet", "parquet")
    source = parquet(tmp_path / "*.parquet", columns=["b", "a"], target="label").source
    x, y = source.read(numpy.array([399, 0, 150]))
    assert x.tolist() == [[3990, 399], [0, 0], [1500, 150]] and y.tolist() == [0, 0, 3]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_table_epoch_has_every_row_once_in_every_runner(tmp_path, gigabytes):
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    read = parquet(path, target="label", gigabytes=gigabytes).shuffle(seed=1, window=2).batch(64)
    here = list(read.epoch(0))
    threads = list(read.prefetch(2, threads=3).epoch(0))
    processes = list(read.prefetch(2, processes=2).epoch(0))
    assert sorted(torch.cat([x[:, 0] for x, _ in here]).tolist()) == list(range(ROWS))
    for others in (threads, processes):
        assert all(
            torch.equal(a, b) for one, other in zip(here, others, strict=True) for a, b in zip(one, other, strict=True)
        )


@pytest.mark.parametrize("form", ["parquet", "csv", "lz4"])
def test_table_source_can_be_pickled(tmp_path, form):
    source = READERS[form](write(numbers(), tmp_path / "t", form), target="label").source
    before = source.read(ANY_ORDER)
    travelled = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 20_000
    assert all(map(torch.equal, travelled.read(ANY_ORDER), before)) and travelled.fingerprint() == source.fingerprint()


def test_table_fingerprint_follows_files_and_options(tmp_path):
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    one = parquet(path, target="label").source.fingerprint()
    assert one == parquet([path], target="label").source.fingerprint()
    assert one != parquet(path, target="label", fill=0).source.fingerprint()
    assert one != parquet(path, columns=["a"], target="label").source.fingerprint()
    os.utime(path, ns=(1, 1))
    assert one != parquet(path, target="label").source.fingerprint()


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_table_missing_values_are_refused_or_filled_by_column(tmp_path, gigabytes):
    table = pa.table({"a": [1.0, None, 3.0, None], "w": ["x", None, "y", "z"], "label": [0, 1, 0, 1]})
    path = write(table, tmp_path / "t.parquet", "parquet")
    rows = numpy.arange(4)
    with pytest.raises(
        ConfigurationError, match=r"column 'a' lacks 2 of its 4 values in .*t\.parquet, row group 0; pass fill=0"
    ):
        parquet(path, columns=["a"], target="label", gigabytes=gigabytes).source.read(rows)
    x, _ = parquet(path, columns=["a"], target="label", fill=-1, gigabytes=gigabytes).source.read(rows)
    assert x[:, 0].tolist() == [1, -1, 3, -1]
    with pytest.raises(ConfigurationError, match="column 'w' lacks 1 of its 4 values"):
        parquet(path, fill=0, gigabytes=gigabytes).source.read(rows)
    batch = parquet(path, fill={"a": float("nan"), "w": "?"}, gigabytes=gigabytes).source.read(rows)
    assert batch["w"] == ["x", "?", "y", "z"] and batch["a"].isnan().tolist() == [False, True, False, True]
    with pytest.raises(ConfigurationError, match=r"column 'a' is of type double, which 'none' cannot fill"):
        parquet(path, fill={"a": "none", "w": ""}, gigabytes=gigabytes).source.read(rows)


def test_table_missing_values_in_lists(tmp_path):
    table = pa.table({"fixed": pa.array([[1, None], [2, 3]], pa.list_(pa.int64(), 2)), "some": [[None], [5, None, 6]]})
    path = write(table.slice(1), tmp_path / "t.feather", "uncompressed")
    with pytest.raises(ConfigurationError, match="column 'some' lacks 1 of its 3 values"):
        feather(path).source.read(numpy.arange(1))
    assert feather(path, fill=9).source.read(numpy.arange(1))["some"][0].tolist() == [5, 9, 6]
    path = write(table, tmp_path / "t.parquet", "parquet")
    batch = parquet(path, fill=9).source.read(numpy.arange(2))
    assert batch["fixed"].tolist() == [[1, 9], [2, 3]] and [row.tolist() for row in batch["some"]] == [[9], [5, 9, 6]]


def test_table_window_beyond_memory_warns(tmp_path):
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    budget = 2.5 * 4 * 4 * RUN / 1e9  # two and a half row groups
    crowded = parquet(path, target="label", gigabytes=budget).shuffle(0, window=4).batch(16)
    with pytest.warns(
        HastenWarning,
        match=r"rows were decoded to return \d+: every row group is decoded repeatedly; use .shuffle\(window=\)",
    ):
        wide = list(crowded)
    with warnings.catch_warnings(action="error", category=HastenWarning):
        list(parquet(path, target="label", gigabytes=budget).shuffle(0, window=2).batch(64))
        expected = list(parquet(path, target="label").shuffle(0, window=4).batch(16))
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(wide, expected, strict=True))


def test_index_of_pandas_is_no_column_unless_it_is_named(tmp_path):
    """``train_test_split`` of a data frame leaves one, and the number of a row predicts the target of sorted data."""
    table = pa.table({"x": [0.5, 1.5], "label": [0, 1], "__index_level_0__": [7, 3]})
    arrow_parquet.write_table(table, tmp_path / "x.parquet")
    inputs, _ = parquet(tmp_path, target="label").source.read(numpy.arange(2))
    assert inputs.tolist() == [[0.5], [1.5]]
    assert parquet(tmp_path, columns=["__index_level_0__", "x"]).source.columns == ["__index_level_0__", "x"]
    with pytest.raises(ConfigurationError, match="has no column '__index_level_0__'"):
        parquet(tmp_path, target="__index_level_0__")


@pytest.mark.parametrize("header", [",x,label", "Unnamed: 0,x,label"])
def test_row_numbers_that_to_csv_of_pandas_writes_are_no_column(header, tmp_path):
    (tmp_path / "x.csv").write_text(f"{header}\n0,0.5,0\n1,1.5,1\n")
    inputs, _ = csv(tmp_path / "x.csv", target="label").source.read(numpy.arange(2))
    assert inputs.tolist() == [[0.5], [1.5]]


def test_table_text_column_in_a_matrix_warns_at_the_call(tmp_path, recwarn):
    path = tmp_path / "t.parquet"
    write(pa.table({"age": [1, 2], "name": ["a", "b"], "word": ["c", "d"], "y": [0, 1]}), path, "parquet")
    with pytest.warns(
        HastenWarning, match=r"^columns= contains 'name' besides numbers, so batches are \(dict of columns, target\)"
    ) as caught:
        parquet(path, columns=["age", "name"], target="y")
    assert [each.filename for each in caught if each.category is HastenWarning] == [__file__]
    recwarn.clear()
    for asked in (
        {"columns": ["age"], "target": "y"},
        {"columns": ["name", "word"], "target": "y"},
        {"columns": ["age", "name"]},
        {"target": "y"},
    ):
        parquet(path, **asked)
    assert not [each for each in recwarn if each.category is HastenWarning]


def test_table_of_remote_files_reads_rows_in_any_order():
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
    system = fsspec.filesystem("memory")
    for number in range(2):
        with system.open(f"/tables/{number}.parquet", "wb") as file:
            arrow_parquet.write_table(numbers(500, 500 * number), file, row_group_size=RUN)
        with system.open(f"/tables/{number}.feather", "wb") as file:
            arrow_feather.write_feather(numbers(500, 500 * number), file)
    for source in (
        parquet("memory://tables", target="label").source,
        feather("memory://tables/*.feather", target="label").source,
    ):
        x, y = source.read(ANY_ORDER)
        assert x[:, 0].tolist() == ANY_ORDER.tolist() and y.tolist() == (ANY_ORDER % 7).tolist()


def test_columns_in_the_names_of_directories_are_named(tmp_path):
    """As pandas and Spark write with ``partition_cols``."""
    for year in (2020, 2021):
        (tmp_path / f"year={year}").mkdir()
        arrow_parquet.write_table(numbers(20), tmp_path / f"year={year}" / "x.parquet")
    with pytest.warns(HastenWarning, match="the names of directories hold values of 'year'"):
        parquet(tmp_path)


def test_arrow_stream_is_named(tmp_path):
    """As the ``datasets`` of Hugging Face store them."""
    table = numbers(20)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ConfigurationError, match="is an Arrow stream, which cannot be read by row number"):
        feather(tmp_path)


@pytest.mark.parametrize("form", ["csv", "parquet", "uncompressed"])
def test_table_in_a_file_whose_name_is_not_utf8(tmp_path, form):
    path = write(numbers(), tmp_path / f"t.{form}", form)
    renamed = os.fsdecode(os.fsencode(str(tmp_path)) + b"/caf\xe9." + form.encode())
    os.rename(path, renamed)
    assert len(READERS[form](renamed).source) == ROWS
