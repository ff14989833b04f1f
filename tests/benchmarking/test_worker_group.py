"""Worker groups: results of rank 0, root causes of failures, timeouts."""

import os
import time
import warnings
from contextlib import ExitStack
from functools import cached_property

import psutil
import pytest

from hasten.benchmarking.fork_server import DeadlineError, Worker
from hasten.benchmarking.worker_group import WorkerGroup, start_workers
from hasten.core.errors import ConfigurationError, HastenWarning, PeerFailure, RunError
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.distributed.process_group import init_process_group
from hasten.engine.resources import available_cpus
from helpers import SLACK_S

HERE = f"{__name__}:Service"


class Service:
    """Runs on every rank, which imports it through this file's directory on sys.path."""

    def __init__(self, start: int = 0):
        self.start, self.context = start, ExitStack()

    @cached_property
    def ranks(self) -> ProcessGroupInfo:
        return self.context.enter_context(init_process_group("cpu"))

    def sum_of_ranks(self) -> float:
        return self.ranks.all_reduce_sum([self.start + self.ranks.rank])[0]

    def variables(self) -> list[str]:
        return [os.environ[name] for name in ("RANK", "LOCAL_WORLD_SIZE", "TORCH_NCCL_ENABLE_MONITORING")]

    def pids(self) -> list[int]:
        return [int(answer) for answer in self.ranks.all_gather(str(os.getpid()).encode())]

    def cores(self) -> int:
        return available_cpus()

    def fail_on(self, rank: int, how: str) -> None:
        """Raises on one rank while the others wait for it."""
        if self.ranks.rank == rank:
            self._fail(how)
        self.ranks.any(False)

    def _fail(self, how: str) -> None:
        if how == "raise":
            raise KeyError("planted")
        if how == "refuse":
            raise ConfigurationError("not this way")
        if how == "die":
            os.kill(os.getpid(), 9)
        if how == "hang":
            time.sleep(3600)

    def fail_alike(self) -> None:
        self.ranks.any(False)
        raise RunError("all of us")

    def fail_after_report(self) -> None:
        """Rank 0 reports at once that another rank has failed; rank 1 reports a moment later that it is the cause."""
        if os.environ["RANK"] == "0":
            raise PeerFailure("another rank has ended")
        time.sleep(0.5)
        raise RunError("it was me")

    def notice(self) -> None:
        warnings.warn(f"rank {'one' if os.environ['RANK'] == '1' else 'zero'} warns", HastenWarning, stacklevel=1)


def job(processes: int = 2, **arguments) -> WorkerGroup:
    return WorkerGroup(processes, HERE, **arguments)


def test_group_of_two_returns_result_of_rank_0():
    with job(3, start=10) as three, job(2) as two:
        assert three.call("sum_of_ranks") == 33
        assert two.call("sum_of_ranks") == 1
        assert three.call("variables") == ["0", "3", "0"]


def test_group_divides_cores_among_ranks():
    with Worker(HERE) as single, job(2) as two:
        assert two.call("cores") == max(1, single.call("cores") // 2)


def test_group_of_one_is_a_worker():
    with start_workers(1, HERE) as one:
        assert isinstance(one, Worker) and one.call("sum_of_ranks") == 0


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", RunError, r"^rank 1: .*KeyError: 'planted'"),
        ("refuse", ConfigurationError, r"^not this way$"),
        ("die", RunError, r"^rank 1: the process was killed, probably because memory ran out$"),
        ("hang", RunError, r"^a measured process took longer than 2 s to report and was ended"),
    ],
)
def test_group_with_failing_rank_ends_all_ranks(how, kind, message):
    with job() as two:
        pids, began = two.call("pids"), time.monotonic()
        with pytest.raises(kind, match=message):
            two.call("fail_on", rank=1, how=how, timeout=2.0)
        assert time.monotonic() - began < 20
        assert processes_ended(pids)


def test_group_at_its_deadline_ends_all_ranks():
    with job() as two:
        pids, two.deadline = two.call("pids"), time.monotonic() + 0.3
        with pytest.raises(DeadlineError):
            two.call("fail_on", rank=1, how="hang", timeout=20.0)
        assert time.monotonic() < two.deadline + SLACK_S
        assert processes_ended(pids)


def test_group_error_of_all_ranks_names_no_rank():
    with job() as two, pytest.raises(RunError, match=r"^all of us$"):
        two.call("fail_alike")


def test_group_waits_for_the_rank_that_caused_the_failure():
    with job() as two, pytest.raises(RunError, match=r"^rank 1: it was me$"):
        two.call("fail_after_report")


def test_group_suspended_runs_only_during_calls():
    with job() as two:
        pids = two.call("pids")
        two.suspend()
        deadline = time.monotonic() + 60
        while {psutil.Process(pid).status() for pid in pids} != {psutil.STATUS_STOPPED} and time.monotonic() < deadline:
            time.sleep(0.001)
        assert {psutil.Process(pid).status() for pid in pids} == {psutil.STATUS_STOPPED}
        assert two.call("sum_of_ranks") == 1


def test_group_shows_warnings_of_rank_0_only():
    with job() as two, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        two.call("notice")
    assert [str(each.message) for each in caught if each.category is HastenWarning] == ["rank zero warns"]


def processes_ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while (alive := any(map(is_alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
