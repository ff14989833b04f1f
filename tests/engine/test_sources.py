"""Batches are a function of the position: an epoch can be entered at any batch, with any number of workers."""

import dataclasses
import multiprocessing
import os
import signal
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from hasten import RunError
from hasten.core.recipe import Recipe
from hasten.engine import data_adapters
from hasten.engine.loaders import from_spec
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.utils.batch import batch_tensors
from hasten.utils.rng import get_rng_state, set_seeds
from helpers import engine_tasks
from helpers.process import start_process

x, y = torch.arange(22.0).reshape(11, 2), torch.arange(11)


def same(some, others) -> bool:
    pairs = list(zip(some, others, strict=True))
    return all(
        torch.equal(a, b) for one, other in pairs for a, b in zip(batch_tensors(one), batch_tensors(other), strict=True)
    )


def batches(data, **changes):
    return data_adapters.training(engine_tasks.task(data, **changes), 4, 0)


@pytest.mark.parametrize("start", range(7))
def test_epoch_can_be_entered_at_any_batch(start):
    train = batches(engine_tasks.Augmented())
    assert same(list(train.epoch(1, 0))[start:], list(train.epoch(1, start)))


def test_epochs_differ_and_contain_every_sample_once():
    train = batches(TensorDataset(x, y))
    first, second = ([label for _, labels in train.epoch(epoch, 0) for label in labels.tolist()] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second


def test_augmentation_is_independent_of_the_number_of_workers():
    import dataclasses

    train = batches(engine_tasks.Augmented())
    with_workers = data_adapters.from_spec(dataclasses.replace(train.spec, num_workers=2))
    assert same(list(train.epoch(0, 0)), list(with_workers.epoch(0, 0)))


def test_map_style_data_keep_the_random_numbers_of_the_model():
    train = batches(engine_tasks.Augmented())
    set_seeds(7)
    expected = torch.rand(3)
    set_seeds(7)
    list(train.epoch(0, 0))
    assert torch.equal(torch.rand(3), expected)


class Epochs(torch.utils.data.IterableDataset):
    """Yields the epoch that it was given."""

    def __init__(self):
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(torch.zeros(2), self.epoch)] * 4)


def test_samplers_and_streams_get_the_number_of_the_epoch():
    data, orders = TensorDataset(x, y), []
    source = batches(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0)))
    by_hand = DistributedSampler(data, num_replicas=1, rank=0)
    for epoch in range(2):
        by_hand.set_epoch(epoch)
        orders.append(torch.cat([labels for _, labels in source.epoch(epoch)]).tolist())
        assert orders[-1] == list(by_hand)
    assert orders[0] != orders[1]
    stream = batches(Epochs())
    assert [next(iter(stream.epoch(epoch)))[1].tolist() for epoch in range(2)] == [[0] * 4, [1] * 4]


def test_epoch_has_as_many_samples_as_its_sampler_draws():
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(11), 8)
    task = engine_tasks.task(DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler))
    assert data_adapters.initial_plan(task).samples == 8


def test_stream_is_reproduced_whatever_else_draws():
    train = batches(engine_tasks.Stream())
    quiet = list(train.epoch(0, 0))
    noisy = []
    for batch in train.epoch(0, 0):
        noisy.append(batch)
        torch.rand(3)
    assert same(quiet, noisy)
    assert not train.seekable


def test_ready_loader_uses_its_generator_as_by_hand():
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=own)
    train = batches(loader)
    assert train.generators == (own,)
    by_hand = list(loader)
    own.manual_seed(3)
    assert same(list(train.epoch(0, 0)), by_hand)


def test_validation_is_in_order_and_draws_the_same_every_time():
    validation = data_adapters.validation(
        engine_tasks.task(TensorDataset(x, y), validation_data=engine_tasks.Augmented()), 4, 0
    )
    before = get_rng_state()
    assert same(list(validation.epoch(0, 0)), list(validation.epoch(0, 0)))
    assert torch.equal(get_rng_state()["torch"], before["torch"])


class Raising(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        if index == 5:
            raise OSError("cannot read image")
        return x[index], y[index]


class RaisingTogether(Raising):
    """Reads whole batches, as Subset and Hugging Face datasets do."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class RaisingOnlyTogether(TensorDataset):
    def __getitems__(self, indices):
        raise OSError("too many at once")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Raising(), "sample 5: OSError: cannot read image"),
        (Subset(Raising(), range(11)), "sample 5: OSError: cannot read image"),
        (RaisingTogether(), "sample 5: OSError: cannot read image"),
        (RaisingOnlyTogether(x, y), "batch 1 of the epoch: OSError: too many at once"),
        (DataLoader(Raising(), batch_size=4, shuffle=True), "sample 5: OSError: cannot read image"),
    ],
)
def test_raising_sample_is_named(data, message):
    with pytest.raises(RunError, match=message):
        list(batches(data).epoch(0, 0))


class Unreadable(Exception):
    """An exception class of the user; a worker's traceback contains its module."""


class RaisingAt(Raising):
    """Raises at one index, or wherever a worker reads it."""

    def __init__(self, error, index=7):
        self.error, self.index = error, index

    def __getitem__(self, index):
        if index == self.index or (self.index is None and torch.utils.data.get_worker_info()):
            raise self.error
        return x[index], y[index]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "order",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "generator": torch.Generator()},
        {"shuffle": True, "persistent_workers": True},
    ],
    ids=" ".join,
)
def test_raising_sample_in_a_worker_of_a_ready_loader_is_named(order, epoch):
    """Also in a later epoch."""
    data = RaisingAt(KeyError("missing.png"), index=torch.tensor(-1).share_memory_())
    train = batches(DataLoader(data, batch_size=4, num_workers=2, **order))
    for earlier in range(epoch):
        list(train.epoch(earlier, 0))
    data.index.fill_(7)
    with pytest.raises(
        RunError, match=r"^the data raised at batch \d of the epoch, sample 7: KeyError: 'missing.png'$"
    ):
        list(train.epoch(epoch, 0))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Unreadable("row 3 is short"), ", sample 7: Unreadable: row 3 is short"),
        (ValueError("two\nlines"), ", sample 7: ValueError: two lines"),
        (ValueError(), ", sample 7: ValueError"),
    ],
    ids=str,
)
def test_worker_error_message_is_shown_once(error, message):
    with pytest.raises(RunError) as failed:
        list(batches(DataLoader(RaisingAt(error), batch_size=4, num_workers=1)).epoch(0, 0))
    assert str(failed.value) == f"the data raised at batch 2 of the epoch{message}"


class KillsReader(Raising):
    """A sample that kills the process that reads it."""

    def __init__(self):
        pass

    def __getitem__(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return x[index], y[index]


def test_sample_that_killed_a_worker_is_not_read_in_the_main_process():
    with pytest.raises(RunError, match=r"killed by signal|exited unexpectedly"):
        list(batches(DataLoader(KillsReader(), batch_size=4, num_workers=1)).epoch(0, 0))


def test_sample_that_fails_only_in_a_worker_is_not_guessed():
    loader = DataLoader(RaisingAt(OSError("no network"), index=None), batch_size=4, num_workers=1)
    with pytest.raises(RunError, match=r"^the data raised at batch 1 of the epoch: OSError: no network$"):
        list(batches(loader).epoch(0, 0))


def wait_until_orphaned(worker: int) -> None:
    run = multiprocessing.parent_process()  # which may be dead already
    while run is not None and os.getppid() == run.pid:
        time.sleep(0.01)


def test_new_worker_does_not_outlive_a_killed_run():
    loader = DataLoader(TensorDataset(x, y), batch_size=4, worker_init_fn=wait_until_orphaned)
    samples = dataclasses.replace(batches(loader).spec, num_workers=1)
    process = start_process(lambda: next(from_spec(samples).epoch(0)))
    while not (workers := psutil.Process(process.pid).children()):
        time.sleep(0.01)
    process.kill()
    process.join()
    _, alive = psutil.wait_procs(workers, timeout=30)
    for worker in alive:
        worker.kill()
    assert not alive


@pytest.mark.parametrize("recipe", ["batch_size:factor=2,rule=none", "loader_workers:num_workers=1"])
def test_rebuilt_loader_starts_its_workers_as_the_given_one(recipe, monkeypatch):
    """A dataset with a handle that no fork may share asks for "spawn"; a timeout guards against a worker that hangs."""
    built, construct = [], DataLoader.__init__

    def noted(self, *arguments, **options):
        built.append(self)
        construct(self, *arguments, **options)

    loader = DataLoader(
        TensorDataset(x, y), batch_size=2, num_workers=1, timeout=50, in_order=False, multiprocessing_context="spawn"
    )
    monkeypatch.setattr(DataLoader, "__init__", noted)
    parts = {"model": lambda: torch.nn.Linear(2, 11), "validation_data": None}
    program = build(dataclasses.replace(engine_tasks.task(loader), **parts), make_methods(Recipe.coerce(recipe)))
    assert len(list(program.train.epoch(0))) == (3 if "batch_size" in recipe else 6)
    started = [one for one in built if one.num_workers]
    assert started
    for one in started:
        assert (one.timeout, one.in_order, one.multiprocessing_context.get_start_method()) == (50, False, "spawn")
