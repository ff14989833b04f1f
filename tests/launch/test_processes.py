"""``hasten train --processes N`` as a user runs it: processes started by torchrun's agent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.data import arrays
from hasten.engine.data_adapters import check_process_count
from hasten.engine.registry import make_methods
from hasten.engine.tasks import TaskRef
from hasten.launch.launcher import preflight_check
from helpers import HELPERS, rank_tasks
from helpers.process import TIMEOUT_S, Job, children, environment, jobs_left, train_command, wait_until_it_trains


def ran(directory: Path, task: str, *more: str) -> subprocess.CompletedProcess:
    return subprocess.run(train_command(task, *more), cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_train_with_processes_prints_one_result(directory):
    done = ran(directory, "samples", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 46 and result["out"] == "runs/train-rank_tasks-py-samples"
    about = json.loads((directory / result["out"] / "environment.json").read_text())
    assert about["processes"] == 2
    assert not jobs_left()


def test_ranks_number_strings_of_a_set_alike(directory, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    done = ran(directory, "with_classes_of_a_set")
    assert done.returncode == 0, done.stderr
    first, second = ((directory / f"classes-{rank}").read_text() for rank in "01")
    assert first == second


def test_processes_of_torchrun_train_one_after_another_task(directory):
    """Each training joins the ranks anew, in the store that torchrun's agent keeps."""
    script = directory / "three.py"
    script.write_text(
        "import os, hasten, rank_tasks\n"
        "for _ in range(3):\n"
        "    steps = hasten.train(rank_tasks.samples(), device='cpu')['steps']\n"
        "    os.write(1, f'{steps}\\n'.encode())  # a whole line, between those of the other rank\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(torchrun, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("46") == 6


@pytest.mark.slow
def test_launch_passes_its_options_before_the_command(directory):
    launch = [
        sys.executable,
        "-m",
        "hasten",
        "launch",
        "--nproc-per-node",
        "2",
        "--json",
        "--seed",
        "7",
        "--",
        "train",
        "rank_tasks.py:samples",
    ]
    done = subprocess.run(launch, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seed"] == 7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("launch --nproc-per-node 2 -- train x --processes 4", "put --processes before the command"),
        ("launch --nproc-per-node 2 -- compare digits", "launch runs train, "),
        (
            "launch --nproc-per-node 1 --nnodes 1:2 --rdzv-endpoint a:1 -- train x --max-bad-rows 5",
            "--max-bad-rows supports a single process",
        ),
        (
            "launch --nproc-per-node 1 --nnodes 1:2 --rdzv-endpoint a:1 -- train x --device cuda:1",
            "several processes cannot share cuda:1",
        ),
        ("launch --nproc-per-node 2 --nnodes 2 -- train digits", "--rdzv-endpoint HOST:PORT"),
        ("launch --nproc-per-node 2 --nnodes 2 --rdzv-endpoint nowhere -- train digits", "must be HOST:PORT"),
        ("launch --nproc-per-node 0 -- train digits", "from 1 to"),
        (
            "launch --nproc-per-node 1 --nnodes 3:2 --rdzv-endpoint a:1 -- train digits",
            "must be M or MIN:MAX with MIN at most MAX, not '3:2'",
        ),
        ("launch --nproc-per-node 1 --nnodes 2: --rdzv-endpoint a:1 -- train digits", "must be M or MIN:MAX"),
        ("launch --nproc-per-node 1 --nnodes few --rdzv-endpoint a:1 -- train digits", "from 1 to"),
        (
            "launch --nproc-per-node 1 --nnodes 2:3 --rdzv-endpoint a:1 -- train x --with tensor_parallel:degree=2",
            "--nnodes 2:3 can result in 3 processes, which tensor_parallel:degree=2 does not divide",
        ),
        ("launch --nproc-per-node 2 --nnodes 2 --rdzv-endpoint .a:1 -- train digits", "'.a' is no name of a host"),
        ("launch --nproc-per-node 2 -- train x --with dpd", "no method is called 'dpd' (did you mean ddp, sdpa?)"),
        ("train x --processes 2 --with dpd", "no method is called 'dpd' (did you mean ddp, sdpa?)"),
        ("launch --nproc-per-node 2 -- train x --max-restarts=4", "put --max-restarts before the command"),
        ("train digits --processes 2 --max-restarts often", "from 0 to"),
        ("train digits --processes 2 --max-restarts -1", "from 0 to"),
        ("train digits --processes 4096", "4096 processes take 819 GB before they begin"),
        ("launch --nproc-per-node 5000 -- train digits", "from 1 to 4096"),
        ("train digits --processes none", "from 1 to"),
    ],
)
def test_launch_invalid_request_is_refused(argv, message, capfd):
    assert main(argv.split()) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "argv", ["train TASK --processes N", "diagnose TASK --processes N", "launch --nproc-per-node N -- train TASK"]
)
def test_train_more_processes_than_cores_are_checked_before_start(argv, monkeypatch, capfd):
    def started(*arguments, **settings):
        raise AssertionError("nothing was to be started")

    monkeypatch.setattr("hasten.launch.launcher.launch", started)
    monkeypatch.setattr("hasten.launch.launcher.available_cpus", lambda: 1)
    task = str(HELPERS / "waiting_tasks.py:few")
    assert main([{"N": "2", "TASK": task}.get(word, word) for word in argv.split()]) == 2
    assert (
        capfd.readouterr().err
        == "hasten: 2 processes cannot share a batch of 1 samples; take fewer, or larger batches\n"
    )


def test_train_model_parallel_job_needs_one_sample_only():
    task = TaskRef.of(str(HELPERS / "waiting_tasks.py:few")).load()
    check_process_count(task, 2, make_methods(Recipe.coerce("tensor_parallel")))
    with pytest.raises(ConfigurationError, match="2 processes cannot share a batch of 1 samples"):
        check_process_count(task, 2, make_methods(Recipe.coerce("ddp")))


def test_train_task_that_reads_its_rank_is_checked_by_the_ranks(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import os\n\ndef task():\n    return os.environ['LOCAL_RANK']\n")
    monkeypatch.setattr("hasten.launch.launcher.available_cpus", lambda: 1)
    preflight_check(f"{tmp_path}/mine.py:task", 2, [])
    with pytest.raises(ConfigurationError, match="there is no file"):
        preflight_check(f"{tmp_path}/nobody.py:task", 2, [])


def test_train_dataset_with_its_own_batch_size_is_checked_by_it():
    rows = rank_tasks.Rows()
    rows.batch_size = 1
    check_process_count(rank_tasks.task(rows), 2)


def test_train_unknown_options_are_refused_before_launch(monkeypatch, capfd):
    monkeypatch.setattr("hasten.launch.launcher.launch", None)
    assert main(["launch", "--nproc-per-node", "2", "--", "train", "digits", "--nonsense"]) == 2
    assert "there is no option --nonsense" in capfd.readouterr().err


def test_train_recipe_of_the_resumed_run_is_checked(tmp_path, capfd):
    (tmp_path / "recipe.toml").write_text(Recipe.coerce("zero:stage=2,hybrid_shard_size=2").to_toml())
    elastic = f"launch --nproc-per-node 1 --nnodes 2:3 --rdzv-endpoint a:1 -- train x --out {tmp_path} --resume"
    assert main(elastic.split()) == 2
    assert (
        "--nnodes 2:3 can result in 3 processes, which zero:hybrid_shard_size=2 does not divide"
        in capfd.readouterr().err
    )


@pytest.mark.slow
def test_train_raising_rank_is_named_and_all_ranks_end_at_once(directory):
    began = time.monotonic()
    done = ran(directory, "raising")
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert lines[0].startswith("hasten: rank ") and "sample 226: OSError: the disk is gone" in lines[0]
    assert time.monotonic() - began < 60 and not jobs_left()


@pytest.mark.slow
def test_train_invalid_request_is_refused_by_the_job(directory):
    done = ran(directory, "samples", "--with", "batch_sise")
    assert done.returncode == 2 and done.stderr.startswith(
        "hasten: no method is called 'batch_sise' (did you mean batch_size"
    ), done.stderr


@pytest.mark.slow
def test_train_rank_without_data_is_named(directory):
    done = ran(directory, "no_data_on_the_second")
    assert done.returncode in (1, 2) and "data/train.npy" in done.stderr and "rank 1" in done.stderr, done.stderr


@pytest.mark.slow
def test_train_killed_rank_is_named_if_no_restart_is_left(directory):
    job = subprocess.Popen(
        train_command("slow", "--out", "run", "--max-restarts", "0"), cwd=directory, stderr=subprocess.PIPE, text=True
    )
    wait_until_it_trains(Job(job), directory / "run")
    victim = next(pid for pid in children(job.pid) if environment(pid).get("RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    error = job.communicate(timeout=TIMEOUT_S)[1]
    assert (
        job.returncode == 1
        and "hasten: rank 1 was killed by SIGKILL (out of memory?); the other ranks were ended" in error
    ), error
    assert not jobs_left()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_train_interrupted_job_saves_first(directory, how):
    job = subprocess.Popen(train_command("slow", "--out", "run"), cwd=directory, stderr=subprocess.PIPE, text=True)
    wait_until_it_trains(Job(job), directory / "run")
    job.send_signal(how)
    error = job.communicate(timeout=TIMEOUT_S)[1]
    assert job.returncode == 1 and "resume with --out" in error, error
    assert list((directory / "run/checkpoints").glob("step-*.pt")) and not jobs_left()


def test_batch_must_suffice_for_all_nodes_that_may_join(monkeypatch, capfd):
    monkeypatch.setattr("hasten.launch.launcher.launch", None)
    monkeypatch.setattr("hasten.launch.launcher.available_cpus", lambda: 8)
    task = str(HELPERS / "waiting_tasks.py:few")  # batches of one sample
    elastic = f"launch --nproc-per-node 1 --nnodes 1:2 --rdzv-endpoint a:1 -- train {task}"
    assert main(elastic.split()) == 2
    assert "2 processes cannot share a batch of 1 samples" in capfd.readouterr().err


def test_last_batch_of_a_pipeline_must_suffice_for_all_processes():
    with pytest.raises(ConfigurationError, match="a batch of 7 rows cannot be divided into 8 shards"):
        check_process_count(rank_tasks.pipeline(), 8)  # 227 rows, in batches of 10
    rows = rank_tasks.Rows()
    without_batches = rank_tasks.task(arrays((rows.inputs, rows.labels)))
    for processes in (1, 2):
        check_process_count(without_batches, processes)


def test_restart_without_the_run_directory_does_not_start_over(directory, monkeypatch, capfd):
    monkeypatch.chdir(directory)
    monkeypatch.setattr("hasten.cli.train.resume_directory", lambda: "lost/run")
    assert main(["train", "rank_tasks.py:samples", "--device", "cpu"]) == 1
    assert "lost/run of this job is not on this node" in capfd.readouterr().err and not Path("lost").exists()
