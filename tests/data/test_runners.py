"""Thread and process runners: errors, deaths, hangs, and no leftovers."""

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch

from hasten import RunError
from hasten.core.errors import HastenWarning
from hasten.data import Pipeline, arrays
from hasten.engine.error_messages import explain_error
from helpers.pipelines import BATCH, ROWS, Bad, Killing, hanging
from helpers.process import FORK, live_children, start_process

BOTH = [{"threads": 2}, {"processes": 2}]
TIMEOUT_S = 60.0  # seconds, for a busy machine; mostly unused


def numbers():
    return arrays(torch.arange(ROWS)).batch(BATCH)


class UnpicklableError(Exception):
    """An error that cannot be rebuilt from its message."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def test_killed_worker_is_named_and_replaced(tmp_path):
    with pytest.warns(
        HastenWarning, match=r"worker process \d+ was killed by SIGKILL.*memory.* batch 3 of the epoch; another process"
    ) as caught:
        batches = list(numbers().map(Killing(tmp_path, 1)).prefetch(processes=2))
    assert torch.cat(batches).tolist() == list(range(ROWS))
    assert len([each for each in caught if each.category is HastenWarning]) == 1 and not live_children()


@pytest.mark.parametrize("second", [0, -1], ids=["each dies", "so does the one in its place"])
def test_worker_killed_from_outside_loses_nothing(second):
    pipeline, seen = numbers().map(lambda batch: time.sleep(0.01) or batch).prefetch(4, processes=2), []
    with warnings.catch_warnings(action="ignore"):
        for number, batch in enumerate(pipeline):
            seen += batch.tolist()
            if number in (0, 3):
                os.kill(live_children()[0 if number == 0 else second].pid, signal.SIGKILL)
    assert seen == list(range(ROWS))


def test_batch_that_kills_two_workers_raises(tmp_path):
    with (
        pytest.warns(HastenWarning),
        pytest.raises(RunError, match=r"worker process \d+ was killed by SIGKILL.*so did the process before it"),
    ):
        list(numbers().map(Killing(tmp_path, 2)).prefetch(processes=2))
    assert not live_children()


def with_timeout(pipeline, seconds):
    """Yields batches; the timeout applies once three have arrived, as workers start slowly on a busy machine."""
    for number, batch in enumerate(pipeline, 1):
        if number == 3:
            object.__setattr__(pipeline.runner, "timeout", seconds)
        yield batch


@pytest.mark.parametrize("way", BOTH, ids=str)
def test_hang_of_a_map_raises(way):
    began = time.perf_counter()
    with pytest.raises(
        RunError, match=r"batch 3 of the epoch was not ready within 0.5 s: (a thread|worker process \d+) hangs"
    ):
        list(with_timeout(numbers().map(hanging).prefetch(**way, timeout=TIMEOUT_S), 0.5))
    assert time.perf_counter() - began < TIMEOUT_S, "it has not waited until the hang was over"
    assert not live_children()


@pytest.mark.parametrize("way", [{"batches": 0}, *BOTH], ids=str)
def test_map_raising_stop_iteration_does_not_end_the_epoch(way):
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(numbers().map(lambda batch: next(iter(()))).prefetch(**way))


@pytest.mark.parametrize("way", [{"batches": 0}, *BOTH], ids=str)
def test_map_error_arrives_after_the_earlier_batches(way):
    def raising(batch):
        if 50 in batch.tolist():
            raise KeyError("no such label")
        return batch

    seen = []
    with pytest.raises(KeyError, match="no such label"):
        for batch in numbers().map(raising).prefetch(**way):
            seen += batch.tolist()
    assert seen == list(range(3 * BATCH)) and not live_children()


@pytest.mark.parametrize("way", BOTH, ids=str)
def test_map_error_is_raised_while_another_worker_hangs(way):
    def one_of_each(batch):
        if 50 in batch.tolist():
            raise KeyError("no such label")
        return hanging(batch - 20)  # the batch after it

    began = time.perf_counter()
    with pytest.raises(KeyError, match="no such label"):
        list(with_timeout(numbers().map(one_of_each).prefetch(**way, timeout=TIMEOUT_S), 1.0))
    assert time.perf_counter() - began < TIMEOUT_S


@pytest.mark.parametrize("way", [{"batches": 0}, *BOTH], ids=str)
def test_map_error_contains_the_user_s_line(way):
    def raising(batch):
        return batch.no_such_column

    with pytest.raises(AttributeError) as caught:
        list(numbers().map(raising).prefetch(**way))
    line = raising.__code__.co_firstlineno + 1
    assert f"({Path(__file__).name} line {line})" in str(explain_error(caught.value, "step 1", BATCH))
    if "processes" in way:
        assert "in worker process" in caught.value.__notes__[0]


def test_unpicklable_error_is_reported():
    def raising(batch):
        raise UnpicklableError(1, 2)

    with pytest.raises(RunError, match="UnpicklableError: 1 and 2"):
        list(numbers().map(raising).prefetch(processes=1))


@pytest.mark.parametrize("way", [{"batches": 0}, *BOTH], ids=str)
def test_first_bad_row_raises_with_its_position(way):
    with pytest.raises(RunError, match=r"row 50 \(numbers.txt line 51\): no number; repair it, or .*skip_bad"):
        list(Pipeline(Bad([50])).batch(BATCH).prefetch(**way))


@pytest.mark.parametrize("way", BOTH, ids=str)
def test_runners_prefetch_no_more_than_configured(way, tmp_path):
    def noted(batch):
        (tmp_path / str(batch[0].item())).touch()
        return batch

    iterator = iter(arrays(torch.arange(400)).batch(4).map(noted).prefetch(3, **way))
    next(iterator)
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) <= 1 + 2 + 4  # returned, being computed, waiting (rounded up to the workers)
    iterator.close()


@pytest.mark.parametrize("way", BOTH, ids=str)
def test_abandoned_epoch_ends_its_workers(way):
    before = set(threading.enumerate())
    for _ in numbers().prefetch(**way):
        break
    assert not live_children() and not set(threading.enumerate()) - before


def test_any_nesting_is_sent_between_processes():
    def nested(batch):
        return {
            "numbers": (batch, batch.double()),
            "names": [f"row {n}" for n in batch.tolist()],
            "none": None,
            "empty": batch[:0],
        }

    for local, received in zip(numbers().map(nested), numbers().map(nested).prefetch(processes=1), strict=True):
        assert (
            torch.equal(local["numbers"][1], received["numbers"][1])
            and local["numbers"][1].dtype == received["numbers"][1].dtype
        )
        assert local["names"] == received["names"] and received["none"] is None and received["empty"].shape == (0,)


def test_batches_of_processes_may_be_kept_and_grow():
    def grown(batch):
        return batch[:, None].expand(-1, 10 * (1 + batch[0].item()))

    batches = list(numbers().map(grown).prefetch(processes=2))
    assert [batch[0, -1].item() for batch in batches] == list(range(0, ROWS, BATCH))


def parent(begun):
    for _ in (
        arrays(torch.zeros(100_000, 100))
        .batch(1000)
        .map(lambda batch: time.sleep(0.02) or batch)
        .prefetch(4, processes=3)
    ):
        begun.set()


def names_left(before: set[str], ours: set[int]) -> set[str]:
    """Returns new names in shared memory, without those that torch has passed to other processes."""
    names = set(os.listdir("/dev/shm")) - before
    return {name for name in names if not name.startswith("torch_") or int(name.split("_")[1]) in ours}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system shows no shared memory as files")
def test_killed_parent_leaves_no_process_or_shared_memory():
    before = set(os.listdir("/dev/shm"))
    process = start_process(parent, begun := FORK.Event())
    assert begun.wait(TIMEOUT_S)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.join()
    assert len(workers) == 3
    _, alive = psutil.wait_procs(workers, timeout=TIMEOUT_S)
    assert not alive, "workers outlive their parent"
    ours = {process.pid, *(worker.pid for worker in workers)}
    end = time.perf_counter() + TIMEOUT_S
    while left := names_left(before, ours):
        assert time.perf_counter() < end, left  # names of other programs on this machine disappear
        time.sleep(0.05)
