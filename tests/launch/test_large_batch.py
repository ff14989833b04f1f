"""The remarks of Goyal et al. 2017 (arXiv 1706.02677, section 3) on silent errors of distributed training, one test
each."""

from itertools import chain

import pytest
import torch
from torch import nn

from hasten.core.recipe import Recipe
from hasten.distributed.process_group import init_process_group
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.engine.train import train, with_strategy
from helpers import rank_tasks
from helpers.assertions import CLOSE, farthest
from helpers.markers import first_quick
from helpers.ranks import run_ranks, training_of

WORLDS = [2, 4]
RATE, MOMENTUM, FACTOR = 0.05, 0.9, 4


class Numbered(rank_tasks.Rows):
    """The first input is the index of the row."""

    def __init__(self):
        super().__init__()
        self.inputs[:, 0] = torch.arange(len(self))


class Noting(torch.optim.SGD):
    """Records the learning rate of every step."""

    def __init__(self, weights, **settings):
        super().__init__(weights, **settings)
        self.rates = []

    def step(self):
        self.rates.append(self.param_groups[0]["lr"])
        super().step()


def decayed():
    return rank_tasks.task(
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=0.1)
    )


def noting():
    return rank_tasks.task(optimizer=lambda model: Noting(model.parameters(), lr=RATE, momentum=MOMENTUM))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "recipe", first_quick(["ddp", "zero:stage=3", "ddp + gradient_accumulation:accumulation_steps=3"])
)
def test_remark_1_weight_decay_is_not_scaled_with_the_loss(tmp_path, recipe, world):
    """Each rank's loss is weighted by its number of samples; the optimizer applies weight decay once per step."""
    train(decayed(), device="cpu", out=tmp_path / "single")
    run_ranks(world, training_of, decayed, recipe, tmp_path / "shared")
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize("corrected", [True, False])
def test_remark_2_momentum_is_corrected_when_the_rate_changes(corrected):
    """If the learning rate is part of the velocity, v <- m (new rate / old rate) v + rate g, a correction is needed;
    torch's v <- m v + g needs none."""
    program = build(noting(), make_methods(Recipe.coerce(f"batch_size:factor={FACTOR},rule=linear,warmup=0.9")))
    weights = [weight.detach().clone() for weight in program.run.unwrapped_model.parameters()]
    replayed = build(noting(), make_methods(Recipe.coerce(f"batch_size:factor={FACTOR},rule=linear,warmup=0.9")))
    for _ in train_steps(program):
        pass
    rates, velocity, old = program.run.optimizer.rates, [torch.zeros_like(weight) for weight in weights], None
    batches = [batch for epoch in range(2) for batch in replayed.train.epoch(epoch, 0)]
    assert len(set(rates)) > 5, "the rate changes"
    for rate, (inputs, labels) in zip(rates, batches, strict=True):
        with torch.no_grad():
            for weight, new in zip(replayed.run.unwrapped_model.parameters(), weights, strict=True):
                weight.copy_(new)
        replayed.run.unwrapped_model.zero_grad()
        nn.functional.cross_entropy(replayed.run.unwrapped_model(inputs), labels).backward()
        correction = rate / old if old and corrected else 1.0
        for number, weight in enumerate(replayed.run.unwrapped_model.parameters()):
            velocity[number] = MOMENTUM * correction * velocity[number] + rate * weight.grad
            weights[number] = weights[number] - velocity[number]
        old = rate
    apart = max(
        ((a - b).abs().max() / b.abs().max()).item()
        for a, b in zip(weights, program.run.unwrapped_model.parameters(), strict=True)
    )
    assert apart < CLOSE if corrected else apart > 1e-3


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("number", [0, 22])
def test_remark_3_loss_is_normalized_by_the_global_batch(world, number):
    """By kn, not by each worker's n: also in the last batch of 7 samples, which ranks divide unequally."""
    program = build(rank_tasks.samples())
    inputs, labels = list(program.train.epoch(0, 0))[number]
    nn.functional.cross_entropy(program.run.unwrapped_model(inputs), labels).backward()
    expected = [weight.grad for weight in program.run.unwrapped_model.parameters()]
    for gradients in run_ranks(world, gradients_of_batch, number):
        for own, reference in zip(gradients, expected, strict=True):
            assert torch.allclose(torch.tensor(own, dtype=torch.float64), reference, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("world", WORLDS)
def test_remark_4_one_shuffle_is_sharded(world):
    """Each sample is read once per epoch, by one rank, in the batch in which one process reads it; every epoch has
    another order."""
    single = rows_read(build(rank_tasks.task(Numbered())))
    everybodys = run_ranks(world, rows_read_by_rank)
    for epoch in range(2):
        shared = [list(chain(*parts)) for parts in zip(*(rows[epoch] for rows in everybodys), strict=True)]
        assert shared == single[epoch]
        assert sorted(chain(*shared)) == list(range(rank_tasks.SAMPLES))
    assert single[0] != single[1]


@pytest.mark.parametrize(("rule", "scale"), [("linear", FACTOR), ("sqrt", FACTOR**0.5)])
def test_warm_up_rises_in_every_iteration(rule, scale):
    """From the task's own rate to the larger one (section 2.2), by equal increments."""
    program = build(noting(), make_methods(Recipe.coerce(f"batch_size:factor={FACTOR},rule={rule},warmup=0.5")))
    for _ in train_steps(program):
        pass
    rates, warm = program.run.optimizer.rates, round(0.5 * program.plan.steps)
    assert rates == pytest.approx([RATE * (1 + (scale - 1) * min(step / warm, 1)) for step in range(len(rates))])


def gradients_of_batch(rank: int, number: int) -> list:
    with init_process_group("cpu") as ranks:
        return gradients(build(rank_tasks.samples(), with_strategy([], ranks), ranks=ranks), number)


def gradients(program, number: int) -> list:
    program.forward_backward(next(program.train.epoch(0, number)))
    return [weight.grad.tolist() for weight in program.run.unwrapped_model.parameters()]


def rows_read_by_rank(rank: int) -> list:
    with init_process_group("cpu") as ranks:
        return rows_read(build(rank_tasks.task(Numbered()), with_strategy([], ranks), ranks=ranks))


def rows_read(program) -> list[list[list[int]]]:
    """Returns the indices of the rows, by epoch and batch."""
    return [[inputs[:, 0].int().tolist() for inputs, _ in program.train.epoch(epoch, 0)] for epoch in range(2)]
