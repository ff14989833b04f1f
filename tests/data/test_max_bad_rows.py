"""Rows that a run skips: up to a given limit, counted, listed in its directory, and the same after any kill."""

import json

import pytest

import hasten
from hasten import ConfigurationError, RunError
from hasten.cli.main import main
from helpers import faulty_tasks
from helpers.process import join_process, start_process

LISTED = [
    *[
        {"data": "train", "row": row, "where": f"patchy.txt line {row + 1}", "why": "no number"}
        for row in faulty_tasks.BAD
    ],
    {"data": "validation", "row": 5, "where": "patchy.txt line 6", "why": "no number"},
]


def named(name):
    return f"{faulty_tasks.__file__}:{name}"


def listed(directory):
    return [json.loads(line) for line in (directory / "skipped.jsonl").read_text().splitlines()]


def left(directory):
    return [(directory / name).read_bytes() for name in ("model.safetensors", "log.jsonl", "skipped.jsonl")]


@pytest.mark.parametrize("name", ["threads", "processes", "made_later"])
def test_run_with_bad_rows_skips_counts_and_lists_them(name, tmp_path):
    for each in ("here", name):
        result = hasten.train(named(each), out=tmp_path / each, device="cpu", max_bad_rows=4)
        assert result["skipped_rows"] == 4 and result["steps"] == 16
        assert json.loads((tmp_path / each / "result.json").read_text())["skipped_rows"] == 4
        assert listed(tmp_path / each) == LISTED
    assert left(tmp_path / "here") == left(tmp_path / name)


def run(out):
    hasten.train(named("killed"), out=out, resume=True, device="cpu", checkpoint_seconds=0, max_bad_rows=4)


def test_killed_run_lists_the_same_rows(tmp_path, monkeypatch):
    """Killed one step before the end: rows skipped earlier are known from the checkpoint only."""
    monkeypatch.setenv(faulty_tasks.FLAG, str(flag := tmp_path / "kill"))
    assert join_process(start_process(run, tmp_path / "undisturbed")) == 0
    flag.touch()
    assert join_process(start_process(run, tmp_path / "killed")) == -9
    assert not (tmp_path / "killed" / "result.json").exists()
    assert join_process(start_process(run, tmp_path / "killed")) == 0
    assert left(tmp_path / "killed") == left(tmp_path / "undisturbed")
    assert listed(tmp_path / "killed") == LISTED


def test_run_above_the_limit_ends_and_lists_the_last_row(tmp_path):
    with pytest.raises(RunError, match="bad row number 3, and max_rows=2 may be skipped"):
        hasten.train(named("here"), out=tmp_path / "run", device="cpu", max_bad_rows=2)
    assert [each["row"] for each in listed(tmp_path / "run")] == [3, 17, 40]
    with pytest.raises(ConfigurationError, match="another max bad rows: 2 there, 4 here"):
        hasten.train(named("here"), out=tmp_path / "run", device="cpu", max_bad_rows=4, resume=True)


def test_run_without_limit_ends_at_the_first_bad_row(tmp_path):
    with pytest.raises(
        RunError, match=r"no number; repair it, or allow bad rows to be skipped: .* --max-bad-rows 10 with hasten train"
    ):
        hasten.train(named("here"), out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run" / "skipped.jsonl").exists()


def test_rows_that_a_pipeline_allows_are_listed(tmp_path):
    task = faulty_tasks.by_itself()
    for run in ("first", "second"):  # with the same data
        assert hasten.train(task, out=tmp_path / run, device="cpu")["skipped_rows"] == 3
        assert [each["row"] for each in listed(tmp_path / run)] == [3, 17, 40]
    assert hasten.train(task, device="cpu")["skipped_rows"] == 3


def test_run_without_bad_rows_lists_nothing(tmp_path):
    task = faulty_tasks.task(faulty_tasks.rows(()))
    clean = hasten.Task(**(vars(task) | {"validation_data": None, "metric": "loss"}))
    assert hasten.train(clean, out=tmp_path / "run", device="cpu", max_bad_rows=1)["skipped_rows"] == 0
    assert not (tmp_path / "run" / "skipped.jsonl").exists()


@pytest.mark.parametrize("name", ["no_pipeline", "no_pipeline_later"])
def test_limit_on_other_data_is_refused(name, tmp_path, capfd):
    assert main(["train", named(name), "--max-bad-rows", "3", "--device", "cpu", "--out", str(tmp_path / "run")]) == 2
    _, err = capfd.readouterr()
    assert err.count("\n") == 1 and "is a TensorDataset, but only a pipeline of hasten.data" in err
    assert not (tmp_path / "run").exists()


def test_max_bad_rows_on_the_command_line(tmp_path, capfd):
    argv = ["train", named("here"), "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main([*argv, "--max-bad-rows", "4", "--quiet"]) == 0
    assert "skipped 4 unreadable rows; skipped.jsonl lists them" in " ".join(capfd.readouterr().out.split())
    assert main([*argv, "--resume", "--max-bad-rows", "5", "--json"]) == 2
    assert "max bad rows: 4 there, 5 here" in json.loads(capfd.readouterr().out)["error"]
    assert main([*argv, "--max-bad-rows", "0"]) == 2
