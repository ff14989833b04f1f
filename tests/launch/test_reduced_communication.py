"""What strategies with reduced communication promise beside their definitions: resume, limits, reports, refusals."""

import json
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from hasten.core.errors import ConfigurationError, RunError
from hasten.distributed.collectives import all_reduce_mean, average_state, broadcast_module
from hasten.distributed.process_group import init_process_group
from hasten.engine.checkpoint import load_checkpoint
from hasten.engine.plan import build
from hasten.engine.train import train
from hasten.utils.batch import map_tensors
from helpers import rank_tasks
from helpers.assertions import CLOSE, farthest
from helpers.by_hand import ByHand, plain, trained
from helpers.markers import first_quick
from helpers.ranks import interrupted_run, resumed_run, run_ranks, training

APART = ["diloco:sync_every=4", "local_sgd:period=4,warmup_steps=10", "local_sgd:period=7,group_size=1,group_period=2"]
LESS = [
    APART[0],
    "powersgd:matrix_approximation_rank=1,min_compression_rate=1.7,start_powerSGD_iter=7",
    *APART[1:],
    "parameter_server:staleness=0",
    "ddp + half_precision_allreduce",
]


@pytest.mark.parametrize("recipe", first_quick(LESS, 2))
def test_interrupted_run_resumes_bit_for_bit(tmp_path, recipe):
    make = rank_tasks.dropping
    uninterrupted = trained(tmp_path, 2, recipe, make)
    broken = run_ranks(2, interrupted_run, make, tmp_path / "broken", recipe)
    assert all(isinstance(answer, Exception) for answer in broken), broken
    answers = run_ranks(2, resumed_run, make, tmp_path / "broken", recipe)
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "broken", uninterrupted) == 0
    assert (tmp_path / "broken/log.jsonl").read_bytes() == (uninterrupted / "log.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("recipe", LESS)
def test_run_resumes_with_another_number_of_ranks(tmp_path, recipe, world):
    make = rank_tasks.samples
    run_ranks(2, interrupted_run, make, tmp_path / "run", recipe)
    answers = (
        run_ranks(world, resumed_run, make, tmp_path / "run") if world > 1 else [resumed_run(0, make, tmp_path / "run")]
    )
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert answers[0]["steps"] == 46 and answers[0]["metric"] > 0.8


@pytest.mark.parametrize("recipe", first_quick(LESS, 2))
def test_run_of_one_process_resumes_on_two(tmp_path, recipe):
    with pytest.raises(RunError):
        interrupted_run(0, rank_tasks.samples, tmp_path / "run", recipe)
    answers = run_ranks(2, resumed_run, rank_tasks.samples, tmp_path / "run")
    assert [type(answer) for answer in answers] == [dict] * 2, answers


@pytest.mark.parametrize("recipe", first_quick(APART))
def test_checkpoint_contains_the_mean_and_each_rank_s_state(tmp_path, recipe):
    run_ranks(2, interrupted_run, rank_tasks.samples, tmp_path / "run", recipe)
    state = load_checkpoint(max((tmp_path / "run/checkpoints").iterdir()))
    (name,) = state["rank_state"][0]
    ones, others = (own[name]["model"] for own in state["rank_state"])
    assert all(torch.equal(state["model"][key], (ones[key] + others[key]) / 2) for key in ones)
    assert any(not torch.equal(ones[key], others[key]) for key in ones), "the checkpoint was made where the ranks agree"
    moments = [own[name]["optimizer"][0]["exp_avg"] for own in state["rank_state"]]
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], sum(moments) / 2)


@pytest.mark.parametrize("recipe", first_quick(APART))
def test_evaluation_uses_the_mean(tmp_path, recipe):
    out = trained(tmp_path, 2, recipe, with_norm)
    model = with_norm().model()
    model.load_state_dict(load_file(out / "model.safetensors"))
    rows = rank_tasks.Rows(40, seed=1)
    right = (model.eval()(rows.inputs).argmax(1) == rows.labels).double().mean().item()
    assert json.loads((out / "result.json").read_text())["metric"] == pytest.approx(right)


@pytest.mark.parametrize("recipe", first_quick(LESS, 2))
def test_microbatches_change_nothing(tmp_path, recipe):
    undivided = trained(tmp_path / "undivided", 2, recipe)
    assert farthest(trained(tmp_path, 2, f"{recipe} + gradient_accumulation:accumulation_steps=3"), undivided) < (
        1e-2 if "compressed" in recipe else CLOSE
    )


@pytest.mark.parametrize(
    "recipe", ["powersgd:matrix_approximation_rank=8,min_compression_rate=0.1", "local_sgd:period=3,warmup_steps=100"]
)
def test_gradients_are_clipped_after_averaging(tmp_path, recipe):
    train(rank_tasks.samples(), "gradient_clipping:max_norm=0.1", device="cpu", out=tmp_path / "single")
    assert farthest(trained(tmp_path, 2, f"{recipe} + gradient_clipping:max_norm=0.1"), tmp_path / "single") < CLOSE


def test_gradients_are_clipped_per_rank_if_not_averaged(tmp_path):
    hand = ByHand(rank_tasks.samples(), 2)
    for number in hand.with_gradients():
        for weights in hand.weights:
            nn.utils.clip_grad_norm_(weights, 0.1)
        hand.step()
        if number % 3 == 0:
            hand.average()
    assert hand.against(trained(tmp_path, 2, "local_sgd:period=3 + gradient_clipping:max_norm=0.1")) < CLOSE


@pytest.mark.parametrize(
    "recipe", ["powersgd:matrix_approximation_rank=1,min_compression_rate=1", "local_sgd:period=3,warmup_steps=100"]
)
def test_unused_weight_is_unchanged(tmp_path, recipe):
    """A weight that only some rank used is not skipped: its gradient is the mean."""
    train(rank_tasks.with_a_spare(), device="cpu", out=tmp_path / "single")
    out = trained(tmp_path, 2, recipe, rank_tasks.with_a_spare)
    spare = "spare.weight"
    assert torch.equal(
        load_file(out / "model.safetensors")[spare], load_file(tmp_path / "single/model.safetensors")[spare]
    )


def test_overflow_leaves_no_error_feedback():
    """float16 skips a step whose gradients are not finite; the error feedback of that step must be dropped."""
    assert run_ranks(2, error_feedback_is_zero_after_an_overflow) == [True, True]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("local_sgd:group_size=2", "local_sgd:group_size=2 must divide the 3 processes"),
        ("local_sgd:group_period=2", "group_period=2 has no effect without groups; set group_size as well"),
        (
            "local_sgd:period=2,group_size=3,group_period=4",
            "group_period=4 is due only when all ranks average anyway, every 2 steps",
        ),
        (
            "local_sgd:period=47",
            "local_sgd:period=47 is longer than the run of 46 steps, in which the processes would never communicate",
        ),
        ("diloco", "diloco:sync_every=100 is longer than the run of 46 steps"),
        ("local_sgd + half_precision_allreduce", "half_precision_allreduce needs ddp or zero:stage=1"),
        ("local_sgd + diloco", "both replace parallelize"),
        ("local_sgd + ema", "ema requires replicated_weights, which local_sgd invalidates"),
        ("powersgd + zero", "both replace parallelize"),
        ("half_precision_allreduce:reduce_dtype=int8", "reduce_dtype must be one of bf16, fp16"),
    ],
)
def test_invalid_request_is_refused(recipe, message):
    answers = run_ranks(3, training, rank_tasks.samples(), recipe)
    assert all(isinstance(answer, ConfigurationError) and message in str(answer) for answer in answers), answers


@pytest.mark.parametrize(
    "recipe",
    ["local_sgd:warmup_steps=46", "powersgd:matrix_approximation_rank=1,min_compression_rate=1,start_powerSGD_iter=46"],
)
def test_start_after_the_last_step_is_reported(recipe):
    answers = run_ranks(2, training, rank_tasks.samples(), recipe)
    assert all(("it begins after 46 steps, and the run has 46" in str(answer["no_effect"])) for answer in answers), (
        answers
    )


@pytest.mark.parametrize(
    ("make", "recipe", "reported"),
    [
        (rank_tasks.samples, "local_sgd", 0),
        (rank_tasks.stream, "local_sgd", 1),
        (rank_tasks.own_sampler, "parameter_server", 1),
        (rank_tasks.stream, "ddp", 0),
    ],
)
def test_sequential_data_compared_in_every_step_is_reported(make, recipe, reported):
    def notices(rank: int) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training(rank, make(), recipe)
        return sum("before every step" in str(each.message) for each in caught)

    assert run_ranks(2, notices) == [reported, 0]


class WithCounts(nn.Module):
    """Buffers of dtypes that gloo does not support."""

    def __init__(self, rank: int):
        super().__init__()
        self.register_buffer("short", torch.full((2, 3), 5 + rank, dtype=torch.int16))
        self.register_buffer("one", torch.tensor(rank, dtype=torch.uint16))
        self.register_buffer("coarse", torch.full((3,), 0.5 + rank).to(torch.float8_e4m3fn))


def copied(rank: int) -> dict:
    with init_process_group("cpu"):
        model = WithCounts(rank)
        broadcast_module(model)
        return {name: tensor.float().tolist() for name, tensor in model.state_dict().items()}


def test_tensors_of_any_dtype_are_broadcast():
    right = {"short": [[5.0] * 3] * 2, "one": 0.0, "coarse": [0.5] * 3}
    assert run_ranks(2, copied) == [right, right]


def test_sparse_gradients_are_refused():
    answers = run_ranks(2, training, rank_tasks.sparse(), "powersgd")
    assert all(
        isinstance(answer, ConfigurationError) and "those of 0 are sparse" in str(answer) for answer in answers
    ), answers


def with_norm():
    return rank_tasks.task(model=lambda: rank_tasks.network(norm=True))


def error_feedback_is_zero_after_an_overflow(rank: int) -> bool:
    from hasten.engine.registry import make_method

    with init_process_group("cpu") as ranks:
        program = build(
            plain(),
            [make_method("powersgd", {"matrix_approximation_rank": 1, "min_compression_rate": 1.0})],
            ranks=ranks,
        )
        for weight in program.run.unwrapped_model.parameters():
            weight.grad = torch.full_like(weight, float("inf") if rank else 1.0)
        program.grad_transform()
        errors = program.run.parallel.rank_state["powersgd"]
        return not any(error.any() for error in errors) and all(
            not w.grad.isfinite().any() for w in program.run.unwrapped_model.parameters()
        )


def test_mean_of_different_states_covers_their_common_entries():
    """For example, a weight without a gradient on one rank so far has no optimizer state there."""

    def mean(rank: int) -> dict:
        state = {
            0: {"step": torch.tensor(3), "momentum": torch.full((2,), float(rank))},
            1: {"momentum": torch.full((1 + rank,), 7.0)},
        }
        with init_process_group("cpu") as ranks:
            found = average_state(
                {"state": state if rank else {5: {"momentum": torch.ones(2)}} | state}, SimpleNamespace(ranks=ranks)
            )
            return map_tensors(torch.Tensor.tolist, found["state"])

    first, second = run_ranks(2, mean)
    assert all(each[0]["momentum"] == [0.5, 0.5] and each[0]["step"] == 3 for each in (first, second))
    assert first[5]["momentum"] == [1.0, 1.0] and first[1]["momentum"] == [7.0]


class Beside(nn.Module):
    """A network with a mask, a large constant weight, and one that follows a trained one, as in a momentum encoder."""

    def __init__(self):
        super().__init__()
        self.network = rank_tasks.network()
        self.large = nn.Parameter(torch.randn(6, 1000, dtype=torch.float64), requires_grad=False)
        self.follower = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mask", torch.full((5,), torch.finfo(torch.float64).min, dtype=torch.float64))

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                self.follower.lerp_(self.network[0].weight, 0.5)
        return self.network(inputs) + 0 * (inputs @ self.large).sum(1, keepdim=True)


def beside():
    return rank_tasks.task(model=Beside, epochs=1)


def longest_message(rank: int, recipe: str, out) -> int:
    """Returns the largest number of elements that a run reduces or gathers at once."""
    lengths = []

    def noted(collective, place):
        return lambda *given, **named: (lengths.append(given[place].numel()), collective(*given, **named))[1]

    with (
        patch.object(dist, "all_reduce", noted(dist.all_reduce, 0)),
        patch.object(dist, "all_gather", noted(dist.all_gather, 1)),
    ):
        training(rank, beside(), recipe, out=out)
    return max(lengths)


@pytest.mark.parametrize("recipe", first_quick(["zero:stage=1", *APART], 2))
def test_untrained_weights_are_unchanged_and_not_communicated(tmp_path, recipe):
    answers = run_ranks(3, longest_message, recipe, tmp_path / "run")
    assert max(answers) < 1000, answers
    after, before = load_file(tmp_path / "run/model.safetensors"), build(beside()).run.unwrapped_model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in ("large", "mask"))


def test_frozen_weight_that_follows_a_trained_one_is_averaged(tmp_path):
    hand = ByHand(beside(), 3)
    for number in hand.with_gradients():
        hand.step()
        if number % 4 == 0:
            hand.average()
    assert hand.against(trained(tmp_path, 3, "local_sgd:period=4", beside)) < CLOSE


def test_mean_of_the_smallest_number_is_itself():
    def means(rank: int) -> list[float]:
        with init_process_group("cpu"):
            tensors = [
                torch.tensor([torch.finfo(kind).min, 2.0 * rank], dtype=kind) for kind in (torch.float32, torch.float16)
            ]
            all_reduce_mean(tensors)
            return [tensor.tolist() for tensor in tensors]

    right = [[torch.finfo(kind).min, 1.0] for kind in (torch.float32, torch.float16)]
    assert run_ranks(2, means) == [right, right]
