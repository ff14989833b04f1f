"""local_sgd, diloco, powersgd and half_precision_allreduce equal the definitions of their papers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hasten.engine.train import train
from helpers import rank_tasks
from helpers.assertions import CLOSE, farthest
from helpers.by_hand import ByHand, plain, trained
from helpers.markers import slow
from helpers.ranks import run_ranks, training

APART = ["local_sgd:period=4,warmup_steps=10", "local_sgd:period=7,group_size=1,group_period=2", "diloco:sync_every=4"]
LESS = [
    *APART,
    "parameter_server:staleness=0",
    "powersgd:matrix_approximation_rank=1,min_compression_rate=1.7,start_powerSGD_iter=7",
    "ddp + half_precision_allreduce",
]


def momentum() -> object:
    """Stochastic gradient descent written out, with momentum per copy."""
    return rank_tasks.task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8))


@pytest.mark.parametrize("make", [momentum, slow(rank_tasks.samples)])
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"period": 4}),
        (3, {"period": 1}),
        (2, {"period": 5, "warmup_steps": 10}),
        (4, {"period": 6, "group_size": 2, "group_period": 2}),
        (4, {"period": 8, "warmup_steps": 3, "group_size": 2, "group_period": 3}),
    ],
)
def test_local_sgd_equals_the_definition_of_stich_and_lin(tmp_path, world, settings, make):
    hand = ByHand(make(), world)
    period, start = settings["period"], settings.get("warmup_steps", 0)
    group_size, group_period = settings.get("group_size", 1), settings.get("group_period", 1)
    for number in hand.with_gradients():
        if number <= start:
            hand.average_gradients()
        hand.step()
        since = number - start
        if since > 0 and since % period == 0:
            hand.average()
        elif since > 0 and since % group_period == 0:
            for first in range(0, world, group_size):
                hand.average(range(first, first + group_size))
    recipe = "local_sgd:" + ",".join(f"{name}={value}" for name, value in settings.items())
    assert hand.against(trained(tmp_path, world, recipe, make)) < CLOSE


def test_local_sgd_averaging_after_every_sgd_step_is_ddp(tmp_path):
    """For shards of any sizes: every sample has the same weight."""
    train(plain(), device="cpu", out=tmp_path / "single")
    assert farthest(trained(tmp_path, 4, "local_sgd:period=1", plain), tmp_path / "single") < CLOSE


@pytest.mark.parametrize(("world", "period"), [(2, 5), (4, 1), (3, 9)])
def test_diloco_equals_the_definition_of_douillard(tmp_path, world, period):
    """With torch's own SGD as the outer optimizer."""
    hand = ByHand(rank_tasks.samples(), world)
    outer = [nn.Parameter(weight.detach().clone()) for weight in hand.weights[0]]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for number in hand.with_gradients():
        hand.step()
        if number % period == 0:
            hand.average()
            for weight, mean in zip(outer, hand.weights[0], strict=True):
                weight.grad = weight.detach() - mean.detach()
            optimizer.step()
            with torch.no_grad():
                for weights in hand.weights:
                    for weight, new in zip(weights, outer, strict=True):
                        weight.copy_(new)
    assert hand.against(trained(tmp_path, world, f"diloco:sync_every={period}")) < CLOSE


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_gradients_are_rounded_once_and_summed(tmp_path, name):
    short, hand = {"bf16": torch.bfloat16, "fp16": torch.float16}[name], ByHand(rank_tasks.samples(), 2)
    for _ in hand.with_gradients():
        for alike in zip(*hand.weights, strict=True):
            one, other = ((weight.grad / 2).to(short) for weight in alike)
            for weight in alike:
                weight.grad = (one + other).double()
        hand.step()
    out = trained(tmp_path, 2, f"ddp:bucket_cap_mb=0.0001 + half_precision_allreduce:reduce_dtype={name}")
    assert hand.against(out) < CLOSE
    train(rank_tasks.samples(), device="cpu", out=tmp_path / "single")
    assert 1e-9 < farthest(out, tmp_path / "single") < 0.1, "it rounds, and not much"


@pytest.mark.parametrize("start", [slow(0), 7])
@pytest.mark.parametrize(("world", "rank"), [(2, 1), slow(4, 1), (3, 2)])
def test_powersgd_equals_the_definition_of_vogels(tmp_path, world, rank, start):
    """With the paper's Gram-Schmidt. The last layer's gradient, whose two rows are opposite, is sent uncompressed:
    compressed, its rounding errors are fed back and grow from step to step, in a direction that changes no output."""
    hand = ByHand(rank_tasks.samples(), world)
    short = [0]
    bases = [hand.weights[0][number].new_empty(0) for number in range(len(hand.weights[0]))]
    for number in short:
        columns = hand.weights[0][number].shape[1]
        bases[number] = torch.randn(columns, rank, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    rests = [[torch.zeros_like(weight) for weight in weights] for weights in hand.weights]
    for step in hand.with_gradients():
        own = [[weight.grad.clone() for weight in weights] for weights in hand.weights]
        hand.average_gradients()
        for number in short if step > start else []:
            matrices = [own[of][number] + rests[of][number] for of in range(world)]
            span = orthonormal(sum(matrix @ bases[number] for matrix in matrices) / world)
            bases[number] = sum(matrix.T @ span for matrix in matrices) / world
            for of in range(world):
                hand.weights[of][number].grad = span @ bases[number].T
                rests[of][number] = matrices[of] - hand.weights[of][number].grad
        hand.step()
    assert (
        hand.against(
            trained(
                tmp_path,
                world,
                f"powersgd:matrix_approximation_rank={rank},min_compression_rate=1.7,start_powerSGD_iter={start}",
            )
        )
        < CLOSE
    )


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    done = []
    for column in columns.T:
        for other in done:
            column = column - (other @ column) * other
        done.append(column / column.norm())
    return torch.stack(done, dim=1)


def test_powersgd_with_another_factorization_has_the_same_span(tmp_path):
    """Of two orthonormal bases of one span, another library may find the other."""

    def on_its_machine(rank: int) -> dict:
        factor = torch.linalg.qr
        torch.linalg.qr = lambda columns: SimpleNamespace(Q=factor(columns).Q * (-1) ** rank)
        return training(
            rank,
            rank_tasks.samples(),
            "powersgd:matrix_approximation_rank=2,min_compression_rate=1.7",
            out=tmp_path / "unlike",
        )

    answers = run_ranks(2, on_its_machine)
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert (
        farthest(
            tmp_path / "unlike", trained(tmp_path, 2, "powersgd:matrix_approximation_rank=2,min_compression_rate=1.7")
        )
        < CLOSE
    )


@pytest.mark.parametrize(
    "recipe",
    [
        "powersgd:matrix_approximation_rank=8,min_compression_rate=0.1",
        *(
            slow(each)
            for each in (
                "powersgd:matrix_approximation_rank=8",
                "powersgd:matrix_approximation_rank=1,min_compression_rate=1,start_powerSGD_iter=100",
            )
        ),
    ],
)
def test_powersgd_of_full_rank_is_ddp(tmp_path, recipe):
    """Also if no gradient can be compressed, and before compression has started."""
    train(rank_tasks.samples(), device="cpu", out=tmp_path / "single")
    assert farthest(trained(tmp_path, 3, recipe), tmp_path / "single") < CLOSE
