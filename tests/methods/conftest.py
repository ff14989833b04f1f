"""Small shared tasks and a way to train them, for the tests of the methods.

``perceptron``, ``convolutional`` and ``transformer`` are functions that return a fresh Task (see
hasten.testing.tasks); ``trained`` trains one under a recipe and returns what is needed to judge it.
"""

from dataclasses import dataclass

import pytest
import torch

from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.engine.loop import train_steps
from hasten.engine.plan import Program, build
from hasten.engine.registry import make_methods
from hasten.testing import tasks


@dataclass
class Trained:
    """A short run: its losses, its exported weights, and all objects built for it."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    program: Program
    run: RunContext

    def same_bits(self, other: "Trained") -> bool:
        return self.weights.keys() == other.weights.keys() and all(
            torch.equal(self.weights[name], other.weights[name]) for name in self.weights
        )


@pytest.fixture
def perceptron():
    return tasks.perceptron


@pytest.fixture
def convolutional():
    return tasks.convolutional


@pytest.fixture
def transformer():
    return tasks.transformer


@pytest.fixture
def trained():
    """Function ``(task, recipe="baseline", number=None, seed=0) -> Trained``.

    A recipe is anything that Recipe.coerce accepts, or a list of methods.
    """

    def train(task, recipe="baseline", number: int | None = None, seed: int = 0) -> Trained:
        methods = recipe if isinstance(recipe, list) else make_methods(Recipe.coerce(recipe))
        program = build(task, methods, seed=seed)
        losses = []
        with program.process_context():
            for loss in program.effects.observed(train_steps(program)):
                losses.append(loss.item())
                if len(losses) == number:
                    break
        weights = {name: value.detach().clone() for name, value in program.export().state_dict().items()}
        return Trained(losses, weights, program, program.run)

    return train


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Asserts that a method has undone its changes to the process."""
    before = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.get_default_dtype(),
    )
    yield
    assert before == (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.get_default_dtype(),
    )
