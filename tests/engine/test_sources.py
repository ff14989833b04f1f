"""Batches are a function of the position: any pass can be entered anywhere, with any number of workers."""

import engine_tasks
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from hasten import Failure
from hasten.contract.batch import tensors
from hasten.engine import sources
from hasten.engine.seeds import random_state, set_seeds

x, y = torch.arange(22.0).reshape(11, 2), torch.arange(11)


def same(some, others) -> bool:
    pairs = list(zip(some, others, strict=True))
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(tensors(one), tensors(other), strict=True))


def batches(data, **changes):
    return sources.training(engine_tasks.task(data, **changes), 4, 0)


@pytest.mark.parametrize("start", range(7))
def test_a_pass_can_be_entered_anywhere(start):
    train = batches(engine_tasks.Augmented())
    assert same(list(train.epoch(1, 0))[start:], list(train.epoch(1, start)))


def test_passes_differ_and_hold_every_sample_once():
    train = batches(TensorDataset(x, y))
    first, second = ([label for _, labels in train.epoch(epoch, 0) for label in labels.tolist()] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second


def test_augmentation_does_not_depend_on_the_number_of_workers():
    import dataclasses

    train = batches(engine_tasks.Augmented())
    with_workers = sources.from_samples(dataclasses.replace(train.samples, workers=2))
    assert same(list(train.epoch(0, 0)), list(with_workers.epoch(0, 0)))


def test_map_style_data_leave_the_models_random_numbers_alone():
    train = batches(engine_tasks.Augmented())
    set_seeds(7)
    expected = torch.rand(3)
    set_seeds(7)
    list(train.epoch(0, 0))
    assert torch.equal(torch.rand(3), expected)


def test_a_stream_replays_the_same_whatever_else_draws():
    train = batches(engine_tasks.Stream())
    quiet = list(train.epoch(0, 0))
    noisy = []
    for batch in train.epoch(0, 0):
        noisy.append(batch)
        torch.rand(3)
    assert same(quiet, noisy)
    assert not train.seekable


def test_ready_loader_brings_its_generator_and_draws_as_by_hand():
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=own)
    train = batches(loader)
    assert train.generators == (own,)
    by_hand = list(loader)
    own.manual_seed(3)
    assert same(list(train.epoch(0, 0)), by_hand)


def test_validation_is_in_order_and_draws_the_same_every_time():
    validation = sources.validation(engine_tasks.task(TensorDataset(x, y), validation_data=engine_tasks.Augmented()), 4, 0)
    before = random_state()
    assert same(list(validation.epoch(0, 0)), list(validation.epoch(0, 0)))
    assert torch.equal(random_state()["torch"], before["torch"])


class Raising(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        if index == 5:
            raise OSError("cannot read image")
        return x[index], y[index]


class RaisingTogether(Raising):
    """Reads a batch at once, as Subset and Hugging Face datasets do."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class RaisingOnlyTogether(TensorDataset):
    def __getitems__(self, indices):
        raise OSError("too many at once")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Raising(), "sample 5: OSError: cannot read image"),
        (Subset(Raising(), range(11)), "sample 5: OSError: cannot read image"),
        (RaisingTogether(), "sample 5: OSError: cannot read image"),
        (RaisingOnlyTogether(x, y), "batch 1 of the pass: OSError: too many at once"),
        (DataLoader(Raising(), batch_size=4, shuffle=True), "sample 5: OSError: cannot read image"),
    ],
)
def test_a_raising_sample_is_named(data, words):
    with pytest.raises(Failure, match=words):
        list(batches(data).epoch(0, 0))
