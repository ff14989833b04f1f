"""bfloat16: products in bfloat16, weights and loss in float32, gradients close to float64's."""

import torch
from torch import nn

from hasten.utils.autocast import autocast_obstacle


def test_matrix_products_are_bfloat16_and_the_loss_is_float32(perceptron, trained):
    seen = {}
    model = nn.Sequential(nn.Linear(12, 4))
    model[0].register_forward_hook(lambda module, inputs, output: seen.update(output=output.dtype))
    run = trained(perceptron(model=lambda: model), "bfloat16", 3)
    assert seen["output"] == torch.bfloat16
    assert all(weight.dtype == torch.float32 for weight in run.weights.values())
    assert all(
        parameter.grad is None or parameter.grad.dtype == torch.float32 for parameter in run.run.model.parameters()
    )
    assert run.program.forward(next(iter(run.program.train))).dtype == torch.float32


def test_loss_falls_as_in_float32(convolutional, trained):
    usual, lower = (trained(convolutional(epochs=5), recipe) for recipe in ("baseline", "bfloat16"))
    assert not usual.same_bits(lower)
    assert lower.losses[-1] < lower.losses[0]
    assert abs(usual.losses[-1] - lower.losses[-1]) < 0.1


def test_bfloat16_model_has_no_effect(perceptron, trained):
    model = nn.Sequential(nn.Linear(12, 4)).to(torch.bfloat16)

    def loss(output, target):
        return nn.functional.cross_entropy(output.float(), target)

    class Lowered(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x.to(torch.bfloat16))

    run = trained(perceptron(model=Lowered, loss=loss), "bfloat16", 1).run
    assert run.no_effect == [("bfloat16", "the model has no float32 matrix that could be multiplied in bfloat16")]


def test_model_under_an_autocast_of_the_scripts_own_has_nothing_to_lower():
    model = torch.nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        obstacle = autocast_obstacle(model, torch.device("cpu"), torch.float16)
    assert obstacle == "the model is called under torch.autocast already, which computes in bfloat16"
    assert autocast_obstacle(model, torch.device("cpu"), torch.float16) is None
