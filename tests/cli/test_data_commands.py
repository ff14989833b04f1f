"""`hasten data`: terminal output and JSON, exit codes, one line per error."""

import json

import numpy
import pytest

from hasten.cli.main import main

INVALID_REQUESTS = [
    ("data", "action"),
    ("data inspct x", "did you mean inspect"),
    ("data inspect", "PATH"),
    ("data inspect gone", "there is no file gone"),
    ("data inspect *.tar", "no file matches *.tar"),
    ("data inspect words.dat", "no file name of words.dat has a known suffix"),
    ("data inspect empty", "the directory empty is empty"),
    ("data inspect broken.parquet", "not a complete Parquet file"),
    ("data inspect x.npy --budget soon", "--budget"),
    ("data inspect x.npy --target y", "a target is a column of a table"),
    ("data inspect x.npy --max-bad-rows 0", "--max-bad-rows"),
    ("data inspect link.parquet", "link.parquet is a link to a missing file"),
    ("data convert x.npy --out out", "--to"),
    ("data convert x.npy --to feather", "--out"),
    ("data convert x.npy --to fether --out out", "did you mean feather"),
    ("data convert x.npy --to webdataset --out out", "cannot be stored as webdataset"),
    ("data convert x.npy --to feather --out x.npy", "must be a directory"),
    ("data convert x.npy --to feather --out full", "contains no conversion"),
    (
        "data convert x.npy --to feather --out words.dat/out",
        "cannot write to words.dat/out: Not a directory; choose another --out",
    ),
    ("data convert x.npy --to feather --out /proc/out", "cannot write to /proc/out"),
    ("data convert x.npy --to feather --out out --shards 5000", "cannot write 1000 rows to 5000 files"),
    ("data convert x.npy --to feather --out out --max-bad-rows 0", "--max-bad-rows"),
    ("data convert gone --to feather --out out", "there is no file gone"),
    ("data convert full --to feather --out full/out", "part of the original"),
    (f"data convert x.npy --to feather --out {'o' * 300}", "File name too long"),
    (f"eject digits --out {'o' * 300}", "File name too long"),
    (f"train digits --out {'o' * 300}", "File name too long"),
    ("data convert empty --to feather --out out", "the directory empty is empty"),
    ("data convert broken.parquet --to feather --out out", "not a complete Parquet file"),
    ("data inspect broken.npy", "is not an array of numbers"),
    ("data inspect directory.npy", "the directory directory.npy is empty"),
    ("data bench digits", "inspect"),
    ("diagnose broken.py:task", "does not import"),
    ("diagnose words.dat", "no workload"),
    ("train digits --out words.dat/run", "cannot write to words.dat/run: Not a directory"),
    ("eject digits --out words.dat/script.py", "cannot write to words.dat/script.py: Not a directory"),
    ("data convert x.npy --to feather --out out --resize 0", "--resize"),
    ("data convert x.npy --to feather --out out --resize 8", "applies to images"),
    ("data convert x.npy --to feather --out out --resise 8", "did you mean --resize"),
    ("diagnose digit", "did you mean digits"),
    ("diagnose gone.py:task", "no file"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    numpy.save("x.npy", numpy.arange(3000, dtype=numpy.float32).reshape(1000, 3))
    (tmp_path / "words.dat").write_text("hello")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "broken.npy").write_bytes(b"no array")
    (tmp_path / "broken.py").write_text("def task(:\n")
    (tmp_path / "link.parquet").symlink_to("nowhere")
    for directory in ("empty", "full", "directory.npy"):
        (tmp_path / directory).mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    return tmp_path


@pytest.mark.parametrize(("argv", "message"), INVALID_REQUESTS, ids=lambda value: value[:60])
def test_data_command_invalid_request_is_one_line(argv, message, here, capfd):
    before = {path for path in here.rglob("*") if "cache" not in path.parts}
    code = main(argv.split())
    out, err = capfd.readouterr()
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("hasten: ")
    assert message.lower() in err.lower() and "internal error" not in err
    assert main([*argv.split(), "--json"]) == 2
    out, err = capfd.readouterr()
    assert message.lower() in json.loads(out)["error"].lower() and err.count("\n") == 1
    assert {path for path in here.rglob("*") if "cache" not in path.parts} == before, "something was left behind"


def test_data_command_prints_its_result_as_json(here, capfd):
    assert main(["--json", "data", "convert", "x.npy", "--to", "feather", "--out", "out", "--quiet"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == 1000
    assert main(["data", "inspect", "out", "--budget", "1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["kind"] == "feather"


def test_data_command_prints_a_page_with_the_result(here, capfd):
    assert main(["data", "convert", "x.npy", "--to", "parquet", "--out", "out"]) == 0
    out = capfd.readouterr().out
    assert "read back" in out and "all 1,000 rows" in out and "before" in out
    assert main(["data", "inspect", "out", "--budget", "1"]) == 0
    out = capfd.readouterr().out
    assert "Parquet" in out and "1,000 rows" in out and "limits" in out


def test_convert_interrupted_states_how_to_resume(here, capfd, monkeypatch):
    from hasten.datatools import conversion

    def stopped(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "convert", stopped)
    assert main(["data", "convert", "x.npy", "--to", "feather", "--out", "my out", "--shards", "2"]) == 1
    assert "to continue: hasten data convert x.npy --to feather --shards 2 --out 'my out'" in capfd.readouterr().err
