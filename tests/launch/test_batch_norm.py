"""Batch normalization over the shards of all ranks equals that of one process over the global batch."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hasten.core.errors import ConfigurationError
from hasten.core.run_context import TrainProgress
from hasten.data import arrays
from hasten.distributed.batch_norm import SyncGroup, convert_sync_batchnorm
from hasten.distributed.process_group import init_process_group
from hasten.engine.train import train
from hasten.utils.batch import map_tensors
from helpers import rank_tasks
from helpers.assertions import CLOSE, farthest, losses
from helpers.markers import slow
from helpers.ranks import run_ranks, training, training_of

LAYERS = {
    1: lambda **more: nn.BatchNorm1d(3, dtype=torch.float64, **more),
    2: lambda **more: nn.BatchNorm2d(3, dtype=torch.float64, **more),
    3: lambda **more: nn.BatchNorm3d(3, dtype=torch.float64, **more),
}


def with_norm(**changes):
    return rank_tasks.task(model=lambda: rank_tasks.network(norm=True), **changes)


def few_in_the_last_batch():
    return with_norm(train_data=rank_tasks.Rows(rank_tasks.SAMPLES - 4))


@pytest.mark.parametrize("recipe", ["ddp", slow("zero:stage=1"), slow("zero:stage=3")])
@pytest.mark.parametrize("world", [2, slow(4)])
@pytest.mark.parametrize("make", [with_norm, few_in_the_last_batch])
def test_two_ranks_train_like_one_process(tmp_path, make, world, recipe):
    """Including the running statistics, which are exported, for shards of any sizes."""
    train(make(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, training_of, make, f"{recipe} + sync_batch_norm", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "single"), rel=CLOSE)


def saved_bytes(rank: int) -> tuple[int, int]:
    """(bytes of the inputs, bytes of other large tensors that the layer keeps for its backward pass), in bfloat16."""
    layer, inputs = nn.BatchNorm2d(3), torch.randn(4, 3, 32, 32, dtype=torch.bfloat16)
    with init_process_group("cpu"):
        progress = TrainProgress(global_batch_size=8)
        convert_sync_batchnorm(layer, SyncGroup(progress, 2))
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
            layer(inputs.requires_grad_())
    large = [tensor for tensor in saved if tensor.numel() >= inputs.numel()]
    return inputs.nbytes, sum(tensor.nbytes for tensor in large if tensor.data_ptr() != inputs.data_ptr())


def test_layer_keeps_its_inputs_and_no_wider_copy_for_the_backward_pass():
    """The layer before keeps them anyway; a float32 copy doubled to quadrupled the memory of activations."""
    for inputs, others in run_ranks(2, saved_bytes):
        assert inputs == 4 * 3 * 32 * 32 * 2 and others <= inputs, "of the affine transform in the same precision"


class Activated(nn.BatchNorm1d):
    """As in libraries: another forward pass under its own class name."""

    def forward(self, inputs):
        return super().forward(inputs).relu()


def test_unknown_normalization_is_named():
    task = rank_tasks.task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Activated(8), nn.Linear(8, 2)).double()
    )
    answers = run_ranks(2, training_of, lambda: task, "sync_batch_norm", None)
    assert all(
        isinstance(answer, ConfigurationError) and "the model has Activated; leave it out" in str(answer)
        for answer in answers
    ), answers


def samples_and_weights(rank: int, make, recipe: str) -> tuple[int, dict]:
    task, models = make(), []
    result = training(rank, replace(task, model=lambda: models.append(task.model()) or models[0]), recipe)
    return result["samples"], {name: weight.tolist() for name, weight in models[0].named_parameters()}


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd:period=2"])
def test_last_batch_of_one_sample_a_rank_is_read_by_all(recipe):
    first, second = run_ranks(2, samples_and_weights, rank_tasks.one_sample_a_rank_in_the_last_batch, recipe)
    assert first == second and first[0] == 2 * (rank_tasks.SAMPLES - 5), (first, second)


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd:period=2"])
def test_batch_that_is_read_by_all_trains_like_one_process(tmp_path, recipe):
    make = rank_tasks.one_sample_a_rank
    train(make(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(2, training_of, make, recipe, tmp_path / "shared")
    assert [answer["samples"] for answer in answers] == [4, 4], answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "single"), rel=CLOSE)


def in_a_pipeline(samples: int = rank_tasks.SAMPLES - 5, **batching):
    rows = rank_tasks.Rows(samples)
    return with_norm(train_data=arrays((rows.inputs, rows.labels)).batch(rank_tasks.BATCH, **batching))


def test_pipeline_with_one_sample_a_rank_in_the_last_batch_is_refused():
    answers = run_ranks(2, training_of, in_a_pipeline, None, None)
    problem = "the last batch has 2 samples for 2 processes, and BatchNorm1d needs 2 in each; use another batch size"
    assert all(isinstance(answer, ConfigurationError) and problem in str(answer) for answer in answers), answers


@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (in_a_pipeline, "ddp + sync_batch_norm"),
        (partial(in_a_pipeline, drop_last=True), "ddp"),
        (partial(in_a_pipeline, rank_tasks.SAMPLES - 3), "ddp"),
    ],
)
def test_pipeline_with_enough_samples_trains(make, recipe):
    answers = run_ranks(2, training_of, make, recipe, None)
    assert [type(answer) for answer in answers] == [dict] * 2, answers


def test_batches_of_one_sample_in_some_processes_are_explained():
    answers = run_ranks(2, training_of, partial(with_norm, batch_size=3), None, None)
    assert any("or fewer processes" in str(answer) and "step 1 (" in str(answer) for answer in answers), answers


def test_task_without_conversion_trains_another_formula(tmp_path):
    train(with_norm(), device="cpu", out=tmp_path / "single")
    run_ranks(2, training_of, with_norm, None, tmp_path / "shared")
    assert farthest(tmp_path / "shared", tmp_path / "single") > 1e-3


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("dimensions", "settings"),
    [(1, {}), (2, {}), (3, {"momentum": None}), (2, {"affine": False}), (1, {"track_running_stats": False})],
)
def test_converted_layer_over_unequal_shards_equals_one_process(world, dimensions, settings):
    """Outputs, gradients and statistics; the first rank has most of the samples."""
    inputs, weights = batch(dimensions)
    layer = LAYERS[dimensions](**settings)
    inputs.requires_grad_()
    for _ in range(2):
        outputs = layer(inputs)
    (outputs * weights).sum().backward()
    parts = [arrays_as_tensors(part) for part in run_ranks(world, over_parts, dimensions, settings)]
    assert torch.allclose(torch.cat([part["outputs"] for part in parts]), outputs, rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat([part["of inputs"] for part in parts]), inputs.grad, rtol=0, atol=1e-12)
    for name, weight in layer.named_parameters():
        assert torch.allclose(sum(part["of weights"][name] for part in parts), weight.grad, rtol=1e-12)
    for part in parts:
        assert all(torch.allclose(part["statistics"][name], value, rtol=1e-12) for name, value in layer.named_buffers())


def batch(dimensions: int):
    generator = torch.Generator().manual_seed(5)
    shape = (13, 3, *[2] * (dimensions if dimensions > 1 else 0))
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 100 * first for first in (True, False)
    )


def arrays_as_tensors(part: dict) -> dict:
    return {
        name: arrays_as_tensors(value) if isinstance(value, dict) else torch.as_tensor(value)
        for name, value in part.items()
    }


def over_parts(rank: int, dimensions: int, settings: dict) -> dict:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    first, end = (0, 13 - 2 * (world - 1)) if rank == 0 else (13 - 2 * (world - rank), 13 - 2 * (world - rank - 1))
    inputs, weights = (tensor[first:end] for tensor in batch(dimensions))
    layer = LAYERS[dimensions](**settings)
    convert_sync_batchnorm(layer, SyncGroup(TrainProgress(global_batch_size=13), world))
    layer = copy.deepcopy(layer)  # as methods that export a copy do
    inputs = inputs.clone().requires_grad_()
    for _ in range(2):
        outputs = layer(inputs)
    (outputs * weights).sum().backward()
    answer = {
        "outputs": outputs,
        "of inputs": inputs.grad,
        "of weights": {name: weight.grad for name, weight in layer.named_parameters()},
        "statistics": dict(layer.named_buffers()),
    }
    dist.barrier()
    dist.destroy_process_group()
    # a tensor would have to be fetched while its process lives
    return map_tensors(lambda tensor: tensor.detach().numpy(), answer)
