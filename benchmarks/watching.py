"""Cost of watching an untouched script: its steps, its start before torch, the scan for its model.

The same script, a loop of tiny steps, runs alone and watched by hasten in turns, each in a new process with one thread.
It prints the processor time of a step, the lower quartile over stretches of 250: other processes can only add to it.
Watching hands out the steps in requests, so that stretches are short compared with those. The start is that of a Python
process that imports nothing.

Figure: at most 10 µs a step, at most 10 ms before ``import torch``, at most 100 ms for the scan for models, which
looks through all objects of the process once, here beside a model of 160 layers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of the scripts, too

from _common import finish, in_turns, interval, parser, show
from torch import nn

from hasten.hosts.inside import models
from hasten.hosts.process import ScriptProcess, injected
from hasten.hosts.script_ref import ScriptRef

STEP_US, START_MS, SCAN_MS = 10.0, 10.0, 100.0
SCRIPT = """
import statistics, time
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))
stretches = []
for _ in range(40):
    began = time.thread_time()
    for _ in range(250):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    stretches.append((time.thread_time() - began) / 250)
print("step", statistics.quantiles(stretches, n=4)[0])
"""


def seconds_alone(script: Path) -> float:
    """Seconds of a step of the script in a process of its own."""
    return _step(subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout)


def seconds_watched(script: Path) -> float:
    """Seconds of a step of the script while hasten watches it."""
    with ScriptProcess(ScriptRef.of_command([sys.executable, str(script)]), {}) as process:
        process.wait_until_trained(120.0, None)
        for _ in process.train_in_chunks(None):
            pass
        return _step(process.output())


def _step(output: str) -> float:
    return float(next(line for line in output.splitlines() if line.startswith("step ")).split()[1])


def seconds_of_start(environment: dict[str, str]) -> float:
    """Seconds of a Python process that does nothing."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True, env=environment)
    return time.perf_counter() - began


def seconds_of_scan() -> float:
    """Seconds of the one scan for models that a script calls itself."""
    began = time.perf_counter()
    found = models._outermost_modules()
    assert found, "there is a model"
    return time.perf_counter() - began


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        script, session = Path(directory, "train.py"), Path(directory, "session")
        script.write_text(SCRIPT)
        session.mkdir()
        plain, prepared = dict(os.environ), injected(dict(os.environ), session)
        arms = {"alone": lambda: seconds_alone(script), "watched": lambda: seconds_watched(script)}
        steps = in_turns(arms, options.rounds)
        starts = in_turns(
            {"alone": lambda: seconds_of_start(plain), "watched": lambda: seconds_of_start(prepared)},
            4 * options.rounds,
        )
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(160)))
    scans = [seconds_of_scan() for _ in range(options.rounds)]
    del model
    step = interval(1e6 * (b - a) for a, b in zip(steps["alone"], steps["watched"], strict=True))
    start = interval(1e3 * (b - a) for a, b in zip(starts["alone"], starts["watched"], strict=True))
    scan = interval(1e3 * seconds for seconds in scans)
    show(
        ("cost of watching", "alone", "watched", "difference"),
        [
            ("a step, µs", *(f"{1e6 * interval(steps[arm]).median:.1f}" for arm in steps), f"{step:.1f}"),
            ("a start, ms", *(f"{1e3 * interval(starts[arm]).median:.1f}" for arm in starts), f"{start:.1f}"),
            ("the scan for models, ms", "", f"{scan.median:.1f}", f"{scan:.1f}"),
        ],
    )
    figure = (
        f"at most {STEP_US:.0f} µs a step, {START_MS:.0f} ms before torch, {SCAN_MS:.0f} ms for the scan; measured "
        f"{step:.1f} µs, {start:.1f} ms, {scan:.1f} ms"
    )
    reached = step.median <= STEP_US and start.median <= START_MS and scan.median <= SCAN_MS
    numbers = {"seconds_per_step": steps, "seconds_of_start": starts, "seconds_of_scan": scans}
    return finish(options, figure, reached, numbers)


if __name__ == "__main__":
    sys.exit(main())
