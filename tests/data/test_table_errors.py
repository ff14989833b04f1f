"""Tables that cannot be read, as a whole or in part: what is refused in one line, and what counts as bad rows."""

import errno
from pathlib import Path

import pytest
import torch

from hasten.core.errors import ConfigurationError, RunError
from hasten.data import csv, feather, parquet
from hasten.data.formats.table_files import asks_too_much

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
import pyarrow.parquet as arrow_parquet  # noqa: E402

from helpers.arrow_tables import ANY_ORDER, BY_RUN, READERS, ROWS, RUN, WHOLE, nested, numbers, write  # noqa: E402

# some tests exceed the memory budget on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*rows were decoded to give")


def bad_inputs(directory):
    good = write(numbers(), directory / "good.parquet", "parquet")
    short = directory / "short.parquet"
    short.write_bytes(Path(good).read_bytes()[:-20])
    (directory / "short.feather").write_bytes(Path(write(numbers(), directory / "g.feather", "lz4")).read_bytes()[:-20])
    (directory / "empty.csv").touch()
    (directory / "ragged.csv").write_text("a,b\n1,2\n3\n")
    write(numbers().drop_columns("a"), directory / "lacks.parquet", "parquet")
    write(numbers().set_column(0, "a", pa.array(["x"] * ROWS)), directory / "other.parquet", "parquet")
    write(nested(), directory / "nested.parquet", "parquet")
    return {
        "a column that does not exist": (
            lambda: parquet(good, columns=["a", "lable"]),
            r"no column 'lable' \(did you mean label\?\)",
        ),
        "a target that does not exist": (lambda: parquet(good, target="lab"), r"no column 'lab' \(did you mean label"),
        "classes of numbers": (
            lambda: parquet(good, target="label", classes=["a"]),
            "classes= are the values of a text target",
        ),
        "negative budget": (lambda: parquet(good, gigabytes=-1), "gigabytes= must be a number of at least 0, not -1"),
        "columns as one text": (lambda: parquet(good, columns="a"), r"must be a list of names, as in columns=\['a'\]"),
        "only the target": (lambda: parquet(good, columns=["a"], target="a"), "has no column to read besides"),
        "a target that is a time": (
            lambda: parquet(directory / "nested.parquet", target="when"),
            r"'when' is of type timestamp\[ms\]",
        ),
        "a file without a column": (
            lambda: parquet([good, directory / "lacks.parquet"]),
            r"good\.parquet has a column 'a', .*lacks\.parquet has not",
        ),
        "another type": (
            lambda: parquet([good, directory / "other.parquet"]),
            r"column 'a' is of type float in .*good.*large_string in .*other",
        ),
        "a footer cut off": (lambda: parquet(short), r"short\.parquet is not a complete Parquet file"),
        "a feather cut off": (
            lambda: feather(directory / "short.feather"),
            r"short\.feather is not a complete Feather file",
        ),
        "one format for another": (lambda: feather(good), r"good\.parquet is not a complete Feather file"),
        "an empty file": (lambda: csv(directory / "empty.csv"), r"empty\.csv is not a complete CSV file"),
        "a ragged file": (
            lambda: csv(directory / "ragged.csv"),
            r"ragged\.csv has no more good lines than bad ones: row 1 of the file, '3', has 1 field, not 2; ",
        ),
        "an empty glob": (lambda: parquet(directory / "*.pqt"), r"no file matches .*\*\.pqt"),
    }


@pytest.mark.parametrize("which", range(15))
def test_invalid_table_is_refused(tmp_path, which):
    name, (make, message) = list(bad_inputs(tmp_path).items())[which]
    with pytest.raises(ConfigurationError, match=message) as refused:
        make()
    assert "\n" not in str(refused.value), name


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_undecodable_row_group_is_bad_rows(tmp_path, gigabytes):
    path = tmp_path / "t.parquet"
    arrow_parquet.write_table(numbers(), path, row_group_size=RUN, use_dictionary=False, write_page_checksum=False)
    place = arrow_parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 60] = bytes([255]) * 60
    path.write_bytes(content)
    read = parquet(path, target="label", gigabytes=gigabytes).batch(50)
    with pytest.raises(RunError, match=rf"row {RUN} .*t\.parquet, row group 1\).*skip_bad"):
        list(read)
    rows_left = torch.cat([x[:, 0] for x, _ in read.shuffle(0).skip_bad_rows(RUN)])
    assert sorted(rows_left.tolist()) == [*range(RUN), *range(2 * RUN, ROWS)]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
@pytest.mark.parametrize("form", ["parquet", "uncompressed"])
def test_unreadable_file_is_a_bad_row(tmp_path, form, gigabytes):
    first, last = numbers(RUN), numbers(RUN, 2 * RUN)
    ending = "parquet" if form == "parquet" else "feather"
    write(first, tmp_path / f"a.{ending}", form)
    write(last, tmp_path / f"d.{ending}", form)
    (tmp_path / f"b.{ending}").symlink_to("gone")
    (tmp_path / f"c.{ending}").write_bytes((tmp_path / f"a.{ending}").read_bytes()[:-20])
    make = READERS[form]
    pipeline = make(tmp_path, target="label", gigabytes=gigabytes).skip_bad_rows(2).batch(50)
    for _ in range(2):
        assert [n for x, _ in pipeline for n in x[:, 0].tolist()] == [*range(RUN), *range(2 * RUN, 3 * RUN)]
    assert [pipeline.faults.found[RUN + each].where for each in range(2)] == [
        str(tmp_path / f"{name}.{ending}") for name in "bc"
    ]
    with pytest.raises(
        RunError, match=rf"c\.{ending}\): .*not a complete .*; it is bad row number 2, and max_rows=1 may be skipped"
    ):
        next(iter(make(tmp_path, target="label", gigabytes=gigabytes).skip_bad_rows(1).batch(50)))
    with pytest.raises(
        RunError, match=rf"row {RUN} \(.*b\.{ending}\): cannot read .*b\.{ending}: No such file.*skip_bad"
    ):
        make(tmp_path, target="label", gigabytes=gigabytes).batches(50, seed=0, training=True)


@pytest.mark.parametrize(
    "fault",
    [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "Input/output error"), MemoryError()],
    ids=repr,
)
@pytest.mark.parametrize("when", ["opened", "looked into"])
def test_out_of_memory_makes_no_bad_row(tmp_path, monkeypatch, when, fault):
    def lacking(*arguments, **named):
        raise fault

    for name in "ab":
        write(numbers(RUN), tmp_path / f"{name}.parquet", "parquet")
    monkeypatch.setattr(*((pa, "OSFile") if when == "opened" else (arrow_parquet, "read_metadata")), lacking)
    with pytest.raises(MemoryError if isinstance(fault, MemoryError) else RunError) as raised:
        parquet(tmp_path, target="label")
    if raised.type is RunError:
        assert str(raised.value).startswith("cannot read ") and str(raised.value).endswith(f": OSError: {fault}")


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_file_that_changes_while_read_raises(tmp_path, gigabytes):
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    source = parquet(path, target="label", gigabytes=gigabytes).source
    write(numbers(ROWS, 5), path, "parquet")
    with pytest.raises(RunError, match=r"t\.parquet changed while it was being read"):
        source.read(ANY_ORDER)


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_file_that_changes_between_epochs_raises(tmp_path, gigabytes):
    """Also if the whole table is in memory by then."""
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    pipeline = parquet(path, target="label", gigabytes=gigabytes).batch(ROWS)
    assert len(list(pipeline)) == 1
    write(numbers(ROWS, 5), path, "parquet")
    with pytest.raises(RunError, match=r"t\.parquet changed while it was being read"):
        list(pipeline)


def test_damaged_remote_table_is_a_bad_row():
    system = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files").filesystem("memory")
    buffer = pa.BufferOutputStream()
    arrow_parquet.write_table(numbers(RUN), buffer)
    content = buffer.getvalue().to_pybytes()
    system.pipe_file("/damaged/a.parquet", content)
    system.pipe_file("/damaged/b.parquet", content[:-20])
    pipeline = parquet("memory://damaged", target="label").skip_bad_rows(1).batch(RUN + 1)
    assert [n for x, _ in pipeline for n in x[:, 0].tolist()] == [*range(RUN)]
    assert "b.parquet is not a complete Parquet file" in pipeline.faults.found[RUN].why


@pytest.mark.parametrize(
    ("message", "absurd"),
    [("malloc of size 9000000000000000000 failed", True), ("malloc of size 4096 failed", False), ("", False)],
)
def test_broken_file_that_requests_huge_memory_raises(message, absurd):
    assert asks_too_much(MemoryError(message)) is absurd
