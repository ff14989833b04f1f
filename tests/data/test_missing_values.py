"""Fill values for missing ones: never in a target that was not named, always the given value, always reported."""

import datetime
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest

from hasten.core.errors import ConfigurationError, HastenWarning
from hasten.data import csv, feather, parquet

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no tables")
import pyarrow.feather as arrow_feather  # noqa: E402
import pyarrow.parquet as arrow_parquet  # noqa: E402

ROWS = numpy.arange(3)
COLUMNS = {
    "whole": pa.array([1, None, 3], pa.int32()),
    "tiny": pa.array([1, None, 3], pa.uint8()),
    "part": pa.array([1.0, None, 3.0], pa.float32()),
    "half": pa.array([1.0, None, 3.0], pa.float16()),
    "price": pa.array([Decimal("1.25"), None, Decimal(3)], pa.decimal128(8, 2)),
    "yes": pa.array([True, None, False]),
    "none": pa.nulls(3),
    "when": pa.array([datetime.date(2020, 1, 1), None, datetime.date(2020, 1, 3)]),
    "word": pa.array(["a", None, "c"]),
    "some": pa.array([[1], [None, 5], []], pa.list_(pa.int64())),
    "row": pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int64(), 2)),
    "rows": pa.array([[[1, 2]], [[3, 4]], None], pa.list_(pa.list_(pa.int64(), 2), 1)),
    "point": pa.array([{"x": 1}, None, {"x": 3}]),
    "inner": pa.array([{"x": 1, "tag": "a"}, {"x": None, "tag": None}, {"x": 3, "tag": "c"}]),
}


def stored(directory, *names):
    path = directory / "t.parquet"
    arrow_parquet.write_table(pa.table({name: COLUMNS[name] for name in names}), path)
    return path


def read(directory, name, fill):
    column = parquet(stored(directory, name), fill=fill).source.read(ROWS)[name]
    return column if isinstance(column, (list, dict)) else column.tolist()


@pytest.mark.parametrize(
    ("name", "fill", "expected"),
    [
        ("whole", -1, [1, -1, 3]),
        ("whole", 7.0, [1, 7, 3]),
        ("whole", numpy.int64(7), [1, 7, 3]),
        ("tiny", {"tiny": 255}, [1, 255, 3]),
        ("part", 0.5, [1, 0.5, 3]),
        ("part", 2, [1, 2, 3]),
        ("half", 0.5, [1, 0.5, 3]),
        ("price", 0.5, [1.25, 0.5, 3]),
        ("price", Decimal("0.25"), [1.25, 0.25, 3]),
        ("yes", 0, [True, False, False]),
        ("yes", {"yes": True}, [True, True, False]),
        ("none", 4, [4, 4, 4]),
        ("when", {"when": datetime.date(2020, 1, 2)}, [18262, 18263, 18264]),
        ("word", {"word": "b"}, ["a", "b", "c"]),
    ],
)
def test_fill_that_fits_replaces_missing_values(tmp_path, name, fill, expected):
    assert read(tmp_path, name, fill) == expected


def test_fill_in_lists_and_structs_is_by_column_name(tmp_path):
    assert [row.tolist() for row in read(tmp_path, "some", {"some": 9})] == [[1], [9, 5], []]
    inner = read(tmp_path, "inner", {"inner.x": 2, "inner.tag": "b"})
    assert inner["x"].tolist() == [1, 2, 3] and inner["tag"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "fill", "message"),
    [
        ("whole", 0.5, r"column 'whole' is of type int32, which 0\.5 cannot fill: .*not an integer"),
        ("whole", float("nan"), "which nan cannot fill"),
        ("whole", float("inf"), "which inf cannot fill"),
        ("whole", 2**40, "which 1099511627776 cannot fill"),
        ("whole", {"whole": "0"}, r"which '0' cannot fill: .*not a number"),
        ("tiny", -1, "which -1 cannot fill"),
        ("price", 0.125, r"which 0\.125 cannot fill"),
        ("price", True, "which True cannot fill"),
        ("price", Fraction(1, 3), "cannot fill"),
        ("row", 0, r"column 'row' lacks 1 of its 3 lists in .*which no value can fill; leave the column out"),
        ("rows", {"rows": 0}, r"column 'rows' lacks 1 of its 3 lists in .*which no value can fill"),
        ("point", 0, r"column 'point' lacks 1 of its 3 structs in .*which no value can fill"),
        ("yes", 2, "which 2 cannot fill: .*neither true nor false"),
        ("word", {"word": 3}, "which 3 cannot fill"),
        ("some", 0.5, r"which 0\.5 cannot fill"),
        ("word", 0, r"column 'word' lacks 1 of its 3 values .*fill=\{'word': \.\.\.\}"),
        ("when", 0, "column 'when' lacks 1 of its 3 values"),
        (
            "inner",
            {"inner.tag": "b"},
            r"column 'inner\.x' lacks 1 .*pass a value for them: fill=\{'inner\.x': \.\.\.\}",
        ),
    ],
)
def test_fill_that_would_be_changed_is_refused(tmp_path, name, fill, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        read(tmp_path, name, fill)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        ({"worth": ""}, r"fill= names a column 'worth' that does not exist \(did you mean word\?\)"),
        ({"inner.y": 0}, r"'inner\.y' that does not exist \(did you mean inner\.x"),
        ({3: 0}, "names a column 3 that does not exist"),
        ("0", "fill= must be a number, or {column: value}, not '0'"),
        ([0], r"not \[0\]"),
    ],
)
def test_fill_of_unknown_names_is_refused_at_once(tmp_path, fill, message):
    with pytest.raises(ConfigurationError, match=message):
        parquet(stored(tmp_path, "word", "inner"), fill=fill)


def test_fill_of_an_unread_column_is_accepted(tmp_path):
    table = parquet(stored(tmp_path, "whole", "word"), columns=["whole"], fill={"word": "", "whole": 0})
    assert table.source.read(ROWS)["whole"].tolist() == [1, 0, 3]


@pytest.mark.parametrize("gigabytes", [None, 0])
@pytest.mark.parametrize("target", ["whole", "part", "word"])
def test_target_is_filled_only_by_its_name(tmp_path, target, gigabytes):
    path = stored(tmp_path, "tiny", target)
    with pytest.raises(
        ConfigurationError, match=rf"column '{target}' lacks 1 of its 3 values .*fill=\{{'{target}': \.\.\.\}}"
    ):
        parquet(path, target=target, fill=0, gigabytes=gigabytes).source.read(ROWS)
    asked = {"tiny": 9, target: "b" if target == "word" else 2}
    source = parquet(path, target=target, fill=asked, gigabytes=gigabytes).source
    inputs, learnt = source.read(ROWS)
    assert inputs[:, 0].tolist() == [1, 9, 3]
    assert learnt.tolist() == ([0, 1, 2] if target == "word" else [1, 2, 3])
    assert source.classes == (["a", "b", "c"] if target == "word" else None)


def test_nan_is_not_missing(tmp_path):
    arrow_feather.write_feather(
        pa.table({"x": pa.array([1.0, float("nan"), None], from_pandas=False)}), tmp_path / "t.feather"
    )
    column = feather(tmp_path / "t.feather", fill=5).source.read(ROWS)["x"]
    assert column[0] == 1 and column[1].isnan() and column[2] == 5


def test_integers_beyond_int64_are_refused(tmp_path):
    arrow_parquet.write_table(
        pa.table({"id": pa.array([1, 2**63 + 5], pa.uint64()), "x": [1, 2]}), tmp_path / "t.parquet"
    )
    with pytest.raises(ConfigurationError, match=rf"column 'id' holds {2**63 + 5} in .*up to {2**63 - 1}"):
        parquet(tmp_path / "t.parquet").source.read(numpy.arange(2))
    assert parquet(tmp_path / "t.parquet", columns=["x"]).source.read(numpy.arange(2))["x"].tolist() == [1, 2]


# ---- fields that are empty throughout a file of an inferred type


def two_files(directory, first, second):
    (directory / "1.csv").write_text(first)
    (directory / "2.csv").write_text(second)
    return directory


EMPTY = "n,x,word\n,,\n,,\n"


@pytest.mark.parametrize("target", [None, "label"])
@pytest.mark.parametrize("fill", [0.5, float("nan"), {"n": 0.5}])
def test_integers_of_another_file_are_not_filled_with_fractions(tmp_path, fill, target):
    files = two_files(tmp_path, "n,label\n1,0\n2,1\n", "n,label\n,0\n,1\n")
    with pytest.raises(
        ConfigurationError, match=rf"column 'n' is of type int64, which {'nan' if fill != fill else 0.5} cannot fill"
    ):
        csv(files, target=target, fill=fill).source.read(numpy.arange(4))


def test_empty_column_has_the_dtype_of_the_other_file(tmp_path):
    source = csv(two_files(tmp_path, "n,x,word\n1,0.25,a\n2,,b\n", EMPTY), fill={"n": 7, "x": 0.5}).source
    columns = source.read(numpy.arange(4))
    assert columns["n"].tolist() == [1, 2, 7, 7] and columns["x"].tolist() == [0.25, 0.5, 0.5, 0.5]
    assert columns["word"] == ["a", "b", "", ""], "an empty field is an empty text"


@pytest.mark.parametrize("target", [None, "label"])
def test_integers_with_gaps_become_floats_if_another_file_has_gaps(tmp_path, target):
    files = two_files(tmp_path, "n,label\n1,0\n,1\n", "n,label\n0.25,0\n,1\n")
    read = csv(files, target=target, fill=0.5).source.read(numpy.arange(4))
    assert (read[0][:, 0] if target else read["n"]).tolist() == [1, 0.5, 0.25, 0.5]


@pytest.mark.parametrize("classes", [None, ["", "a", "b"]])
def test_empty_labels_of_a_whole_file_are_missing_unless_a_class(tmp_path, classes):
    files = two_files(tmp_path, "x,kind\n1,b\n2,\n3,a\n", "x,kind\n4,\n5,\n")
    if classes is None:
        with pytest.raises(ConfigurationError, match=r"column 'kind' lacks \d of its \d values"):
            csv(files, target="kind").source.read(numpy.arange(5))
    else:
        assert csv(files, target="kind", classes=classes).source.read(numpy.arange(5))[1].tolist() == [2, 0, 1, 0, 0]


def test_file_with_header_only_adds_nothing(tmp_path):
    files = two_files(tmp_path, "x,kind\n1,b\n2,a\n", "x,kind\n")
    assert csv(files, target="kind").source.read(numpy.arange(2))[1].tolist() == [1, 0]
    assert csv(files).source.read(numpy.arange(2))["kind"] == ["b", "a"]


# ---- classes


def labelled(directory, text="x,kind\n1,b\n2,\n3,a\n"):
    (directory / "t.csv").write_text(text)
    return directory / "t.csv"


def test_csv_empty_label_is_missing(tmp_path):
    with pytest.raises(
        ConfigurationError,
        match=r"column 'kind' lacks 1 of its 3 values in .*t\.csv; pass a value for them: fill={'kind': \.\.\.}",
    ):
        csv(labelled(tmp_path), target="kind").source.read(ROWS)
    named = csv(labelled(tmp_path), target="kind", fill={"kind": "c"}).source
    assert named.classes == ["a", "b", "c"] and named.read(ROWS)[1].tolist() == [1, 2, 0]
    chosen = csv(labelled(tmp_path), target="kind", classes=["", "a", "b"]).source
    assert chosen.read(ROWS)[1].tolist() == [2, 0, 1], "unless classes= contains it"
    assert csv(labelled(tmp_path)).source.read(ROWS)["kind"] == ["b", "", "a"], "a text may be empty"


def test_csv_file_of_empty_labels_beside_others(tmp_path):
    labelled(tmp_path)
    (tmp_path / "u.csv").write_text("x,kind\n4,\n5,\n")
    source = csv(tmp_path, target="kind", fill={"kind": "a"}).source
    assert source.read(numpy.arange(5))[1].tolist() == [1, 0, 0, 0, 0]


def test_parquet_empty_text_is_a_value(tmp_path):
    arrow_parquet.write_table(pa.table({"x": [1, 2], "kind": ["", "a"]}), tmp_path / "t.parquet")
    source = parquet(tmp_path / "t.parquet", target="kind").source
    assert source.classes == ["", "a"] and source.read(numpy.arange(2))[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("ba", r"classes= must be a list of names, as in classes=\['ba'\]"),
        (["a", "b", "a"], "classes= contains 'a' twice"),
        ([], "classes= is empty"),
        ({"a", "b"}, "classes= must be a list of names, not {"),
        ({"b": 1, "a": 0}, "classes= must be a list of names, not {'b': 1"),
        ([1, 2], "classes= must be a list of names; 1 is not a name"),
        (3, "classes= must be a list of names, not 3"),
    ],
)
def test_invalid_classes_are_refused(tmp_path, classes, message):
    with pytest.raises(ConfigurationError, match=message):
        csv(labelled(tmp_path), target="kind", classes=classes)


# ---- text that is harder to parse


def test_csv_quoted_line_breaks_in_long_files(tmp_path):
    rows = 4000
    (tmp_path / "t.csv").write_text(
        "n,text\n" + "".join(f'{row},"{"x" * 300}\n{"y" * 200}{row}"\n' for row in range(rows))
    )
    batch = csv(tmp_path / "t.csv").source.read(numpy.array([0, rows - 1]))
    assert batch["n"].tolist() == [0, rows - 1]
    assert batch["text"] == ["x" * 300 + "\n" + "y" * 200 + str(row) for row in (0, rows - 1)]


def test_csv_row_longer_than_a_block(tmp_path):
    (tmp_path / "t.csv").write_text(f"n,text\n1,{'x' * 3_000_000}\n2,short\n")
    assert [len(text) for text in csv(tmp_path / "t.csv").source.read(numpy.arange(2))["text"]] == [3_000_000, 5]


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("a,b\n1,2\n".encode("utf-16"), {}, r"t\.csv is not a complete CSV file"),
        ("é,b\n1,2\n".encode("latin-1"), {}, r"t\.csv is not a complete CSV file: .*UTF-8\?"),
        (b"a,b\n1,2\n", {"header": ["p", "q", "r"]}, "row 0 of the file, 'a,b', has 2 fields, not 3"),
        (b"a,b\n1,2\n", {"header": ["p", "p"]}, "contains 'p' twice"),
        (b"a,a\n1,2\n", {}, "two columns named 'a'"),
        (b"a,b\n1,2\n", {"header": "pq"}, r"must be a list of names, as in csv\(header=\)\['pq'\]"),
        (b"a,b\n1,2\n", {"header": []}, "is empty"),
        (b"a,b\n1,2\n", {"header": [1, 2]}, "; 1 is not a name"),
        (b"a,b\n1,2\n", {"header": 2}, "not 2"),
        *(
            (b"a,b\n1,2\n", {"delimiter": each}, r"csv\(delimiter=\) must be one character")
            for each in ("::", "", "\n", '"', "é", 5, ["x"])
        ),
    ],
)
def test_file_of_another_table_format_is_one_line(tmp_path, content, settings, message):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as refused:
        csv(tmp_path / "t.csv", **settings)
    assert "\n" not in str(refused.value)


def test_csv_delimiter_is_used(tmp_path):
    (tmp_path / "t.csv").write_text("a|b\n1|2,5\n")
    assert csv(tmp_path / "t.csv", delimiter="|").source.read(numpy.arange(1))["b"] == ["2,5"]


@pytest.mark.parametrize("word", ["NA", "NaN", "null"])
def test_csv_label_that_means_a_missing_one_is_no_class(tmp_path, word):
    path = labelled(tmp_path, f"x,kind\n1,b\n2,{word}\n3,a\n")
    with pytest.raises(ConfigurationError, match=r"column 'kind' lacks 1 of its 3 values"):
        csv(path, target="kind").source.read(ROWS)
    assert csv(path, target="kind", classes=[word, "a", "b"]).source.read(ROWS)[1].tolist() == [2, 0, 1]


def test_csv_numbers_that_one_word_makes_classes_are_named(tmp_path):
    source = csv(labelled(tmp_path, "x,price\n1,13495\n2,?\n3,16500\n"), target="price").source
    with pytest.warns(HastenWarning, match=r"the target 'price' holds '\?' besides numbers"):
        assert source.classes == ["13495", "16500", "?"]
