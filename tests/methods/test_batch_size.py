"""batch_size: larger batches; learning rates and warm-up as computed by hand for every step, under any schedule."""

from itertools import islice

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.engine.checkpoint import get_state, load_checkpoint, restore
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.utils.batch import batch_size


def sgd(model, rate=0.1):
    weights, biases = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": rate / 10}], lr=rate)


SCHEDULES = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 48),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.1, 0.01], total_steps=48, cycle_momentum=False
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
}


def with_schedule(make):
    def optimizer(model):
        made = sgd(model)
        schedule = make(made)
        return made if schedule is None else (made, schedule)

    return optimizer


def rates_of(task, recipe):
    """Returns the learning rate of every group at each optimizer step."""
    seen = []
    recipe = make_methods(Recipe.coerce(recipe))
    original = torch.optim.SGD.step

    def watched(self, *args, **kwargs):
        seen.append([group["lr"] for group in self.param_groups])
        return original(self, *args, **kwargs)

    torch.optim.SGD.step = watched
    try:
        for _ in train_steps(build(task, recipe)):
            pass
    finally:
        torch.optim.SGD.step = original
    return torch.tensor(seen, dtype=torch.float64)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("rule", "scale"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_learning_rates_equal_the_formula_at_every_step(perceptron, name, rule, scale):
    optimizer = with_schedule(SCHEDULES[name])
    task = perceptron(optimizer=optimizer, batch_size=2, epochs=1)
    plain = rates_of(task, "baseline")[::4]  # the schedule advances as fast as the samples
    large = rates_of(task, f"batch_size:factor=4,rule={rule},warmup=0.34")
    assert len(plain) == len(large) == 12
    # 4 = 0.34 of 12 steps; from 1 to the full scale
    warm_up = [(1 + (scale - 1) * min(step / 4, 1)) for step in range(12)]
    torch.testing.assert_close(large, plain * torch.tensor(warm_up, dtype=torch.float64)[:, None])


def test_learning_rate_is_restored_after_the_step(perceptron):
    program = build(
        perceptron(optimizer=sgd), make_methods(Recipe.coerce("batch_size:factor=2,rule=linear,warmup=0.9"))
    )
    for _ in train_steps(program):
        assert [group["lr"] for group in program.run.optimizer.param_groups] == [0.2, 0.02]


def test_batches_are_larger_and_steps_fewer(perceptron, trained):
    run = trained(perceptron(batch_size=8, epochs=2), "batch_size:factor=3")
    assert (run.run.plan.batch_size, run.run.plan.steps, len(run.losses)) == (24, 8, 8)


def test_ready_loader_gets_larger_batches(perceptron):
    task = perceptron(train_data=DataLoader(perceptron().train_data, batch_size=16, shuffle=True), batch_size=None)
    program = build(task, make_methods(Recipe.coerce("batch_size:factor=2")))
    assert [batch_size(batch) for batch in program.train.epoch(0, 0)] == [32, 32, 32]


def test_batch_larger_than_the_data_is_refused(perceptron):
    with pytest.raises(ConfigurationError, match=r"batch of 128, which is larger.*96 samples.*factor below 8"):
        build(perceptron(batch_size=16), make_methods(Recipe.coerce("batch_size:factor=8")))


def test_prebatched_loader_is_refused(perceptron):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.randn(12), 0)] * 32)

    for loader in (
        DataLoader(Stream(), batch_size=8),
        DataLoader(perceptron().train_data, batch_sampler=[[0, 1], [2, 3]]),
    ):
        with pytest.raises(ConfigurationError, match="cannot be changed"):
            build(
                perceptron(train_data=loader, batch_size=None),
                make_methods(Recipe.coerce("batch_size:factor=2,warmup=0")),
            )


def test_stream_with_relative_warm_up_is_refused(perceptron):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.randn(12), 0)] * 32)

    with pytest.raises(ConfigurationError, match="pass warmup=0"):
        build(perceptron(train_data=Stream()), make_methods(Recipe.coerce("batch_size")))
    assert (
        build(perceptron(train_data=Stream()), make_methods(Recipe.coerce("batch_size:warmup=0"))).plan.batch_size == 32
    )


def test_run_resumed_inside_the_warm_up_continues_it(perceptron, tmp_path):
    task = perceptron(optimizer=sgd)
    recipe = make_methods(Recipe.coerce("batch_size:factor=2,rule=linear,warmup=0.9"))
    whole, resumed = build(task, recipe), build(task, recipe)
    for number, _ in enumerate(train_steps(whole), 1):
        if number == 2:
            torch.save(get_state(whole), tmp_path / "state.pt")
        if number == 4:
            break
    restore(resumed, load_checkpoint(tmp_path / "state.pt"))
    for _ in islice(train_steps(resumed), 2):
        pass
    assert all(map(torch.equal, resumed.run.model.parameters(), whole.run.model.parameters()))
