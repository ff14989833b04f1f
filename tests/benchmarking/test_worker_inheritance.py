"""What a worker of the fork server gets from its parent: variables, import path, and no warning about threads."""

import os
import sys
from multiprocessing.util import get_temp_dir

import torch

from hasten.benchmarking import fork_server
from hasten.benchmarking.fork_server import ForkServer, Worker, clean_server
from hasten.engine.resources import available_cpus

HERE = f"{__name__}:Inheriting"


class Inheriting:
    """Runs in a worker, which imports it through this file's directory on sys.path."""

    def variables(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def threads(self) -> int:
        return torch.get_num_threads()

    def ready(self) -> bool:
        return True

    def share_a_tensor(self) -> str:
        """The directory of the sockets over which a loader worker hands a batch to this process."""
        self.batches = iter(torch.utils.data.DataLoader(torch.ones(4), num_workers=1))
        next(self.batches)
        return get_temp_dir()


def test_worker_has_the_variables_that_the_parent_has_when_it_starts(monkeypatch):
    """Those of the rank of the parent are not its own, whenever they are set."""
    monkeypatch.setenv("HASTEN_TEST_DELETED", "1")
    monkeypatch.setattr(fork_server, "_servers", {})
    names = ["HASTEN_TEST_DELETED", "HASTEN_TEST_SET", "HASTEN_TEST_OWN", "RANK", "WORLD_SIZE"]
    try:
        with Worker(HERE) as one:
            assert one.call("variables", names=names) == {**dict.fromkeys(names), "HASTEN_TEST_DELETED": "1"}
        monkeypatch.delenv("HASTEN_TEST_DELETED")
        monkeypatch.setenv("HASTEN_TEST_SET", "2")
        monkeypatch.setenv("HASTEN_TEST_OWN", "3")
        monkeypatch.setenv("RANK", "5")
        monkeypatch.setenv("WORLD_SIZE", "6")
        with Worker(HERE, {"HASTEN_TEST_OWN": "4", "RANK": "0"}) as other:
            found = other.call("variables", names=names)
        assert found == {**dict.fromkeys(names), "HASTEN_TEST_SET": "2", "HASTEN_TEST_OWN": "4", "RANK": "0"}
    finally:
        clean_server().close()


def test_killed_workers_leave_no_sockets_behind(monkeypatch):
    monkeypatch.setattr(fork_server, "_servers", {})
    try:
        with Worker(HERE) as one, Worker(HERE) as other:
            directory = one.call("share_a_tensor")
            assert other.call("share_a_tensor") == directory and os.listdir(directory)
    finally:
        clean_server().close()
    assert not os.path.exists(directory)


def test_ranks_have_the_threads_of_launched_ranks_though_the_server_has_imported_torch_before(monkeypatch):
    """As many as OMP_NUM_THREADS, whenever it is set; without it the ranks share the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(fork_server, "_servers", {})
    share, rank = max(1, available_cpus() // 2), {"LOCAL_WORLD_SIZE": "2"}
    try:
        for value, count in (("", share), (f"{share + 3}", share + 3), (f"{share + 4},2", share + 4), ("", share)):
            monkeypatch.setenv("OMP_NUM_THREADS", value) if value else monkeypatch.delenv("OMP_NUM_THREADS", False)
            with Worker(HERE, rank) as one:
                assert one.call("threads") == count
    finally:
        clean_server().close()


def test_entries_of_the_import_path_that_are_no_text_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    monkeypatch.setattr(fork_server, "_servers", {})
    try:
        with Worker(HERE) as one:
            assert one.call("ready")
    finally:
        clean_server().close()


FORK_OF_PYTHON_3_12 = """
import os, runpy, warnings

def fork(fork=os.fork):
    warnings.warn("This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks in the child.",
                  DeprecationWarning, stacklevel=2)
    return fork()

os.fork = fork
runpy.run_module("hasten.benchmarking.worker_process", run_name="__main__")
"""


def test_warning_of_python_that_the_server_has_threads_is_not_shown(monkeypatch, capfd):
    command = lambda control: [sys.executable, "-c", FORK_OF_PYTHON_3_12, str(control.fileno())]  # noqa: E731
    monkeypatch.setattr(fork_server, "server_command", command)
    server = ForkServer()
    monkeypatch.setattr(fork_server, "_servers", {os.getpid(): server})
    try:
        with Worker(HERE) as one:
            assert one.call("ready")
    finally:
        server.close()
    assert "multi-threaded" not in capfd.readouterr().err
