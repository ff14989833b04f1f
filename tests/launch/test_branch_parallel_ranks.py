"""Branches of a model on several ranks: the same training as in one process, for any assignment."""

import pytest

from hasten.core.errors import ConfigurationError
from hasten.distributed.process_group import init_process_group
from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.engine.train import train
from helpers import branch_tasks, rank_tasks
from helpers.assertions import CLOSE, farthest
from helpers.equivalence import assert_resumes_under, assert_trains_like_one_process
from helpers.markers import first_quick
from helpers.ranks import (
    interrupted_early,
    progress_while_building,
    resumed_run,
    run_ranks,
    training_of,
)

ALIKE = [
    ("towers", "branch_parallel:degree=2", 4),
    ("ensemble", "branch_parallel", 2),
    ("recurrent", "branch_parallel", 2),
    ("inception", "branch_parallel", 2),
    ("inception", "branch_parallel", 4),
    ("towers", "branch_parallel", 2),
    ("ensemble", "branch_parallel", 4),
]


@pytest.mark.parametrize(("name", "strategy", "world"), first_quick(ALIKE, 3))
def test_branches_train_like_one_process(tmp_path, name, strategy, world):
    make = getattr(branch_tasks, name)
    assert_trains_like_one_process(tmp_path, make, strategy, world)


@pytest.mark.slow
def test_branches_interrupted_resume_bit_for_bit(tmp_path):
    make, strategy = branch_tasks.inception, "branch_parallel:assignment=0-1-0-1-1-0-1-0-0-1"
    run_ranks(2, training_of, make, strategy, tmp_path / "whole")
    run_ranks(2, interrupted_early, make, tmp_path / "broken", strategy)
    answers = run_ranks(2, resumed_run, make, tmp_path / "broken", strategy)
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "broken", tmp_path / "whole") == 0


@pytest.mark.parametrize(
    ("first", "then", "world"),
    first_quick(
        [
            ("branch_parallel", "baseline", 1),
            ("branch_parallel", "ddp", 2),
            ("pipeline:split_sizes=3-3", "branch_parallel", 2),
            ("branch_parallel", "branch_parallel:degree=2", 4),
            ("branch_parallel", "zero:stage=3", 2),
        ]
    ),
)
def test_branches_run_resumes_under_another_strategy(tmp_path, first, then, world):
    make = branch_tasks.towers if "pipeline" not in first else branch_tasks.trunk_of_branches
    assert_resumes_under(then, world, tmp_path, make, first)


@pytest.mark.parametrize(
    ("method", "world"),
    first_quick(
        [
            ("gradient_accumulation:accumulation_steps=3", 2),
            ("gradient_clipping:max_norm=0.1", 4),
            ("gradient_clipping:max_norm=0.1", 2),
            ("gradient_centralization", 2),
            ("in_memory_batches", 2),
            ("fused_optimizer", 2),
            ("bfloat16", 2),
            ("compile:backend=eager", 2),
        ]
    ),
)
def test_branches_combine_with_other_methods(tmp_path, method, world):
    make = branch_tasks.towers
    train(make(), method, device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, training_of, make, f"branch_parallel:degree=2 + {method}", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.slow
def test_checkpointed_block_is_not_divided(tmp_path):
    """The two equal blocks are divided, and the one between them is not."""
    train(branch_tasks.inception(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(
        2,
        training_of,
        branch_tasks.inception,
        "branch_parallel:assignment=0-1 + activation_checkpointing",
        tmp_path / "shared",
    )
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


def test_branches_inside_user_checkpointing_are_refused():
    answers = run_ranks(2, training_of, branch_tasks.computing_again, "branch_parallel", None)
    assert all(
        isinstance(answer, ConfigurationError) and "cannot recompute branches in the backward pass" in str(answer)
        for answer in answers
    ), answers


@pytest.mark.parametrize(
    ("strategy", "world", "make", "message"),
    [
        ("branch_parallel:degree=2", 3, branch_tasks.ensemble, "degree=2 does not divide 3 processes; take 3"),
        (
            "branch_parallel",
            2,
            rank_tasks.samples,
            "finds no branches in this model for 2 processes. It looked for branches with trained weights",
        ),
        (
            "branch_parallel",
            2,
            branch_tasks.siamese,
            "left.0 to left.5: it shares weights with another part of the model",
        ),
        ("branch_parallel", 2, branch_tasks.dropping_ensemble, "members_0_2 draws random numbers"),
        (
            "branch_parallel",
            2,
            branch_tasks.changing_in_place,
            "first.0 to first.1 changes in place what other branches read",
        ),
        (
            "branch_parallel:assignment=0-1",
            2,
            branch_tasks.ensemble,
            "assignment=0-1 must give each of 3 branches a rank from 0 to 1, and each block two ranks or more",
        ),
        ("branch_parallel:assignment=1-1-1", 2, branch_tasks.ensemble, "each block two ranks or more, such as 0-1-0"),
        ("branch_parallel:assignment=0-1-2", 2, branch_tasks.ensemble, "from 0 to 1"),
    ],
)
def test_model_without_branches_is_refused(strategy, world, make, message):
    answers = run_ranks(world, training_of, make, strategy, None)
    assert all(isinstance(answer, ConfigurationError) and message in str(answer) for answer in answers), answers


def test_rank_has_weights_of_its_branches_and_of_the_shared_layers():
    one, other = run_ranks(2, weights_held)
    assert one | other == {name for name, _ in branch_tasks.Towers().named_parameters()}
    assert one & other == {"head.weight", "head.bias"} and "left.0.weight" in one and "right.0.weight" in other


def test_assignment_is_reported():
    first, second = run_ranks(2, progress_while_building, "branch_parallel", branch_tasks.towers, {"assignment": "0-1"})
    assert first == [
        "branch_parallel: left.0 to left.5 on rank 0, right.0 to right.8 on rank 1; they join in mul_2",
        "branch_parallel: 94% of the weights are divided",
    ]
    assert not second


def weights_held(rank: int) -> set[str]:
    with init_process_group("cpu") as ranks:
        program = build(branch_tasks.towers(), [make_method("branch_parallel", {"assignment": "0-1"})], ranks=ranks)
        return {name for name, weight in program.run.unwrapped_model.named_parameters() if not weight.is_meta}
