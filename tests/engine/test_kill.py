"""``kill -9`` at any instant, during a checkpoint too: taken up again, the run ends with the same bits."""

import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import engine_tasks
import pytest
from forked import forked, wait_until_it_trains

import hasten

METHOD = f"{engine_tasks.__file__}:Averaging"
TASK = f"{Path(engine_tasks.__file__)}:longer"
FRESH = """
import sys, warnings, torch
torch.set_num_threads(1)
import hasten
warnings.simplefilter("error")
warnings.filterwarnings("ignore", ".* has been edited|no checkpoint was written yet")  # this test lies beside the task, and is not imported here
hasten.train(sys.argv[1], sys.argv[2], out=sys.argv[3], resume=True, device="cpu", checkpoint_seconds=0)
"""


def to_be_killed(out: Path) -> None:
    def wait(records):  # near the end, for whoever kills it
        if records[-1]["step"] >= 70:
            time.sleep(60)

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "there is no run|no checkpoint was written yet")
    hasten.train(TASK, METHOD, out=out, resume=True, device="cpu", checkpoint_seconds=0, observers=[wait])


def killed_and_taken_up(folder: Path, kills: int, seed: int) -> None:
    """Runs until it is done, killed ``kills`` times on the way; by a fresh process in the end, which knows what lies on the disk."""
    chance, out = random.Random(seed), folder / "killed"
    for _ in range(kills):
        process = forked(to_be_killed, out)
        wait_until_it_trains(process, out)
        time.sleep(chance.random() * 0.05)
        assert process.is_alive(), "the run was over before it could be killed"
        process.kill()
        process.join()
    assert subprocess.run([sys.executable, "-c", FRESH, TASK, METHOD, str(out)]).returncode == 0


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
