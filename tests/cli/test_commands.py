"""The command line, mostly in a process of its own: results, JSON, exit codes, interruption."""

import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from functools import partial

import psutil
import pytest

from hasten.cli import methods, progress
from hasten.cli.argument_types import duration
from hasten.cli.main import main, parse_arguments
from hasten.cli.output import strict_json
from hasten.core.progress import no_progress
from hasten.engine.registry import method_names
from helpers.markers import first_quick
from helpers.process import TIMEOUT_S, join_process, live_children, run_hasten, start_hasten

NOISY = """
import os, subprocess
import torch
from torch import nn
from hasten import Task

print("a task file that prints")
os.write(1, b"and writes to file descriptor 1\\n")
subprocess.run(["echo", "and starts a child that prints"])

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        torch.ones(1).numpy()
        import time
        time.sleep({nap})
        return torch.full((2,), index / 64), index % 2

def task():
    print("and prints once more")
    import warnings
    warnings.warn("a library's warning")
    return Task(
        model=lambda: nn.Linear(2, 2), train_data=Slow(), validation_data=Slow(), loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), metric="accuracy", batch_size=8,
        epochs={epochs}, target=2.0,
    )
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY.format(nap=0, epochs=2))
    (tmp_path / "slow.py").write_text(NOISY.format(nap=0.01, epochs=1000))
    return tmp_path


def test_json_output_is_one_object_whatever_the_task_prints(here):
    done = run_hasten("train", "noisy.py:task", "--json", "--with", "ema", "--out", "run", "--seed", "3", cwd=here)
    assert done.returncode == 1, done.stderr  # the target of 2 cannot be reached
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result.keys() >= {"metric", "best_metric", "steps", "seconds", "seconds_to_target", "out"}
    assert result["steps"] == 16 and result["seed"] == 3 and result["seconds_to_target"] is None
    for printed in ("a task file that prints", "file descriptor 1", "starts a child", "once more"):
        assert printed in done.stderr
    assert "library's warning" not in done.stderr
    assert (here / "run" / "model.safetensors").exists()


def test_train_missed_target_is_stated(here, monkeypatch, capfd):
    monkeypatch.chdir(here)
    assert main(["--seed", "3", "train", "noisy.py:task"]) == 1
    out, err = capfd.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("hasten:")]
    assert "not reached" in out and "prints" not in out
    assert "the target 2 was not reached" in line and "the best was 0." in line


def test_train_without_out_uses_a_new_directory_per_run(here, monkeypatch, capfd):
    monkeypatch.chdir(here)
    for directory in ("train-noisy-py-task", "train-noisy-py-task-2", "train-noisy-py-task-3"):
        main(["train", "noisy.py:task", "--json"])
        assert json.loads(capfd.readouterr().out)["out"] == f"runs/{directory}"
        assert (here / "runs" / directory / "model.safetensors").exists()


def test_json_output_of_an_error_is_json(here):
    done = run_hasten("tune", "digits", "--budget", "soon", "--json", cwd=here)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--budget" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize(
    "argv",
    [
        "--json --seed 7 train TASK",
        "train --json --seed 7 TASK",
        "train TASK --seed 7 --json",
        "--seed 7 train TASK --json",
    ],
)
def test_global_options_before_and_after_the_command(argv):
    options = parse_arguments(argv.split())
    assert (options.json, options.seed, options.verb, options.task, options.device, options.quiet) == (
        True,
        7,
        "train",
        "TASK",
        None,
        False,
    )


def test_methods_json_of_one_method():
    method = methods.run(Namespace(name="znorm", device="cpu"), no_progress).result
    assert {"name": "eps", "type": "float", "default": 1e-8, "range": "above 0"} in method["options"]
    assert "float16" in method["wraps"] and "znorm" not in method["wraps"]
    both = methods.run(Namespace(name="in_memory_batches", device="cpu"), no_progress).result
    assert "cache_dataset" in [conflict["method"] for conflict in both["conflicts"]]
    json.loads(strict_json(both))


def test_methods_page_shows_options_that_can_be_typed(capfd):
    """Options and their defaults; None is not a value that can be typed."""
    for name, *expected in (
        ("autotune_loader", "threads: chosen by the method unless given (int, at least 0 and at most 256)"),
        ("float16", "scale = dynamic (str or float, dynamic or above 0)"),
        ("loader_workers", "pin_memory = true (true or false)", "num_workers = 2 (int, at least 0 and at most 64)"),
    ):
        assert main(["methods", name]) == 0
        page = " ".join(capfd.readouterr().out.split())
        assert all(text in page for text in expected) and "None" not in page


def test_methods_page_lists_all_methods(here, monkeypatch, capfd):
    listed = {
        method["name"]: method
        for method in methods.run(Namespace(name=None, device="cpu"), no_progress).result["methods"]
    }
    assert listed.keys() == set(method_names())
    assert listed["tf32"]["not_here"] and not listed["ema"]["not_here"]
    assert main(["methods"]) == 0
    assert set(method_names()) <= set(capfd.readouterr().out.split())


def publish(trials: list[dict], directory, monkeypatch):
    """Replaces the published records by one of a search on digits."""
    (directory / "records.jsonl").write_text(json.dumps({"workload": "digits", "trials": trials}) + "\n")
    monkeypatch.setattr(methods, "RECORDS", directory / "records.jsonl")


def test_methods_page_shows_records(here, monkeypatch, capfd):
    trial = {
        "what": "ema:decay=0.9",
        "verdict": "no gain",
        "ratio": {"median": 0.973, "low": 0.9, "high": 1.1},
        "why": "slower",
    }
    publish([trial, trial | {"what": "emanation"}], here, monkeypatch)
    assert main(["methods", "ema"]) == 0
    page = capfd.readouterr().out
    assert "above 0 and below 1" in page and "digits: ema:decay=0.9 no gain, 0.97x" in page and "emanation" not in page


def test_methods_page_record_of_several_methods_is_shown_for_each(here, monkeypatch):
    trial = {
        "what": "batch_size:factor=4,rule=sqrt + ema:decay=0.9 + znorm",
        "verdict": "faster",
        "ratio": None,
        "why": "",
    }
    publish([trial], here, monkeypatch)
    for name, times in (("batch_size", 1), ("ema", 1), ("znorm", 1), ("float16", 0)):
        records = methods.run(Namespace(name=name, device="cpu"), no_progress).result["records"]
        assert [record["what"] for record in records] == [trial["what"]] * times


def test_published_records_are_installed_with_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = methods.run(Namespace(name="channels_last", device="cpu"), no_progress).result["records"]
    assert {"cifar10", "fashion_mnist"} <= {record["task"] for record in records}
    assert any(record["ratio"] and record["ratio"]["median"] > 1.1 for record in records)


def test_stdout_closed_by_its_reader_is_no_error(here):
    reader, theirs = os.pipe()
    with open(here / "err", "w+") as err:
        process = start_hasten("methods", cwd=here, out=theirs, err=err.fileno(), prepare=lambda: os.close(reader))
        os.close(reader)
        os.close(theirs)
        assert (join_process(process), err.seek(0) or err.read()) == (0, "")


@pytest.mark.slow
def test_stderr_closed_by_its_reader_does_not_stop_the_run(here):
    """A broken pipe of the progress output must not end the measuring process, as its result would be awaited for ever.

    A broken pipe of the task is the task's own error.
    """
    quiet = [
        line for line in NOISY.format(nap=0, epochs=1).splitlines() if "print" not in line and "os.write" not in line
    ]
    (here / "quiet.py").write_text("\n".join(quiet))
    reader, theirs = os.pipe()
    os.close(reader)
    argv = ["compare", "quiet.py:task", "--a", "baseline", "--b", "ema", "--budget", "1s", "--json"]
    with open(here / "answer", "w+") as answer:
        code = join_process(
            start_hasten(
                *argv,
                cwd=here,
                out=answer.fileno(),
                err=theirs,
                prepare=lambda: setattr(progress, "INITIAL_DELAY_S", 0.0),
            )
        )
        answer.seek(0)
        assert "ratio" in json.loads(answer.read()) and code in (0, 1)
    os.close(theirs)


def in_ascii() -> None:
    sys.stdout.reconfigure(encoding="ascii", errors="strict")


def without_columns() -> None:
    os.environ["COLUMNS"] = "0"


@pytest.mark.parametrize("odd", [in_ascii, without_columns])
def test_terminal_with_unusual_settings_gets_output(here, odd):
    done = run_hasten("methods", cwd=here, prepare=odd)
    assert done.returncode == 0 and done.stderr == "" and "in_memory_batches" in done.stdout


def test_current_directory_deleted_is_reported(here):
    (gone := here / "gone").mkdir()
    done = run_hasten("methods", cwd=gone, prepare=gone.rmdir)
    assert (done.returncode, done.stderr) == (
        2,
        "hasten: the current directory does not exist any more; cd into another one\n",
    )


def test_eject_writes_a_script(here, monkeypatch, capfd):
    monkeypatch.chdir(here)
    assert main(["eject", "noisy.py:task", "--with", "ema", "--out", "script.py"]) == 0
    assert "script.py" in capfd.readouterr().out
    script = (here / "script.py").read_text()
    assert main(["eject", "noisy.py:task", "--with", "ema"]) == 0
    assert capfd.readouterr().out == script and "class Ema" in script


def interrupted(ready, *argv, here, by=signal.SIGINT) -> tuple[int, str, str]:
    """Returns (exit code, output, error) of the program, which gets Ctrl-C as soon as a file exists."""
    with open(here / "out", "w+") as out, open(here / "err", "w+") as err:
        process = start_hasten(*argv, cwd=here, out=out.fileno(), err=err.fileno())
        wait_for(ready)
        os.kill(process.pid, by)
        return join_process(process), *(file.seek(0) or file.read() for file in (out, err))


@pytest.mark.parametrize(("options", "directory"), [(["--out", "run"], "run"), ([], "runs/train-slow-py-task")])
def test_train_interrupted_stops_cleanly_and_states_how_to_resume(here, options, directory):
    log = here / directory / "log.jsonl"
    code, _, err = interrupted(
        lambda: log.exists() and log.stat().st_size > 0, "train", "slow.py:task", *options, here=here
    )
    last = err.strip().splitlines()[-1]
    assert code == 1 and last.startswith("hasten: ") and f"--out {directory} --resume" in last
    assert "Traceback" not in err


@pytest.mark.slow
def test_train_interrupted_repeatedly_still_prints_the_result(here):
    """Ctrl-C is repeated while the program cleans up; the task's own cleanup takes a moment here, as torch's does."""
    with open(here / "slow.py", "a") as file:
        file.write("\nimport atexit, time\natexit.register(time.sleep, 0.3)\n")
    argv = [sys.executable, "-m", "hasten", "train", "slow.py:task", "--out", "run", "--quiet"]
    process = subprocess.Popen(argv, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = here / "run" / "log.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    message = next(line for line in process.stderr if line.startswith("hasten: "))
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert process.returncode == 1 and "--out run --resume" in message and "Traceback" not in process.stderr.read()


def test_terminal_shows_a_progress_bar_with_remaining_time(here):
    ours, theirs = pty.openpty()
    with open(os.devnull, "w") as nowhere:
        prepare = partial(os.environ.update, {"TERM": "xterm", "COLUMNS": "100"})
        process = start_hasten("train", "slow.py:task", cwd=here, out=nowhere.fileno(), err=theirs, prepare=prepare)
    os.close(theirs)
    seen = b""
    try:
        until = time.monotonic() + TIMEOUT_S
        while b"left" not in seen and time.monotonic() < until:
            seen += os.read(ours, 4096)
    finally:
        process.kill()
        process.join()
        os.close(ours)
    assert b"%" in seen and b" left" in seen


def test_quiet_hides_progress(here, monkeypatch, capfd):
    monkeypatch.chdir(here)
    monkeypatch.setattr(progress, "INITIAL_DELAY_S", 0.0)
    for options, shown in (["--json"], True), (["--json", "--quiet"], False):
        main(["train", "noisy.py:task", *options])
        assert ("training: " in capfd.readouterr().err) is shown


@pytest.mark.slow
@pytest.mark.parametrize("by", first_quick([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_tune_interrupted_shows_the_answer_so_far_and_how_to_continue(here, by):
    ready = (here / "search" / "result.json").exists
    code, out, err = interrupted(ready, "tune", "slow.py:task", "--out", "search", here=here, by=by)
    assert code == 1 and "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("hasten:")]
    assert lines[-1] == "hasten: interrupted; the same command continues the search"
    assert out.startswith(("Nothing was compared, so far", "No improvement, so far"))


def test_tune_interrupted_before_its_first_answer_is_one_line(here):
    code, out, err = interrupted((here / "search").exists, "tune", "slow.py:task", "--out", "search", here=here)
    (line,) = [line for line in err.splitlines() if line.startswith("hasten:")]
    assert code == 1 and out == "" and line.startswith("hasten: interrupted")


@pytest.mark.parametrize(("text", "expected"), [("90", 90), ("90s", 90), ("10m", 600), ("1h", 3600), ("1.5m", 90)])
def test_format_remaining_time(text, expected):
    assert duration(text) == expected


def test_json_output_has_no_nan_or_infinity():
    text = strict_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": (1, None, True)}, "e": {"y", "x"}})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": [1, None, True]}, "e": ["x", "y"]}


def test_version_and_help_are_printed_without_a_task(here):
    done = subprocess.run(
        [sys.executable, "-m", "hasten", "--version"], cwd=here, capture_output=True, text=True, check=True
    )
    assert done.stdout == "hasten 0.1.0\n" and done.stderr == ""
    assert "--resume" in run_hasten("train", "--help", cwd=here).stdout
    assert "tune" in run_hasten(cwd=here).stdout


ENDING = """

def ending():
    import dataclasses

    def loss(output, target):
        raise SystemExit(0)

    return dataclasses.replace(task(), loss=loss)
"""


@pytest.mark.parametrize("verb", ["train ending.py:ending --out r", "compare ending.py:ending --a baseline --b ema"])
def test_train_task_that_exits_the_process_fails(verb, here, monkeypatch, capfd):
    (here / "ending.py").write_text((here / "noisy.py").read_text() + ENDING)
    monkeypatch.chdir(here)
    assert main([*verb.split(), "--quiet"]) == 1
    err = capfd.readouterr().err
    assert "code ended the pro" in err and "Traceback" not in err


def test_stdout_that_cannot_be_written_is_one_error_line(here):
    with open("/dev/full", "w") as full, open(here / "err", "w+") as err:
        code = join_process(start_hasten("methods", cwd=here, out=full.fileno(), err=err.fileno()))
        message = err.seek(0) or err.read()
    assert code == 1 and "cannot be written to standard output" in message and "internal" not in message


@pytest.mark.slow
def test_stdout_closed_at_start_is_ignored(here):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m hasten methods --json >&-"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(autouse=True, scope="module")
def assert_no_process_left():
    """Asserts that no started process is left; other helpers check child processes."""
    yield
    for child in [other for direct in live_children() for other in (direct, *direct.children(recursive=True))]:
        with suppress(psutil.NoSuchProcess):  # ended together with its parent
            child.kill()
            child.wait(10)


def wait_for(ready, patience: float = TIMEOUT_S) -> None:
    until = time.monotonic() + patience
    while not ready():
        assert time.monotonic() < until, "it did not come in time"
        time.sleep(0.05)


def test_compare_without_a_takes_the_baseline():
    options = parse_arguments(["compare", "digits", "--b", "num_threads"])
    assert options is not None and options.a == "baseline"


@pytest.mark.slow
def test_warnings_of_the_compiler_stay_out_of_the_terminal():
    code = "import logging, hasten.cli.main as m; m._silence_libraries(); import torch; "
    code += "logging.getLogger('torch._dynamo').warning('Graph break from Tensor.item()')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Graph break" not in done.stderr
