"""Which rank holds which weights of a divided model, and models that cannot be divided."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.distributed.dtensor_state import to_local
from hasten.distributed.fx.pipeline_split import find_split_points
from hasten.distributed.process_group import init_process_group
from hasten.engine.plan import build
from hasten.engine.registry import make_method, make_methods
from hasten.testing import tasks
from helpers import rank_tasks, tower_tasks
from helpers.ranks import (
    progress_while_building,
    run_ranks,
    training_of,
)


@pytest.mark.parametrize(
    ("strategy", "world", "make", "message"),
    [
        ("tensor_parallel:degree=2", 3, tower_tasks.tower, "degree=2 does not divide 3 processes; take 3"),
        ("pipeline:degree=1", 2, tower_tasks.tower, "degree=1 leaves every process a whole copy"),
        ("tensor_parallel", 3, rank_tasks.samples, "0 by columns, 4 by rows: 3 does not divide 8"),
        ("tensor_parallel", 2, rank_tasks.scalar, "It looked for Linear layers whose outputs meet in one Linear alone"),
        (
            "pipeline:schedule=interleaved",
            2,
            rank_tasks.samples,
            "has 4 stages to fill and found a chain of 2 that have weights in this model",
        ),
        (
            "pipeline:microbatches=1",
            2,
            tower_tasks.tower,
            "microbatches=1 leaves some of 2 processes idle with schedule=1f1b; take 2",
        ),
        (
            "pipeline:schedule=zero_bubble,microbatches=5",
            2,
            tower_tasks.tower,
            "microbatches=5 does not fill the rounds of schedule=zero_bubble; take 6",
        ),
        (
            "pipeline:split_sizes=3-3",
            2,
            tower_tasks.tower,
            "split_sizes=3-3 must be 2 lengths that make up the chain of 5",
        ),
        ("data_parallel", 2, tower_tasks.tower, "data_parallel is for a single process"),
        ("pipeline", 2, rank_tasks.tied, "stages 1 and 2 both use 0.weight; untie it"),
        ("pipeline", 2, rank_tasks.own_loss, "pipeline computes the loss apart from the model"),
        (
            "pipeline + tensor_parallel",
            2,
            tower_tasks.tower,
            "tensor_parallel and pipeline would each take all 2 processes; give one of them a degree",
        ),
        (
            "pipeline + tensor_parallel:degree=2",
            2,
            tower_tasks.tower,
            "tensor_parallel:degree=2 and pipeline do not fit 2 processes: each takes 2 or",
        ),
        ("pipeline + sync_batch_norm", 2, rank_tasks.norming, "sync_batch_norm cannot be combined with pipeline"),
        ("pipeline + zero", 2, tower_tasks.tower, "zero and pipeline both replace parallelize; choose one of them"),
    ],
)
def test_model_that_cannot_be_split_is_refused(strategy, world, make, message):
    answers = run_ranks(world, training_of, make, strategy, None)
    assert all(isinstance(answer, ConfigurationError) and message in str(answer) for answer in answers), answers


@pytest.mark.parametrize("method", ["bfloat16", "ema", "float16", "compile"])
def test_methods_that_require_the_full_model_are_refused(method):
    answers = run_ranks(2, training_of, tower_tasks.tower, f"pipeline + {method}", None)
    assert all(
        isinstance(answer, ConfigurationError) and "which pipeline invalidates" in str(answer) for answer in answers
    ), answers


def test_pipeline_rank_has_only_the_weights_of_its_stage():
    one, other = run_ranks(2, weights_held)
    assert one | other == {name for name, _ in tower_tasks.Tower().named_parameters()} and not one & other


@pytest.mark.slow
def test_rank_has_its_shard_of_the_split_layers_of_its_stage():
    sizes = run_ranks(4, sizes_held, "tensor_parallel:degree=2 + pipeline:degree=2")
    full = {name: weight.numel() for name, weight in tower_tasks.Tower().named_parameters()}
    for one, other in (sizes[:2], sizes[2:]):
        assert one == other
        assert {size / full[name] for name, size in one.items()} == {1.0, 0.5}
    assert sizes[0].keys() | sizes[2].keys() == full.keys() and not sizes[0].keys() & sizes[2].keys()


def test_sharded_activations_are_not_exposed_to_other_modules():
    """Between the queries and the last layer of an attention, each rank has some heads of a sharded tensor."""
    cut, _ = run_ranks(2, members_of_cut_layers, tower_tasks.bare_attention)
    assert [member[-1] for member in cut] == ["first", "mean", "last"]


def test_blocks_that_fail_verification_are_not_split():
    """Queries, keys and values in one layer cannot be split by columns, as its halves are no heads. The other layers
    can."""
    reported, _ = run_ranks(2, progress_while_building, "tensor_parallel", tasks.transformer)
    sharded, dropped = (f"tensor_parallel: {how}blocks.0." for how in ("", "not sharded: "))
    assert f"{sharded}mlp.0 by columns, blocks.0.mlp.2 by rows" in reported
    assert any(line.startswith(f"{dropped}qkv by columns") for line in reported), reported


def test_plan_is_reported():
    first, second = run_ranks(2, progress_while_building, "tensor_parallel")
    assert first[0] == "tensor_parallel: layers.0.query, layers.0.value, layers.0.key by columns, layers.0.mix by rows"
    assert first[1] == "tensor_parallel: layers.0.gate, layers.0.up by columns, layers.0.down by rows"
    assert first[-1].endswith("% of the weights are sharded") and len(first) == 7 and not second
    first, second = run_ranks(2, progress_while_building, "pipeline")
    assert first[0].startswith("pipeline: stage 1 of 2 is ") and len(first) == 2 and not second


def weights_held(rank: int) -> set[str]:
    with init_process_group("cpu") as ranks:
        program = build(tower_tasks.tower(), [make_method("pipeline")], ranks=ranks)
        return {name for name, weight in program.run.unwrapped_model.named_parameters() if not weight.is_meta}


def sizes_held(rank: int, recipe: str) -> dict[str, int]:
    with init_process_group("cpu") as ranks:
        program = build(tower_tasks.tower(), make_methods(Recipe.parse(recipe)), ranks=ranks)
        return {
            name: to_local(weight).numel()
            for name, weight in program.run.unwrapped_model.named_parameters()
            if not weight.is_meta
        }


def members_of_cut_layers(rank: int, make) -> list[list[str]]:
    with init_process_group("cpu") as ranks:
        program = build(make(), [make_method("tensor_parallel")], ranks=ranks)
        _, members = find_split_points(program.run.unwrapped_model, 3, lambda: next(program.train.epoch(0, 0)))
        return [[node.name for node in member] for member in members]


class OverTime(nn.Module):
    """The mean over the first dimension."""

    def forward(self, inputs):
        return inputs.mean(0)


def with_time_first(samples):
    inputs, labels = zip(*samples, strict=True)
    return torch.stack(inputs).t().unsqueeze(-1), torch.stack(labels)


def sequences():
    """A task whose inputs have the shape (time, samples, 1)."""
    data = DataLoader(rank_tasks.Rows(220), batch_size=10, shuffle=True, collate_fn=with_time_first)
    layers = lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), OverTime(), nn.Linear(8, 2)).double()  # noqa: E731
    return rank_tasks.task(
        data, model=layers, validation_data=DataLoader(rank_tasks.Rows(40), 10, collate_fn=with_time_first)
    )


def test_pipeline_refuses_batches_in_which_time_comes_first():
    answers = run_ranks(2, training_of, sequences, "pipeline:microbatches=2", None)
    assert all("as where time comes first" in str(answer) for answer in answers)
