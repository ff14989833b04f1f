"""malloc_tuning: fewer page faults, the same bits, and the former settings afterwards."""

import platform
import resource
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from hasten.core.run_context import RunContext
from hasten.methods.malloc_tuning import MallocTuning

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this machine's C library is not glibc")

FAULTS = """
import resource, torch
from contextlib import nullcontext
from hasten.core.run_context import RunContext
from hasten.methods.malloc_tuning import MallocTuning
torch.set_num_threads(1)
for context in nullcontext, MallocTuning().process_context(nullcontext, RunContext(torch.device("cpu"), None)):
    with context():
        for step in range(14):
            if step == 4:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(10 << 20)  # 40 MiB
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@needs_glibc
def test_large_tensors_cause_no_further_page_faults():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    without, with_it = map(int, done.stdout.split())
    assert with_it < without / 4


@needs_glibc
def test_memory_is_returned_to_the_system_afterwards():
    with MallocTuning().process_context(nullcontext, RunContext(torch.device("cpu"), None))():
        torch.ones(16 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(16 << 20)
    # page faults occur again, with or without huge pages
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 3 * 32


def test_run_on_a_gpu_has_no_effect():
    run = RunContext(torch.device("cuda"), None)
    assert MallocTuning().process_context(nullcontext, run) is nullcontext
    assert "GPU" in run.no_effect[0][1]
