"""Memory and CPUs that a process has and may use."""

import subprocess
import sys

import psutil
import pytest
import torch

from hasten.engine.resources import peak_memory

MIB = 1 << 20


def test_peak_memory_remembers_what_was_freed():
    before = psutil.Process().memory_info().rss
    torch.ones(512 * MIB, dtype=torch.uint8)  # freed at once
    assert peak_memory() > before + 500 * MIB


@pytest.mark.slow
def test_peak_memory_of_a_started_process_excludes_its_parent():
    """``getrusage`` counts what the parent held when it started the process."""
    held = torch.ones(1024 * MIB, dtype=torch.uint8)
    script = "from hasten.engine.resources import peak_memory; print(peak_memory())"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert 0 < int(printed) < held.nbytes
