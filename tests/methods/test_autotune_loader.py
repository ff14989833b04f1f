"""autotune_loader: the same bits during the search, workers if steps wait, and its result in the recipe."""

import json
import os
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch

import hasten
from hasten import ConfigurationError, Recipe
from hasten.core.data import WorkerConfig
from hasten.core.errors import HastenWarning
from hasten.engine import cadence
from hasten.engine.plan import build
from hasten.engine.registry import make_methods
from hasten.loading import autotuner as autotuner_module
from hasten.loading import loader_stats
from hasten.loading.autotuner import LoaderAutotuner
from helpers import loader_tasks
from helpers.markers import first_quick
from helpers.process import join_process, start_process, wait_until_it_trains

TUNED = "autotune_loader:cores=2"
TIMEOUT_S = 60.0  # seconds, for a busy machine; mostly unused


@pytest.fixture
def quick(monkeypatch):
    """Shorter measurements: many changes of workers in a short run."""
    for name, value in {"MIN_BATCHES": 4, "MIN_SECONDS": 0.02, "BATCHES_PER_WORKER": 1}.items():
        monkeypatch.setattr(loader_stats, name, value)


def files(directory: Path) -> tuple[bytes, bytes]:
    return (directory / "model.safetensors").read_bytes(), (directory / "log.jsonl").read_bytes()


def process_and_thread_count() -> tuple[set, int]:
    """Returns the child processes and the number of threads of this process."""
    return set(psutil.Process().children()), threading.active_count()


def no_processes_left(before: tuple[set, int]) -> bool:
    """torch does not wait for the threads that feed its workers: they end a moment later."""
    end = time.perf_counter() + TIMEOUT_S
    while process_and_thread_count()[0] - before[0] or process_and_thread_count()[1] > before[1]:
        if time.perf_counter() > end:
            return False
        time.sleep(0.01)
    return True


def test_workers_above_cores_are_refused():
    with pytest.raises(ConfigurationError, match="4 workers are more than cores=1"):
        make_methods(Recipe.parse("autotune_loader:cores=1,processes=4"))


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(["loader", "dataset", "pipeline"]))
def test_weights_are_identical_and_no_processes_are_left(name, tmp_path, quick):
    before = process_and_thread_count()
    task = getattr(loader_tasks, name)
    hasten.train(task(), out=tmp_path / "plain", device="cpu")
    with warnings.catch_warnings(
        action="ignore", category=HastenWarning
    ):  # whether it converges in so short a run depends on the machine
        result = hasten.train(task(), TUNED, out=tmp_path / "tuned", device="cpu")
    assert files(tmp_path / "plain") == files(tmp_path / "tuned")
    assert result["no_effect"] == [] and no_processes_left(before)


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dataset", "pipeline"])
def test_slow_source_gets_workers_and_recipe_stores_them(name, tmp_path, monkeypatch):
    monkeypatch.setattr(loader_stats, "MIN_SECONDS", 0.1)  # enough batches to search again on a busy machine
    task = getattr(loader_tasks, name)(epochs=60)
    with pytest.warns(
        HastenWarning, match=r"autotune_loader converged at .*: a step waits for data [\d.]+% of its time"
    ):
        result = hasten.train(task, [TUNED], out=tmp_path / "run", device="cpu")
    found = result["tuned_settings"]["autotune_loader"]
    assert 1 <= found["processes"] <= 2 and found["prefetch"] >= 2
    assert json.loads((tmp_path / "run" / "result.json").read_text())["tuned_settings"] == result["tuned_settings"]

    recipe = Recipe.load(tmp_path / "run" / "recipe.toml")
    assert recipe.methods["autotune_loader"] == {"cores": 2, **found}
    autotuner = build(task, make_methods(recipe)).run.checkpoint_state["autotune_loader"]
    assert autotuner.workers == WorkerConfig(processes=found["processes"], prefetch=found["prefetch"]), (
        "the next run begins there"
    )

    # a run is identified by the requested recipe, the tuned recipe and its directory
    for resumed_with in ([TUNED], recipe, None):
        again = hasten.train(task, resumed_with, out=tmp_path / "run", resume=True, device="cpu")
        assert again["metric"] == result["metric"]
    with pytest.raises(ConfigurationError, match="another recipe: autotune_loader:cores=2 there, baseline here"):
        hasten.train(task, "baseline", out=tmp_path / "run", resume=True, device="cpu")


@pytest.mark.slow
def test_stopped_run_stores_result_in_recipe(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(cadence, "CHECKPOINT_TIME_FRACTION", 1.0)  # they appear soon, however slow the disk is

    def stop(records):
        if "processes" in (tmp_path / "run" / "recipe.toml").read_text():
            raise InterruptedError

    task = loader_tasks.dataset(epochs=60)
    with pytest.warns(HastenWarning, match="converged"), pytest.raises(InterruptedError):
        hasten.train(task, TUNED, out=tmp_path / "run", observers=[stop], checkpoint_seconds=0.1, device="cpu")
    found = Recipe.load(tmp_path / "run" / "recipe.toml").methods["autotune_loader"]
    assert found["cores"] == 2 and 0 <= found["processes"] <= 2 and not (tmp_path / "run" / "result.json").exists()

    with warnings.catch_warnings(action="ignore", category=HastenWarning):  # it may converge to another configuration
        again = hasten.train(task, out=tmp_path / "run", resume=True, device="cpu")
    assert again["recipe"] == TUNED and "processes" in again["tuned_settings"]["autotune_loader"]


def test_fast_source_uses_no_workers(perceptron, monkeypatch):
    napped = 0.0
    # a busy machine is not a slow source
    monkeypatch.setattr(autotuner_module, "perf_counter", lambda: time.thread_time() + napped)
    program = build(perceptron(), make_methods(Recipe.coerce("autotune_loader")))
    autotuner = program.run.checkpoint_state["autotune_loader"]
    with pytest.warns(HastenWarning, match="converged"):
        for _ in program.train.epoch(0, 0):
            napped += 1.0
    assert (
        autotuner.converged
        and autotuner.workers.num_workers == 0
        and program.run.tuned_settings == {"autotune_loader": {"processes": 0}}
    )


def run(name, out, end):
    def wait(records):  # near the end, for a test that kills the run
        if records[-1]["step"] >= 150 and end == "to be killed":
            time.sleep(60)

    warnings.simplefilter("ignore")
    loader_stats.MIN_BATCHES, loader_stats.MIN_SECONDS, loader_stats.BATCHES_PER_WORKER = 4, 0.02, 1
    recipe = "baseline" if end == "undisturbed" else TUNED
    hasten.train(
        getattr(loader_tasks, name)(),
        recipe,
        out=out,
        resume=True,
        device="cpu",
        checkpoint_seconds=0,
        observers=[wait],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dataset", "loader", "pipeline"])
def test_killed_run_resumes_to_same_bits(name, tmp_path):
    for pause in (0.15, 0.3):
        process = start_process(run, name, tmp_path / "killed", "to be killed")
        wait_until_it_trains(process, tmp_path / "killed")
        time.sleep(pause)
        workers = psutil.Process(process.pid).children()
        assert process.is_alive(), "the run was over before it could be killed"
        process.kill()
        process.join()
        _, alive = psutil.wait_procs(workers, timeout=TIMEOUT_S)
        assert not alive, "workers outlive their run"
    for directory, end in (("killed", "not killed"), ("plain", "undisturbed")):
        assert join_process(start_process(run, name, tmp_path / directory, end)) == 0
    assert files(tmp_path / "killed") == files(tmp_path / "plain")


def readers(program) -> set[int]:
    """Returns the IDs of the processes that read the validation data."""
    return {number for _, target in program.validation.epoch(0, 0) for number in target.tolist()}


@pytest.mark.parametrize("name", ["dataset", "loader", "pipeline"])
def test_validation_data_get_the_workers_found(name):
    before, ours = process_and_thread_count(), {os.getpid()}
    program = build(loader_tasks.recording_readers(name), make_methods(Recipe.coerce(TUNED)))
    assert readers(program) == ours, "no workers have been found yet"
    program.run.checkpoint_state["autotune_loader"].workers = WorkerConfig(processes=2, prefetch=2)
    found = readers(program)
    assert len(found) == 2 and not found & ours
    if name != "pipeline":
        assert readers(program) == found, "they stay for the next evaluation"
    del program
    assert no_processes_left(before)


@pytest.mark.parametrize(
    ("train", "validation"), [("dataset", "pipeline"), ("pipeline", "dataset"), ("dataset", "other")]
)
def test_validation_data_of_another_type_keep_their_workers(train, validation):
    program = build(loader_tasks.recording_readers(train, validation), make_methods(Recipe.coerce(TUNED)))
    program.run.checkpoint_state["autotune_loader"].workers = WorkerConfig(processes=2, prefetch=2)
    assert readers(program) == {os.getpid()}


def test_validation_workers_of_the_task_are_unchanged():
    program = build(loader_tasks.recording_readers("loader", workers=1), make_methods(Recipe.coerce(TUNED)))
    program.run.checkpoint_state["autotune_loader"].workers = WorkerConfig(processes=2, prefetch=2)
    assert len(readers(program) - {os.getpid()}) == 1


def test_resumed_run_starts_with_workers_found(perceptron):
    program = build(perceptron(), make_methods(Recipe.coerce("autotune_loader:cores=4")))
    found = LoaderAutotuner(WorkerConfig(processes=3, prefetch=4), cores=4, memory_budget=float)
    found.wait_fraction = 0.002
    program.run.checkpoint_state["autotune_loader"].load_state_dict(found.state_dict())
    assert program.run.checkpoint_state["autotune_loader"].workers == WorkerConfig(processes=3, prefetch=4)
    assert program.run.checkpoint_state["autotune_loader"].converged


def autotuner_of(task, recipe):
    return build(task, make_methods(Recipe.coerce(recipe))).run.checkpoint_state["autotune_loader"]


def test_initial_workers_are_used_first(perceptron):
    assert autotuner_of(perceptron(), "autotune_loader").workers == WorkerConfig()
    assert autotuner_of(perceptron(), "autotune_loader:processes=2").workers == WorkerConfig(processes=2, prefetch=2)
    assert autotuner_of(perceptron(), "autotune_loader:processes=3,cores=3,prefetch=5").workers == WorkerConfig(
        processes=3, prefetch=5
    )
    assert autotuner_of(
        perceptron(), ["autotune_loader", "loader_workers:num_workers=2,prefetch_factor=3"]
    ).workers == WorkerConfig(processes=2, prefetch=4)
    loader = torch.utils.data.DataLoader(perceptron().train_data, batch_size=16, num_workers=2)
    assert autotuner_of(perceptron(train_data=loader, batch_size=None), "autotune_loader").workers == WorkerConfig(
        processes=2, prefetch=2
    )
    assert autotuner_of(loader_tasks.pipeline(), "autotune_loader:cache=no").cache == "no"


def test_no_effect_states_its_reason(trained):
    assert "no other thread or process" in trained(loader_tasks.stream(), "autotune_loader").run.no_effect[0][1]
    noisy = trained(loader_tasks.loader(noisy=True, epochs=1), "autotune_loader")
    assert "random" in noisy.run.no_effect[0][1]


def test_contradicting_options_are_refused(perceptron):
    with pytest.raises(ConfigurationError, match="threads=1 and processes=1 exclude each other"):
        make_methods(Recipe.coerce("autotune_loader:threads=1,processes=1"))
    for recipe in ("autotune_loader:threads=2", "autotune_loader:cache=memory"):
        with pytest.raises(ConfigurationError, match=r"require a hasten\.data pipeline"):
            build(perceptron(), make_methods(Recipe.coerce(recipe)))
    for recipe in ("cores=0", "gigabytes=0", "cache=ram", "processes=-1", "prefetch=2000"):
        with pytest.raises(ConfigurationError, match=recipe.partition("=")[0]):
            make_methods(Recipe.coerce(f"autotune_loader:{recipe}"))
