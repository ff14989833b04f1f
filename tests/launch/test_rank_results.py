"""Results of ranks: error files, and a program that is interrupted while it starts."""

import json
import sys
import threading
import time
from types import ModuleType

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hasten import __main__
from hasten.launch import rank_results
from hasten.launch.rank_results import RankResult, peer_error, read_results, write_result
from helpers.ranks import write_rank_result


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_results, "_error_file", str(tmp_path / "hasten_x/attempt_0/0/error.json"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    return str(tmp_path)


def test_rank_reports_when_all_others_have_succeeded(job):
    write_rank_result(1, RankResult(0), job)
    later = threading.Timer(0.2, write_rank_result, (2, RankResult(1), job))
    began = time.monotonic()
    later.start()
    assert peer_error() is None and time.monotonic() - began >= 0.2


def test_rank_does_not_report_if_another_failed(job):
    write_rank_result(2, RankResult(1, "the disk is gone"), job)
    assert peer_error() == "the disk is gone"


def test_rank_that_never_ends_is_not_waited_for_forever(job, monkeypatch):
    monkeypatch.setattr(rank_results, "PEER_RESULT_TIMEOUT_S", 0.1)
    assert peer_error() is None


def test_error_file_is_read_by_torchrun(tmp_path):
    """torch takes the message and the time of the failure from it."""
    write_result(RankResult(1, "the disk is gone", waited=2.0), tmp_path / "error.json", 3)
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert failure.message["message"] == "the disk is gone" and abs(failure.timestamp - time.time()) < 60


def test_error_files_are_read_by_rank(tmp_path):
    write_rank_result(3, RankResult(1, "the disk is gone", is_peer_failure=True, waited=2.0), tmp_path)
    found = read_results(str(tmp_path))
    assert list(found) == [3] and found[3].timestamp > 0
    assert (found[3].code, found[3].message, found[3].is_peer_failure, found[3].waited) == (
        1,
        "the disk is gone",
        True,
        2.0,
    )


def test_interrupt_during_start_up_gives_a_result(capsys, monkeypatch):
    stopped = ModuleType("hasten.cli.main")
    stopped.__getattr__ = lambda name: (_ for _ in ()).throw(KeyboardInterrupt)
    monkeypatch.setitem(sys.modules, "hasten.cli.main", stopped)
    monkeypatch.setattr(sys, "argv", ["hasten", "train", "digits", "--json"])
    assert __main__.main() == 1
    captured = capsys.readouterr()
    assert captured.err == "hasten: interrupted\n" and json.loads(captured.out) == {"error": "interrupted"}
