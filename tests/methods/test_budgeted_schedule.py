"""budgeted_schedule: fewer epochs, and the learning rate of every step as computed by hand."""

from math import cos, pi

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset

from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods


def rates_of(task, recipe="baseline") -> list[float]:
    program = build(task, make_methods(Recipe.coerce(recipe)))
    rates = [program.run.optimizer.param_groups[0]["lr"]]
    rates += [program.run.optimizer.param_groups[0]["lr"] for _ in train_steps(program)]  # after step and schedule
    return rates


def constant(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


DECAYS = {"linear": lambda left: left, "cosine": lambda left: 0.5 - 0.5 * cos(pi * left)}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("peak", [1.0, 3.0])
def test_task_without_schedule_warms_up_and_decays_to_zero(perceptron, decay, peak):
    rates = rates_of(
        perceptron(optimizer=constant, epochs=8), f"budgeted_schedule:factor=0.25,decay={decay},peak={peak},warmup=0.25"
    )
    warm_up = [0.1 * peak * step / 4 for step in (1, 2, 3)]  # 12 steps, a quarter of them rising
    fall = [0.1 * peak * DECAYS[decay]((12 - step) / 9) for step in range(3, 13)]
    assert rates == pytest.approx(warm_up + fall)
    assert max(rates) == pytest.approx(0.1 * peak)
    assert rates[-1] == 0


def test_no_decay_only_shortens_training(perceptron, trained):
    task = perceptron(epochs=4)
    short = trained(task, "budgeted_schedule:factor=0.5,decay=none")
    assert short.run.plan.epochs == 2
    assert short.same_bits(trained(task, number=12))


def test_fraction_of_an_epoch_rounds_steps(perceptron, trained):
    assert len(trained(perceptron(epochs=1), "budgeted_schedule:factor=0.5").losses) == 3


def test_scheduler_built_from_the_number_of_steps_is_shorter(perceptron):
    def optimizer(model, steps):
        made = constant(model)
        return made, lr_scheduler.LinearLR(made, 1.0, 0.0, total_iters=steps)

    rates = rates_of(perceptron(optimizer=optimizer, epochs=4), "budgeted_schedule:factor=0.5,peak=2.0")
    assert rates == pytest.approx([0.2 * (12 - step) / 12 for step in range(13)], abs=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 24),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [6, 18], 0.1),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8), lr_scheduler.CosineAnnealingLR(optimizer, 16)],
            milestones=[8],
        ),
    ],
    ids=["cosine", "steps", "sequence"],
)
@pytest.mark.parametrize("peak", [1.0, 2.0])
def test_scheduler_made_for_the_long_run_is_compressed(perceptron, schedule, peak):
    def optimizer(model):
        made = constant(model)
        return made, schedule(made)

    task = perceptron(optimizer=optimizer, epochs=4)
    long, short = rates_of(task), rates_of(task, f"budgeted_schedule:factor=0.5,peak={peak}")
    assert len(short) == 13
    assert short == pytest.approx([peak * rate for rate in long[::2]], abs=1e-12)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # nothing is trained here
def test_compressed_scheduler_resumes_from_a_checkpoint(perceptron):
    def program():
        def optimizer(model):
            made = constant(model)
            return made, lr_scheduler.ExponentialLR(made, 0.9)

        return build(perceptron(optimizer=optimizer), make_methods(Recipe.coerce("budgeted_schedule:factor=0.3")))

    first, second = program(), program()
    for _ in range(2):
        first.schedule.step()
    second.schedule.load_state_dict(first.schedule.state_dict())
    second.run.optimizer.load_state_dict(first.run.optimizer.state_dict())
    for each in (first, second):
        each.schedule.step()
    assert (
        second.run.optimizer.param_groups[0]["lr"]
        == first.run.optimizer.param_groups[0]["lr"]
        == pytest.approx(0.1 * 0.9**10)
    )


def test_combination_with_batch_size_multiplies_both_learning_rates(perceptron):
    task = perceptron(optimizer=constant, batch_size=4, epochs=2)  # 48 steps
    recipe = "budgeted_schedule:factor=0.5,peak=2.0,warmup=0.25 + batch_size:factor=4,rule=linear,warmup=0.0"
    rates = rates_of(task, recipe)
    warm_up = [0.8 * step / 3 for step in (1, 2)]  # 0.1 * 2 * 4, 6 steps, two of them rising (round half to even)
    assert rates == pytest.approx(warm_up + [0.8 * (6 - step) / 4 for step in range(2, 7)])


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_warm_up_of_nearly_all_steps_leaves_one_to_decay(perceptron, steps):
    rates = rates_of(
        perceptron(optimizer=constant, batch_size=96 // steps, epochs=2), "budgeted_schedule:factor=0.5,warmup=0.99"
    )
    assert len(rates) == steps + 1 and rates[-2] == pytest.approx(0.1) and rates[-1] == 0


@pytest.mark.parametrize("decay", ["linear", "none"])
def test_stream_of_unknown_length_is_refused(perceptron, decay):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.randn(12), 0)] * 32)

    with pytest.raises(ConfigurationError, match="no length"):
        build(perceptron(train_data=Stream()), make_methods(Recipe.coerce(f"budgeted_schedule:decay={decay}")))


@pytest.mark.parametrize("samples", [96, 112])
def test_one_cycle_of_the_task_ends_with_the_run(perceptron, samples):
    """Half of an odd number of steps is rounded up, and OneCycleLR refuses a step beyond its end."""
    data = torch.utils.data.TensorDataset(torch.randn(samples, 12), torch.randint(0, 4, (samples,)))
    steps = len(torch.utils.data.DataLoader(data, batch_size=perceptron().batch_size))

    def cycle(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)

    task = perceptron(train_data=data, optimizer=cycle, epochs=1)
    assert rates_of(task, "budgeted_schedule:factor=0.5")[-1] == pytest.approx(rates_of(task)[-1])


def test_schedule_that_counts_steps_ends_with_the_run_under_larger_batches(perceptron):
    def optimizer(model):
        made = constant(model)
        return made, lr_scheduler.LinearLR(made, 1.0, 0.0, total_iters=48)

    task = perceptron(optimizer=optimizer, batch_size=4, epochs=2)  # 48 steps, 6 with the recipe
    rates = rates_of(task, "budgeted_schedule:factor=0.5 + batch_size:factor=4,rule=none,warmup=0.0")
    assert rates == pytest.approx([0.1 * (6 - step) / 6 for step in range(7)], abs=1e-12)
