"""Kills ranks and nodes at random while a run continues, and counts how often it resumed and which samples were used.

``make chaos``, or ``PYTHONPATH=tests python -m helpers.chaos --kills 30`` on one machine; with ``--machines`` on two
nodes (network namespaces; needs root and iproute2). The run must end by itself with the same weights and log as an
undisturbed one, bit for bit; the weights count each sample, which must be used once per epoch.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from helpers import HELPERS
from helpers.netns_cluster import lose, missing, processes_on, start_on, two_nodes
from helpers.process import children, environment

HANG_TIMEOUT_S = 600.0  # a run without a step for that long counts as hanging
RESTARTS = ("--max-restarts", "999")


@dataclass
class ChaosOutcome:
    """Outcome of a disturbed run."""

    ranks: int = 0  # killed
    machines: int = 0
    recoveries: int = 0
    stderr: list[str] = field(default_factory=list)
    seconds: float = 0.0


def train_words(task: str, out: Path) -> list[str]:
    return ["train", f"rank_tasks.py:{task}", "--out", str(out), "--checkpoint-every", "0.5s"]


def chaos(directory: Path, kills: int, task: str, machines: bool, dice: random.Random) -> ChaosOutcome:
    """Runs into ``directory/run`` while ranks, and nodes if there are two, are killed that many times.

    Raises:
        AssertionError: the run does not end by itself with exit code 0.
    """
    shutil.copy(HELPERS / "rank_tasks.py", directory)
    outcome, began = ChaosOutcome(), time.monotonic()
    begin = _on_machine if machines else _on_this_machine
    with two_nodes() if machines else nullcontext():
        jobs = [begin(place, task, directory, outcome) for place in range(1 + machines)]
        try:
            for _ in range(kills):
                _wait_for_a_step(directory / "run", jobs)
                # between a step and the next checkpoint, while one is written, at the start, at the end
                time.sleep(dice.uniform(0.0, 2.5))
                if all(job.poll() == 0 for job in jobs):
                    break
                place = dice.randrange(len(jobs))
                if machines and dice.random() < 0.5:
                    lose(place)
                    jobs[place].wait()
                    outcome.machines += 1
                    time.sleep(dice.uniform(0.0, 3.0))
                    jobs[place] = begin(place, task, directory, outcome)
                elif ranks := ranks_of(jobs[place], place if machines else None):
                    with suppress(ProcessLookupError):
                        os.kill(dice.choice(ranks), signal.SIGKILL)
                        outcome.ranks += 1
            codes = [job.wait(HANG_TIMEOUT_S) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
    outcome.seconds = time.monotonic() - began
    outcome.recoveries = sum("restarting all ranks" in line or "continue together" in line for line in outcome.stderr)
    assert codes == [0] * len(jobs), (codes, outcome.stderr)
    return outcome


def _on_this_machine(place: int, task: str, directory: Path, outcome: ChaosOutcome) -> subprocess.Popen:
    argv = [*train_words(task, directory / "run"), "--processes", "2", *RESTARTS, "--quiet"]
    job = subprocess.Popen(
        [sys.executable, "-m", "hasten", *argv],
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return _collect_stderr(job, outcome)


def _on_machine(place: int, task: str, directory: Path, outcome: ChaosOutcome) -> subprocess.Popen:
    return _collect_stderr(
        start_on(place, *train_words(task, directory / "run"), cwd=directory, launch=("--nnodes", "2", *RESTARTS)),
        outcome,
    )


def _collect_stderr(job: subprocess.Popen, outcome: ChaosOutcome) -> subprocess.Popen:
    """Collects the standard error of a job line by line."""

    def collect() -> None:
        with job.stderr:
            outcome.stderr.extend(job.stderr)

    threading.Thread(target=collect, daemon=True).start()
    return job


def ranks_of(job: subprocess.Popen, machine: int | None) -> list[int]:
    """Returns the process IDs of all ranks."""
    processes = processes_on(machine) if machine is not None else children(job.pid)
    return [pid for pid in processes if "RANK" in environment(pid)]


def _wait_for_a_step(out: Path, jobs: list[subprocess.Popen]) -> None:
    """Waits until the run has recorded another step, or has ended."""
    times, until = out / "times.jsonl", time.monotonic() + HANG_TIMEOUT_S
    size = times.stat().st_size if times.exists() else 0
    while not (times.exists() and times.stat().st_size != size) and not all(job.poll() is not None for job in jobs):
        assert time.monotonic() < until, f"no step for {HANG_TIMEOUT_S:.0f} s"
        time.sleep(0.01)


def compare_with_undisturbed(out: Path, undisturbed: Path, passes: int) -> dict[str, bool]:
    """Returns which properties of the undisturbed run the disturbed one has."""
    weights, others = (load_file(each / "model.safetensors") for each in (out, undisturbed))
    return {
        "weights equal, bit for bit": all(weights[name].equal(others[name]) for name in others),
        "log equal, byte for byte": (out / "log.jsonl").read_bytes() == (undisturbed / "log.jsonl").read_bytes(),
        "every sample counted once per epoch": bool((weights["seen"] == passes).all()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--machines", action="store_true", help="two nodes, which are killed, too")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    if options.machines and (why := missing()):
        print(why)
        return 2
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        outcome = chaos(directory, options.kills, "counting_for_long", options.machines, random.Random(options.seed))
        chaos(run_directory_of(directory, "undisturbed"), 0, "counting_for_long", False, random.Random())
        good = compare_with_undisturbed(directory / "run", directory / "undisturbed/run", 60)
    print(
        f"seed {options.seed}: {outcome.ranks} ranks and {outcome.machines} machines killed, "
        f"{outcome.recoveries} times resumed, ended by itself in {outcome.seconds:.0f} s"
    )
    for what, holds in good.items():
        print(f"  {what}: {'yes' if holds else 'NO'}")
    return 0 if all(good.values()) else 1


def run_directory_of(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


if __name__ == "__main__":
    sys.exit(main())
