"""Compares the latency of deployed models in turns, and takes their memory in processes of their own."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from timeit import timeit

import torch

from hasten.benchmarking.ratio import Ratio, ratio_of
from hasten.core.errors import RunError

BLOCK_S = 0.004  # a block of calls takes at least this long
WARM_UP_S = 0.05
ALPHA = 0.005  # about ten calls are compared with the reference: one of twenty comparisons may have a wrong verdict

Call = Callable[[], object]

_PEAK = """
import json, sys
import numpy, onnxruntime

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

open("/proc/self/clear_refs", "w").write("5")  # the peak so far is that of the imports
before = kilobytes("VmRSS")
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 3
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
shapes = json.loads(sys.argv[2])
session.run(None, {name: numpy.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()})
print(1024 * (kilobytes("VmHWM") - before))
"""


def compare_latency(reference: Call, calls: Mapping[str, Call], seconds: float) -> dict[str, tuple[Ratio, float]]:
    """Times calls in turns with a reference.

    Args:
        reference: What the others are compared with.
        calls: The others by name.
        seconds: Time for all of it, approximately; at least 12 blocks of each are timed.

    Returns:
        For each name ("": the reference): (seconds of the reference / seconds of the call, median seconds of the call).
    """
    arms = {"": reference, **calls}
    counts = {name: _calls_per_block(call) for name, call in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    began, order = time.perf_counter(), list(arms)
    while len(times[""]) < 12 or time.perf_counter() - began < seconds:
        for name in order:
            times[name].append(timeit(arms[name], number=counts[name]) / counts[name])
        order = [*order[1:], order[0]]  # no arm always follows the same one
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    return {name: (ratio_of(times[""], times[name], ALPHA), medians[name]) for name in arms}


def peak_memory(model: Path, inputs: Mapping[str, torch.Tensor]) -> int:
    """Bytes that loading an ONNX model and one call add to the peak of a new process; RunError if that fails."""
    shapes = {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in inputs.items()}
    command = [sys.executable, "-c", _PEAK, str(model), json.dumps(shapes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise RunError(f"the model {model} does not run: {reason:.200}")
    return int(done.stdout)


def _calls_per_block(call: Call) -> int:
    """Warms up by calling for WARM_UP_S; returns how many calls take about BLOCK_S, at least 1."""
    began, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - began < WARM_UP_S:
        call()
        count += 1
    return max(1, round(BLOCK_S * 3 / timeit(call, number=3)))
