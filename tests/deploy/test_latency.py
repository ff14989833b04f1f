"""Latency in turns: a call that takes twice as long is found to, and memory is that of the model."""

import time

import pytest

from hasten import RunError
from hasten.deploy.latency import compare_latency, peak_memory


def spin(seconds):
    def call():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return call


@pytest.mark.slow
@pytest.mark.timing
def test_ratio_of_a_call_that_takes_half_the_time():
    found = compare_latency(spin(4e-4), {"half": spin(2e-4), "same": spin(4e-4)}, seconds=0.3)
    ratio, seconds = found["half"]
    assert 1.6 < ratio.median < 2.4 and 1.5e-4 < seconds < 4e-4
    assert found["same"][0].low <= 1.1 and found["same"][0].high >= 0.9


def test_model_that_does_not_run_is_one_line(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(RunError, match="does not run") as failed:
        peak_memory(tmp_path / "model.onnx", {})
    assert "\n" not in str(failed.value)
