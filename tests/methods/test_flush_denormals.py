"""flush_denormals: planted denormal numbers become zero in every thread and process of a run, and in none after it."""

import multiprocessing
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hasten.core.data import WorkerConfig
from hasten.core.method import Method
from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.core.task import Task
from hasten.data.workers.processes import ProcessRunner
from hasten.data.workers.runners import InlineRunner, ThreadRunner
from hasten.engine.plan import build
from hasten.methods.flush_denormals import FlushDenormals
from hasten.methods.loader_workers import LoaderWorkers
from hasten.testing.effects import observe_effect
from hasten.testing.tasks import perceptron
from hasten.utils.denormals import flushes_denormals, nonzero_values, smallest_denormals
from helpers.markers import slow

COUNT = 1 << 18  # values of an operation, so that each thread computes some


class Planted(Dataset):
    """Samples (x, survived): whether a denormal number survives arithmetic where the sample is computed."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.zeros(1), torch.tensor([0.0 if flushes_denormals() else 1.0])


def task(data: Dataset | DataLoader) -> Task:
    return Task(
        name="planted",
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        train_data=data,
        batch_size=None if isinstance(data, DataLoader) else 1,
        epochs=1,
    )


class Recorded(torch.autograd.Function):
    """Records the thread of its backward pass, and whether that flushes; nests ``depth`` backward passes in it."""

    @staticmethod
    def forward(ctx, x, depth, seen):
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen[threading.get_ident()] = flushes_denormals()
        if ctx.depth:
            with torch.enable_grad():
                nested_backward(ctx.depth - 1, ctx.seen)
        return grad, None, None


def nested_backward(depth: int, seen: dict[int, bool]) -> dict[int, bool]:
    Recorded.apply(torch.ones(1, requires_grad=True), depth, seen).sum().backward()
    return seen


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def survivors() -> int:
    return nonzero_values(smallest_denormals(COUNT) * 1.0)


def flushed_context():
    return build(task(DataLoader(Planted())), [FlushDenormals()]).process_context()


@pytest.mark.usefixtures("two_threads")
def test_intra_op_threads_that_run_already_flush_during_the_run_only():
    assert survivors() == COUNT  # starts the threads
    with pytest.raises(KeyError), flushed_context():
        assert survivors() == 0
        assert torch.get_num_threads() == 2
        raise KeyError
    assert survivors() == COUNT


@pytest.mark.usefixtures("two_threads")
def test_set_flush_denormal_alone_does_not_reach_running_threads():
    """The reason for ending them; if this fails, the method can be shorter."""
    assert survivors() == COUNT
    try:
        torch.set_flush_denormal(True)
        assert 0 < survivors() < COUNT
    finally:
        torch.set_flush_denormal(False)


def test_backward_pass_flushes_during_the_run_only():
    with flushed_context():
        assert set(nested_backward(0, {}).values()) == {True}
    assert set(nested_backward(0, {}).values()) == {False}


@pytest.mark.slow
def test_autograd_thread_of_nested_backward_passes_flushes():
    """Autograd computes passes that are nested 60 deep in a thread of its own, which then stays: a fresh process."""
    script = "import test_flush_denormals as here; context = here.flushed_context(); context.__enter__()\n"
    script += "print([*here.nested_backward(65, {}).values()])"
    directory = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=directory, check=True)
    assert done.stdout.strip() == "[True, True]"


def test_thread_that_is_started_during_the_run_flushes():
    seen = []

    def record():
        seen.append(flushes_denormals())

    with flushed_context():
        _run(threading.Thread(target=record))
    _run(threading.Thread(target=record))
    assert seen == [True, False]


def _run(thread):
    thread.start()
    thread.join()


slow_spawn = slow("spawn")  # imports torch anew


@pytest.mark.parametrize("start", ["fork", slow_spawn])
@pytest.mark.parametrize("methods", [[], [FlushDenormals()]], ids=["without", "with"])
def test_worker_of_the_users_loader_flushes_with_the_method_only(start, methods):
    loader = DataLoader(Planted(), num_workers=1, multiprocessing_context=start)
    assert survived_in_batches(task(loader), methods) == [0.0 if methods else 1.0] * 2
    assert loader.worker_init_fn is None


def test_persistent_worker_of_a_resumed_run_flushes(monkeypatch):
    """This process does not flush, so that a forked worker inherits as little as a spawned one."""
    monkeypatch.setattr("hasten.engine.loaders.flushes_denormals", lambda: True)
    loader = DataLoader(Planted(), num_workers=1, persistent_workers=True)
    assert survived_in_batches(task(loader), [], epoch=1) == [0.0, 0.0]


@pytest.fixture
def start_method(request):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("start_method")
@pytest.mark.parametrize("start_method", ["fork", slow_spawn], indirect=True)
@pytest.mark.parametrize("methods", [[], [FlushDenormals()]], ids=["without", "with"])
def test_worker_of_a_dataset_flushes_with_the_method_only(methods):
    methods = [*methods, LoaderWorkers(num_workers=1)]
    assert survived_in_batches(task(Planted()), methods) == [0.0 if len(methods) > 1 else 1.0] * 2


def survived_in_batches(task: Task, methods: list[Method], epoch: int = 0) -> list[float]:
    program = build(task, methods)
    with program.process_context():
        return [float(target) for _, targets in program.train.epoch(epoch, 0) for target in targets]


@pytest.mark.parametrize(
    "runner", [InlineRunner(), ThreadRunner(WorkerConfig(threads=1)), ProcessRunner(WorkerConfig(processes=1))]
)
def test_worker_of_a_pipeline_flushes_during_the_run_only(runner):
    with flushed_context():
        assert list(runner(lambda _: flushes_denormals(), range(2))) == [True, True]
    assert list(runner(lambda _: flushes_denormals(), range(2))) == [False, False]


@pytest.mark.usefixtures("two_threads")
def test_effect_names_the_threads():
    assert survivors() == COUNT
    effect = observe_effect(perceptron(), Recipe().with_method("flush_denormals"))
    assert effect.acts and effect.text == "planted denormal numbers became zero in 2 intra-op threads and in autograd"


@pytest.mark.usefixtures("two_threads")
def test_effect_without_ended_threads_is_refused(monkeypatch):
    assert survivors() == COUNT
    monkeypatch.setattr("hasten.utils.denormals.end_intra_op_threads", lambda: False)
    effect = observe_effect(perceptron(), Recipe().with_method("flush_denormals"))
    assert not effect.acts and "not flushed by the intra-op threads" in effect.text


def test_run_on_a_gpu_has_no_effect():
    run = RunContext(torch.device("cuda"), None)
    assert FlushDenormals().process_context(nullcontext, run) is nullcontext
    assert "GPU" in run.no_effect[0][1]
