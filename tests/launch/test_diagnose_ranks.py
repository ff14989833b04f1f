"""``hasten diagnose`` of several processes: planted delays are attributed to their rank and cause."""

import json
import shutil
import subprocess
import sys
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from hasten.benchmarking.ratio import Ratio
from hasten.core.errors import ConfigurationError, PeerFailure, RunError
from hasten.engine.resources import peak_memory
from hasten.profiling.communication import describe_job_diagnosis
from hasten.profiling.rank_profile import DDP_ONLY, diagnose_ranks
from hasten.profiling.stragglers import find_straggler, rank_phase_times
from hasten.reporting.terminal_ranks import ranks_answer
from helpers import HELPERS, rank_tasks, tower_tasks, waiting_tasks
from helpers.netns_cluster import missing, run_on_both, two_nodes
from helpers.ranks import run_ranks
from helpers.waiting_tasks import LATE

WHY_NOT = missing()


@pytest.fixture
def directory(tmp_path) -> Path:
    for name in ("rank_tasks.py", "waiting_tasks.py"):
        shutil.copy(HELPERS / name, tmp_path)
    return tmp_path


def diagnosed(task, world: int = 2) -> dict:
    """Returns the result of rank 0; all ranks have the same."""
    found = run_ranks(world, lambda rank: diagnose_ranks(task, budget=1.0, device="cpu"))
    for each in found:
        if isinstance(each, Exception):
            raise each
    results = [{name: each[name] for name in ("verdict", "ranks", "straggler", "ceilings")} for each in found]
    assert all(each == results[0] for each in results)
    return found[0]


@pytest.mark.slow
def test_free_memory_of_ranks_is_enough_for_one_more_process():
    """Each rank reports its share of the free memory."""

    def with_little(rank: int) -> dict:
        share = int(1.3 * peak_memory())
        with patch("hasten.engine.memory.free_memory", lambda: share):
            return diagnose_ranks(rank_tasks.samples, budget=0.5, device="cpu")

    assert all(each["speedup"] and "speedup" not in each["not_measured"] for each in run_ranks(2, with_little))


def test_steps_that_differ_from_short_blocks_are_reported():
    def of(recipe: str):
        return run_ranks(
            2, lambda rank: diagnose_ranks(rank_tasks.task(epochs=10**6), recipe=recipe, budget=0.05, device="cpu")
        )

    for recipe, message in (
        ("local_sgd:warmup_steps=20", "the first 20 steps of"),
        ("local_sgd:period=40000", "synchronizes every 40000 steps"),
    ):
        for report in of(recipe):
            assert isinstance(report, RunError) and message in str(report), report


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "cause", "works"),
    [
        (waiting_tasks.late_data, "data", False),
        (waiting_tasks.late_stream, "data", False),
        (waiting_tasks.slower_computation, "compute", True),
        (waiting_tasks.sleeping_rank, "compute", False),
    ],
)
def test_late_rank_is_named_with_its_cause(task, cause, works):
    found = diagnosed(task)
    straggler = found["straggler"]
    assert straggler["rank"] == 1 and straggler["cause"] == cause, straggler
    assert 0.7 * LATE < straggler["seconds"] < 10 * LATE, "a busy machine stretches work"
    first, second = found["ranks"]
    assert first["wait_seconds"] > 0.7 * LATE > 3 * second["wait_seconds"] and second["last_fraction"] > 0.8
    assert (second["cpu_seconds"] - first["cpu_seconds"] > 0.7 * LATE) == works
    phases = {"data": "input", "compute": "forward"}
    assert found["skew"][phases[cause]] > 0.7 * LATE
    assert found["verdict"].startswith("Rank 1 makes the others wait")


@pytest.mark.timing
@pytest.mark.slow
def test_late_rank_of_three_is_named():
    assert diagnosed(waiting_tasks.late_data, world=3)["straggler"]["rank"] == 1


@pytest.mark.timing
@pytest.mark.slow
def test_communication_bound_job_is_named():
    found = diagnosed(waiting_tasks.communication_bound)
    exchange = found["communication"]
    assert (
        exchange["bytes"] == 8_000_112 and exchange["share"] > 0.5 and exchange["exposed"] > 0.5 * exchange["seconds"]
    )
    assert found["ceilings"]["exchange"]["median"] > 2
    bounds = {row["method"]: row["bound"] for row in found["advice"]}
    assert bounds["ddp"] == pytest.approx(found["ceilings"]["exchange"]["median"])
    assert "distributed" in found["facts"]


@pytest.mark.timing
@pytest.mark.slow
def test_compute_bound_job_is_named():
    found = diagnosed(waiting_tasks.compute_bound)
    assert found["communication"]["share"] < 0.3
    assert found["speedup"]["median"] == pytest.approx(1.0, abs=0.3), "a sleep is as long for half of the batch"
    assert found["efficiency"] == pytest.approx(found["speedup"]["median"] / 2)


@pytest.mark.slow
def test_ranks_whose_exchange_cannot_be_disabled_are_reported():
    """The slow rank is then unknown, which is reported; everything else is measured."""
    found, _ = run_ranks(
        2,
        lambda rank: diagnose_ranks(
            rank_tasks.samples, recipe=f"{HELPERS}/averaging.py:Averaging", budget=1.0, device="cpu"
        ),
    )
    assert (
        found["ceilings"].keys() == {"input"}
        and found["straggler"] is None
        and found["communication"]["exposed"] is None
    )
    assert found["not_measured"]["exchange"] == DDP_ONLY
    assert all(row["phases"]["forward"] > 0 for row in found["ranks"]) and found["speedup"]["median"] > 0
    Console(file=StringIO()).print(ranks_answer(found))


def blocks(*waits: list[float], forward: tuple[float, ...] = (), cpu: tuple[float, ...] = ()) -> list[dict]:
    """Returns what ranks report that wait this long in each step of a block."""
    usual = dict.fromkeys(("input", "copy", "forward", "backward", "grad_transform", "optimizer_step"), 0.01)
    own = [
        {"wait_seconds": each, "phases": usual | {"forward": longer}, "cpu": busy}
        for each, longer, busy in zip_longest(waits, forward, cpu, fillvalue=0.01)
    ]
    return [{"barrier": [each], "plain": [each]} for each in own]


def test_ranks_late_in_turns_are_no_stragglers():
    """The ranks are late in turns: both wait, and neither is a straggler."""
    measured = blocks([0.0, 0.02, 0.0, 0.02], [0.02, 0.0, 0.02, 0.0])
    rows = rank_phase_times(measured)
    assert [row["wait_seconds"] for row in rows] == [0.01, 0.01] and [row["last_fraction"] for row in rows] == [
        0.5,
        0.5,
    ]
    assert find_straggler(rows, measured, 0.05, [1e-3, 1e-3], 0.0) is None


@pytest.mark.parametrize(
    ("cpu", "message"),
    [
        ((0.02, 0.04), "as much more CPU time: it has more to compute"),
        ((0.02, 0.02), "without more CPU time: the model waits"),
    ],
)
def test_slow_rank_with_more_work_or_less_cpu_is_distinguished(cpu, message):
    measured = blocks([0.02] * 4, [0.0] * 4, forward=(0.01, 0.03), cpu=cpu)
    straggler = find_straggler(rank_phase_times(measured), measured, 0.1, [1e-3, 1e-3], 0.0)
    assert straggler["cause"] == "compute" and message in straggler["sentence"]
    assert straggler["sentence"].startswith(
        "rank 1 makes the others wait 20.0 ms a step (20%): its forward and backward pass take longer (40.0 ms, 20.0"
    )


def test_late_rank_without_a_visible_cause_is_reported():
    measured = blocks([0.02] * 4, [0.001] * 4)
    straggler = find_straggler(rank_phase_times(measured), measured, 0.05, [1e-3, 1e-3], 0.0)
    assert (straggler["rank"], straggler["cause"]) == (1, "unknown") and straggler["seconds"] == pytest.approx(0.019)


@pytest.mark.parametrize(
    ("links", "rank"), [([1e-3, 8e-3, 8e-3, 1e-3], 2), ([8e-3, 1e-3, 1e-3, 8e-3], 0), ([8e-3, 1e-3, 1e-3, 1e-3], None)]
)
def test_slow_link_is_attributed_to_the_rank_between_two_slow_links(links, rank):
    measured = blocks(*([0.0] * 4 for _ in links))
    straggler = find_straggler(rank_phase_times(measured), measured, 0.05, links, exposed=0.02)
    assert (straggler and (straggler["rank"], straggler["cause"])) == (None if rank is None else (rank, "link"))


ROW = {"phases": dict.fromkeys(("input", "copy", "forward", "backward", "grad_transform", "optimizer_step"), 0.01)}
TALK = {"exposed": 0.05, "hidden": 0.01, "share": 0.5}
LATE_RANK = {"share": 0.4, "sentence": "rank 1 is late"}


@pytest.mark.parametrize(
    ("straggler", "exchange", "replayed", "waits", "message"),
    [
        (
            None,
            Ratio(2.0, 1.9, 2.1),
            Ratio(1.0, 0.9, 1.1),
            0.0,
            "Averaging the gradients makes a step 50.0 ms longer, 50% of it, and 10.0 ms more",
        ),
        (
            None,
            Ratio(1.2, 1.1, 1.3),
            Ratio(3.0, 2.9, 3.1),
            0.0,
            "All ranks wait for their next batch; if batches came for free",
        ),
        (
            None,
            Ratio(2.0, 0.9, 4.0),
            Ratio(1.0, 0.9, 1.1),
            0.0,
            "Each rank's own arithmetic, forward and backward, takes 20% of a step",
        ),
        (
            None,
            Ratio(1.0, 0.9, 1.1),
            Ratio(1.0, 0.9, 1.1),
            0.03,
            "The ranks wait for each other, 30.0 ms a step (30%), each time for another rank",
        ),
        (LATE_RANK, Ratio(2.0, 1.9, 2.1), Ratio(1.0, 0.9, 1.1), 0.03, "Rank 1 is late."),
        (LATE_RANK, Ratio(9.0, 8.9, 9.1), Ratio(1.0, 0.9, 1.1), 0.03, "Averaging the gradients"),
    ],
)
def test_largest_cause_is_named(straggler, exchange, replayed, waits, message):
    assert describe_job_diagnosis(
        straggler, {"exchange": exchange, "input": replayed}, TALK, [ROW | {"wait_seconds": waits}], 0.1
    ).startswith(message)


def test_rank_with_a_bad_batch_reports_it():
    answers = run_ranks(2, lambda rank: diagnose_ranks(rank_tasks.not_a_number, budget=3.0, device="cpu"))
    assert {type(each) for each in answers} == {PeerFailure, RunError}, answers
    assert any("the batch itself holds NaN" in str(each) for each in answers), answers


@pytest.mark.slow
def test_pipeline_ranks_are_diagnosed():
    answers = run_ranks(2, lambda rank: diagnose_ranks(tower_tasks.tower, recipe="pipeline", budget=1.0, device="cpu"))
    assert all(isinstance(answer, dict) for answer in answers), answers
    assert all(rank["phases"]["forward"] + rank["phases"]["backward"] > 0 for rank in answers[0]["ranks"])
    rows = answers[0]["advice"] + answers[0]["not_advised"]
    assert rows and not {"ddp", "zero", "branch_parallel"}.intersection(row["method"] for row in rows), (
        "they would take its place"
    )


def test_single_process_with_a_distributed_request_is_refused():
    with pytest.raises(ConfigurationError, match="a single process has no other ranks to profile"):
        diagnose_ranks(rank_tasks.samples, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (
            "diagnose rank_tasks.py:raising --processes 2",
            1,
            "hasten: rank 1: the dataset raised at sample 226: OSError: the disk is gone",
        ),
        (
            "diagnose waiting_tasks.py:few --processes 2",
            2,
            "hasten: 2 processes cannot share a batch of 1 samples",
        ),
        (
            "diagnose waiting_tasks.py:no_batches --processes 2",
            2,
            "hasten: Task(train_data=) must be",
        ),
        (
            "launch --nproc-per-node 1 -- diagnose rank_tasks.py:samples",
            2,
            "hasten: a single process has no other ranks to profile",
        ),
    ],
)
def test_invalid_request_is_one_line(directory, argv, code, message):
    done = subprocess.run(
        [sys.executable, "-m", "hasten", *argv.split(), "--quiet"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code and done.stdout == "" and done.stderr.startswith(message), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.timing
@pytest.mark.slow
def test_terminal_output_has_a_table_of_ranks(directory):
    argv = "launch --nproc-per-node 2 --quiet -- diagnose waiting_tasks.py:late_data --budget 2s"
    done = subprocess.run(
        [sys.executable, "-m", "hasten", *argv.split()], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for what in (
        "Rank 1 makes the others wait",
        "  rank   input",
        "  skew",
        "no exchange",
        "2 processes",
        "could pay",
    ):
        assert what in done.stdout, done.stdout
    assert done.stdout.count("Rank 1 makes") == 1 and done.stderr == ""


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_slow_network_makes_communication_the_largest_part(directory):
    """Eight megabytes of gradients take 0.3 s at 200 Mbit/s, each way."""
    shares = []
    for megabits in (None, 200):
        with two_nodes(megabits):
            first, second = run_on_both(
                directory, "diagnose", "waiting_tasks.py:communication_and_compute", "--json", "--budget", "20s"
            )
        assert first[0] == 0 and second[1] == "", (first, second)
        found = json.loads(first[1])
        shares.append(found["communication"]["share"])
    assert shares[1] > 0.8 > shares[0], shares
    assert found["communication"]["seconds"] > 0.25
    assert 15e6 < found["links"][0]["bytes"] / found["links"][0]["seconds"] < 40e6
