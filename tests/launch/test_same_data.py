"""Ranks that read different data are found before a step; batches that cannot be divided are refused or reported."""

import warnings
from dataclasses import dataclass
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    default_collate,
)

from hasten.core.errors import ConfigurationError, RunError
from hasten.data import arrays
from hasten.distributed.fx.tracing import try_trace
from helpers import rank_tasks, tower_tasks
from helpers.ranks import run_ranks, training, training_as_rank


class Made(IterableDataset):
    """Every ``step``-th sample, made by ``make(index)``."""

    def __init__(self, make, first: int = 0, step: int = 1):
        self.make, self.numbers = make, range(first, rank_tasks.SAMPLES, step)

    def __iter__(self):
        return map(self.make, self.numbers)


def ids(number: int):
    return torch.full((6,), number % 7), torch.full((6,), number % 7)


def numbers(number: int):
    return torch.full((6,), float(number), dtype=torch.float64), torch.tensor([number / 7.0], dtype=torch.float64)


def texts(number: int):
    return torch.full((6,), float(number), dtype=torch.float64), f"number {number}"


@pytest.mark.parametrize("make", [ids, numbers])
def test_stream_sharded_by_the_user_is_detected_by_ids_or_targets(make):
    answers = run_ranks(2, training_as_rank, lambda rank: rank_tasks.task(Made(make, first=rank, step=2)))
    assert all(
        isinstance(answer, RunError) and str(answer).startswith("the ranks read different data as batch 1")
        for answer in answers
    ), answers


@pytest.mark.parametrize("field", ["train_data", "validation_data"])
def test_sampler_that_shards_is_refused(field):
    def task(rank: int):
        rows = rank_tasks.Rows()
        loader = DataLoader(
            rows, batch_size=rank_tasks.BATCH, sampler=DistributedSampler(rows, num_replicas=2, rank=rank)
        )
        return rank_tasks.task(**{"data": loader} if field == "train_data" else {field: loader})

    answers = run_ranks(2, training_as_rank, task)
    assert all(
        isinstance(answer, ConfigurationError) and f"DistributedSampler of Task({field}=)" in str(answer)
        for answer in answers
    ), answers


class DrawingForItself(rank_tasks.Rows):
    """Draws from a generator of its own, which each process seeds differently."""

    def __init__(self):
        super().__init__()
        self.chance = numpy.random.default_rng()

    def __getitem__(self, index: int):
        inputs, label = super().__getitem__(index)
        return inputs * self.chance.random(), label


@pytest.mark.parametrize("strategy", ["pipeline", "tensor_parallel"])
def test_ranks_of_one_replica_with_different_samples_are_detected(strategy):
    def task(rank: int):
        rows = DrawingForItself()
        return tower_tasks.tower(DataLoader(rows, batch_size=rank_tasks.BATCH, sampler=RandomSampler(rows)))

    answers = run_ranks(2, lambda rank: training(rank, task(rank), strategy))
    assert all(
        isinstance(answer, RunError) and "rank 1 was given other samples than rank 0" in str(answer)
        for answer in answers
    ), answers


@pytest.mark.parametrize("wrap", [lambda rows: rows, partial(DataLoader, batch_size=rank_tasks.BATCH, shuffle=True)])
def test_rows_that_differ_between_ranks_are_detected(wrap):
    answers = run_ranks(2, training_as_rank, lambda rank: rank_tasks.task(wrap(rank_tasks.Rows(seed=rank))))
    assert all(
        isinstance(answer, RunError) and str(answer).startswith("rank 1 has other samples than rank 0")
        for answer in answers
    ), answers


class DrawingLabels(DrawingForItself):
    """Draws labels, as data sets of pairs do, from a generator of its own."""

    def __getitem__(self, index: int):
        inputs, label = super().__getitem__(index)
        return inputs, (label + int(self.chance.integers(2))) % 2


def test_labels_that_are_drawn_at_every_read_may_differ_between_ranks():
    answers = run_ranks(2, training_as_rank, lambda rank: rank_tasks.task(DrawingLabels()))
    assert not any(isinstance(answer, Exception) for answer in answers), answers


def without_the_first(batch: list) -> tuple:
    return default_collate(batch[1:])


def test_collate_function_that_drops_samples_is_named():
    data = DataLoader(rank_tasks.Rows(), batch_size=rank_tasks.BATCH, collate_fn=without_the_first)
    answers = run_ranks(2, training, rank_tasks.task(data))
    assert all(
        isinstance(answer, RunError) and "the collate function drops or adds samples" in str(answer)
        for answer in answers
    ), answers


def ragged(batch: list) -> tuple:
    return torch.stack([inputs for inputs, _ in batch]), [[0] * (1 + number % 3) for number in range(len(batch))]


def named(batch: list) -> tuple:
    return torch.stack([inputs for inputs, _ in batch]), [{"name": "one"} for _ in batch]


def single_numbers(batch: list) -> tuple:
    return torch.stack([inputs for inputs, _ in batch]), [torch.tensor(1) for _ in batch]


@dataclass
class Worded:
    inputs: torch.Tensor
    labels: torch.Tensor
    words: list


def worded(batch: list) -> Worded:
    return Worded(*default_collate(batch), words=["one" for _ in batch])


def loader(collate) -> DataLoader:
    """A loader over a stream that every rank reads whole."""
    return DataLoader(rank_tasks.Stream(), batch_size=rank_tasks.BATCH, collate_fn=collate)


@pytest.mark.parametrize(
    "data", [lambda: Made(texts), *(partial(loader, each) for each in (ragged, named, single_numbers, worded))]
)
def test_batch_of_non_tensors_cannot_be_divided(data):
    answers = run_ranks(2, training, rank_tasks.task(data()))
    assert all(
        isinstance(answer, RunError) and "tensors with the same number of samples" in str(answer) for answer in answers
    ), answers


class Scaling(nn.Module):
    """Its forward pass gets facts about each batch that are not per-sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2).double()

    def forward(self, inputs, scales):
        return self.layer(inputs * sum(scales))


def with_scales(batch: list) -> dict:
    inputs, labels = default_collate(batch)
    return {"inputs": inputs, "labels": labels, "scales": [0.25] * (rank_tasks.SAMPLES % rank_tasks.BATCH)}


def test_field_of_the_batch_may_be_as_long_as_the_last_batch():
    answers = run_ranks(
        2, training, rank_tasks.task(loader(with_scales), validation_data=loader(with_scales), model=Scaling)
    )
    assert [answer["steps"] for answer in answers] == [46, 46], answers


def test_pipeline_that_skips_bad_rows_is_refused():
    rows = rank_tasks.Rows()
    data = arrays(rows.inputs.numpy(), rows.labels.numpy()).skip_bad_rows(3)
    answers = run_ranks(2, training, rank_tasks.task(data))
    assert all(
        isinstance(answer, ConfigurationError) and str(answer).startswith("--max-bad-rows is for a single process")
        for answer in answers
    ), answers


class Divisible(rank_tasks.Rows):
    """Has a method of the name that pipelines have, as the datasets of Hugging Face."""

    def shard(self, num_shards: int, index: int):
        raise AssertionError("hasten shards the batches of a dataset itself")


def test_dataset_with_its_own_method_shard_is_sharded_by_batches():
    answers = run_ranks(2, training, rank_tasks.task(Divisible()))
    assert [answer["steps"] for answer in answers] == [46, 46], answers


def over_images() -> nn.Module:
    """Batch normalization over images of 3 x 2 pixels."""
    return nn.Sequential(nn.Unflatten(1, (1, 3, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(6, 2)).double()


def of_size(samples: int, model=rank_tasks.network):
    """Ready batches of a size that neither the task nor the loader states."""
    rows = rank_tasks.Rows(6 * samples)
    data = DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), samples, drop_last=False))
    return rank_tasks.task(data, batch_size=None, model=model, validation_data=None, metric="loss")


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (partial(of_size, 1), "batch 1 of epoch 1 has 1 samples, too few for 2 processes: each computes the whole"),
        (partial(of_size, 2), None),
        (partial(of_size, 2, lambda: rank_tasks.network(norm=True)), "(batch normalization needs 2 in each)"),
        (partial(of_size, 2, over_images), None),
        (rank_tasks.one_sample_a_rank_in_the_last_batch, None),
    ],
)
def test_batches_that_every_rank_computes_are_reported_once(make, reported):
    def notices(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training(rank, make(), "ddp")
        return [text for text in (str(each.message) for each in caught) if "no speedup" in text]

    first, second = run_ranks(2, notices)
    assert not second and len(first) == bool(reported) and all(reported in text for text in first), first


class Skipping(tower_tasks.Tower):
    """Skips layers at random during training (LayerDrop), with either generator; or counts its calls."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, inputs):
        for layer in self.layers:
            self.calls += self.how == "counted"
            chance = {"torch": lambda: torch.rand([]), "numpy": numpy.random.random, "counted": lambda: self.calls}[
                self.how
            ]()
            if not (self.training and chance < 1e-9):
                inputs = layer(inputs)
        return self.last(inputs.mean(1)) if hasattr(self, "last") else inputs


class Remembering(nn.Module):
    """Stores its inputs without using them."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows, self.inputs, self.loss = nn.Linear(6, 2), 0, None, 0.0

    def forward(self, inputs):
        self.rows, self.inputs = inputs.shape[0], inputs
        self.loss = inputs.mean()
        self.norm = inputs.norm()
        return self.layer(inputs)


class Growing(nn.Module):
    """Creates a submodule at its first call."""

    def forward(self, inputs):
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(6, 2)
        return self.layer(inputs)


def test_stored_inputs_that_do_not_matter_are_accepted_and_restored():
    model = Remembering()
    before = dict(vars(model))
    assert try_trace(model) is not None
    assert vars(model) == before


def test_submodule_created_in_the_forward_pass_is_restored():
    model = Growing()
    try_trace(model)
    assert not list(model.children())


@pytest.mark.parametrize("how", ["torch", "numpy", "counted"])
def test_model_with_data_dependent_control_flow_is_not_traced(how):
    model = Skipping(how)
    state, calls = torch.get_rng_state(), model.calls
    assert try_trace(model, is_leaf=lambda part: isinstance(part, nn.Linear) or not list(part.children())) is None
    assert torch.equal(state, torch.get_rng_state()) and model.calls == calls


class OpeningLate(rank_tasks.Rows):
    file = None

    def __getitem__(self, index: int):
        self.file = self.file or open(__file__, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(index)
        self.file.read(1)
        return super().__getitem__(index)


def test_file_that_is_opened_late_is_opened_in_the_workers():
    answers = run_ranks(2, training, rank_tasks.task(OpeningLate()), "loader_workers:num_workers=1")
    assert [answer["no_effect"] for answer in answers] == [[], []], answers
