"""The parameter server: its definition; starting, resuming and ending a job."""

import dataclasses
import random
import subprocess
import sys
import threading
import time

import pytest
import torch

from hasten.core.errors import ConfigurationError, RunError
from hasten.distributed.process_group import init_process_group
from hasten.engine.plan import build
from hasten.engine.registry import make_method
from hasten.engine.train import train
from helpers import HELPERS, rank_tasks
from helpers.assertions import CLOSE, farthest
from helpers.markers import slow
from helpers.ranks import interrupted_run, resumed_run, run_ranks, training, training_of


class OwnWeights(torch.nn.Module):
    def __init__(self, world: int, steps: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(world, steps, dtype=torch.float64))


def updates_before_each_step(rank: int, world: int, steps: int, staleness: int) -> tuple[list[int], torch.Tensor]:
    """Returns how many updates the weights had before each step, and the weights after the last one.

    The gradient of a rank in a step changes a weight of its own, by the learning rate of the step.
    """
    task = dataclasses.replace(
        rank_tasks.samples(),
        model=lambda: OwnWeights(world, steps),
        optimizer=lambda model: torch.optim.SGD(model.parameters()),
    )
    chance, seen = random.Random(rank), []
    with init_process_group("cpu") as ranks:
        program = build(task, [make_method("parameter_server", {"staleness": staleness})], ranks=ranks)
        weight = program.run.model.weight
        with program.process_context():
            for step in range(steps):
                time.sleep(chance.random() * 0.002)
                columns = (weight != 0).sum(0)
                assert set(columns.tolist()) <= {0, world}, "an update lacks the gradient of a rank"
                seen.append(int((columns == world).sum()))
                weight.grad = torch.zeros_like(weight)
                weight.grad[rank, step] = 1.0
                program.run.optimizer.param_groups[0]["lr"] = world / (1 + step)
                program.optimizer_step()
            return seen, program.export().weight.detach().clone()


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_every_gradient_counts_once_and_staleness_is_bounded(staleness):
    world, steps = 3, 30
    wanted = -1 / (1 + torch.arange(steps, dtype=torch.float64)).expand(world, steps)
    for seen, weights in run_ranks(world, updates_before_each_step, world, steps, staleness):
        assert all(step - staleness <= updates <= step for step, updates in enumerate(seen)), seen
        torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=0)


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


def test_updates_use_the_optimizer_of_other_methods(tmp_path):
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
def test_run_resumes_from_a_checkpoint(tmp_path, world):
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
