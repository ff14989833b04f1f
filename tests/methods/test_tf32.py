"""tf32: on a GPU it sets two flags and restores them; without a GPU it has no effect."""

import pytest
import torch

from hasten.engine.plan import build
from hasten.engine.registry import make_method


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
