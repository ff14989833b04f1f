"""``kill -9`` at any instant, during a checkpoint too: taken up again, the run ends with the same bits."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import engine_tasks
import pytest

import hasten

METHOD = f"{engine_tasks.__file__}:Averaging"
TASK = f"{Path(engine_tasks.__file__)}:longer"
RUN = """
import sys, time, torch
torch.set_num_threads(1)
import hasten

def wait(records):  # near the end, for whoever kills it
    if records[-1]["step"] >= 70:
        time.sleep(60)

hasten.train(
    sys.argv[1], sys.argv[2], out=sys.argv[3], resume=True, device="cpu", checkpoint_seconds=0,
    observers=[wait] if sys.argv[4] == "to be killed" else [],
)
"""
QUIET = ("-W", "error", "-W", "ignore:there is no run", "-W", "ignore:no checkpoint was written yet")


def start(out: Path, end: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *QUIET, "-c", RUN, TASK, METHOD, str(out), end])


def killed_and_taken_up(folder: Path, kills: int, seed: int) -> None:
    """Runs until it is done, killed ``kills`` times on the way."""
    chance, out = random.Random(seed), folder / "killed"
    for _ in range(kills):
        process = start(out, "to be killed")
        while not (out / "times.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        began = (out / "times.jsonl").stat().st_size
        while process.poll() is None and (out / "times.jsonl").stat().st_size == began:
            time.sleep(0.001)  # until it trains
        time.sleep(chance.random() * 0.05)
        assert process.poll() is None, "the run was over before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(out, "left alone").wait() == 0


def compare_with_undisturbed(folder: Path, kills: int, seed: int) -> None:
    hasten.train(TASK, METHOD, out=folder / "undisturbed", device="cpu")
    killed_and_taken_up(folder, kills, seed)
    for name in ("model.safetensors", "log.jsonl"):
        assert (folder / "killed" / name).read_bytes() == (folder / "undisturbed" / name).read_bytes(), name


def test_two_kills(tmp_path):
    compare_with_undisturbed(tmp_path, 2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(4))
def test_twenty_kills(round_, tmp_path):
    compare_with_undisturbed(tmp_path, 5, seed=round_)
