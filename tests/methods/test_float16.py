"""float16: the loss scale adapts, overflowing steps change nothing, and the state is saved in checkpoints."""

import math

import pytest
import torch

from hasten.core.errors import RunError
from hasten.core.process_group_info import ProcessGroupInfo
from hasten.core.recipe import Recipe
from hasten.core.run_context import ParallelContext, RunContext
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_method, make_methods
from hasten.methods.float16 import GROWTH_INTERVAL, Float16, LossScale
from hasten.testing.tasks import Labeled


def test_gradients_are_unscaled_before_other_methods_read_them(perceptron, trained):
    """With clipping that never applies the run is bit-identical for any scale (a power of two)."""
    scaled, clipped = (
        trained(perceptron(), f"float16:scale=256{more}") for more in ("", " + gradient_clipping:max_norm=1e6")
    )
    assert scaled.same_bits(clipped)


def test_overflow_skips_the_step_and_halves_the_scale(perceptron):
    task = perceptron(loss=lambda output, target: 1e4 * torch.nn.functional.cross_entropy(output, target))
    program = build(task, [make_method("float16")])
    scale = program.run.checkpoint_state["float16"]
    before = [parameter.detach().clone() for parameter in program.run.model.parameters()]
    running = train_steps(program)
    next(running)
    assert scale.overflow and scale.value == 2.0**15
    assert all(map(torch.equal, before, program.run.model.parameters())), "a step that overflowed moved the weights"
    for _ in running:
        pass
    assert not scale.overflow and scale.value < 2.0**15
    assert not any(map(torch.equal, before, program.run.model.parameters()))


def fused(loss, **changes):
    optimizer = lambda model: torch.optim.Adam(model.parameters(), fused=True)  # noqa: E731
    return {"loss": loss, "optimizer": optimizer, **changes}


def test_fused_optimizer_skips_the_step_by_itself_and_the_scale_settles_as_without(perceptron, trained):
    """Nothing reads the overflow on the host."""
    loss = lambda output, target: 1e4 * torch.nn.functional.cross_entropy(output, target)  # noqa: E731
    program = build(perceptron(**fused(loss)), [make_method("float16")])
    scale = program.run.checkpoint_state["float16"]
    assert scale.on_device
    before = [parameter.detach().clone() for parameter in program.run.model.parameters()]
    running = train_steps(program)
    next(running)
    assert scale.overflow and scale.value == 2.0**15
    assert all(map(torch.equal, before, program.run.model.parameters())), "a step that overflowed moved the weights"
    for _ in running:
        pass
    plain = trained(perceptron(loss=loss), "float16").run.checkpoint_state["float16"]
    assert scale.state_dict() == plain.state_dict()
    assert not any(map(torch.equal, before, program.run.model.parameters()))


@pytest.mark.parametrize(("optimizer", "by_itself"), [("Adam", True), ("AdamW", True), ("SGD", False)])
def test_optimizer_that_fused_optimizer_made_skips_the_step_by_itself(perceptron, optimizer, by_itself):
    make = lambda model: getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)  # noqa: E731
    loss = lambda output, target: 1e4 * torch.nn.functional.cross_entropy(output, target)  # noqa: E731
    program = build(perceptron(optimizer=make, loss=loss), [make_method("float16"), make_method("fused_optimizer")])
    scale = program.run.checkpoint_state["float16"]
    assert scale.on_device is by_itself
    before = [parameter.detach().clone() for parameter in program.run.model.parameters()]
    running = train_steps(program)
    next(running)
    assert scale.overflow and all(map(torch.equal, before, program.run.model.parameters()))
    for _ in running:
        pass
    assert not scale.overflow and not any(map(torch.equal, before, program.run.model.parameters()))


def test_scale_doubles_after_good_steps_counts_again_after_a_bad_one_and_is_restored():
    scale, optimizer = LossScale("dynamic", torch.device("cpu")), torch.optim.SGD([torch.zeros(1)])

    def steps(count, overflow):
        scale.found.fill_(overflow)
        for _ in range(count):
            scale.step(lambda: None, optimizer)

    steps(GROWTH_INTERVAL - 1, overflow=False)
    assert scale.value == 2.0**16
    steps(1, overflow=True)
    assert scale.state_dict() == {"value": 2.0**15, "good_steps": 0, "overflows": 1}
    steps(GROWTH_INTERVAL, overflow=False)
    assert scale.state_dict() == {"value": 2.0**16, "good_steps": 0, "overflows": 0}
    steps(1, overflow=True)
    loaded = LossScale("dynamic", torch.device("cpu"))
    loaded.load_state_dict(scale.state_dict())
    assert loaded.state_dict() == scale.state_dict() and loaded.tensor.item() == 2.0**15


def test_constant_scale_is_unchanged(perceptron, trained):
    assert trained(perceptron(), "float16:scale=128").run.checkpoint_state["float16"].value == 128.0


def test_scale_prevents_underflow_of_small_gradients(perceptron, trained):
    """A loss of 1e-7 gives float16 gradients below 2**-24 without a scale: they underflow and nothing is learned."""

    def task():
        return perceptron(
            loss=lambda output, target: 1e-7 * torch.nn.functional.cross_entropy(output, target),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e6),
        )

    usual, plain, scaled = (trained(task(), recipe) for recipe in ("baseline", "float16:scale=1", "float16"))
    with_scale, without = ((usual.weights["0.weight"] - run.weights["0.weight"]).norm() for run in (scaled, plain))
    assert with_scale < 0.1 * without


@pytest.mark.parametrize("is_fused", [False, True])
def test_gradients_that_never_become_finite_end_the_run(perceptron, trained, is_fused):
    loss = lambda output, target: output.sum() * float("nan")  # noqa: E731
    task = perceptron(epochs=20, **(fused(loss) if is_fused else {"loss": loss}))
    with pytest.raises(RunError, match="overflowed 30 steps in a row"):
        trained(task, "float16")


def test_gradients_of_weights_that_are_not_trained_are_no_overflow(perceptron, trained):
    """The optimizer never clears them, so that they would stay infinite after the first overflow."""
    task = perceptron(optimizer=lambda model: torch.optim.SGD(list(model.parameters())[-2:], lr=0.1), epochs=2)
    program = build(task, make_methods(Recipe.coerce("float16")))
    first = next(program.run.model.parameters())
    first.grad = torch.full_like(first, math.inf)
    for _ in train_steps(program):
        pass
    assert program.run.checkpoint_state["float16"].good > 0


def test_overflow_on_one_rank_skips_the_step_on_all():
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    run = RunContext(
        torch.device("cpu"),
        task=None,
        model=model,
        parallel=ParallelContext(ProcessGroupInfo(all_reduce_max=lambda mine: [True])),
    )
    method = Float16()
    method.forward(lambda batch: None, run)
    method.grad_transform(lambda: None, run)()
    method.optimizer_step(lambda: pytest.fail("the optimizer stepped although another rank overflowed"), run)()


def test_model_without_float32_matrices_has_no_effect(perceptron, trained):
    def task():
        return perceptron(model=lambda: perceptron().model().double(), train_data=Doubled())

    usual, scaled = trained(task()), trained(task(), "float16")
    assert scaled.run.no_effect == [("float16", "the model has no float32 matrix that could be multiplied in float16")]
    assert "float16" not in scaled.run.checkpoint_state and usual.same_bits(scaled)


class Doubled(Labeled):
    def __init__(self):
        super().__init__((12,))
        self.inputs = self.inputs.double()


def test_recipe_states_the_option():
    recipe = Recipe.parse("float16:scale=1024")
    assert make_method("float16", recipe.methods["float16"]).scale == 1024


def test_gradients_of_a_loss_with_parameters_are_unscaled(perceptron, trained):
    def weights_of_the_loss(scale):
        weight = torch.nn.Parameter(torch.ones(()))
        task = perceptron(
            optimizer=lambda model: torch.optim.SGD([*model.parameters(), weight], lr=0.1),
            loss=lambda output, target: weight * torch.nn.functional.cross_entropy(output, target) + weight**2,
        )
        trained(task, f"float16:scale={scale}", number=3)
        return weight.item()

    assert weights_of_the_loss(256) == weights_of_the_loss(1) < 1
