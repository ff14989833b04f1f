"""Launchers of a job, as processes of this machine that stand in for nodes: one node too many, nodes that leave."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from hasten.core.errors import ConfigurationError, ProgressWarning, RunError
from hasten.launch import rendezvous
from hasten.launch.elastic import describe_lost_rank, exit_codes
from hasten.launch.rank_results import ERROR_FILE, PARENT, RankResult
from hasten.launch.rendezvous import hosts_rendezvous
from helpers.chaos import train_words
from helpers.process import Job, jobs_left, wait_until_it_trains
from helpers.ranks import free_port

HASTEN = [sys.executable, "-m", "hasten"]
ISOLATED = ["unshare", "--user", "--map-root-user", "--net", "--mount"]  # a node with no network but its own loopback
PROBE = ["sh", "-c", 'exec "$@"', "sh", *ISOLATED, "ip", "link"]  # without unshare, an error of the shell
NO_NAMESPACES = subprocess.run(PROBE, capture_output=True, text=True).stderr.strip()


def begun(directory: Path, port: int, *argv: str, nodes: str = "1") -> subprocess.Popen:
    launch = [
        "launch",
        "--nproc-per-node",
        "1",
        "--nnodes",
        nodes,
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--",
        *argv,
    ]
    return subprocess.Popen([*HASTEN, *launch], cwd=directory, stderr=subprocess.PIPE, text=True)


def wait_until_somebody_answers(port: int) -> None:
    until = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.slow
def test_node_above_the_maximum_waits_without_harm(directory):
    """One additional node waits until the job ends, another is removed before; the training nodes continue."""
    port, argv = free_port(), train_words("counting_for_long", directory / "run")
    trains = begun(directory, port, *argv)
    wait_until_it_trains(Job(trains), directory / "run")
    waits, leaves = begun(directory, port, *argv), begun(directory, port, *argv)
    time.sleep(6)
    leaves.send_signal(signal.SIGTERM)
    error = leaves.communicate(timeout=30)[1]
    assert leaves.returncode == 1 and error.endswith("hasten: stopped by SIGTERM\n"), error
    assert trains.wait(120) == 0
    error = waits.communicate(timeout=30)[1]
    assert waits.returncode == 0 and "the job is over; it had enough nodes without this one" in error, error


@pytest.mark.slow
def test_node_in_a_long_step_is_informed_that_the_job_has_ended(directory):
    port, argv = free_port(), ["train", "rank_tasks.py:raises_on_the_first_while_the_other_is_busy", "--out", "run"]
    jobs = [begun(directory, port, *argv, nodes="2") for _ in range(2)]
    errors = [job.communicate(timeout=100)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1], errors
    assert sum("OSError: the disk is gone" in each for each in errors) == 1, errors
    assert not any("continue together" in each or "restart" in each for each in errors), errors


@pytest.mark.slow
def test_nohup_is_respected(directory):
    job = subprocess.Popen(
        ["nohup", *HASTEN, *train_words("counting", directory / "run"), "--processes", "2"], cwd=directory
    )
    wait_until_it_trains(Job(job), directory / "run")
    job.send_signal(signal.SIGHUP)
    assert job.wait(120) == 0


def test_rank_whose_launcher_has_ended_before_it_starts_ends(directory, tmp_path):
    names = {
        ERROR_FILE: str(tmp_path / "error.json"),
        PARENT: "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    done = subprocess.run(
        [*HASTEN, "train", "rank_tasks.py:samples"], cwd=directory, env=os.environ | names, timeout=60
    )
    assert done.returncode == 1 and not (directory / "runs").exists() and not jobs_left()


def test_rank_killed_by_the_agent_is_not_the_first_failure():
    """Rank 0 was busy when rank 1 was lost, and was killed a minute later."""
    killed = {rank: SimpleNamespace(exitcode=-signal.SIGKILL, timestamp=when) for rank, when in ((0, 160), (1, 100))}
    assert describe_lost_rank({}, exit_codes(RunResult(WorkerState.FAILED, failures=killed))).startswith(
        "rank 1 was killed by SIGKILL"
    )


def test_rank_killed_while_others_waited_is_named_as_silent():
    ended = {0: RankResult(1, "another rank has not answered for 5 s", is_peer_failure=True, waited=5.0)}
    assert describe_lost_rank(ended, {0: 1, 1: -signal.SIGKILL}) == "rank 1 was silent for 5 s"
    assert describe_lost_rank(ended, {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGKILL}) == "ranks 1, 2 were silent for 5 s"
    assert describe_lost_rank(ended, {0: 1}) is None


def test_node_whose_own_name_is_a_loopback_address_is_reached_by_its_default_route(monkeypatch):
    addresses = {rendezvous.ELSEWHERE: "10.0.0.5", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", {"node7": "127.0.1.1"}.get)
    monkeypatch.setattr(rendezvous, "_source_address", lambda host, port: addresses[host])
    assert rendezvous.local_address("node7:29500") == "10.0.0.5"
    assert hosts_rendezvous(f"node7:{free_port()}")


@pytest.mark.skipif(bool(NO_NAMESPACES), reason=f"no network namespaces here: {NO_NAMESPACES}")
def test_node_without_a_network_meets_at_its_own_name(tmp_path):
    """As on a laptop: the own name is a loopback address, and there is no default route."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node7\n")
    script = 'ip link set lo up && mount --bind "$0" /etc/hosts && exec "$@"'
    meet = "from hasten.launch.rendezvous import local_address; print(local_address('node7:29500'))"
    node = [*ISOLATED, "sh", "-c", script, str(hosts), sys.executable, "-c", meet]
    done = subprocess.run(node, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("127."), done.stderr


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_loopback_address_that_the_user_gives_is_kept(name):
    assert rendezvous.local_address(f"{name}:29500") == "127.0.0.1"


def test_host_name_that_is_unknown_at_first_is_retried(monkeypatch):
    answers = iter([socket.gaierror(-2, "Name or service not known")] * 2)

    def resolve(host: str) -> str:
        for error in answers:
            raise error
        return "127.0.0.1"

    monkeypatch.setattr(rendezvous.socket, "gethostbyname", resolve)
    monkeypatch.setattr(rendezvous, "_source_address", lambda host, port: host)
    monkeypatch.setattr(rendezvous, "ELSEWHERE", "10.0.0.5")
    with pytest.warns(ProgressWarning, match="node7 has no address yet; trying again for 60 s") as warned:
        assert rendezvous.local_address("node7:29500") == "10.0.0.5"
    assert len(warned) == 1


def test_host_name_that_stays_unknown_is_reported_and_refused():
    refusal = r"the nodes cannot meet at no\.such\.machine:2000: .*an IP address"
    with (
        pytest.warns(ProgressWarning, match=r"no\.such\.machine has no address yet"),
        pytest.raises(ConfigurationError, match=refusal),
    ):
        rendezvous.local_address("no.such.machine:2000", timeout=0.3)


def test_host_name_lost_with_its_node_is_retried():
    with pytest.raises(RunError, match=r"no answer from the rendezvous at gone\.invalid:29500"):
        hosts_rendezvous("gone.invalid:29500", timeout=0.3)
