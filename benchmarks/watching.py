"""Cost of watching an untouched script: its steps, its start before torch, the scan for its model.

The script is a loop of tiny steps with one thread, in new processes that hasten watches. It takes out what hasten has
put into torch and puts it back, in turns, every 50 steps: the cost of a step is the difference in processor time of
neighboring stretches, to which neither the memory nor the neighbors of a process contribute. The start is that of a
Python process that imports nothing, prepared by hasten or not, in turns.

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
import time
import torch
from torch import nn
from torch.optim import optimizer as hooks

model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))


def seconds(steps):
    began = time.thread_time()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return (time.thread_time() - began) / steps


seconds(500)  # hasten searches for the model in the first steps
backward, call = torch.Tensor.backward, model._compiled_call_impl
registered = [(known, dict(known)) for known in (hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks)]
assert backward.__wrapped__ is not None and registered[1][1], "hasten watches"


def stretch(watched):
    torch.Tensor.backward = backward if watched else backward.__wrapped__
    model._compiled_call_impl = call if watched else None
    for known, its in registered:
        known.clear()
        known.update(its if watched else {})
    return seconds(50)


for pair in range(100):
    order = (True, False) if pair % 2 else (False, True)
    taken = {watched: stretch(watched) for watched in order}
    print("steps", taken[False], taken[True])
"""


def steps_in_turns(script: Path) -> list[tuple[float, float]]:
    """(seconds of a step that is not watched, seconds of one that is) of the stretches of one process."""
    with ScriptProcess(ScriptRef.of_command([sys.executable, str(script)]), {}) as process:
        process.wait_until_trained(120.0, None)
        for _ in process.train_in_chunks(None):
            pass
        lines = [line.split() for line in process.output().splitlines() if line.startswith("steps ")]
        return [(float(alone), float(watched)) for _, alone, watched in lines]


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
        steps = [pair for _ in range(options.rounds) for pair in steps_in_turns(script)]
        starts = in_turns(
            {"alone": lambda: seconds_of_start(plain), "watched": lambda: seconds_of_start(prepared)},
            4 * options.rounds,
        )
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(160)))
    scans = [seconds_of_scan() for _ in range(options.rounds)]
    del model
    step = interval(1e6 * (watched - alone) for alone, watched in steps)
    start = interval(1e3 * (b - a) for a, b in zip(starts["alone"], starts["watched"], strict=True))
    scan = interval(1e3 * seconds for seconds in scans)
    show(
        ("cost of watching", "alone", "watched", "difference"),
        [
            (
                "a step, µs",
                *(f"{1e6 * interval(times).median:.1f}" for times in zip(*steps, strict=True)),
                f"{step:.1f}",
            ),
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
