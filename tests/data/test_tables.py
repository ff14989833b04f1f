"""Parquet, Feather and CSV: what their batches look like, from memory and run by run, and what is said of bad files."""

import datetime
import errno
import gzip
import json
import os
import pickle
import warnings
from decimal import Decimal
from itertools import product
from pathlib import Path

import numpy
import pytest
import torch

from hasten.contract.batch import split
from hasten.contract.errors import Failure, Notice, Refusal
from hasten.data import csv, feather, parquet
from hasten.data.formats import table_files
from hasten.data.formats.table_files import asks_too_much

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
import pyarrow.csv as arrow_csv  # noqa: E402
import pyarrow.feather as arrow_feather  # noqa: E402
import pyarrow.parquet as arrow_parquet  # noqa: E402

ROWS, RUN = 1000, 128
WHOLE, BY_RUN = None, 0  # gigabytes


def numbers(rows: int = ROWS, first: int = 0):
    count = numpy.arange(first, first + rows)
    return pa.table({"a": count.astype("f4"), "b": count * 10, "yes": count % 3 == 0, "label": count % 7})


def nested():
    count = range(ROWS)
    return pa.table(
        {
            "id": pa.array(count, pa.int32()),
            "pair": pa.array([[i, -i] for i in count], pa.list_(pa.float32(), 2)),
            "grid": pa.array([[[i] * 3] * 2 for i in count], pa.list_(pa.list_(pa.int16(), 3), 2)),
            "words": [f"word {i}" for i in count],
            "raw": [bytes([i % 256]) for i in count],
            "some": pa.array([list(range(i % 4)) for i in count], pa.list_(pa.int64())),
            "names": [["x"] * (i % 3) for i in count],
            "point": [{"x": float(i), "tag": str(i)} for i in count],
            "when": pa.array([datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=i) for i in count], pa.timestamp("ms")),
            "price": pa.array([Decimal(i) / 4 for i in count], pa.decimal128(8, 2)),
            "kind": pa.array([f"k{i % 5}" for i in count]).dictionary_encode(),
        }
    )


def write(table, path, form: str) -> str:
    if form == "parquet":
        arrow_parquet.write_table(table, path, row_group_size=RUN)
    elif form == "csv":
        arrow_csv.write_csv(table, path)
    else:
        arrow_feather.write_feather(table, path, compression=form, chunksize=RUN)
    return str(path)


pytestmark = pytest.mark.filterwarnings("ignore:.*rows were decoded to give")  # some tests leave no room on purpose
READERS = {"parquet": parquet, "csv": csv, "uncompressed": feather, "lz4": feather, "zstd": feather}
ANY_ORDER = numpy.random.default_rng(0).permutation(ROWS)[:300]


@pytest.mark.parametrize(("form", "gigabytes"), [("csv", WHOLE), *product(("parquet", "uncompressed", "lz4", "zstd"), (WHOLE, BY_RUN))])
def test_a_matrix_and_a_target(tmp_path, form, gigabytes):
    table = numbers()
    path = write(table, tmp_path / f"t.{form}", form)
    source = READERS[form](path, target="label", **({} if form == "csv" else {"gigabytes": gigabytes})).source
    x, y = source.read(ANY_ORDER)
    assert x.dtype == torch.float32 and x.shape == (300, 3) and y.dtype == torch.int64
    for number, name in enumerate(("a", "b", "yes")):
        assert numpy.array_equal(x[:, number].numpy(), table[name].to_numpy()[ANY_ORDER].astype("f4"))
    assert numpy.array_equal(y.numpy(), table["label"].to_numpy()[ANY_ORDER])
    assert source.edges().tolist() == ([0, ROWS] if form == "csv" else [*range(0, ROWS, RUN), ROWS])
    assert len(source) == ROWS


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
@pytest.mark.parametrize("form", ["parquet", "lz4"])
def test_columns_of_every_kind(tmp_path, form, gigabytes):
    table = nested()
    batch = READERS[form](write(table, tmp_path / "t", form), gigabytes=gigabytes).source.read(ANY_ORDER)
    rows = table.take(ANY_ORDER).to_pylist()
    assert batch["id"].dtype == torch.int32 and batch["id"].tolist() == [row["id"] for row in rows]
    assert batch["pair"].dtype == torch.float32 and batch["pair"].tolist() == [row["pair"] for row in rows]
    assert batch["grid"].shape == (300, 2, 3) and batch["grid"].tolist() == [row["grid"] for row in rows]
    assert [row.tolist() for row in batch["some"]] == [row["some"] for row in rows] and batch["some"][0].dtype == torch.int64
    for name in ("words", "raw", "names", "kind"):
        assert batch[name] == [row[name] for row in rows]
    assert batch["point"]["x"].tolist() == [row["point"]["x"] for row in rows]
    assert batch["point"]["tag"] == [row["point"]["tag"] for row in rows]
    assert batch["when"].tolist() == [int(row["when"].replace(tzinfo=datetime.UTC).timestamp() * 1000) for row in rows]
    assert batch["price"].dtype == torch.float64 and batch["price"].tolist() == [float(row["price"]) for row in rows]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_a_target_of_text(tmp_path, gigabytes):
    table = numbers().set_column(3, "label", pa.array([("dog", "cat", "eel")[i % 3] for i in range(ROWS)]).dictionary_encode())
    path = write(table, tmp_path / "t.parquet", "parquet")
    source = parquet(path, target="label", gigabytes=gigabytes).source
    assert source.classes == ["cat", "dog", "eel"]
    assert source.read(numpy.arange(4))[1].tolist() == [1, 0, 2, 1]
    chosen = parquet(path, target="label", classes=["eel", "dog", "cat"], gigabytes=gigabytes).source
    assert chosen.read(numpy.arange(4))[1].tolist() == [1, 2, 0, 1]
    with pytest.raises(Refusal, match=r"column 'label' holds 'dog' in .*, which is none of its classes: cat, eel"):
        parquet(path, target="label", classes=["cat", "eel"], gigabytes=gigabytes).source.read(numpy.arange(4))


def test_a_target_of_fractions_and_text_beside_it(tmp_path):
    table = pa.table({"words": ["a", "b"], "size": [0.5, 1.5]})
    batch = parquet(write(table, tmp_path / "t.parquet", "parquet"), target="size").source.read(numpy.array([1, 0]))
    inputs, size = batch
    assert inputs == {"words": ["b", "a"]} and size.dtype == torch.float32 and size.tolist() == [1.5, 0.5]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_a_target_beside_columns_of_every_kind_is_one_that_a_task_finds(tmp_path, gigabytes):
    path = write(nested().append_column("label", pa.array(range(ROWS))), tmp_path / "t.parquet", "parquet")
    (inputs,), _, label = split(parquet(path, columns=["id", "words", "point"], target="label", gigabytes=gigabytes).source.read(ANY_ORDER))
    assert label.tolist() == inputs["id"].tolist() == inputs["point"]["x"].tolist() == ANY_ORDER.tolist()


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
@pytest.mark.parametrize("kind", ["i4", "u4", "i8", "u8"])
def test_whole_numbers_that_a_matrix_would_round_are_told_once(tmp_path, kind, gigabytes):
    names = (numpy.arange(ROWS) + (1 << 24) - ROWS + 2).astype(kind)  # the last one is beyond what fits
    table = pa.table({"name": names, "right": names - 1, "label": names})
    path = write(table, tmp_path / "t.parquet", "parquet")
    with pytest.warns(Notice) as told:
        list(parquet(path, target="label", gigabytes=gigabytes).batch(100))
    (notice,) = (str(one.message) for one in told if "rounded" in str(one.message))
    assert notice.startswith("column 'name' holds whole numbers as big as 16777217,") and "no target=" in notice
    with warnings.catch_warnings(action="error"):
        list(parquet(path, columns=["right"], target="label").batch(100))
        assert parquet(path).source.read(numpy.array([ROWS - 1]))["name"].tolist() == [16777217]


def test_chosen_columns_of_several_files(tmp_path):
    for number in range(3):
        write(numbers(100, 100 * number), tmp_path / f"{number}.parquet", "parquet")
    write(numbers(100, 300).rename_columns(["a", "b", "other", "label"]), tmp_path / "3.parquet", "parquet")
    source = parquet(tmp_path / "*.parquet", columns=["b", "a"], target="label").source
    x, y = source.read(numpy.array([399, 0, 150]))
    assert x.tolist() == [[3990, 399], [0, 0], [1500, 150]] and y.tolist() == [0, 0, 3]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_a_pass_is_every_row_once_whoever_reads(tmp_path, gigabytes):
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    read = parquet(path, target="label", gigabytes=gigabytes).shuffle(seed=1, window=2).batch(64)
    here = list(read.epoch(0))
    threads = list(read.prefetch(2, threads=3).epoch(0))
    processes = list(read.prefetch(2, processes=2).epoch(0))
    assert sorted(torch.cat([x[:, 0] for x, _ in here]).tolist()) == list(range(ROWS))
    for others in (threads, processes):
        assert all(torch.equal(a, b) for one, other in zip(here, others, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("form", ["parquet", "csv", "lz4"])
def test_a_source_travels(tmp_path, form):
    source = READERS[form](write(numbers(), tmp_path / "t", form), target="label").source
    before = source.read(ANY_ORDER)
    travelled = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 20_000
    assert all(map(torch.equal, travelled.read(ANY_ORDER), before)) and travelled.identity() == source.identity()


def test_identity_follows_the_files_and_what_is_read(tmp_path):
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    one = parquet(path, target="label").source.identity()
    assert one == parquet([path], target="label").source.identity()
    assert one != parquet(path, target="label", fill=0).source.identity()
    assert one != parquet(path, columns=["a"], target="label").source.identity()
    os.utime(path, ns=(1, 1))
    assert one != parquet(path, target="label").source.identity()


def test_the_identity_of_a_csv_follows_how_it_is_read(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    settings = ({}, {"delimiter": ";"}, {"header": ["p", "q"]}, {"header": ["q", "p"]})
    identities = [json.dumps(csv(tmp_path / "t.csv", **setting).source.identity()) for setting in settings]
    assert len(set(identities)) == 4 and json.dumps(csv(tmp_path / "t.csv").source.identity()) == identities[0]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_missing_values(tmp_path, gigabytes):
    table = pa.table({"a": [1.0, None, 3.0, None], "w": ["x", None, "y", "z"], "label": [0, 1, 0, 1]})
    path = write(table, tmp_path / "t.parquet", "parquet")
    rows = numpy.arange(4)
    with pytest.raises(Refusal, match=r"column 'a' lacks 2 of its 4 values in .*t\.parquet, row group 0; fill them"):
        parquet(path, columns=["a"], target="label", gigabytes=gigabytes).source.read(rows)
    x, _ = parquet(path, columns=["a"], target="label", fill=-1, gigabytes=gigabytes).source.read(rows)
    assert x[:, 0].tolist() == [1, -1, 3, -1]
    with pytest.raises(Refusal, match="column 'w' lacks 1 of its 4 values"):
        parquet(path, fill=0, gigabytes=gigabytes).source.read(rows)
    batch = parquet(path, fill={"a": float("nan"), "w": "?"}, gigabytes=gigabytes).source.read(rows)
    assert batch["w"] == ["x", "?", "y", "z"] and batch["a"].isnan().tolist() == [False, True, False, True]
    with pytest.raises(Refusal, match=r"column 'a' is of type double, which 'none' cannot fill"):
        parquet(path, fill={"a": "none", "w": ""}, gigabytes=gigabytes).source.read(rows)


def test_missing_values_in_lists(tmp_path):
    table = pa.table({"fixed": pa.array([[1, None], [2, 3]], pa.list_(pa.int64(), 2)), "some": [[None], [5, None, 6]]})
    path = write(table.slice(1), tmp_path / "t.feather", "uncompressed")
    with pytest.raises(Refusal, match="column 'some' lacks 1 of its 3 values"):
        feather(path).source.read(numpy.arange(1))
    assert feather(path, fill=9).source.read(numpy.arange(1))["some"][0].tolist() == [5, 9, 6]
    path = write(table, tmp_path / "t.parquet", "parquet")
    batch = parquet(path, fill=9).source.read(numpy.arange(2))
    assert batch["fixed"].tolist() == [[1, 9], [2, 3]] and [row.tolist() for row in batch["some"]] == [[9], [5, 9, 6]]


def test_csv_of_a_harder_kind(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,t\n" + "1,2,no\n" * 300_000 + "1.5,2,yes\n")  # the fraction is beyond the first block
    (tmp_path / "b.csv").write_text("x,y,t\n7,8.25,no\n")
    source = csv(tmp_path / "*.csv", target="t").source
    x, y = source.read(numpy.array([0, 300_000, 300_001]))
    assert x.tolist() == [[1, 2], [1.5, 2], [7, 8.25]] and y.tolist() == [0, 1, 0] and source.classes == ["no", "yes"]
    with gzip.open(tmp_path / "c.tsv.gz", "wt") as file:
        file.write("1\t2\n3\t4\n")
    batch = csv(tmp_path / "c.tsv.gz", header=["p", "q"]).source.read(numpy.array([1]))
    assert batch["p"].tolist() == [3] and batch["q"].tolist() == [4]


def test_a_window_that_is_too_large_is_told(tmp_path):
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    room = 2.5 * 4 * 4 * RUN / 1e9  # two runs and a half
    crowded = parquet(path, target="label", gigabytes=room).shuffle(0, window=4).batch(16)
    with pytest.warns(Notice, match=r"rows were decoded to give \d+: each row group is decoded again and again; use .shuffle\(window=\)"):
        wide = list(crowded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(parquet(path, target="label", gigabytes=room).shuffle(0, window=2).batch(64))
        whole = list(parquet(path, target="label").shuffle(0, window=4).batch(16))
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(wide, whole, strict=True))


def bad_inputs(folder):
    good = write(numbers(), folder / "good.parquet", "parquet")
    short = folder / "short.parquet"
    short.write_bytes(Path(good).read_bytes()[:-20])
    (folder / "short.feather").write_bytes(Path(write(numbers(), folder / "g.feather", "lz4")).read_bytes()[:-20])
    (folder / "empty.csv").touch()
    (folder / "ragged.csv").write_text("a,b\n1,2\n3\n")
    write(numbers().drop_columns("a"), folder / "lacks.parquet", "parquet")
    write(numbers().set_column(0, "a", pa.array(["x"] * ROWS)), folder / "other.parquet", "parquet")
    write(nested(), folder / "nested.parquet", "parquet")
    return {
        "a column that is not there": (lambda: parquet(good, columns=["a", "lable"]), r"no column 'lable' \(did you mean label\?\)"),
        "a target that is not there": (lambda: parquet(good, target="lab"), r"no column 'lab' \(did you mean label"),
        "classes of numbers": (lambda: parquet(good, target="label", classes=["a"]), "classes= are the words of a target of text"),
        "no room": (lambda: parquet(good, gigabytes=-1), "gigabytes= is a number of at least 0, not -1"),
        "columns as one text": (lambda: parquet(good, columns="a"), r"wants a list of names, as in columns=\['a'\]"),
        "nothing but the target": (lambda: parquet(good, columns=["a"], target="a"), "no column of .* is left to read"),
        "a target that is a time": (lambda: parquet(folder / "nested.parquet", target="when"), r"'when' is of type timestamp\[ms\]"),
        "a file without a column": (lambda: parquet([good, folder / "lacks.parquet"]), r"good\.parquet has a column 'a', .*lacks\.parquet has not"),
        "another type": (lambda: parquet([good, folder / "other.parquet"]), r"column 'a' is of type float in .*good.*large_string in .*other"),
        "a footer cut off": (lambda: parquet(short), r"short\.parquet is no whole Parquet file"),
        "a feather cut off": (lambda: feather(folder / "short.feather"), r"short\.feather is no whole Feather file"),
        "one format for another": (lambda: feather(good), r"good\.parquet is no whole Feather file"),
        "an empty file": (lambda: csv(folder / "empty.csv"), r"empty\.csv is no whole CSV file"),
        "a ragged file": (lambda: csv(folder / "ragged.csv"), r"ragged\.csv has no more good lines than bad ones: line 3 has 1 field, not 2; "),
        "an empty glob": (lambda: parquet(folder / "*.pqt"), r"no file matches .*\*\.pqt"),
    }  # fmt: skip


@pytest.mark.parametrize("which", range(15))
def test_bad_input(tmp_path, which):
    name, (make, said) = list(bad_inputs(tmp_path).items())[which]
    with pytest.raises(Refusal, match=said) as refused:
        make()
    assert "\n" not in str(refused.value), name


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_a_row_group_that_cannot_be_decoded(tmp_path, gigabytes):
    path = tmp_path / "t.parquet"
    arrow_parquet.write_table(numbers(), path, row_group_size=RUN, use_dictionary=False, write_page_checksum=False)
    place = arrow_parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 60] = bytes([255]) * 60
    path.write_bytes(content)
    read = parquet(path, target="label", gigabytes=gigabytes).batch(50)
    with pytest.raises(Failure, match=rf"row {RUN} .*t\.parquet, row group 1\).*skip_bad"):
        list(read)
    kept = torch.cat([x[:, 0] for x, _ in read.shuffle(0).skip_bad(RUN)])
    assert sorted(kept.tolist()) == [*range(RUN), *range(2 * RUN, ROWS)]


ODD = 'n,word\n0,"two\nlines"\n\n1\n2,b\n3,c,d\n4,e\n5,f\n6'  # bad are the lines 5, 7 and 10
ODD_LINES = {1: "line 5 has 1 field, not 2", 3: "line 7 has 3 fields, not 2", 6: "line 10 has 1 field, not 2"}


@pytest.mark.parametrize("form", ["plain", "gz", "no header"])
def test_a_line_of_csv_with_other_fields_is_a_bad_row(tmp_path, form):
    path, settings = tmp_path / ("t.csv.gz" if form == "gz" else "t.csv"), {}
    content = ODD.encode()
    if form == "no header":
        content, settings = content.replace(b"n,word", b"", 1), {"header": ["n", "word"]}  # an empty line, which counts as one
    path.write_bytes(gzip.compress(content) if form == "gz" else content)
    pipeline = csv(path, **settings).skip_bad(3).batch(4)
    for seed in (None, 1):
        read = pipeline if seed is None else csv(path, **settings).shuffle(seed).skip_bad(3).batch(7)
        batches = list(read)
        assert sorted(n for batch in batches for n in batch["n"].tolist()) == [0, 2, 4, 5]
        assert {row: (fault.where, fault.why) for row, fault in read.faults.found.items()} == {
            row: (str(path), why) for row, why in ODD_LINES.items()
        }
    assert [batch["n"].tolist() for batch in pipeline] == [[0, 2], [4, 5]]
    assert [word for batch in pipeline for word in batch["word"]] == ["two\nlines", "b", "e", "f"]
    assert len(pipeline.source) == 7


def test_a_bad_line_of_csv_that_is_no_text_is_told_in_one_line(tmp_path, capfd):
    (tmp_path / "t.csv").write_bytes("n,word\n1,a\n2,b\n3,é,é\n".encode("latin-1"))
    with pytest.raises(Refusal, match=r"t\.csv is no whole CSV file: .*UTF-8\?$"):
        csv(tmp_path / "t.csv")
    assert capfd.readouterr() == ("", "")


def test_a_bad_line_of_csv_is_named_before_anything_is_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("n,label\n" + "1,0\n" * 100 + "1\n" + "1,0\n" * 100)
    told = r"row 100 \(.*t\.csv\): line 102 has 1 field, not 2; mend it, or let some be left out"
    with pytest.raises(Failure, match=told):
        next(iter(csv(path, target="label").batch(10)))
    with pytest.raises(Failure, match=told):
        csv(path, target="label").batches(10, seed=0, training=False)
    assert sum(len(y) for _, y in csv(path, target="label").skip_bad(1).cache().batch(10)) == 200
    (tmp_path / "u.csv").write_text(path.read_text())
    with pytest.raises(Failure, match=r"row 301 \(.*u\.csv\): line 102 .*; it is bad row number 2, and 1 may be left out"):
        next(iter(csv(tmp_path, target="label").skip_bad(1).batch(10)))


def test_a_quote_that_is_never_closed_makes_no_single_bad_row(tmp_path):
    """It has swallowed all lines after it."""
    (tmp_path / "t.csv").write_text("n,word,x\n" + "1,a,2\n" * 4 + '5,"Tom\n' + "6,b,7\n" * 100)
    with pytest.raises(Refusal, match=r"t\.csv is no whole CSV file: .*line 6 opens a quote that is never closed; "):
        csv(tmp_path / "t.csv")


def test_a_sign_for_inches_is_no_quote_that_is_never_closed(tmp_path):
    (tmp_path / "t.csv").write_text("n,word,x\n" + "1,a,2\n" * 4 + '5,5" pipe,2,2\n' + "6,b,7\n" * 4)
    (bad,) = csv(tmp_path / "t.csv").source.known_bad()
    assert (bad.row, bad.why) == (4, "line 6 has 4 fields, not 3")


def test_a_bad_line_of_csv_that_is_not_found_again_is_told_by_its_row(tmp_path):
    """Some lines end as on old Macs; those after them are found all the same."""
    (tmp_path / "t.csv").write_bytes(b"n,word\n1,a\n2\r3,c\n4,d\n\n\n5,e,f\n6,g\n")
    source = csv(tmp_path / "t.csv").source
    assert {bad.row: bad.why for bad in source.known_bad()} == {
        1: "row 1 of the file has 1 field, not 2",
        4: "line 7 has 3 fields, not 2",
    }


def test_too_many_bad_lines_of_csv_are_not_collected(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "MOST_BAD", 3)
    path = tmp_path / "t.csv"
    path.write_text("n,word\n" + "1,a\n" * 20 + "2\n" * 3)
    assert len(csv(path).source.known_bad()) == 3
    path.write_text("n,word\n" + "1,a\n" * 20 + "2\n" * 4)
    with pytest.raises(Refusal, match=r"t\.csv has more than 3 lines with too few fields or too many; are the delimiter"):
        csv(path)


def test_a_csv_with_another_delimiter_is_no_bad_row_among_others(tmp_path):
    (tmp_path / "a.csv").write_text("n,label\n" + "1,0\n" * 100)
    (tmp_path / "b.csv").write_text("n,label\n" + "1;0\n" * 100)
    with pytest.raises(Refusal, match=r"b\.csv has no more good lines than bad ones: line 2 has 1 field, not 2; are the delimiter"):
        csv(tmp_path)


def test_a_column_of_text_that_makes_no_matrix_is_told_where_it_was_asked_for(tmp_path, recwarn):
    path = tmp_path / "t.parquet"
    write(pa.table({"age": [1, 2], "name": ["a", "b"], "word": ["c", "d"], "y": [0, 1]}), path, "parquet")
    with pytest.warns(Notice, match=r"^columns= takes in 'name' beside numbers, so batches are \(dict of columns, target\)") as told:
        parquet(path, columns=["age", "name"], target="y")
    assert [each.filename for each in told] == [__file__]
    recwarn.clear()
    for asked in (
        {"columns": ["age"], "target": "y"},
        {"columns": ["name", "word"], "target": "y"},
        {"columns": ["age", "name"]},
        {"target": "y"},
    ):
        parquet(path, **asked)
    assert not [each for each in recwarn if each.category is Notice]


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
@pytest.mark.parametrize("form", ["parquet", "uncompressed"])
def test_a_file_that_cannot_be_opened_is_a_bad_row(tmp_path, form, gigabytes):
    first, last = numbers(RUN), numbers(RUN, 2 * RUN)
    ending = "parquet" if form == "parquet" else "feather"
    write(first, tmp_path / f"a.{ending}", form)
    write(last, tmp_path / f"d.{ending}", form)
    (tmp_path / f"b.{ending}").symlink_to("gone")
    (tmp_path / f"c.{ending}").write_bytes((tmp_path / f"a.{ending}").read_bytes()[:-20])
    make = READERS[form]
    pipeline = make(tmp_path, target="label", gigabytes=gigabytes).skip_bad(2).batch(50)
    for _ in range(2):
        assert [n for x, _ in pipeline for n in x[:, 0].tolist()] == [*range(RUN), *range(2 * RUN, 3 * RUN)]
    assert [pipeline.faults.found[RUN + each].where for each in range(2)] == [str(tmp_path / f"{name}.{ending}") for name in "bc"]
    with pytest.raises(Failure, match=rf"c\.{ending}\): .*no whole .*; it is bad row number 2, and 1 may be left out"):
        next(iter(make(tmp_path, target="label", gigabytes=gigabytes).skip_bad(1).batch(50)))
    with pytest.raises(Failure, match=rf"row {RUN} \(.*b\.{ending}\): cannot read .*b\.{ending}: No such file.*skip_bad"):
        make(tmp_path, target="label", gigabytes=gigabytes).batches(50, seed=0, training=True)


@pytest.mark.parametrize(
    "fault", [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "Input/output error"), MemoryError()], ids=repr
)
@pytest.mark.parametrize("when", ["opened", "looked into"])
def test_what_the_machine_lacks_makes_no_file_a_bad_row(tmp_path, monkeypatch, when, fault):
    def lacking(*arguments, **named):
        raise fault

    for name in "ab":
        write(numbers(RUN), tmp_path / f"{name}.parquet", "parquet")
    monkeypatch.setattr(*((pa, "OSFile") if when == "opened" else (arrow_parquet, "read_metadata")), lacking)
    with pytest.raises(MemoryError if isinstance(fault, MemoryError) else Failure) as raised:
        parquet(tmp_path, target="label")
    if raised.type is Failure:
        assert str(raised.value).startswith("cannot read ") and str(raised.value).endswith(f": OSError: {fault}")


@pytest.mark.parametrize("gigabytes", [WHOLE, BY_RUN])
def test_a_file_that_changes_while_it_is_read(tmp_path, gigabytes):
    path = write(numbers(), tmp_path / "t.parquet", "parquet")
    source = parquet(path, target="label", gigabytes=gigabytes).source
    write(numbers(ROWS, 5), path, "parquet")
    with pytest.raises(Failure, match=r"t\.parquet changed while it was being read"):
        source.read(ANY_ORDER)


def test_remote_tables():
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files")
    system = fsspec.filesystem("memory")
    for number in range(2):
        with system.open(f"/tables/{number}.parquet", "wb") as file:
            arrow_parquet.write_table(numbers(500, 500 * number), file, row_group_size=RUN)
        with system.open(f"/tables/{number}.feather", "wb") as file:
            arrow_feather.write_feather(numbers(500, 500 * number), file)
    for source in (parquet("memory://tables", target="label").source, feather("memory://tables/*.feather", target="label").source):
        x, y = source.read(ANY_ORDER)
        assert x[:, 0].tolist() == ANY_ORDER.tolist() and y.tolist() == (ANY_ORDER % 7).tolist()


def test_a_damaged_remote_table_is_a_bad_row():
    system = pytest.importorskip("fsspec", reason="fsspec is not installed: no remote files").filesystem("memory")
    whole = pa.BufferOutputStream()
    arrow_parquet.write_table(numbers(RUN), whole)
    content = whole.getvalue().to_pybytes()
    system.pipe_file("/damaged/a.parquet", content)
    system.pipe_file("/damaged/b.parquet", content[:-20])
    pipeline = parquet("memory://damaged", target="label").skip_bad(1).batch(RUN + 1)
    assert [n for x, _ in pipeline for n in x[:, 0].tolist()] == [*range(RUN)]
    assert "b.parquet is no whole Parquet file" in pipeline.faults.found[RUN].why


@pytest.mark.parametrize(
    ("words", "absurd"), [("malloc of size 9000000000000000000 failed", True), ("malloc of size 4096 failed", False), ("", False)]
)
def test_memory_that_no_machine_has_is_asked_for_by_a_broken_file(words, absurd):
    assert asks_too_much(MemoryError(words)) is absurd
