"""CSV: inferred types, given names and delimiters, and lines with more or fewer fields than the others."""

import gzip
import json

import numpy
import pytest

from hasten.core.errors import ConfigurationError, RunError
from hasten.data import csv
from hasten.data.formats import table_files

pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")


def test_csv_with_difficult_content_is_read(tmp_path):
    # the fraction is beyond the first block
    (tmp_path / "a.csv").write_text("x,y,t\n" + "1,2,no\n" * 300_000 + "1.5,2,yes\n")
    (tmp_path / "b.csv").write_text("x,y,t\n7,8.25,no\n")
    source = csv(tmp_path / "*.csv", target="t").source
    x, y = source.read(numpy.array([0, 300_000, 300_001]))
    assert x.tolist() == [[1, 2], [1.5, 2], [7, 8.25]] and y.tolist() == [0, 1, 0] and source.classes == ["no", "yes"]
    with gzip.open(tmp_path / "c.tsv.gz", "wt") as file:
        file.write("1\t2\n3\t4\n")
    batch = csv(tmp_path / "c.tsv.gz", header=["p", "q"]).source.read(numpy.array([1]))
    assert batch["p"].tolist() == [3] and batch["q"].tolist() == [4]


def test_csv_fingerprint_follows_its_options(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    settings = ({}, {"delimiter": ";"}, {"header": ["p", "q"]}, {"header": ["q", "p"]})
    identities = [json.dumps(csv(tmp_path / "t.csv", **setting).source.fingerprint()) for setting in settings]
    assert len(set(identities)) == 4 and json.dumps(csv(tmp_path / "t.csv").source.fingerprint()) == identities[0]


ODD = 'n,word\n0,"two\nlines"\n\n1\n2,b\n3,c,d\n4,e\n5,f\n6'
ODD_ROWS = {
    1: "row 1 of the file, '1', has 1 field, not 2",
    3: "row 3 of the file, '3,c,d', has 3 fields, not 2",
    6: "row 6 of the file, '6', has 1 field, not 2",
}


@pytest.mark.parametrize("form", ["plain", "gz", "no header"])
def test_csv_line_with_other_field_count_is_a_bad_row(tmp_path, form):
    path, settings = tmp_path / ("t.csv.gz" if form == "gz" else "t.csv"), {}
    content = ODD.encode()
    if form == "no header":
        # an empty line, which counts as one
        content, settings = (content.replace(b"n,word", b"", 1), {"header": ["n", "word"]})
    path.write_bytes(gzip.compress(content) if form == "gz" else content)
    pipeline = csv(path, **settings).skip_bad_rows(3).batch(4)
    for seed in (None, 1):
        read = pipeline if seed is None else csv(path, **settings).shuffle(seed).skip_bad_rows(3).batch(7)
        batches = list(read)
        assert sorted(n for batch in batches for n in batch["n"].tolist()) == [0, 2, 4, 5]
        assert {row: (fault.where, fault.why) for row, fault in read.faults.found.items()} == {
            row: (str(path), why) for row, why in ODD_ROWS.items()
        }
    assert [batch["n"].tolist() for batch in pipeline] == [[0, 2], [4, 5]]
    assert [word for batch in pipeline for word in batch["word"]] == ["two\nlines", "b", "e", "f"]
    assert len(pipeline.source) == 7


def test_csv_bad_line_that_is_not_text_is_one_line(tmp_path, capfd):
    (tmp_path / "t.csv").write_bytes("n,word\n1,a\n2,b\n3,é,é\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"t\.csv is not a complete CSV file: .*UTF-8\?$"):
        csv(tmp_path / "t.csv")
    assert capfd.readouterr() == ("", "")


def test_csv_bad_line_is_reported_before_reading(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("n,label\n" + "1,0\n" * 100 + "1\n" + "1,0\n" * 100)
    message = (
        r"row 100 \(.*t\.csv\): row 100 of the file, '1', has 1 field, not 2; repair it, or allow bad rows "
        r"to be skipped"
    )
    with pytest.raises(RunError, match=message):
        next(iter(csv(path, target="label").batch(10)))
    with pytest.raises(RunError, match=message):
        csv(path, target="label").batches(10, seed=0, training=False)
    assert sum(len(y) for _, y in csv(path, target="label").skip_bad_rows(1).cache().batch(10)) == 200
    (tmp_path / "u.csv").write_text(path.read_text())
    with pytest.raises(
        RunError,
        match=r"row 301 \(.*u\.csv\): row 100 of the file, .*; it is bad row number 2, and max_rows=1 may be skipped",
    ):
        next(iter(csv(tmp_path, target="label").skip_bad_rows(1).batch(10)))


def test_csv_unclosed_quote_is_not_a_single_bad_row(tmp_path):
    """The unclosed quote extends over all following lines."""
    (tmp_path / "t.csv").write_text("n,word,x\n" + "1,a,2\n" * 4 + '5,"Tom\n' + "6,b,7\n" * 100)
    with pytest.raises(
        ConfigurationError,
        match=r"t\.csv is not a complete CSV file: .*row 4 of the file, .* opens a quote that is never closed; ",
    ):
        csv(tmp_path / "t.csv")


def test_csv_inch_sign_is_not_an_unclosed_quote(tmp_path):
    (tmp_path / "t.csv").write_text("n,word,x\n" + "1,a,2\n" * 4 + '5,5" pipe,2,2\n' + "6,b,7\n" * 4)
    (bad,) = csv(tmp_path / "t.csv").source.known_bad_rows()
    assert (bad.row, bad.why) == (4, "row 4 of the file, '5,5\" pipe,2,2', has 4 fields, not 3")


def test_csv_bad_lines_above_the_limit_are_not_collected(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "MAX_BAD_LINES", 3)
    path = tmp_path / "t.csv"
    path.write_text("n,word\n" + "1,a\n" * 20 + "2\n" * 3)
    assert len(csv(path).source.known_bad_rows()) == 3
    path.write_text("n,word\n" + "1,a\n" * 20 + "2\n" * 4)
    with pytest.raises(
        ConfigurationError, match=r"t\.csv has over 3 lines with too few fields or too many; are the delimiter"
    ):
        csv(path)


def test_csv_with_another_delimiter_is_not_a_bad_row(tmp_path):
    (tmp_path / "a.csv").write_text("n,label\n" + "1,0\n" * 100)
    (tmp_path / "b.csv").write_text("n,label\n" + "1;0\n" * 100)
    with pytest.raises(
        ConfigurationError,
        match=r"b\.csv has no more good lines than bad ones: row 0 of the file, '1;0', has 1 field, not 2; are "
        r"the delimiter",
    ):
        csv(tmp_path)


def test_csv_text_that_is_not_utf_8_is_refused_with_its_column(tmp_path):
    (tmp_path / "t.csv").write_bytes("n,city\n1,Köln\n2,Bonn\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"column 'city' is not UTF-8"):
        csv(tmp_path / "t.csv")


def test_csv_without_a_header_is_refused_with_the_option_that_names_its_columns(tmp_path):
    (tmp_path / "t.csv").write_text("5,0,0\n4,0,1\n")
    with pytest.raises(ConfigurationError, match=r"two columns named '0'; rename one, or .* pass csv\(header="):
        csv(tmp_path / "t.csv")


def test_csv_larger_than_the_memory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr("hasten.data.formats.table_files.free_memory", lambda: 3)
    with pytest.raises(ConfigurationError, match=r"are parsed in memory, and .* GB are free; split the file"):
        csv(tmp_path / "t.csv")
