"""tf32: on a GPU it sets two flags and puts them back; without one it says so."""

import pytest
import torch

from hasten.engine.find import make_method
from hasten.engine.plan import build


def test_without_a_gpu_it_says_so_and_changes_nothing(perceptron, trained):
    usual, tf32 = trained(perceptron()), trained(perceptron(), "tf32")
    assert tf32.run.idle == [("tf32", "TF32 needs an NVIDIA GPU from Ampere on; this run is on cpu")]
    assert usual.same_bits(tf32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_flags_are_set_inside_and_restored_outside(perceptron):
    torch.backends.cudnn.allow_tf32 = False
    program = build(perceptron(), [make_method("tf32")], device="cuda")
    with pytest.raises(KeyError), program.process():
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
        raise KeyError
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    torch.backends.cudnn.allow_tf32 = True
