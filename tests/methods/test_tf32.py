"""tf32: on a GPU it sets two flags and restores them; without a GPU it has no effect."""

import subprocess
import sys

import pytest
import torch

from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.methods.tf32 import _already_set


def test_run_without_gpu_has_no_effect(perceptron, trained):
    usual, tf32 = trained(perceptron()), trained(perceptron(), "tf32")
    assert tf32.run.no_effect == [("tf32", "TF32 needs an NVIDIA GPU from Ampere on; this run is on cpu")]
    assert usual.same_bits(tf32)


@pytest.mark.gpu
def test_flags_are_set_during_the_run_and_restored(perceptron):
    torch.backends.cudnn.allow_tf32 = False
    program = build(perceptron(), [make_method("tf32")], device="cuda")
    with pytest.raises(KeyError), program.process_context():
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
        raise KeyError
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    torch.backends.cudnn.allow_tf32 = True


def test_flag_that_is_set_already_has_no_effect():
    torch.set_float32_matmul_precision("highest")
    assert _already_set() is None
    torch.set_float32_matmul_precision("high")
    try:
        assert _already_set() == "TF32 is enabled already"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.slow
def test_precision_set_by_the_newer_api_is_unchanged():
    """In a process of its own: once the newer flags are set, torch refuses to read the older ones."""
    code = (
        "import torch; from hasten.methods.tf32 import _already_set; torch.backends.fp32_precision = 'tf32'; "
        "print(_already_set())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "set already, through torch.backends.fp32_precision" in done.stdout, done.stderr
