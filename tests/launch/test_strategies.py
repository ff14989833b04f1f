"""Every strategy trains what a single process trains, and any other strategy can resume its run."""

import os
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from hasten.core.errors import ConfigurationError, HastenWarning, RunError
from hasten.distributed.dtensor_state import PIECE
from hasten.engine.checkpoint import load_checkpoint
from hasten.engine.train import train
from helpers import rank_tasks
from helpers.assertions import CLOSE, farthest, losses
from helpers.equivalence import assert_resumes_under, assert_trains_like_one_process
from helpers.markers import first_quick, slow
from helpers.ranks import interrupted_run, resumed_run, run_ranks, training, training_of

STRATEGIES = ["ddp", "zero:stage=1", "zero:stage=2", "zero:stage=3"]


NAMES = ["blocks", "rates_by_name_and_schedule"]
QUICK = [(NAMES[0], STRATEGIES[3], 2), *((NAMES[1], strategy, 2) for strategy in STRATEGIES[:3])]
ALL = product(NAMES, [*STRATEGIES, "zero:stage=3,hybrid_shard_size=1"], (2, 4))


@pytest.mark.parametrize(("name", "strategy", "world"), [*QUICK, *(slow(*case) for case in ALL if case not in QUICK)])
def test_strategy_trains_like_one_process(tmp_path, name, strategy, world):
    make = getattr(rank_tasks, name)
    assert_trains_like_one_process(tmp_path, make, strategy, world)


def test_weights_of_images_are_sharded_under_channels_last(tmp_path):
    make = rank_tasks.pictures
    train(make(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(2, training_of, make, "zero:stage=3 + channels_last", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize("stage", [2, slow(3)])
def test_tied_weights_are_saved_once(tmp_path, stage):
    answers = run_ranks(2, training_of, rank_tasks.tied, f"zero:stage={stage}", tmp_path / "run")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert load_model(rank_tasks.tied().model(), tmp_path / "run" / "model.safetensors") == (set(), [])


def test_weight_that_views_another_one_is_not_untied():
    answers = run_ranks(2, training_of, rank_tasks.tied_by_a_view, "zero:stage=3", None)
    assert all("non-contiguous parameters" in str(answer) for answer in answers), answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "world"),
    [
        ("zero:stage=1", "zero:stage=3", 3),
        ("zero:stage=3", "zero:stage=3", 2),
        ("zero:stage=2", "ddp", 2),
        ("ddp", "zero:stage=1", 4),
    ],
)
def test_run_resumes_under_another_strategy_and_size(tmp_path, first, then, world):
    assert_resumes_under(then, world, tmp_path, rank_tasks.blocks, first)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", first_quick(STRATEGIES[::-1]))
def test_run_resumes_in_one_process(tmp_path, strategy):
    train(rank_tasks.blocks(), device="cpu", out=tmp_path / "single")
    run_ranks(2, interrupted_run, rank_tasks.blocks, tmp_path / "shared", strategy)
    resumed_run(0, rank_tasks.blocks, tmp_path / "shared", "baseline")
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "method",
    [
        "gradient_accumulation:accumulation_steps=3",
        "gradient_clipping:max_norm=0.1",
        "gradient_centralization",
        "activation_checkpointing",
        "in_memory_batches",
        "fused_optimizer",
    ],
)
def test_methods_combine_with_a_strategy(tmp_path, strategy, method):
    make = rank_tasks.blocks
    train(make(), method, device="cpu", out=tmp_path / "single")
    answers = run_ranks(2, training_of, make, f"{strategy} + {method}", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


def test_weight_without_dimension_trains_or_is_refused(tmp_path):
    """Stage 1 supports it; torch's fully_shard does not, and the error states the alternative."""
    train(rank_tasks.scalar(), device="cpu", out=tmp_path / "single")
    run_ranks(2, training_of, rank_tasks.scalar, "zero:stage=1", tmp_path / "shared")
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
    answers = run_ranks(2, training_of, rank_tasks.scalar, "zero:stage=3", tmp_path / "refused")
    assert all(
        isinstance(answer, ConfigurationError) and "the weight scale has no dimension" in str(answer)
        for answer in answers
    ), answers


@pytest.mark.slow
def test_ranks_write_their_own_shards(tmp_path):
    """Each rank writes its shards of weights and optimizer state; a checkpoint with a missing shard is invalid."""
    run_ranks(2, interrupted_run, rank_tasks.blocks, tmp_path / "shared", "zero:stage=3")
    second, first = (load_checkpoint(path) for path in sorted((tmp_path / "shared/checkpoints").glob("step-*9*.pt")))
    assert first["model"]["1.0.weight"]["shape"] == second["model"]["1.0.weight"]["shape"] == [801, 9]
    assert [len(state["model"]["1.0.weight"][PIECE]) for state in (first, second)] == [401, 400]
    (tmp_path / "shared/checkpoints/step-0000000029-of-rank-1.pt").unlink()
    with pytest.warns(
        HastenWarning,
        match=r"step-0000000029.pt is passed over: .* shard step-0000000029-of-rank-1.pt is missing",
    ):
        resumed_run(0, rank_tasks.blocks, tmp_path / "shared", "baseline")
    train(rank_tasks.blocks(), device="cpu", out=tmp_path / "single")
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
def test_rank_0_writes_the_full_state_without_a_shared_directory(tmp_path):
    """As on nodes without a shared disk."""
    answers = run_ranks(2, saved_in_a_directory_of_its_own, tmp_path)
    assert all(isinstance(answer, RunError) for answer in answers), answers
    names = sorted(path.name for path in (tmp_path / "rank-0/checkpoints").iterdir())
    assert names == ["step-0000000028.pt", "step-0000000029.pt"]
    assert load_checkpoint(tmp_path / "rank-0/checkpoints" / names[1])["model"]["1.0.weight"].shape == (801, 9)


def saved_in_a_directory_of_its_own(rank: int, directory) -> dict:
    """Each rank has another current directory, and rank 0 names a path that differs on the others."""
    (directory / f"rank-{rank}").mkdir()
    os.chdir(directory / f"rank-{rank}")
    return interrupted_run(rank, rank_tasks.blocks, ".", "zero:stage=3")


@pytest.mark.slow
def test_ranks_with_fewer_samples_use_as_many_microbatches(tmp_path):
    """Sharded gradients are communicated after every microbatch."""
    make, pieces = rank_tasks.uneven_batches, "gradient_accumulation:accumulation_steps=3"
    train(make(), pieces, device="cpu", out=tmp_path / "single")
    answers = run_ranks(2, training_of, make, f"zero:stage=2 + {pieces}", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
def test_shards_of_different_saves_are_not_merged(tmp_path):
    """Such as those of a job with more ranks that saved at the same step."""
    run_ranks(2, interrupted_run, rank_tasks.blocks, tmp_path / "shared", "zero:stage=3")
    part = tmp_path / "shared/checkpoints/step-0000000029-of-rank-1.pt"
    torch.save(load_checkpoint(part) | {"save": "another"}, part)
    with pytest.warns(
        HastenWarning,
        match=r"step-0000000029.pt is passed over: ValueError: the shards of its ranks were written by different saves",
    ):
        resumed_run(0, rank_tasks.blocks, tmp_path / "shared", "baseline")


class NumpySGD(torch.optim.SGD):
    """Updates weights through NumPy, which no version of torch supports for a DTensor; Rprop supports it since torch
    2.15."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.detach().numpy()[...] -= group["lr"] * weight.grad.numpy()


@pytest.mark.parametrize("stage", [slow(1), 2])
def test_optimizer_without_dtensor_support_is_refused_before_training(stage):
    task = rank_tasks.task(optimizer=lambda model: NumpySGD(model.parameters(), lr=0.1))
    answers = run_ranks(2, training, task, f"zero:stage={stage}")
    line = "zero shards the parameters, and NumpySGD cannot update DTensors; take Adam, "
    assert all(isinstance(answer, ConfigurationError) and str(answer).startswith(line) for answer in answers), answers


class Forked(torch.nn.Module):
    """Two branches of equal size; the first sample decides which of them its batch uses."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 2)) for _ in range(2)
        )

    def forward(self, x):
        return self.branches[int(x[0, 0] > 0)](x)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_on_different_layers_do_not_mix_their_gathers(stage):
    task = rank_tasks.task(model=lambda: Forked().double())
    answers = run_ranks(2, training, task, f"zero:stage={stage}")
    assert all(
        isinstance(answer, RunError) and "the batches of the ranks pass different layers" in str(answer)
        for answer in answers
    ), answers


def test_advice_for_unused_weights_can_be_followed():
    """ddp and zero both replace parallelize."""
    task = rank_tasks.task(model=lambda: Forked().double())
    answers = run_ranks(2, training, task, "zero:stage=1")
    advice = "pass --with ddp:find_unused_parameters=true, in place of zero"
    assert any(isinstance(answer, RunError) and advice in str(answer) for answer in answers), answers


class Opposed(rank_tasks.Rows):
    """Two samples, each of which uses a branch of its own."""

    def __init__(self):
        super().__init__(2)
        self.inputs[:, 0] = torch.tensor([1.0, -1.0])


def weights_after(rank: int) -> list[float]:
    made = []
    task = rank_tasks.task(Opposed(), model=lambda: made.append(Forked().double()) or made[0], epochs=1, batch_size=2)
    train(task, "zero:stage=1", device="cpu")
    return [weight.double().sum().item() for weight in made[0].parameters()]


def test_weights_used_by_some_ranks_only_are_gathered_by_all():
    """In the only step, after which DistributedDataParallel no longer checks for unused parameters."""
    weights = run_ranks(2, weights_after)
    assert weights[0] == weights[1], weights


def adding_up(shape: tuple = (1,)) -> rank_tasks.Task:
    """With an optimizer that creates its state at once."""
    return rank_tasks.task(
        model=lambda: rank_tasks.Scaled(shape),
        optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, lr_decay=0.1),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "make"),
    [(1, adding_up), (1, partial(adding_up, ())), (2, adding_up), (3, adding_up)],
)
def test_optimizer_with_eager_state_is_sharded_and_resumes(tmp_path, stage, make):
    train(make(), device="cpu", out=tmp_path / "single")
    broken = run_ranks(2, interrupted_run, make, tmp_path / "shared", f"zero:stage={stage}")
    assert [str(answer) for answer in broken] == ["interrupted"] * 2, broken
    answers = run_ranks(2, resumed_run, make, tmp_path / "shared", f"zero:stage={stage}")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


class Rows32(rank_tasks.Rows):
    def __init__(self):
        super().__init__()
        self.inputs = self.inputs.float()


def float32_blocks():
    """Blocks large enough to be gathered one by one."""
    model = lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 2))  # noqa: E731
    return rank_tasks.task(Rows32(), model=model, validation_data=None)


def precision_of_gathers(rank: int, recipe: str, out) -> tuple[dict, list[torch.dtype]]:
    """(result, dtypes of the weights in the forward passes)."""
    seen: set[torch.dtype] = set()

    def model():
        built = float32_blocks().model()
        built[0].register_forward_pre_hook(lambda layer, inputs: seen.add(layer.weight.dtype))
        return built

    return training(rank, replace(float32_blocks(), model=model), recipe, out=out), list(seen)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, slow(3)])
def test_shards_gathered_in_bfloat16_train_float32_weights(tmp_path, stage):
    plain, short = f"zero:stage={stage}", f"zero:stage={stage},param_dtype=bfloat16"
    answers = run_ranks(2, precision_of_gathers, plain, tmp_path / "plain")
    assert [dtypes for _, dtypes in answers] == [[torch.float32]] * 2
    answers = run_ranks(2, precision_of_gathers, short, tmp_path / "short")
    assert [dtypes for _, dtypes in answers] == [[torch.bfloat16]] * 2
    weights = load_file(tmp_path / "short" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert 0 < farthest(tmp_path / "short", tmp_path / "plain") < 0.05
    assert losses(tmp_path / "short") == pytest.approx(losses(tmp_path / "plain"), rel=0.05)


def test_gathering_in_bfloat16_without_shards_is_refused():
    answers = run_ranks(2, training, float32_blocks(), "zero:stage=1,param_dtype=bfloat16")
    assert all("is for stages 2 and 3" in str(answer) for answer in answers), answers


def clipped():
    return replace(rank_tasks.rates_by_name_and_schedule(), clip_grad_norm=0.05)


@pytest.mark.parametrize("strategy", first_quick(STRATEGIES[1:]))
def test_task_that_clips_gradients_trains_like_one_process(tmp_path, strategy):
    """The optimizer of stage 1 has shards, whose gradients are set in its step."""
    assert_trains_like_one_process(tmp_path, clipped, strategy, 2)
