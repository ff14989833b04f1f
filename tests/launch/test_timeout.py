"""Ranks that hang: after the timeout they are named and killed, and the job continues without waiting for them."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from hasten.cli.main import main
from hasten.core.errors import CollectiveTimeout
from hasten.distributed.process_group import init_process_group
from hasten.engine.train import train
from hasten.launch.elastic import FAILURE_GRACE_S, SHUTDOWN_GRACE_S
from helpers import rank_tasks
from helpers.process import Job, children, environment, jobs_left, train_command, wait_until_it_trains
from helpers.ranks import run_ranks

PATIENCE = 5.0


def stopped(directory: Path, rank: int, *more: str) -> tuple[subprocess.Popen, str, float]:
    """Returns the output and the seconds of a job of which one rank was stopped while it trained."""
    options = ("--out", "run", "--timeout", f"{PATIENCE:g}s", "--checkpoint-every", "0.1s", *more)
    job = subprocess.Popen(train_command("slow", *options), cwd=directory, stderr=subprocess.PIPE, text=True)
    wait_until_it_trains(Job(job), directory / "run")
    os.kill(next(pid for pid in children(job.pid) if environment(pid).get("RANK") == str(rank)), signal.SIGSTOP)
    began = time.monotonic()
    return job, job.communicate(timeout=120)[1], time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_hanging_rank_is_named_and_not_the_waiting_one(directory, rank):
    job, error, seconds = stopped(directory, rank, "--max-restarts", "0")
    assert job.returncode == 1 and f"hasten: rank {rank} was silent for 5 s; the other ranks were ended" in error, error
    assert PATIENCE < seconds < PATIENCE + 60 and not jobs_left()


@pytest.mark.slow
def test_all_ranks_restart_if_a_restart_is_left(directory):
    job, error, _ = stopped(directory, 1, "--max-restarts", "1")
    assert (
        job.returncode == 0 and "rank 1 was silent for 5 s; restarting all ranks from the newest checkpoint" in error
    ), error
    train(rank_tasks.slow(), out=directory / "single", device="cpu")
    ours, single = (load_file(directory / name / "model.safetensors") for name in ("run", "single"))
    assert all(ours[name].sub(single[name]).abs().max() < 1e-9 for name in single) and not jobs_left()


@pytest.mark.slow
def test_rank_that_waits_in_c_for_a_lost_rank_is_killed_before_the_time_for_a_checkpoint_is_over(directory):
    words = [*train_command("waits_in_c_for_a_lost_rank", "--out", "run", "--max-restarts", "0")]
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True)
    seconds = time.time() - (directory / "killed").stat().st_mtime
    assert done.returncode == 1 and "rank 1 was killed by SIGKILL (out of memory?)" in done.stderr, done.stderr
    assert FAILURE_GRACE_S <= seconds < (FAILURE_GRACE_S + SHUTDOWN_GRACE_S) / 2 and not jobs_left()


@pytest.mark.slow
def test_process_groups_of_torch_have_the_same_timeout():
    def waits(rank: int) -> float:
        with init_process_group("cpu", timeout=2.0) as ranks:
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
            ranks.any(False)
            began = time.monotonic()
            if rank == 0:
                dist.barrier(mesh["dp_shard"].get_group())
            time.sleep(5.0)
        return time.monotonic() - began

    waited, slept = run_ranks(2, waits)
    assert isinstance(waited, CollectiveTimeout) and waited.seconds == 2.0 and slept > 4.0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("train digits --processes 2 --timeout long", "must be a time such as 90s, 10m or 1h"),
        ("tune digits --processes 2 --timeout 0.5s", "--timeout must be at least 1s"),
        ("launch --nproc-per-node 2 -- train digits --timeout 5m", "put --timeout before the command"),
    ],
)
def test_invalid_timeout_is_refused(argv, message, capfd):
    assert main(argv.split()) == 2
    assert message in capfd.readouterr().err
