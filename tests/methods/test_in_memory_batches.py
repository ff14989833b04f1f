"""in_memory_batches: exactly the batches of per-sample loading, or the reason why it has no effect."""

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from hasten.core.errors import ConfigurationError, RunError
from hasten.core.recipe import Recipe
from hasten.data import arrays
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.methods.in_memory_batches import BatchBuffer
from hasten.utils.batch import batch_tensors, map_tensors
from hasten.utils.tree import bitwise_equal

RECIPE = Recipe().with_method("in_memory_batches")


class Listed(Dataset):
    """Samples computed by a function of their index."""

    def __init__(self, sample, length=50):
        self.sample, self.length, self.readings = sample, length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.readings += 1
        return self.sample(index)


def vector(index: int, dtype=torch.float32) -> torch.Tensor:
    return torch.arange(12, dtype=dtype) * index


SHAPES = {
    "tensors": lambda i: (vector(i), i % 4),
    "arrays": lambda i: (numpy.full((2, 3), i, dtype="float32"), numpy.int64(i % 4)),
    "numbers": lambda i: (i / 3, i, i % 2 == 0),
    "dictionary": lambda i: {"inputs": {"a": vector(i), "b": numpy.uint8(i)}, "labels": i % 4},
    "nested": lambda i: [(vector(i, torch.float64), i), vector(i).half()],
    "not a number": lambda i: (torch.full((3,), float("nan")), i),
}


def batches_of(task, recipe=RECIPE, passes=2, validation=False, start=0):
    program = build(task, make_methods(recipe))
    source = program.validation if validation else program.train
    drawn = [[_copied(batch) for batch in source.epoch(number, start)] for number in range(passes)]
    return drawn, program.run.no_effect


def _copied(batch):
    return map_tensors(torch.clone, batch)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("validation", [False, True], ids=["training", "validation"])
def test_batches_equal_those_of_single_samples(perceptron, name, validation):
    task = perceptron(train_data=Listed(SHAPES[name]), validation_data=Listed(SHAPES[name], 21), batch_size=16)
    plain, _ = batches_of(task, Recipe(), validation=validation)
    batched, idle = batches_of(task, validation=validation)
    assert idle == []
    assert bitwise_equal(plain, batched)  # dtypes, nesting, tail batch and order of both passes
    assert type(plain[0][0]) is type(batched[0][0])


@pytest.mark.parametrize("start", [0, 3])
def test_epoch_resumes_at_any_batch(perceptron, start):
    task = perceptron(train_data=Listed(SHAPES["tensors"]), batch_size=8)
    assert bitwise_equal(batches_of(task, Recipe(), start=start)[0], batches_of(task, start=start)[0])


@pytest.mark.parametrize("kind", ["perceptron", "convolutional", "transformer"])
def test_thirty_steps_give_the_same_bits(kind, request, trained):
    task = request.getfixturevalue(kind)(epochs=5)
    plain, batched = trained(task), trained(task, RECIPE)
    assert len(plain.losses) == 30
    assert batched.run.no_effect == []
    assert plain.same_bits(batched)


@pytest.mark.parametrize("generator", [None, 7], ids=["global generator", "its own generator"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ready_loader_gives_the_same_bits(transformer, trained, generator, drop_last):
    def task():
        made = generator and torch.Generator().manual_seed(generator)
        loader = DataLoader(transformer().train_data, batch_size=20, shuffle=True, generator=made, drop_last=drop_last)
        return transformer(dropout=0.2, train_data=loader, batch_size=None, epochs=6)

    plain, batched = trained(task()), trained(task(), RECIPE)
    assert batched.run.no_effect == []
    assert len(plain.losses) == (24 if drop_last else 30)
    assert plain.same_bits(batched)


def test_samples_are_read_once_and_few_while_building(perceptron):
    data = Listed(SHAPES["tensors"], 500)
    program = build(perceptron(train_data=data), make_methods(RECIPE))
    probed, data.readings = data.readings, 0
    assert 0 < probed < 200
    for number in range(3):
        list(program.train.epoch(number, 0))
    assert data.readings == 500


def memory_of(batches) -> tuple[int, int]:
    """Returns (number of separate storages of the first field, batches)."""
    held = list(batches)
    return len({batch_tensors(batch)[0].untyped_storage().data_ptr() for batch in held}), len(held)


def test_buffers_are_reused_in_training_unless_batches_are_kept_and_fresh_in_validation(perceptron):
    large = Listed(lambda i: (torch.full((4096,), i), i), 160)
    program = build(perceptron(train_data=large, validation_data=large, batch_size=16), make_methods(RECIPE))
    places = [batch_tensors(batch)[0].untyped_storage().data_ptr() for batch in program.train.epoch(0, 0)]
    assert (len(set(places)), len(places)) == (3, 10)
    assert memory_of(program.train.epoch(0, 0)) == (10, 10)
    assert memory_of(program.validation.epoch(0, 0)) == (10, 10)


def test_small_batches_are_gathered_together(perceptron):
    data = TensorDataset(torch.randn(1000, 12), torch.randint(4, (1000,)))
    program = build(perceptron(train_data=data, batch_size=16), make_methods(RECIPE))
    assert memory_of(program.train.epoch(0, 0)) == (1, 63)


@pytest.mark.parametrize("batch_size", [1, 7, 16, 50])
def test_batches_are_aligned_like_fresh_memory(perceptron, batch_size):
    data = TensorDataset(torch.randn(300, 3), torch.randint(4, (300,)))
    program = build(perceptron(train_data=data, batch_size=batch_size), make_methods(RECIPE))
    assert all(part.data_ptr() % 64 == 0 for batch in program.train.epoch(0, 0) for part in batch_tensors(batch))


def test_sampler_of_a_ready_loader_is_not_read_ahead(perceptron):
    class Watched(RandomSampler):
        asked = 0

        def __iter__(self):
            for index in super().__iter__():
                self.asked += 1
                yield index

    data = TensorDataset(torch.randn(100, 12), torch.randint(4, (100,)))
    sampler = Watched(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    program = build(perceptron(train_data=loader, batch_size=None), make_methods(RECIPE))
    next(program.train.epoch(0, 0))
    assert sampler.asked == 16


def test_tensor_datasets_are_used_without_a_copy(perceptron, monkeypatch):
    data = TensorDataset(torch.randn(40, 12), torch.randint(4, (40,)))
    monkeypatch.setattr(TensorDataset, "__getitem__", None)  # no sample is read
    drawn, idle = batches_of(perceptron(train_data=data, validation_data=data), validation=True, passes=1)
    assert idle == []
    assert torch.equal(torch.cat([x for x, _ in drawn[0]]), data.tensors[0])


def test_random_numbers_of_the_model_are_unchanged(transformer, trained):
    task = transformer(dropout=0.3)
    assert trained(task).same_bits(trained(task, RECIPE))


NO_EFFECT = {
    "random": (lambda i: (vector(i) * torch.rand(()) * numpy.random.rand(), i), {}),
    "unequal shapes": (lambda i: (torch.zeros(1 + i % 3), i), {}),
    "no tensor": (lambda i: (vector(i), str(i)), {}),
    "GB": (lambda i: (torch.zeros(10_000), i), {"gigabytes": 1e-3}),
}


@pytest.mark.parametrize("reason", NO_EFFECT)
def test_no_effect_states_its_reason(perceptron, reason):
    sample, settings = NO_EFFECT[reason]
    task = perceptron(train_data=Listed(sample), validation_data=None, batch_size=1)
    drawn, idle = batches_of(task, Recipe().with_method("in_memory_batches", **settings))
    assert [name for name, why in idle if reason in why] == ["in_memory_batches"]
    assert bitwise_equal(drawn, batches_of(task, Recipe())[0])


def test_collate_function_of_the_user_is_applied(perceptron):
    loader = DataLoader(
        Listed(SHAPES["tensors"]), batch_size=4, collate_fn=lambda samples: torch.utils.data.default_collate(samples)
    )
    _, idle = batches_of(perceptron(train_data=loader, batch_size=None))
    assert "collate function" in idle[0][1]


def test_sample_that_the_probe_missed_raises(perceptron):
    data = Listed(lambda i: (torch.zeros(4 if i == 77 else 3), i), 100)  # the probe reads every fourth sample
    program = build(perceptron(train_data=data, batch_size=1, validation_data=None), make_methods(RECIPE))
    assert program.run.no_effect == []
    assert sum(len(x[0]) for x, _ in program.train.epoch(0, 0)) == 301
    assert "cannot be stacked" in program.run.no_effect[0][1]


def test_raising_dataset_names_its_sample(perceptron):
    data = Listed(lambda i: (vector(i), 1 // (i - 77)), 100)
    program = build(perceptron(train_data=data, batch_size=1, validation_data=None), make_methods(RECIPE))
    with pytest.raises(RunError, match="sample 77: ZeroDivisionError"):
        list(program.train.epoch(0, 0))


def test_combination_with_batch_methods_works_and_with_the_cache_is_refused(perceptron, trained):
    task = perceptron()
    both = trained(task, "in_memory_batches + loader_workers")
    assert [name for name, _ in both.run.no_effect] == ["loader_workers"]
    assert both.same_bits(trained(task))
    with pytest.raises(ConfigurationError, match="both replace data"):
        build(task, make_methods(Recipe.coerce("in_memory_batches + cache_dataset")))


def test_place_device_of_a_pipeline_has_no_effect_on_the_cpu(perceptron):
    pipeline = arrays((torch.randn(50, 12), torch.arange(50) % 4)).shuffle(seed=0).batch(16)
    task = perceptron(train_data=pipeline, validation_data=pipeline, batch_size=None)
    recipe = Recipe().with_method("in_memory_batches", place="device")
    program = build(task, make_methods(recipe))
    assert dict(program.run.no_effect) == {"in_memory_batches": "place=device is for GPUs; this run is on cpu"}
    assert bitwise_equal(batches_of(task, recipe)[0], batches_of(task, Recipe())[0])


def test_buffer_leaves_batches_alone_that_the_consumer_keeps():
    buffer, fields = BatchBuffer(), [torch.arange(40).view(20, 2)]
    first = buffer.fetch(fields, [[0, 1], [2, 3]])
    kept, place = first[1][0], buffer.tensors[0].data_ptr()
    del first
    second = buffer.fetch(fields, [[4, 5], [6, 7]])
    assert kept.tolist() == [[4, 5], [6, 7]]
    assert buffer.tensors[0].data_ptr() != place
    place = buffer.tensors[0].data_ptr()
    del second
    third = buffer.fetch(fields, [[8, 9], [10, 11]])
    assert third[0][0].tolist() == [[16, 17], [18, 19]]
    assert buffer.tensors[0].data_ptr() == place
