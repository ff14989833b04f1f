"""The parameter server: its definition for any order of arrival; starting, resuming and ending a job."""

import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hasten.core.errors import ConfigurationError, PeerFailure, RunError
from hasten.engine.train import train
from hasten.methods.distributed.parameter_server import Server
from helpers import HELPERS, rank_tasks
from helpers.assertions import CLOSE, farthest
from helpers.markers import slow
from helpers.ranks import interrupted_run, resumed_run, run_ranks, training, training_of


def server_of(size: int, world: int, staleness: int, rate: float = 1.0, momentum: float = 0.0) -> Server:
    weight = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))
    return Server([weight], torch.optim.SGD([weight], lr=rate, momentum=momentum), world, staleness)


def message(gradient: torch.Tensor) -> torch.Tensor:
    return torch.cat([gradient, gradient.new_ones(1)])


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_any_order_of_arrival_equals_the_definition(world, staleness):
    """Gradients depend on the weights that their rank had; momentum and falling rates identify each update."""
    chance, steps = random.Random(world), 200
    wanted = torch.randn(world, steps, 4, generator=torch.Generator().manual_seed(staleness), dtype=torch.float64)
    server = server_of(4, world, staleness, momentum=0.9)
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer, after = torch.optim.SGD([weight], lr=1.0, momentum=0.9), [weight.detach().clone()]
    came, had, aheads = defaultdict(dict), [0] * world, set()
    while min(server.pushed) < steps:
        worker = chance.choice(
            [each for each in range(world) if server.pushed[each] < steps and ahead(server.pushed, each) <= staleness]
        )
        step = server.pushed[worker]
        settings = [{"lr": 0.5 / (1 + step)}]
        came[step][worker] = after[had[worker]] - wanted[worker, step]
        if len(came[step]) == world:
            optimizer.param_groups[0].update(settings[0])
            weight.grad = sum(came[step].values()) / world
            optimizer.step()
            after.append(weight.detach().clone())
        newest = server.exchange(worker, message(came[step][worker]), settings if worker == 0 else None)
        torch.testing.assert_close(newest, after[-1], rtol=1e-12, atol=1e-12)
        had[worker] = len(after) - 1
        aheads.add(step + 1 - had[worker])
    assert max(aheads) == staleness, "the bound was never tried"
    assert server.version == steps and not server.sums and not server.settings


def ahead(pushed: list[int], worker: int) -> int:
    """Returns how many steps ahead of the slowest worker one more step would be."""
    counts = [*pushed[:worker], pushed[worker] + 1, *pushed[worker + 1 :]]
    return counts[worker] - min(counts)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_every_gradient_counts_once_and_staleness_is_bounded(staleness):
    """Each gradient changes a weight of its own."""
    world, steps = 4, 30
    server = server_of(world * steps, world, staleness)

    def work(worker: int) -> None:
        chance = random.Random(worker)
        for step in range(steps):
            time.sleep(chance.random() * 0.002)
            own = torch.zeros(world, steps, dtype=torch.float64)
            own[worker, step] = 1.0
            newest = server.exchange(worker, message(own.flatten()), [{"lr": 1.0}] if worker == 0 else None)
            updates = (newest.view(world, steps) == -1 / world).all(0)
            assert updates[: max(step + 1 - staleness, 0)].all(), "weights are too old"
            assert step + 1 - min(server.pushed) <= staleness

    with ThreadPoolExecutor(world) as threads:
        list(threads.map(work, range(world)))
    assert torch.equal(server.newest, torch.full((world * steps,), -1 / world, dtype=torch.float64))


def test_worker_that_left_is_missed_only_if_waited_for():
    server = server_of(1, 3, 1)
    for worker in (0, 1):
        server.exchange(worker, message(torch.ones(1, dtype=torch.float64)), [{}] if worker == 0 else None)
    server.lose(2)
    with pytest.raises(PeerFailure, match="rank 2 has ended without an error message"):
        server.exchange(0, message(torch.ones(1, dtype=torch.float64)), [{}])
    server = server_of(1, 2, 1)
    server.exchange(1, message(torch.ones(1, dtype=torch.float64)))
    server.lose(1)
    assert server.exchange(0, message(torch.ones(1, dtype=torch.float64)), [{}]).item() == -1


@pytest.mark.parametrize(("groups", "trouble"), [(1, ZeroDivisionError), (2, ValueError)])
def test_update_that_raises_is_reported_to_all(groups, trouble):
    """In the optimizer, or before it: the message has more parameter groups than the optimizer."""
    server = server_of(1, 2, 1)
    server.optimizer.step = lambda: 1 / 0
    server.exchange(0, message(torch.ones(1, dtype=torch.float64)), [{}] * groups)
    for worker in (1, 0):
        with pytest.raises(trouble):
            server.exchange(worker, message(torch.ones(1, dtype=torch.float64)), [{}] * groups)


@pytest.mark.parametrize("world", [2, slow(4)])
@pytest.mark.parametrize(
    "make", [rank_tasks.samples, rank_tasks.rates_by_name_and_schedule, rank_tasks.stream, rank_tasks.with_a_spare]
)
def test_training_without_staleness_equals_one_process(tmp_path, make, world):
    train(make(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, training_of, make, "parameter_server:staleness=0", tmp_path / "shared")
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


class Remembering(torch.nn.Module):
    """Keeps a tensor with its graph, as a mixture of experts keeps its auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2).double()

    def forward(self, inputs):
        self.seen = self.layer(inputs)
        return self.seen


def test_model_may_keep_its_activations(tmp_path):
    train(rank_tasks.task(model=Remembering), device="cpu", out=tmp_path / "single")
    answers = run_ranks(
        2, training_of, lambda: rank_tasks.task(model=Remembering), "parameter_server:staleness=0", tmp_path / "shared"
    )
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


def test_optimizer_of_another_method_is_used(tmp_path):
    train(rank_tasks.samples(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(
        2, training_of, rank_tasks.samples, "parameter_server:staleness=0 + fused_optimizer", tmp_path / "shared"
    )
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize("world", [slow(2), 4])
def test_training_with_staleness_converges(tmp_path, world):
    """One rank is late in every step; all return the same run and leave no thread."""
    recipe = f"parameter_server:staleness=3 + {HELPERS / 'rank_methods.py'}:Dozing"
    train(rank_tasks.samples(), device="cpu", out=tmp_path / "single")
    answers = run_ranks(world, threads_left, rank_tasks.samples, recipe, tmp_path / "shared")
    assert not any(threads for _, threads in answers), answers
    assert {(answer["steps"], answer["metric"]) for answer, _ in answers} == {(46, answers[0][0]["metric"])}
    assert answers[0][0]["metric"] > 0.8
    assert farthest(tmp_path / "shared", tmp_path / "single") > CLOSE, "no gradient was ever taken at older weights"


def test_server_updates_with_the_optimizer_of_other_methods(tmp_path):
    """With the optimizer that a method creates in place of the task's, whatever its internal state."""
    recipe = f"{HELPERS / 'rank_methods.py'}:Descending"
    train(rank_tasks.rates_by_name_and_schedule(), recipe, device="cpu", out=tmp_path / "single")
    answers = run_ranks(
        2,
        training_of,
        rank_tasks.rates_by_name_and_schedule,
        f"parameter_server:staleness=0 + {recipe}",
        tmp_path / "shared",
    )
    assert [type(answer) for answer in answers] == [dict] * 2, answers
    assert farthest(tmp_path / "shared", tmp_path / "single") < CLOSE


@pytest.mark.parametrize("world", [slow(1), slow(2), 3])
def test_run_resumes_with_the_state_of_the_server(tmp_path, world):
    make, recipe = rank_tasks.rates_by_name_and_schedule, "parameter_server:staleness=2"
    broken = run_ranks(2, interrupted_run, make, tmp_path / "run", recipe)
    assert all(isinstance(answer, RunError) for answer in broken), broken
    answers = (
        run_ranks(world, resumed_run, make, tmp_path / "run") if world > 1 else [resumed_run(0, make, tmp_path / "run")]
    )
    assert [type(answer) for answer in answers] == [dict] * world, answers
    assert answers[0]["steps"] == 46 and answers[0]["metric"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "method", "staleness"),
    [
        (0, "RaisingFirst", 0),
        (0, "RaisingFirst", 2),
        (1, "Raising", 2),
    ],
)
def test_rank_that_raises_ends_the_job(tmp_path, rank, method, staleness):
    """As a user starts it; no rank waits for a response that will not come."""
    recipe = f"--with parameter_server:staleness={staleness} --with {HELPERS / 'rank_methods.py'}:{method}"
    argv = f"train {HELPERS / 'rank_tasks.py'}:samples --processes 3 {recipe}"
    done = subprocess.run(
        [sys.executable, "-m", "hasten", *argv.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and f"rank {rank}: " in done.stderr and "planted" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("parameter_server + ddp", "both replace parallelize"),
        ("parameter_server + ema", "ema requires replicated_weights, which parameter_server invalidates"),
        (
            "parameter_server + gradient_clipping",
            "gradient_clipping requires reduced_gradients, which parameter_server invalidates",
        ),
        ("parameter_server + znorm", "znorm requires reduced_gradients, which parameter_server invalidates"),
        ("parameter_server:staleness=-1", "staleness must be at least 0"),
    ],
)
def test_invalid_request_is_refused(recipe, message):
    answers = run_ranks(2, training, rank_tasks.samples(), recipe)
    assert all(isinstance(answer, ConfigurationError) and message in str(answer) for answer in answers), answers


def test_sparse_gradients_are_refused():
    answers = run_ranks(2, training, rank_tasks.sparse(), "parameter_server")
    assert all(
        isinstance(answer, ConfigurationError) and "those of 0 are sparse" in str(answer) for answer in answers
    ), answers


def threads_left(rank: int, make, recipe, out) -> tuple[dict, list[str]]:
    """Returns the result of a run, and the names of the threads that it left."""
    before = threading.enumerate()
    result = training_of(rank, make, recipe, out)
    started = [thread for thread in threading.enumerate() if thread not in before]
    return result, [thread.name for thread in started if thread.name != "tqdm_monitor"]  # one for all progress bars


def test_task_that_clips_gradients_is_refused():
    """Each rank would clip its own, before the mean."""
    answers = run_ranks(2, training, rank_tasks.task(clip_grad_norm=0.1), "parameter_server")
    message = "Task(clip_grad_norm=) requires reduced_gradients, which parameter_server invalidates"
    assert all(isinstance(answer, ConfigurationError) and message in str(answer) for answer in answers), answers
