"""The pool of ranks that tests share: reused, reset between uses, replaced after a failure with unknown state."""

import os
import time

import pytest
import torch

from hasten.core.errors import ConfigurationError, RunError
from helpers import ranks
from helpers.ranks import run_ranks


def pid(rank: int) -> int:
    return os.getpid()


def state(rank: int) -> tuple:
    return os.getpid(), torch.get_default_dtype(), os.environ.get("LEFT"), torch.rand(1).item()


def leaves_state(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT"] = "behind"
    torch.rand(7)


def refuses(rank: int) -> None:
    raise ConfigurationError("as hasten refuses")


def fails(rank: int) -> None:
    raise RunError("as hasten fails")


def raises(rank: int) -> None:
    raise OSError("anything else")


def test_run_ranks_another_call_uses_the_same_processes_reset():
    before = run_ranks(2, state)
    run_ranks(2, leaves_state)
    assert run_ranks(2, state) == before and os.getpid() not in (each[0] for each in before)


def test_run_ranks_local_function_is_sent_by_value():
    seen = 3
    assert run_ranks(2, lambda rank, factor: rank * factor + seen, 10) == [3, 13]


def test_run_ranks_refusal_is_returned_and_the_pool_reused():
    before = run_ranks(2, pid)
    assert [str(error) for error in run_ranks(2, refuses)] == ["as hasten refuses"] * 2
    assert run_ranks(2, pid) == before


def test_run_ranks_failure_is_returned_and_the_pool_replaced():
    """Its process group may not be collected: threads of gloo may need the interpreter that waits for them."""
    before = run_ranks(2, pid)
    assert [str(error) for error in run_ranks(2, fails)] == ["as hasten fails"] * 2
    assert not set(run_ranks(2, pid)) & set(before)


def test_run_ranks_other_error_is_returned_and_the_pool_replaced():
    before = run_ranks(2, pid)
    answers = run_ranks(2, raises)
    assert all(type(error) is RuntimeError and "OSError: anything else" in str(error) for error in answers)
    assert not set(run_ranks(2, pid)) & set(before)


@pytest.mark.parametrize("one", [0, 1])
def test_run_ranks_rank_that_dies_is_named_and_the_pool_replaced(one):
    before = run_ranks(2, pid)
    with pytest.raises(AssertionError, match=f"rank {one} of 2 has died"):
        run_ranks(2, lambda rank: os._exit(1) if rank == one else None)
    assert not set(run_ranks(2, pid)) & set(before)


def test_run_ranks_rank_that_hangs_is_reported_and_the_pool_replaced(monkeypatch):
    monkeypatch.setattr(ranks, "TIMEOUT_S", 1.0)
    with pytest.raises(AssertionError, match="only ranks"):
        run_ranks(2, lambda rank: time.sleep(60 * rank))
    monkeypatch.undo()
    assert run_ranks(2, lambda rank: rank) == [0, 1]
