"""ema: the exported weights are the average computed by hand; the trained ones are unchanged."""

import pytest
import torch

from hasten.core.recipe import Recipe
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.testing.tasks import Labeled
from helpers import public_loops


@pytest.mark.parametrize(("decay", "start"), [(0.9, 0), (0.2, 0), (0.9, 5)])
def test_average_equals_the_one_computed_by_hand(convolutional, decay, start):
    program = build(convolutional(), make_methods(Recipe().with_method("ema", decay=decay, start=start)))
    average = None
    for number, _ in enumerate(train_steps(program)):
        live = [p.detach().double().clone() for p in program.run.model.parameters()]
        if number < start or average is None:
            average = live if number < start or start else [p.double() for p in _first_weights(convolutional)]
        if number >= start:
            d = min(decay, (1 + number - start) / (10 + number - start))
            average = [d * a + (1 - d) * w for a, w in zip(average, live, strict=True)]
    for exported, expected in zip(program.export().parameters(), average, strict=True):
        torch.testing.assert_close(exported.double(), expected, rtol=1e-5, atol=1e-7)


def test_average_of_bfloat16_weights_moves_by_small_parts(perceptron):
    """In bfloat16 a difference of 1 % would be lost, and the average would stay where it was."""
    task = perceptron(model=lambda: perceptron().model().bfloat16(), train_data=Rounded(), validation_data=None)
    program = build(task, make_methods(Recipe().with_method("ema", decay=0.99, start=0)))
    average = program.run.checkpoint_state["ema"]
    with torch.no_grad():
        for weight, mean in zip(program.run.model.parameters(), average, strict=True):
            weight.fill_(1.0)
            mean.fill_(0.9)
    program.run.progress.step = 10_000
    program.run.optimizer.step = lambda: None
    program.optimizer_step()
    assert average[0].dtype == torch.float32 and average[0].mean().item() == pytest.approx(0.901, abs=1e-5)
    assert next(program.export().parameters()).dtype == torch.bfloat16


class Rounded(Labeled):
    def __init__(self):
        super().__init__((12,))
        self.inputs = self.inputs.bfloat16()


def _first_weights(convolutional):
    return [p.detach().clone() for p in build(convolutional()).run.model.parameters()]


def test_trained_weights_are_unchanged(convolutional, trained):
    task = convolutional()
    plain, averaged = trained(task), trained(task, "ema")
    live = averaged.run.model.state_dict()
    assert plain.losses == averaged.losses
    assert all(torch.equal(value, live[name]) for name, value in plain.weights.items())
    buffers = [name for name, _ in averaged.run.model.named_buffers()]
    assert buffers
    assert all(torch.equal(averaged.weights[name], live[name]) for name in buffers)  # those of the trained model
    assert not averaged.same_bits(plain)


def test_average_is_saved_in_checkpoints(perceptron):
    recipe = Recipe.coerce("ema:decay=0.5")
    first, second = (build(perceptron(), make_methods(recipe), seed=seed) for seed in (0, 1))
    for _ in train_steps(first):
        pass
    state = {name: tensor.clone() for name, tensor in first.run.checkpoint_state["ema"].state_dict().items()}
    second.run.checkpoint_state["ema"].load_state_dict(state)
    assert all(map(torch.equal, first.export().parameters(), second.export().parameters()))


def test_start_after_the_last_step_has_no_effect(perceptron, trained):
    number = build(perceptron()).plan.steps
    assert not trained(perceptron(), f"ema:start={number - 1}").run.no_effect
    for start in (number, 10**23):
        idle = trained(perceptron(), f"ema:start={start}")
        assert [name for name, _ in idle.run.no_effect] == [
            "ema"
        ] and f"ends after {number} steps" in idle.run.no_effect[0][1]
        assert idle.same_bits(trained(perceptron()))


def test_average_of_several_optimizers_is_taken_once_a_step():
    program = build(public_loops.gan(), make_methods(Recipe.coerce("ema:decay=0.9")))
    parameters = list(program.run.model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    for number, _ in enumerate(train_steps(program)):
        d = min(0.9, (1 + number) / (10 + number))
        average = [d * mean + (1 - d) * live.detach() for mean, live in zip(average, parameters, strict=True)]
    for exported, expected in zip(program.export().parameters(), average, strict=True):
        torch.testing.assert_close(exported, expected, rtol=1e-5, atol=1e-7)


class KeepsItsOutput(torch.nn.Sequential):
    """A perceptron with the output of the last batch as an attribute, with its graph."""

    def __init__(self):
        super().__init__(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4))

    def forward(self, inputs):
        self.last = super().forward(inputs)
        return self.last


def test_model_that_keeps_an_output_is_averaged(perceptron, trained):
    usual, kept = (trained(perceptron(**model), "ema") for model in ({}, {"model": KeepsItsOutput}))
    assert kept.same_bits(usual)
