"""loader_workers: the same bits for any number of workers, also with the task's own loader."""

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hasten.core.data import WorkerConfig
from hasten.core.recipe import Recipe
from hasten.data import arrays
from hasten.engine.data_adapters import from_spec
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.profiling.probe import facts_of
from hasten.utils.tree import bitwise_equal


class Noisy(Dataset):
    """Draws from torch's and NumPy's generators for every sample, as an augmenting dataset does."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(12) + numpy.random.rand() + index / 96, index % 4


def with_workers(number: int) -> Recipe:
    return Recipe().with_method("loader_workers", num_workers=number, persistent_workers=False)


def test_random_dataset_is_the_same_for_any_number_of_workers(perceptron, trained):
    task = perceptron(train_data=Noisy(), epochs=2, batch_size=8)
    plain, *others = (trained(task, recipe) for recipe in (Recipe(), with_workers(0), with_workers(1), with_workers(3)))
    assert len(plain.losses) == 24
    assert all(plain.same_bits(other) for other in others)


def test_persistent_workers_give_the_same_batches(perceptron, trained):
    task = perceptron(train_data=Noisy(), epochs=3)
    assert trained(task).same_bits(trained(task, "loader_workers:num_workers=1,prefetch_factor=1"))


@pytest.mark.multiprocess
def test_second_epoch_at_a_time_leaves_the_first_to_the_persistent_workers(perceptron):
    task = perceptron(train_data=Noisy(), batch_size=16)
    source = build(task, make_methods(Recipe.coerce("loader_workers:num_workers=1"))).train
    expected = [list(source.epoch(epoch, 0)) for epoch in range(2)]
    first = source.epoch(0, 0)
    read = [next(first)]
    assert bitwise_equal(list(source.epoch(1, 0)), expected[1])
    assert bitwise_equal([*read, *first], expected[0])
    assert bitwise_equal(list(source.epoch(1, 0)), expected[1])  # by the persistent workers again


def test_ready_loader_keeps_its_order_and_the_random_numbers_of_the_model(transformer, trained):
    def task():
        data = transformer().train_data
        return transformer(
            dropout=0.2, train_data=DataLoader(data, batch_size=16, shuffle=True), batch_size=None, epochs=5
        )

    assert trained(task()).same_bits(trained(task(), with_workers(2), number=None))


def test_resumed_run_reads_the_rest_of_the_epoch(perceptron):
    program = build(perceptron(train_data=Noisy()), make_methods(with_workers(1)))
    expected = [x for x, _ in program.train.epoch(1, 0)]
    rest = [x for x, _ in program.train.epoch(1, 4)]
    assert len(rest) == len(expected) - 4
    assert all(torch.equal(a, b) for a, b in zip(expected[4:], rest, strict=True))


def test_options_are_passed_to_the_loader(perceptron):
    samples = build(
        perceptron(), make_methods(Recipe.coerce("loader_workers:num_workers=3,prefetch_factor=5"))
    ).train.spec
    assert (samples.num_workers, samples.prefetch_factor, samples.persistent_workers, samples.pin_memory) == (
        3,
        5,
        True,
        False,
    )
    assert from_spec(samples).length == 6


def test_stream_has_no_effect(perceptron, trained):
    stream = [(torch.randn(12), torch.tensor(index % 4)) for index in range(32)]
    task = perceptron(train_data=DataLoader(_Stream(stream), batch_size=8), batch_size=None)
    assert [name for name, _ in trained(task, with_workers(2)).run.no_effect] == ["loader_workers"]


def test_validation_stream_leaves_the_workers_to_training(perceptron, trained):
    stream = DataLoader(_Stream([(torch.randn(12), torch.tensor(0))] * 8), batch_size=8)
    assert trained(perceptron(validation_data=stream), with_workers(1)).run.no_effect == []


def test_task_with_these_settings_has_no_effect(perceptron, trained):
    assert "already" in trained(perceptron(), with_workers(0)).run.no_effect[0][1]


def test_pipelines_use_as_many_processes(perceptron, trained):
    x, y = torch.randn(96, 12), torch.arange(96) % 4

    def task():
        return perceptron(train_data=arrays(x, y).shuffle(seed=2).batch(16).map(noisy), batch_size=None)

    plain, others = trained(task()), trained(task(), "loader_workers:num_workers=2,prefetch_factor=3")
    assert plain.same_bits(others) and others.run.no_effect == []
    assert build(
        task(), make_methods(Recipe.coerce("loader_workers:num_workers=2,prefetch_factor=3"))
    ).train.workers == WorkerConfig(processes=2, prefetch=4)
    assert "already" in trained(task(), with_workers(0)).run.no_effect[0][1]
    assert "workers" in facts_of(build(task())) and "indexed_samples" not in facts_of(build(task()))


def noisy(batch, rng):
    return batch[0] + rng.uniform()[:, None], batch[1]


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class FromOpenFile(Noisy):
    def __init__(self, path):
        path.write_bytes(bytes(range(96)) * 1000)
        self.file = path.open("rb", buffering=0)

    def __getitem__(self, index):
        self.file.seek(index * 1000)
        return torch.full((12,), self.file.read(1)[0] / 96), index % 4


@pytest.mark.multiprocess
@pytest.mark.parametrize("recipe", ["loader_workers:num_workers=2", "autotune_loader"])
def test_file_that_is_open_already_is_left_to_one_process(perceptron, recipe, tmp_path):
    program = build(perceptron(train_data=FromOpenFile(tmp_path / "rows")), make_methods(Recipe.coerce(recipe)))
    ((_, why),) = program.run.no_effect
    assert "position all workers would share" in why
