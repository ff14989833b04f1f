"""Every workload on its real data: documented samples, a model that learns, a valid metric."""

import dataclasses
import functools
import math

import pytest
import torch
from torch.utils.data import Subset

from hasten import RunError
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.tasks import load_task
from hasten.utils.batch import batch_tensors
from hasten.workloads import _data


@dataclasses.dataclass(frozen=True)
class Expected:
    """The documented facts of a workload: files, sizes, and (shape, type, smallest, largest) of a sample's tensors."""

    sizes: tuple[int, int]
    sample: tuple
    files: tuple[str, ...] = ()
    needs: str = "torch"


FLOAT, WHOLE = torch.float32, torch.int64
WORKLOADS = {
    "digits": Expected((898, 899), (((64,), FLOAT, 0, 1), ((), WHOLE, 0, 9))),
    "fashion_mnist": Expected(
        (60_000, 10_000),
        (((1, 28, 28), FLOAT, -0.811, 2.023), ((), WHOLE, 0, 9)),
        tuple(
            f"fashion-mnist/{split}-{what}-ubyte.gz"
            for split in ("train", "t10k")
            for what in ("images-idx3", "labels-idx1")
        ),
    ),
    "cifar10": Expected(
        (50_000, 10_000),
        (((3, 32, 32), FLOAT, -2.0, 2.2), ((), WHOLE, 0, 9)),
        ("cifar10-jpeg/train.tar.gz", "cifar10-jpeg/test.tar.gz"),
    ),
    "tiny_shakespeare": Expected(
        (15_685, 1000), (((64,), WHOLE, 0, 64), ((64,), WHOLE, 0, 64)), ("tinyshakespeare/input.txt",)
    ),
    "adult": Expected(
        (32_561, 16_281),
        (((6,), FLOAT, -4, 15), ((8,), WHOLE, 0, 41), ((), WHOLE, 0, 1)),
        ("adult/adult.data", "adult/adult.test"),
    ),
    "imdb": Expected(
        (10_000, 5000),
        (((128,), WHOLE, 0, 9999), ((128,), WHOLE, 0, 1), ((), WHOLE, 0, 1)),
        ("imdb-subset/aclImdb-subset.tar.gz",),
        needs="transformers",
    ),
}

loaded = functools.cache(load_task)


@pytest.fixture(params=WORKLOADS)
def name(request):
    expected = WORKLOADS[request.param]
    pytest.importorskip(expected.needs)
    if missing := [file for file in expected.files if _data.find_file(file) is None]:
        pytest.skip(f"the data of {request.param} are not here ({missing[0]}); set HASTEN_DATA")
    return request.param


def test_workload_files_and_sizes_exist(name):
    task = loaded(name)
    assert (len(task.train_data), len(task.validation_data)) == WORKLOADS[name].sizes
    assert task.name == name and task.target is not None and task.epochs > 1


def test_workload_samples_are_as_documented(name):
    task = loaded(name)
    for data in (task.train_data, task.validation_data):
        for index in torch.linspace(0, len(data) - 1, 40).long().tolist():
            sample = batch_tensors(labels_as_tensors(data[index]))
            for tensor, (shape, kind, smallest, largest) in zip(sample, WORKLOADS[name].sample, strict=True):
                assert (tuple(tensor.shape), tensor.dtype) == (shape, kind)
                assert smallest <= tensor.min() and tensor.max() <= largest


def test_workload_training_and_validation_data_differ(name):
    task = loaded(name)
    first = {repr(labels_as_tensors(task.train_data[index])) for index in range(50)}
    assert len(first) > 45 and not first & {repr(labels_as_tensors(task.validation_data[index])) for index in range(50)}


def test_workload_loss_falls(name):
    """A batch of samples, repeated twelve times: the loss is finite and falls."""
    task = dataclasses.replace(loaded(name), train_data=some_of(loaded(name).train_data, 32), batch_size=32, epochs=12)
    program = build(task, seed=1)
    losses = [loss.item() for loss in train_steps(program)]
    assert len(losses) == 12 and all(map(math.isfinite, losses)) and losses[-1] < losses[0] * 0.98


def test_workload_metric_before_training_is_guessing(name):
    """Before training the metric is that of guessing."""
    task = dataclasses.replace(loaded(name), validation_data=some_of(loaded(name).validation_data, 200))
    measured = evaluate(build(task, seed=1))
    classes = WORKLOADS[name].sample[-1][3] + 1
    assert 0.7 * math.log(classes) < measured.loss < 1.3 * math.log(classes)
    if task.metric == "accuracy":
        assert measured.metric < 0.8 if classes == 2 else measured.metric < 0.3


def test_workload_with_the_same_seed_gives_the_same_model(name):
    task = loaded(name)
    once, again, other = (build(task, seed=seed).run.model.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(once[key], again[key]) for key in once)
    assert any(not torch.equal(once[key], other[key]) for key in once)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if WORKLOADS[name].files])
def test_missing_data_message_names_address_and_path(name, tmp_path, monkeypatch):
    pytest.importorskip(WORKLOADS[name].needs)
    monkeypatch.setenv("HASTEN_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:1")  # no server listens there, as without a network
    with pytest.raises(
        RunError,
        match=r"^cannot download https?://\S+: .*; put the file at /\S+ by hand, or set HASTEN_DATA to a directory",
    ):
        load_task(name)


def some_of(data, count: int) -> Subset:
    return Subset(data, torch.linspace(0, len(data) - 1, count).long().tolist())


def labels_as_tensors(sample):
    """The sample as in a batch, where a plain number is a tensor, too."""
    if isinstance(sample, dict):
        return {key: torch.as_tensor(value) for key, value in sample.items()}
    return tuple(torch.as_tensor(value) for value in sample)
