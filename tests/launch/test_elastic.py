"""Ranks and nodes that are lost: the job resumes by itself and trains as if undisturbed."""

import random
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from hasten.core.errors import ConfigurationError
from hasten.launch import elastic, launcher
from hasten.launch.rank_results import RankResult
from helpers import rank_tasks
from helpers.chaos import chaos, compare_with_undisturbed, train_words
from helpers.netns_cluster import disconnect, lose, missing, reconnect, start_on, two_nodes
from helpers.process import Job, wait_until_it_trains
from helpers.ranks import free_port, run_ranks, training, write_rank_result

WHY_NOT = missing()
machines = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def disturbed(tmp_path, kills: int, task: str, passes: int, on_machines: bool = False, seed: int = 0):
    outcome = chaos(tmp_path, kills, task, on_machines, random.Random(seed))
    assert_as_undisturbed(tmp_path / "run", passes)
    return outcome


def assert_as_undisturbed(out: Path, passes: int = 60) -> None:
    """Asserts that the run has the bits of one that nothing disturbed, and whose samples do not wait."""

    def undisturbed(rank: int) -> dict:
        task = rank_tasks.counting(passes)
        task.train_data.seconds = task.validation_data.seconds = 0.0
        return training(rank, task, out=out.parent / "undisturbed")

    run_ranks(2, undisturbed)
    assert all(compare_with_undisturbed(out, out.parent / "undisturbed", passes).values())


def assert_every_sample_counts_once_per_epoch(out: Path, passes: int = 60) -> None:
    """Asserts what holds exactly even if other nodes shared the batches, which changes the rounding."""
    assert (load_file(out / "model.safetensors")["seen"] == passes).all()


@pytest.mark.slow
def test_killed_ranks_lose_and_repeat_no_sample(tmp_path):
    outcome = disturbed(tmp_path, 1, "counting", 10)
    assert outcome.ranks > 0 and any(
        "was killed by SIGKILL" in line and "restart 1 of 999" in line for line in outcome.stderr
    ), outcome


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("on_machines", [False, pytest.param(True, marks=machines)])
def test_thirty_kills_lose_no_sample(tmp_path, on_machines):
    outcome = disturbed(tmp_path, 30, "counting_for_long", 60, on_machines)
    print(outcome.ranks, "ranks and", outcome.machines, "machines killed,", outcome.recoveries, "times gone on")
    assert outcome.ranks + outcome.machines == 30 and outcome.recoveries > 0


@pytest.mark.slow
def test_port_of_another_program_is_reported(monkeypatch):
    """A port of a program that never responds: torch would wait for it forever."""
    monkeypatch.setattr(launcher, "STORE_ANSWER_S", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(
            ConfigurationError, match="another program has that port; choose another port, the same on all nodes"
        ):
            launcher.launch(["train", "digits"], 1, (2, 2), f"127.0.0.1:{other.getsockname()[1]}")


@pytest.mark.slow
def test_nodes_with_different_nproc_per_node_are_refused(directory):
    port = free_port()
    first = launch(port, 1, directory)
    try:
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
            time.sleep(0.1)
        second = launch(port, 2, directory)
        error = second.communicate(timeout=90)[1]
        assert second.returncode == 2, error
        assert (
            "this node was started with --nproc-per-node 2, another one with --nproc-per-node 1; give all nodes "
            "the same" in error
        )
    finally:
        first.kill()
        first.communicate()


def launch(port: int, each: int, directory: Path) -> subprocess.Popen:
    argv = [
        "launch",
        "--nproc-per-node",
        str(each),
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--",
        "train",
        "rank_tasks.py:samples",
    ]
    return subprocess.Popen([sys.executable, "-m", "hasten", *argv], cwd=directory, stderr=subprocess.PIPE, text=True)


def test_finished_node_is_not_missed(monkeypatch):
    """Its ranks have ended while those of another node still write the model."""
    monkeypatch.setattr(elastic, "HEARTBEAT_TIMEOUT_S", 0.0)
    agent, group = (
        object.__new__(elastic.ElasticAgent),
        SimpleNamespace(group_world_size=2, group_rank=0, store=HashStore()),
    )

    def misses() -> bool:
        agent.last_check, agent.heartbeats = float("-inf"), getattr(agent, "heartbeats", {})
        return agent._misses_a_node(group)

    assert [misses(), misses()] == [False, True], "the other one has stderr nothing since the first look"
    group.store.set(f"{elastic.DONE}/1", "")
    assert not misses() and agent.done == {1}


def stopped_group(tmp_path, waiting: list[int], endings: dict[int, RankResult]) -> tuple:
    """An agent of two nodes whose ranks have ended with these codes, and the content of the wait list."""
    for rank, ending in endings.items():
        write_rank_result(rank, ending, tmp_path)
    agent = object.__new__(elastic.ElasticAgent)
    agent.job, agent.done, agent.remaining_restarts = str(tmp_path), set(), 2
    agent._state_of = lambda group: RunResult(WorkerState.FAILED)
    handler = SimpleNamespace(
        num_nodes_waiting=lambda: waiting.pop(0) if len(waiting) > 1 else waiting[0], is_closed=lambda: False
    )
    spec = SimpleNamespace(rdzv_handler=handler, monitor_interval=0.01, max_restarts=2)
    return agent, SimpleNamespace(group_world_size=2, group_rank=0, store=HashStore(), spec=spec)


STOPPED = RankResult(1, "stopped at step 7", is_peer_failure=True, stopped=True)


def test_job_that_another_node_ends_is_not_announced_as_restarting(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "JOIN_NOTICE_S", 0.2)
    agent, group = stopped_group(tmp_path, [0], {0: STOPPED, 1: STOPPED})
    answers = iter([False, True])
    group.spec.rdzv_handler.is_closed = lambda: next(answers)
    with warnings.catch_warnings(), pytest.raises(RendezvousClosedError):
        warnings.simplefilter("error")
        agent.monitor_workers(group)


@pytest.mark.parametrize(
    ("waiting", "endings", "left"),
    [
        ([0, 0, 1], {0: STOPPED, 1: STOPPED}, 3),  # torch removes one; a new node is noticed late
        ([0], {0: STOPPED, 1: STOPPED}, 2),  # another node was removed
        ([1], {0: STOPPED, 1: RankResult(1, "another rank ended without reporting an error", is_peer_failure=True)}, 2),
        ([1], {0: STOPPED, 1: RankResult(1, "OSError: the disk is gone")}, 0),
    ],
)
def test_joining_costs_no_restart_and_leaving_costs_one(tmp_path, monkeypatch, waiting, endings, left):
    monkeypatch.setattr(elastic, "JOIN_NOTICE_S", 0.2)
    agent, group = stopped_group(tmp_path, waiting, endings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agent.monitor_workers(group)
    assert agent.remaining_restarts == left


def test_job_does_not_resume_if_another_node_has_finished(tmp_path):
    """It would wait for a node that never joins."""
    agent, group = stopped_group(tmp_path, [0], {})
    group.store.set(f"{elastic.DONE}/1", "")
    agent.monitor_workers(group)
    assert agent.remaining_restarts == 0


def test_finished_node_waits_for_the_others_and_reports_their_failure(tmp_path):
    agent, group = stopped_group(tmp_path, [0], {})
    agent._worker_group, agent.last_check, agent.heartbeats, closed = group, float("inf"), {}, []
    group.spec.rdzv_handler.is_closed = lambda: bool(closed)
    threading.Timer(0.2, lambda: group.store.set(f"{elastic.DONE}/1", "")).start()
    agent.exit_barrier()
    assert agent.done == {0, 1}
    group.store.delete_key(f"{elastic.DONE}/1")
    threading.Timer(0.2, lambda: closed.append(True)).start()
    with pytest.raises(RendezvousClosedError):
        agent.exit_barrier()


@pytest.mark.soak
@pytest.mark.slow
def test_joining_node_restarts_no_rank(directory):
    """Three agents on this machine stand in for nodes; none of them may lose a rank."""
    port, options = free_port(), ["--nnodes", "1:3", "--max-restarts", "0"]

    def begun() -> subprocess.Popen:
        launch = ["launch", "--nproc-per-node", "1", *options, "--rdzv-endpoint", f"127.0.0.1:{port}", "--"]
        command = [sys.executable, "-m", "hasten", *launch, *train_words("counting_for_long", directory / "run")]
        return subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True)

    first = begun()
    until = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
        time.sleep(0.1)
    jobs = [first, begun()]
    wait_until_it_trains(Job(first), directory / "run")
    time.sleep(1)
    jobs.append(begun())
    errors = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], errors
    assert sum("another node has joined" in each for each in errors) == 2 and not any(
        "lost" in each for each in errors
    ), errors
    assert_every_sample_counts_once_per_epoch(directory / "run")


class Pair:
    """The same command on two nodes."""

    def __init__(self, directory: Path, *launch: str):
        self.directory, self.launch, self.stderr = directory, (*launch, "--max-restarts", "9"), [[], []]
        self.jobs = [self.begun(0), self.begun(1)]

    def begun(self, machine: int) -> subprocess.Popen:
        job = start_on(
            machine, *train_words("counting_for_long", self.directory / "run"), cwd=self.directory, launch=self.launch
        )
        threading.Thread(target=lambda: self.stderr[machine].extend(job.stderr), daemon=True).start()
        return job

    def wait_until_it_trains(self, watched: int) -> None:
        wait_until_it_trains(Job(self.jobs[watched]), self.directory / "run")

    def lose(self, machine: int) -> None:
        lose(machine)
        self.jobs[machine].wait()

    def ended(self) -> None:
        codes = [job.wait(400) for job in self.jobs]
        assert codes == [0, 0], self.stderr


@pytest.mark.soak
@pytest.mark.slow
@machines
@pytest.mark.parametrize("lost", [0, 1])
def test_lost_node_is_waited_for(directory, lost):
    """The first node hosts the rendezvous."""
    with two_nodes():
        pair = Pair(directory, "--nnodes", "2")
        pair.wait_until_it_trains(0)
        time.sleep(2)
        pair.lose(lost)
        time.sleep(2)
        pair.jobs[lost] = pair.begun(lost)
        pair.ended()
    message = "waiting for the same command on that node" if lost == 0 else "ranks of another node were lost"
    assert any(message in line for line in pair.stderr[1 - lost]), pair.stderr
    assert_as_undisturbed(directory / "run")


@pytest.mark.soak
@pytest.mark.slow
@machines
def test_fewer_nodes_continue_and_admit_new_ones(directory):
    with two_nodes():
        pair = Pair(directory, "--nnodes", "1:2")
        pair.wait_until_it_trains(0)
        pair.lose(1)
        pair.wait_until_it_trains(0)
        pair.jobs[1] = pair.begun(1)
        pair.ended()
    assert any("another node has joined" in line for line in pair.stderr[0]), pair.stderr
    assert_every_sample_counts_once_per_epoch(directory / "run")


@pytest.mark.soak
@pytest.mark.slow
@machines
def test_network_outage_of_half_a_minute_is_survived(directory):
    with two_nodes():
        pair = Pair(directory, "--nnodes", "2")
        pair.wait_until_it_trains(0)
        disconnect()
        time.sleep(30)
        reconnect()
        pair.ended()
    assert_as_undisturbed(directory / "run")
