"""A run that is killed at random moments and resumed until it is done."""

import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import hasten
from helpers import engine_tasks
from helpers.process import start_process, wait_until_it_trains

METHOD = f"{engine_tasks.__file__}:Averaging"
TASK = f"{Path(engine_tasks.__file__)}:longer"
FRESH = """
import sys, warnings, torch
torch.set_num_threads(1)
import hasten
warnings.simplefilter("error")
# in the directory of the task, not imported here
warnings.filterwarnings("ignore", ".* has been edited|no checkpoint was written yet")
hasten.train(sys.argv[1], sys.argv[2], out=sys.argv[3], resume=True, device="cpu", checkpoint_seconds=0)
"""


def train_until_killed(out: Path) -> None:
    def wait(records):  # near the end, so that it can be killed
        if records[-1]["step"] >= 70:
            time.sleep(60)

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "there is no run|no checkpoint was written yet")
    hasten.train(TASK, METHOD, out=out, resume=True, device="cpu", checkpoint_seconds=0, observers=[wait])


def kill_and_resume(directory: Path, kills: int, seed: int) -> None:
    """Kills the run ``kills`` times, then finishes it in a new interpreter."""
    rng, out = random.Random(seed), directory / "killed"
    for _ in range(kills):
        process = start_process(train_until_killed, out)
        wait_until_it_trains(process, out)
        time.sleep(rng.random() * 0.05)
        assert process.is_alive(), "the run ended before it could be killed"
        process.kill()
        process.join()
    assert subprocess.run([sys.executable, "-c", FRESH, TASK, METHOD, str(out)]).returncode == 0
