"""cache_dataset: every sample is read once if it fits in the memory budget, and training is unchanged."""

from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hasten.core.recipe import Recipe
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.methods.cache_dataset import sample_bytes
from hasten.utils.tree import bitwise_equal

RECIPE = Recipe().with_method("cache_dataset")


class Ragged(Dataset):
    """Samples of unequal length, such as text; counts its reads."""

    def __init__(self, length=60):
        self.length, self.readings = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.readings += 1
        return {"x": numpy.full(1 + index % 12, index / 60, dtype="float32"), "label": index % 4}


def padded(samples: list[dict]):
    """A collate function that modifies its samples, as those of transformers do."""
    labels = torch.tensor([sample.pop("label") for sample in samples])
    rows = [torch.nn.functional.pad(torch.from_numpy(sample["x"]), (0, 12 - len(sample["x"]))) for sample in samples]
    return torch.stack(rows), labels


def ragged(perceptron, data, **changes):
    return perceptron(
        train_data=DataLoader(data, batch_size=10, shuffle=True, collate_fn=padded),
        batch_size=None,
        epochs=5,
        **changes,
    )


def test_weights_are_identical_and_each_sample_is_read_once(perceptron, trained):
    plain = trained(ragged(perceptron, Ragged()))
    data = Ragged()
    cached = trained(ragged(perceptron, data), RECIPE)
    assert len(plain.losses) == 30
    assert cached.run.no_effect == []
    assert plain.same_bits(cached)
    assert data.readings == 60 + 4 * 30  # once each, after four probes of every other one


class Boxes(Ragged):
    """Samples that a collate function hands out one by one, as for the detection of objects."""

    def __getitem__(self, index):
        return {"boxes": torch.full((1 + index % 3, 4), 1.0), "size": numpy.array([index, index]), "tags": {index}}


def test_samples_that_the_training_edits_in_place_stay_as_they_were_read(perceptron):
    loader = DataLoader(Boxes(12), batch_size=4, collate_fn=list)
    source = build(perceptron(train_data=loader, batch_size=None, validation_data=None), make_methods(RECIPE)).train
    for epoch in range(3):
        samples = [sample for batch in source.epoch(epoch, 0) for sample in batch]
        assert bitwise_equal(samples, [Boxes(12)[index] for index in range(12)])
        for sample in samples:
            sample["boxes"].mul_(2.0)
            sample["size"] += 1
            sample["tags"].add("seen")


def test_size_of_a_sample_counts_what_its_objects_hold():
    image = SimpleNamespace(pixels=bytes(100_000))
    assert 100_000 <= sample_bytes((image, 1)) < 101_000 and sample_bytes((lambda: None, "a")) < 1_000


def test_memory_budget_is_respected(perceptron, trained):
    data = Ragged()
    small = trained(ragged(perceptron, data), "cache_dataset:gigabytes=1e-6")  # about a dozen samples of 76 bytes
    assert small.same_bits(trained(ragged(perceptron, Ragged())))
    assert 60 + 4 * 40 < data.readings - 90 < 5 * 60


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (TensorDataset(torch.randn(32, 12), torch.zeros(32, dtype=torch.long)), "in memory already"),
        ([(lambda: None, 0)], "random"),
    ],
    ids=["tensors", "random"],
)
def test_no_effect_states_its_reason(perceptron, data, reason):
    class Noise(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return torch.rand(12), 0

    program = build(
        perceptron(train_data=Noise() if reason == "random" else data, validation_data=None), make_methods(RECIPE)
    )
    assert [reason in why for _, why in program.run.no_effect] == [True]
