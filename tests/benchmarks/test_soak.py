"""The data soak detects what it looks for, memory shared by forked workers and unused names; its short form passes."""

import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import data_soak

    yield data_soak
    for name in ("data_soak", "_common"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_held_includes_memory_shared_with_forked_workers(soak):
    before = soak.held()
    leak = numpy.ones(64 << 20, numpy.uint8)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        assert 0.9 * leak.nbytes < soak.held() - before < 1.5 * leak.nbytes, "once, not never and not twice"
    finally:
        worker.kill()
        worker.join()


def test_growth_compares_second_and_last_quarter(soak):
    assert soak.growth_of([50, 90, 100, 100, 101, 102, 110, 110]) == pytest.approx((100, 110, 0.1))
    assert soak.growth_of([1] * 7) is None


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs Linux")
def test_unused_finds_names_without_a_process(soak):
    path = soak.SHARED / f"hasten-test-{os.getpid()}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert soak.unused({path.name}) == []
        assert soak.unused({path.name}) == [path.name]
    finally:
        path.unlink()


def run_soak(directory, *length):
    """Returns (exit code, output, raw numbers)."""
    command = [sys.executable, str(BENCHMARKS / "data_soak.py"), *length, "--json", str(directory / "soak.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1) and "Figure: " in done.stdout, done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr, json.loads((directory / "soak.json").read_text())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_soak_quick_passes(tmp_path):
    """If the epochs are too few to tell growth from noise, as on a busy machine, more are run: a leak only grows."""
    for length in (["--quick"], ["--minutes", "1"]):
        code, output, result = run_soak(tmp_path, *length)
        assert result["wrong"] == 0 < result["noticed"] <= result["deaths"] and not any(result["left"].values()), output
        if code == 0:
            return
    pytest.fail(output)
