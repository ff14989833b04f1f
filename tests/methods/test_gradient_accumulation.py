"""gradient_accumulation: the pieces are really smaller, and weigh by their samples."""

import pytest
import torch

from hasten.core.errors import ConfigurationError
from hasten.engine.registry import make_method


def test_the_batch_comes_in_pieces_and_the_step_stays_one(perceptron, trained):
    sizes, model = [], perceptron().model()
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    run = trained(perceptron(model=lambda: model), "gradient_accumulation:accumulation_steps=3", 2).run
    assert sizes == [5, 5, 6, 5, 5, 6]
    assert run.progress.step == 2 and run.progress.samples == 32


def test_unequal_pieces_give_the_gradient_of_the_whole(perceptron, trained):
    whole, cut = (
        trained(perceptron(batch_size=7), recipe, 20)
        for recipe in ("baseline", "gradient_accumulation:accumulation_steps=3")
    )
    for name in whole.weights:
        torch.testing.assert_close(cut.weights[name], whole.weights[name], rtol=1e-4, atol=1e-5)
    assert cut.losses == pytest.approx(whole.losses, rel=1e-4)


def test_batch_normalisation_is_another_formula_so_nothing_is_cut(convolutional, trained):
    usual, cut = trained(convolutional()), trained(convolutional(), "gradient_accumulation")
    ((name, why),) = cut.run.no_effect
    assert name == "gradient_accumulation" and "batch normalisation" in why
    assert cut.program.plan.microbatches == 1 and usual.same_bits(cut)


def test_one_piece_is_nothing_to_do(perceptron, trained):
    assert trained(perceptron(), "gradient_accumulation:accumulation_steps=1", 1).run.no_effect == [
        ("gradient_accumulation", "each batch is a single microbatch")
    ]


def test_no_piece_is_refused():
    with pytest.raises(ConfigurationError, match="accumulation_steps must be at least 1"):
        make_method("gradient_accumulation", {"pieces": 0})
