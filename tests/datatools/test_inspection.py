"""``hasten data inspect``: the content of data, the bottleneck of reading them, faster formats; no files are left
behind."""

import gzip
import io
import json
import shlex

import numpy
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from rich.console import Console

from hasten import ConfigurationError
from hasten.cli.main import main
from hasten.data import convert, csv, inspect
from hasten.datatools import inspection
from hasten.reporting.terminal_data import inspect_answer
from helpers.markers import first_quick
from helpers.storages import ROWS, damage, mixed_table, numeric_table, write_images, write_table

BUDGET = 1.0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The directory of trial files; empty again after every test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("HASTEN_CACHE", str(directory))
    yield
    assert not directory.exists() or not [path for path in directory.rglob("*") if path.is_file()]


def test_inspect_table_states_types_speeds_and_the_limit(tmp_path):
    result = inspect(write_table(tmp_path / "in"), target="label", budget=BUDGET)
    assert (result["kind"], result["files"], result["rows"], result["rows_exact"]) == ("parquet", 1, ROWS, True)
    assert result["columns"] == {"inputs": "float32 (4,)", "label": "int64"}
    assert all(result["speed"][name] > 0 for name in ("page_cache", "decode", "copy", "batches"))
    assert result["passes"] == "first" and result["in_memory"] and result["limit"] in ("decode", "copy")
    assert result["trouble"] is None and json.dumps(result)


def test_inspect_figures_are_medians_with_their_range(tmp_path, capfd):
    data = write_table(tmp_path / "in", content=numeric_table(400_000), runs=20_000)
    assert main(["data", "inspect", str(data), "--target", "label", "--budget", "6", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    speed, ranges = result["speed"], result["ranges"]
    assert {"page_cache", "decode", "copy", "batches"} <= ranges.keys() <= speed.keys()
    assert all(0 < low <= speed[name] <= high for name, (low, high) in ranges.items())
    assert all(each["low"] <= each["gain"] <= each["high"] for each in result["storages"])
    page = " ".join(_page(result).split())
    for name in ("decode", "copy", "batches"):
        low, median, high = (f"{float(f'{each:.3g}'):,.0f}" for each in (ranges[name][0], speed[name], ranges[name][1]))
        assert f"{median} rows/s ({low} to {high})" in page


def _page(result):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(inspect_answer(result))
    return console.export_text()


@pytest.mark.timing
@pytest.mark.slow
def test_inspect_table_that_is_slow_to_decode_recommends_rows(tmp_path):
    """Compressed text of numbers: nothing takes longer to decode."""
    (tmp_path / "in").mkdir()
    pyarrow.csv.write_csv(numeric_table(100_000), tmp_path / "in" / "train.csv")
    result = inspect(tmp_path / "in", target="label", budget=6.0)
    gains = {each["to"]: each["gain"] for each in result["storages"]}
    assert gains["rows"] > 3 and list(gains.values()) == sorted(gains.values(), reverse=True)
    assert all(0 < each["bytes"] < 10 * result["bytes"] for each in result["storages"])


def test_inspect_long_csv_reads_its_first_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("hasten.datatools.inspection.SAMPLED_CSV_BYTES", 50_000)
    (tmp_path / "in").mkdir()
    pyarrow.csv.write_csv(numeric_table(5000), tmp_path / "in" / "train.csv")
    result = inspect(tmp_path / "in", budget=BUDGET)
    assert not result["rows_exact"] and abs(result["rows"] - 5000) < 100
    cases = {
        "packed.csv.gz": (b"not packed at all", "is not a complete CSV file: "),
        "ragged.csv": (b"1,2\n3\n", "has no more good lines than "),
    }
    for name, (content, expected) in cases.items():
        (tmp_path / name).write_bytes(content * 10_000)
        with pytest.raises(ConfigurationError, match=f"^{tmp_path / name} {expected}"):
            inspect(tmp_path / name)


def test_inspect_long_csv_files_whose_first_holds_only_a_header(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "SAMPLED_CSV_BYTES", 50_000)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("x0,x1,x2,x3,label\n")
    pyarrow.csv.write_csv(numeric_table(5000), tmp_path / "in" / "b.csv")
    result = inspect(tmp_path / "in", budget=BUDGET)
    assert result["trouble"] is None and abs(result["rows"] - 5000) < 100
    (tmp_path / "in" / "b.csv").write_bytes(b"1,2\n3\n" * 10_000)
    with pytest.raises(ConfigurationError, match=f"^{tmp_path / 'in' / 'b.csv'} has no more good lines than "):
        inspect(tmp_path / "in")


def test_inspect_long_csv_with_an_upper_case_name(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "SAMPLED_CSV_BYTES", 5_000)
    lines = "\n".join(f"{number}\t{number / 7}" for number in range(5000))
    (tmp_path / "X.TSV.GZ").write_bytes(gzip.compress(f"n\tx\n{lines}\n".encode()))
    assert set(inspect(tmp_path / "X.TSV.GZ", budget=BUDGET)["columns"]) == {"n", "x"}


def test_inspect_csv_first_lines_end_at_a_row(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("n,word,m\n" + '1,"two\nlines",2\n' * 50)
    (tmp_path / "head").mkdir()
    for size in range(100, 120):
        monkeypatch.setattr(inspection, "SAMPLED_CSV_BYTES", size)
        head, _ = inspection._head(str(tmp_path / "t.csv"), tmp_path / "head")
        (batch,) = csv(head).batch(50)
        assert set(batch["word"]) == {"two\nlines"}, size


def test_inspect_images_recommends_rows_at_one_size(tmp_path):
    result = inspect(write_images(tmp_path / "in", count=24), budget=4.0)
    assert (result["kind"], result["files"], result["rows"], result["resize"]) == ("images", 24, 24, 256)
    assert result["columns"] == {"images": "uint8 (3, 256, 256)", "labels": "int64"}
    assert result["limit"] == "decode" and result["passes"] == "every"
    best = result["storages"][0]
    assert (best["to"], best["resize"]) == ("rows", 256) and best["gain"] > 3


def test_inspect_images_without_directories_have_no_labels(tmp_path):
    result = inspect(write_images(tmp_path / "in", sizes=((32, 48),)) / "cat", budget=BUDGET)
    assert result["columns"] == {"images": "uint8 (3, 32, 48)"} and result["classes"] is None


def test_inspect_small_images_of_one_size_are_not_resized(tmp_path):
    result = inspect(write_images(tmp_path / "in", sizes=((32, 48),), ending="png"), budget=BUDGET)
    assert result["resize"] is None and result["columns"]["images"] == "uint8 (3, 32, 48)"
    assert all(each["resize"] is None for each in result["storages"])


@pytest.mark.parametrize("to", first_quick(["rows", "webdataset"]))
def test_inspect_recognizes_what_convert_wrote(tmp_path, to):
    convert(write_images(tmp_path / "in"), tmp_path / "out", to=to, resize=64)
    result = inspect(tmp_path / "out", budget=BUDGET)
    assert (result["kind"], result["rows"]) == (to, 12) and result["speed"]["copy"] > 0
    assert (result["speed"]["decode"] is None) == (to == "rows")


@pytest.mark.slow
def test_inspect_counts_records_and_finds_nothing_faster_than_tokens(tmp_path):
    convert(write_table(tmp_path / "in"), tmp_path / "out", to="tfrecord")
    assert inspect(tmp_path / "out", budget=BUDGET)["rows"] == ROWS
    numpy.arange(10_000, dtype=numpy.uint16).tofile(tmp_path / "train.bin")
    result = inspect(tmp_path / "train.bin", budget=BUDGET)
    assert (result["kind"], result["limit"], result["storages"]) == ("tokens", "copy", [])


def test_inspect_undecodable_files_are_reported_beside_the_others(tmp_path):
    data = write_images(tmp_path / "in")
    for path in (data / "cat").iterdir():
        path.write_bytes(b"no picture")
    result = inspect(data, budget=BUDGET)
    assert "not a JPEG or PNG" in result["trouble"] and result["files"] == 12 and result["storages"] == []
    lists = pa.table({"list": [[1], None]})
    result = inspect(write_table(tmp_path / "lists", content=lists), budget=BUDGET)
    assert "column 'list'" in result["trouble"] and result["rows"] == 2 and result["speed"]["disk"] != 0


def test_inspect_measures_a_table_whose_numbers_and_text_are_missing(tmp_path):
    inner = pa.array([[None, 1]] * ROWS), pa.array([["a", None]] * ROWS), pa.array([{"a": None, "b": None}] * ROWS)
    content = mixed_table()
    for name, column in zip(("numbers", "words", "struct"), inner, strict=True):
        content = content.append_column(name, column)
    result = inspect(write_table(tmp_path / "mixed", content=content), budget=BUDGET)
    assert result["trouble"] is None and result["speed"]["batches"] > 0 and "word" in result["columns"]


def test_inspect_invalid_request_is_refused(tmp_path):
    torch.save([1], tmp_path / "model.pt")
    for path, message in (
        (tmp_path / "nothing", "there is no file"),
        (tmp_path, "no file name of .* has a known suffix"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            inspect(path)
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigurationError, match="is not a complete Parquet file"):
        inspect(tmp_path / "x.parquet")


@pytest.mark.slow
def test_inspect_unsupported_formats_are_named(tmp_path, capfd):
    data = write_images(tmp_path / "in", count=6, sizes=((16, 16),))
    (data / "labels.csv").write_text("a,b\n1,2\n")
    for name in ("notes.doc", "more.doc"):
        (data / name).touch()
    result = inspect(data, budget=BUDGET)
    assert (result["kind"], result["files"], result["others"]) == ("images", 6, {"CSV": 1, "unknown": 2})
    assert convert(data, tmp_path / "out", to="webdataset")["others"] == {"CSV": 1, "unknown": 2}
    assert inspect(tmp_path / "out", budget=BUDGET)["others"] == {}
    assert main(["data", "inspect", str(data), "--budget", "1"]) == 0
    assert "other files 1 CSV, 2 unknown; not inspected" in " ".join(capfd.readouterr().out.split())


def lacking(rows):
    table = numeric_table(rows)
    return table.set_column(0, "x0", pa.array([None if row % 7 == 3 else row / 7 for row in range(rows)]))


@pytest.mark.parametrize(
    "kind",
    first_quick(["pictures", "lacking", "pictures of one size", "shards of one size", "pictures that are gone"], 2),
)
def test_inspect_recommendation_can_be_run(kind, tmp_path, capfd):
    more = []
    if kind == "lacking":
        (tmp_path / "in").mkdir()
        pyarrow.csv.write_csv(lacking(50_000), tmp_path / "in" / "train.csv")
        data, more = tmp_path / "in", ["--target", "label"]
    else:
        data = write_images(tmp_path / "in", count=24, **({} if kind == "pictures" else {"sizes": ((120, 90),)}))
    if kind.startswith("shards"):
        convert(data, tmp_path / "shards", to="webdataset")
        data = tmp_path / "shards"
    if kind == "pictures that are gone":
        (data / "cat" / "1.jpg").unlink()
        (data / "cat" / "1.jpg").symlink_to("gone")
        more = ["--max-bad-rows", "1"]
    assert main(["data", "inspect", str(data), "--budget", "3", *more]) == 0
    page = capfd.readouterr().out
    (line,) = [line for line in page.splitlines() if line.startswith("hasten data convert")]
    assert ("1 row that could not be read: cannot read" in " ".join(page.split())) == (kind == "pictures that are gone")
    assert ("--resize 256" in line) == (kind == "pictures") and ("--fill 0" in line) == (
        kind == "lacking" and "--to rows" in line
    )
    argv = shlex.split(line.replace("DIR", shlex.quote(str(tmp_path / "out"))))
    assert main([*argv[1:], "--quiet"]) == 0


def test_inspect_unopenable_file_is_named_or_skipped(tmp_path, capfd):
    data = write_table(tmp_path / "in")
    (data / "gone.parquet").symlink_to("nowhere")
    assert main(["data", "inspect", str(data), "--budget", "1"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err == f"hasten: cannot read {data / 'gone.parquet'}: No such file or directory\n"
    (data / "cut.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigurationError, match=r"gone.parquet.*; this is bad file 2, and at most 1 may be skipped"):
        inspect(data, max_bad_rows=1, budget=BUDGET)
    assert main(["data", "inspect", str(data), "--budget", "1", "--max-bad-rows", "2", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["files"], result["rows"], result["trouble"]) == (1, ROWS, None) and result["speed"]["batches"] > 0
    assert [each["where"] for each in result["skipped_rows"]] == [str(data / "cut.parquet"), str(data / "gone.parquet")]


def test_inspect_unreadable_row_group_is_reported_or_skipped(tmp_path):
    data = write_table(tmp_path / "in", runs=50)
    damage(data / "train.parquet", run=0)
    assert "train.parquet, row group 0" in inspect(data, budget=BUDGET)["trouble"]
    result = inspect(data, max_bad_rows=50, budget=BUDGET)
    assert result["trouble"] is None and result["speed"]["batches"] > 0 and 0 < len(result["skipped_rows"]) <= 50


def test_inspect_without_a_measurement_exits_1(tmp_path, capfd):
    data = write_images(tmp_path / "in")
    for path in (data / "cat").iterdir():
        path.write_bytes(b"no picture")
    assert main(["data", "inspect", str(data), "--budget", "1"]) == 1
    out, err = capfd.readouterr()
    assert "Not measured:" in out and err == ""
