"""One model replica over several ranks: the same training for any division of the model."""

from itertools import islice

import pytest
import torch
from torch import nn

from hasten.core.recipe import Recipe
from hasten.distributed.process_group import init_process_group
from hasten.engine.checkpoint import sync_rng
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.engine.train import train
from helpers import drawing_tasks, rank_tasks, tower_tasks
from helpers.assertions import CLOSE, farthest, losses
from helpers.equivalence import assert_resumes_under, assert_trains_like_one_process
from helpers.markers import first_quick, slow, soak
from helpers.ranks import (
    interrupted_early,
    interrupted_run,
    resumed_run,
    run_ranks,
    training_of,
)

BOTH = "tensor_parallel:degree=2 + pipeline:degree=2"
BY_WORLD = [
    ("tensor_parallel", 2),
    ("pipeline", 2),
    ("pipeline:schedule=gpipe,microbatches=3", 2),
    ("tensor_parallel", 4),
    ("tensor_parallel:degree=2", 4),
    ("pipeline", 4),
    ("pipeline:schedule=interleaved,degree=2", 4),
    ("pipeline:schedule=zero_bubble", 2),
    (BOTH, 4),
    soak(BOTH, 8),
    soak("tensor_parallel + pipeline:schedule=interleaved,degree=2", 4),
    soak("tensor_parallel + pipeline:schedule=zero_bubble,degree=2", 4),
    soak("tensor_parallel + pipeline:schedule=gpipe,degree=4", 8),
]
STRATEGIES = ["pipeline", "tensor_parallel"]


@pytest.mark.parametrize(("strategy", "world"), first_quick(BY_WORLD, 3))
def test_strategy_trains_like_one_process(tmp_path, strategy, world):
    make = tower_tasks.tower
    assert_trains_like_one_process(tmp_path, make, strategy, world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("tensor_parallel:degree=2", 4),
        ("pipeline:degree=2,microbatches=5", 4),
        ("pipeline", 3),
        soak(f"{BOTH},microbatches=5", 8),
    ],
)
def test_batches_of_indivisible_sizes_train_like_one_process(tmp_path, strategy, world):
    train(tower_tasks.uneven_tower(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, training_of, tower_tasks.uneven_tower, strategy, tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "single"), rel=CLOSE)


@pytest.mark.parametrize("strategy", ["tensor_parallel", "pipeline:schedule=gpipe,microbatches=1"])
def test_batch_norm_uses_the_global_batch_outside_split_layers(tmp_path, strategy):
    train(rank_tasks.norming(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(2, training_of, rank_tasks.norming, strategy, tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


class InPieces(nn.Sequential):
    """A model that normalizes chunks of a training batch separately: batches of ten in two, of seven in one, of four in
    two."""

    def forward(self, inputs):
        pieces = inputs.chunk(1 if len(inputs) == 7 or not self.training else 2)
        return torch.cat([super(InPieces, self).forward(piece) for piece in pieces])


@pytest.mark.parametrize(
    ("strategy", "rows"),
    first_quick(
        [
            ("pipeline", 227),
            ("pipeline", 224),
            ("pipeline:schedule=interleaved", 227),
            ("pipeline:schedule=zero_bubble", 224),
        ]
    ),
)
def test_batch_norm_ignores_padding_rows(tmp_path, strategy, rows):
    def make(kind=nn.Sequential):
        return rank_tasks.task(rank_tasks.Rows(rows), model=lambda: kind(*rank_tasks.norming().model()), epochs=1)

    train(make(InPieces), device="cpu", out=tmp_path / "single")
    answers = run_ranks(2, training_of, make, strategy, tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize(
    ("make", "strategy", "world"),
    first_quick([(rank_tasks.viewing, "pipeline:", 2), (tower_tasks.in_a_row, f"{BOTH},", 4)]),
)
def test_stages_end_in_a_view_or_in_a_split_layer(tmp_path, make, strategy, world):
    train(make(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, training_of, make, f"{strategy}schedule=zero_bubble", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize(
    ("strategy", "world"),
    first_quick([("pipeline:split_sizes=2-3", 2), ("tensor_parallel", 2), (f"{BOTH},split_sizes=2-3", 4)]),
)
def test_interrupted_run_resumes_bit_for_bit(tmp_path, strategy, world):
    make = tower_tasks.dropping_tower
    run_ranks(world, training_of, make, strategy, tmp_path / "whole")
    run_ranks(world, interrupted_early, make, tmp_path / "broken", strategy)
    answers = run_ranks(world, resumed_run, make, tmp_path / "broken", strategy)
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "broken", tmp_path / "whole") == 0


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
    make = tower_tasks.tower
    train(make(), method, device="cpu", out=tmp_path / "single")
    answers = run_ranks(2, training_of, make, f"{strategy} + {method}", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "world"),
    [
        ("tensor_parallel", "pipeline", 2),
        ("pipeline", "tensor_parallel:degree=2", 4),
        ("pipeline", "zero:stage=3", 2),
        ("zero:stage=2", "pipeline:schedule=interleaved", 2),
        ("ddp", "tensor_parallel", 2),
        ("pipeline", "pipeline", 3),
    ],
)
def test_run_resumes_under_another_strategy_and_size(tmp_path, first, then, world):
    assert_resumes_under(then, world, tmp_path, tower_tasks.longer_tower, first)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", first_quick(STRATEGIES))
def test_run_resumes_in_one_process(tmp_path, strategy):
    train(tower_tasks.longer_tower(), device="cpu", out=tmp_path / "single")
    run_ranks(2, interrupted_run, tower_tasks.longer_tower, tmp_path / "shared", strategy)
    resumed = resumed_run(0, tower_tasks.longer_tower, tmp_path / "shared", "baseline")
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
    assert resumed["tuned_settings"] == {} and not Recipe.load(tmp_path / "shared" / "recipe.toml"), (
        "the cuts are not those of this run any more"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "at", "then", "world"),
    [
        (BOTH, 4, "baseline", 1),
        soak(BOTH, 4, "ddp", 2),
        soak(BOTH, 8, "zero:stage=3", 2),
        ("ddp", 2, BOTH, 4),
        soak("pipeline", 2, BOTH, 8),
        soak(BOTH, 4, "tensor_parallel", 2),
    ],
)
def test_pipeline_of_split_layers_is_another_strategy(tmp_path, first, at, then, world):
    make = tower_tasks.longer_tower
    train(make(), device="cpu", out=tmp_path / "single")
    run_ranks(at, interrupted_run, make, tmp_path / "shared", first)
    answers = (
        run_ranks(world, resumed_run, make, tmp_path / "shared", then)
        if world > 1
        else [resumed_run(0, make, tmp_path / "shared", then)]
    )
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), [("pipeline:degree=2", 4), (BOTH, 4), soak(BOTH, 8)])
def test_gradient_norm_covers_all_replicas_and_stages(tmp_path, strategy, world):
    """The norm of the mean gradient, in which a weight on several ranks counts once."""
    clipping = "gradient_clipping:max_norm=0.1"
    train(tower_tasks.tower(), clipping, device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, training_of, tower_tasks.tower, f"{strategy} + {clipping}", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
def test_dropout_between_split_layers_equals_one_process(tmp_path):
    train(tower_tasks.dropping_tower(), device="cpu", out=tmp_path / "single")
    run_ranks(2, training_of, tower_tasks.dropping_tower, "tensor_parallel", tmp_path / "shared")
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
def test_ranks_of_one_replica_draw_alike_after_resuming_from_one_process(tmp_path):
    train(tower_tasks.dropping_tower(), device="cpu", out=tmp_path / "single")
    interrupted_early(0, tower_tasks.dropping_tower, tmp_path / "shared", "baseline")
    answers = run_ranks(2, resumed_run, tower_tasks.dropping_tower, tmp_path / "shared", "tensor_parallel")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize(
    ("make", "strategy", "world"),
    [
        (drawing_tasks.in_a_loader, "pipeline", 2),
        (drawing_tasks.in_a_loader, "pipeline + in_memory_batches", 2),
        (drawing_tasks.with_a_sampler, "pipeline", 2),
        slow(drawing_tasks.with_a_sampler, "pipeline:degree=2", 4),
    ],
)
def test_stages_of_one_replica_read_the_same_batches(make, strategy, world):
    seen = run_ranks(world, read_while_training, make, strategy)
    assert all(one == other for one, other in zip(seen[::2], seen[1::2], strict=True)), seen
    assert len({tuple(each) for each in seen}) == world // 2 and len(set(seen[0])) == len(seen[0])


@pytest.mark.slow
@pytest.mark.parametrize("make", [drawing_tasks.in_a_loader, drawing_tasks.with_a_sampler])
def test_stages_resume_their_random_state(tmp_path, make):
    run_ranks(2, training_of, make, "pipeline:split_sizes=1-1", tmp_path / "whole")
    run_ranks(2, interrupted_run, make, tmp_path / "broken", "pipeline:split_sizes=1-1")
    answers = run_ranks(2, resumed_run, make, tmp_path / "broken", "pipeline:split_sizes=1-1")
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "broken", tmp_path / "whole") == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [rank_tasks.loader, rank_tasks.own_sampler])
def test_stages_read_a_loader_in_the_order_of_one_process(tmp_path, make):
    train(make(), device="cpu", out=tmp_path / "single")
    run_ranks(2, training_of, make, "pipeline", tmp_path / "shared")
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


def read_while_training(rank: int, make, recipe: str) -> list[float]:
    """Returns an id of each of the first batches that a rank reads while its model trains."""
    with init_process_group("cpu") as ranks:
        program, seen = build(make(), make_methods(Recipe.parse(recipe)), ranks=ranks), []
        sync_rng(ranks, program.source)  # as every epoch begins
        for batch in islice(program.train.epoch(0, 0), 3):
            seen.append(batch[0].sum().item())
            program.forward_backward(batch)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("then", first_quick(["ddp", "pipeline"]))
def test_stages_keep_unused_buffers_and_initial_optimizer_state(tmp_path, then):
    make = tower_tasks.tower_with_a_mask
    train(make(), device="cpu", out=tmp_path / "single")
    run_ranks(2, interrupted_early, make, tmp_path / "shared", "pipeline")
    answers = run_ranks(2, resumed_run, make, tmp_path / "shared", then)
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
