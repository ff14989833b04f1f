"""``compare`` and ``tune`` with several processes: whole groups take turns, and faults planted on one rank are
found."""

import json
import time
from pathlib import Path

import pytest

import hasten
from hasten import ConfigurationError, Recipe, RunError
from hasten.benchmarking.blocks import block_samples
from hasten.benchmarking.compare import run_interleaved
from hasten.benchmarking.ratio import Ratio
from hasten.cli.main import main
from hasten.core.errors import HastenWarning
from hasten.core.progress import no_progress
from hasten.engine.tasks import TaskRef
from hasten.profiling.step_profile import profile_steps
from hasten.tuning import study, tune
from hasten.tuning.budget import Budget
from hasten.tuning.confirmation import Confirmation
from hasten.tuning.gate import NonInferiorityResult
from hasten.tuning.result import SearchState, _why
from hasten.tuning.study import Study
from hasten.tuning.systems import Incumbents, candidate, search_systems
from hasten.tuning.systems_stage import compare_with_one_process
from hasten.tuning.trial_store import TrialStore
from helpers import HELPERS, rank_methods, rank_tasks
from helpers.markers import first_quick

TASK = f"{HELPERS / 'rank_tasks.py'}:samples"


def method(name: str) -> str:
    return f"{HELPERS / 'rank_methods.py'}:{name}"


def study_of(directory: Path, task: str = "rank_tasks.py:samples", **more) -> Study:
    ref = TaskRef.of(f"{HELPERS}/{task}")
    return Study(ref, "cpu", TrialStore(directory, {}), Budget(600.0), no_progress, processes=2, timeout=4.0, **more)


@pytest.mark.timing
@pytest.mark.slow
def test_compare_of_a_job_with_itself_finds_no_difference():
    result = hasten.compare(TASK, processes=2, budget=1)
    assert result["processes"] == 2
    assert result["verdict"] in ("no difference", "unsure"), result
    assert result["ratio"]["low"] < 1.02 and result["ratio"]["high"] > 0.98
    assert all(result["evaluation_seconds"].values())


@pytest.mark.timing
@pytest.mark.slow
def test_compare_finds_a_straggler_on_any_rank():
    result = hasten.compare(TASK, "baseline", method("Dozing"), processes=2, budget=6)
    assert result["verdict"] == "slower", result
    lost = result["seconds_per_1000_samples"]["b"] - result["seconds_per_1000_samples"]["a"]
    assert lost > 0.8 * rank_methods.LATE * 1000 / rank_tasks.BATCH


@pytest.mark.slow
def test_compare_counts_samples_of_all_ranks():
    comparison = run_interleaved(TaskRef.of(TASK), Recipe(), Recipe(), budget=1, processes=(2, 1), device="cpu")
    assert (comparison.a.processes, comparison.b.processes) == (2, 1)
    sides = comparison.a, comparison.b
    samples = block_samples([side.plan for side in sides])
    for side in sides:
        assert all(0.9 * samples <= block["samples"] <= 1.1 * samples for block in side.blocks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raising", r"^rank 1: .*RuntimeError: planted \(rank_methods\.py line \d+\)"),
        ("Hanging", r"^a measured process took longer than 4 s"),
    ],
)
def test_compare_with_a_failing_rank_ends(name, message):
    began = time.monotonic()
    with pytest.raises(RunError, match=message):
        run_interleaved(
            TaskRef.of(TASK),
            Recipe(),
            Recipe.coerce(method(name)),
            budget=1,
            timeout=3.0,
            processes=(2, 2),
            device="cpu",
        )
    assert time.monotonic() - began < 30


def test_compare_more_processes_than_samples_per_batch_is_refused_before_start(tmp_path):
    for ask in (hasten.compare, lambda task, **more: hasten.tune(task, out=tmp_path / "out", **more)):
        with pytest.raises(ConfigurationError, match=r"^11 processes cannot share a batch of 10 samples"):
            ask(TASK, processes=11)
    assert not (tmp_path / "out").exists()


def test_compare_more_processes_than_cores_warns(monkeypatch):
    def record_processes(*arguments, processes, **others):
        raise RunError(f"{processes}")

    monkeypatch.setattr("hasten.benchmarking.compare.run_interleaved", record_processes)
    monkeypatch.setattr("hasten.engine.resources.available_cpus", lambda: 3)
    with (
        pytest.warns(HastenWarning, match=r"^4 processes share 3 cores: "),
        pytest.raises(RunError, match=r"^\(4, 4\)$"),
    ):
        hasten.compare(TASK, processes=4)


def test_compare_processes_option_on_the_command_line(capfd, monkeypatch):
    monkeypatch.chdir(HELPERS)
    code = main(
        [
            "compare",
            "rank_tasks.py:samples",
            "--a",
            "baseline",
            "--b",
            "ddp:static_graph=true",
            "--processes",
            "2",
            "--budget",
            "1s",
            "--json",
        ]
    )
    result = json.loads(capfd.readouterr().out)
    assert (
        result["processes"] == 2
        and result["b"] == "ddp:static_graph=true"
        and code == (0 if result["verdict"] == "faster" else 1)
    )
    assert main(["compare", "rank_tasks.py:samples", "--a", "baseline", "--b", "ddp+no_such", "--processes", "2"]) == 2
    assert main(["tune", "rank_tasks.py:samples", "--processes", "0"]) == 2


def test_exactness_check_runs_in_the_job(tmp_path):
    of = study_of(tmp_path)
    for name in ("ddp:static_graph=true", "ddp:bucket_cap_mb=1.0", "gradient_accumulation"):
        proof = of.check_exactness(Recipe(), Recipe.coerce(name), hasten.Exactness.EQUIVALENT_MATH)
        assert proof.get("passed"), proof
    proof = of.check_exactness(Recipe(), Recipe.coerce(method("Unlike")), hasten.Exactness.EQUIVALENT_MATH)
    assert not proof["passed"] and "in float64 the weights differ by" in proof["why"]


def test_exactness_check_compares_gradients_of_a_job(tmp_path):
    proof = study_of(tmp_path, "rank_tasks.py:in_float32").check_exactness(
        Recipe(), Recipe.coerce("bfloat16"), hasten.Exactness.REDUCED_PRECISION
    )
    assert proof.get("passed"), proof


@pytest.mark.parametrize("name", first_quick(["pipeline", "pipeline:balance=memory"]))
def test_exactness_check_of_a_divided_model_passes(tmp_path, name):
    of = study_of(tmp_path, "tower_tasks.py:tower")
    proof = of.check_exactness(Recipe(), Recipe.coerce(name), hasten.Exactness.EQUIVALENT_MATH)
    assert proof.get("passed"), proof
    proof = of.check_exactness(
        Recipe(), Recipe.coerce(f"{name} + {method('Faster')}"), hasten.Exactness.EQUIVALENT_MATH
    )
    assert not proof["passed"] and "in float64 the weights differ by" in proof["why"]
    proof = of.check_exactness(
        Recipe(), Recipe.coerce(f"{name} + {method('Unlike')}"), hasten.Exactness.EQUIVALENT_MATH
    )
    assert "Unlike requires monolithic_forward, which pipeline invalidates; choose one of them" in proof["failed"]


@pytest.mark.slow
def test_exactness_check_compares_sharded_gradients_with_full_ones(tmp_path):
    of = study_of(tmp_path, "tower_tasks.py:tower")
    honest = of.check_exactness(Recipe(), Recipe.coerce("pipeline"), hasten.Exactness.REDUCED_PRECISION)
    assert honest.get("passed"), honest
    lying = of.check_exactness(
        Recipe(), Recipe.coerce(f"pipeline + {method('Rounding')}"), hasten.Exactness.REDUCED_PRECISION
    )
    assert not lying["passed"] and "dB above its error against float64" in lying["why"]


@pytest.mark.timing
@pytest.mark.slow
def test_search_continues_after_a_rank_that_hangs_or_raises(tmp_path):
    """The first by its exactness check, which comes first for a method of the user; then by its speed comparison."""
    of, incumbents = study_of(tmp_path, "rank_tasks.py:slow"), Incumbents()
    names = [method(name) for name in ("Hanging", "Stuck", "Raising", "LighterSleep")]
    search_systems(of, incumbents, [candidate(names[0], offered=True), *map(candidate, names)], 100_000, 1.0)
    verdicts = [(trial["what"].rpartition(":")[2], trial["verdict"]) for trial in of.trials]
    lost = [(name, "failed") for name in ("Hanging", "Hanging", "Stuck", "Raising")]
    assert verdicts == [*lost, ("LighterSleep", "kept")], of.trials
    hung = [trial["why"].startswith("a measured process took longer than ") for trial in of.trials]
    assert hung == [True, True, True, False, False]
    assert of.trials[3]["why"].startswith("rank 1: ")
    assert incumbents.best == Recipe().with_method(names[3])


@pytest.mark.slow
def test_hang_while_building_is_ended_by_the_timeout(tmp_path):
    ref, stuck = TaskRef.of(TASK), Recipe.coerce(method("Stuck"))
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^a measured process took longer than 2 s"):
        profile_steps(ref, stuck, device="cpu", seed=0, budget=1.0, processes=2, timeout=2.0)
    of = study_of(tmp_path)
    of.timeout = 2.0
    assert of.step_profile(stuck) == {}
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_search_with_several_processes_tries_strategies():
    result = hasten.diagnose(TASK, processes=2, budget=1)
    assert "distributed" in result["facts"]
    assert "ddp" in [each["method"] for each in result["advice"]]
    assert {} not in candidate("ddp").presets, "as it is, it is what is done anyway"


@pytest.mark.parametrize(("low", "high", "wins"), [(1.5, 1.7, True), (0.4, 0.6, False), (0.9, 1.2, False)])
def test_search_selects_a_faster_single_process(low, high, wins):
    found = SearchState(one_process=Ratio((low * high) ** 0.5, low, high))
    assert found.one_process_is_faster is wins


def test_search_selects_a_distributed_recipe_faster_than_one_process():
    found = SearchState(one_process=Ratio(1.6, 1.5, 1.7), confirmation=confirmed(Ratio(1.8, 1.7, 1.9)))
    assert found.winner and not found.one_process_is_faster
    found = SearchState(one_process=Ratio(1.6, 1.5, 1.7), confirmation=confirmed(Ratio(1.3, 1.2, 1.4)))
    assert found.winner and found.one_process_is_faster


@pytest.mark.slow
def test_winner_is_compared_with_its_single_process_part(tmp_path):
    """Small steps, which communication makes many times as long."""
    of, winner = study_of(tmp_path), confirmed(Ratio(1.8, 1.7, 1.9))
    winner.recipe = Recipe.coerce("ddp:static_graph=true + gradient_clipping")
    found = SearchState(confirmation=winner, comparison_seconds=2.0, one_process=Ratio(1.6, 1.5, 1.7))
    found.winner_in_one_process = compare_with_one_process(of, found, winner.recipe, samples=1000)
    assert of.trials[-1]["what"] == "gradient_clipping, one process"
    assert found.winner and found.one_process_is_faster
    assert _why(of, found).startswith(
        f"one process with gradient_clipping is {found.winner_in_one_process} as fast as 2 with the best recipe"
    )


@pytest.mark.parametrize(("strategy", "decides"), [("ddp:static_graph=true", True), ("local_sgd:period=4", False)])
def test_single_process_with_different_training_is_not_compared_with_the_winner(strategy, decides):
    winner = confirmed(Ratio(1.8, 1.7, 1.9))
    winner.recipe = Recipe.coerce(f"{strategy} + ema")
    found = SearchState(confirmation=winner, winner_in_one_process=Ratio(1.3, 1.2, 1.4))
    assert found.winner and found.one_process_is_faster is decides


def confirmed(speedup: Ratio) -> Confirmation:
    gate = NonInferiorityResult(0.9, 0.9, 0.01, None, [], True, True, "planted")
    return Confirmation(Recipe.coerce("ddp:static_graph=true"), gate, speedup)


@pytest.mark.timing
@pytest.mark.slow
def test_search_for_a_job_finds_a_recipe_that_trains(tmp_path, monkeypatch, capfd):
    paced = study.Study.compare_speed
    monkeypatch.setattr(
        study.Study, "compare_speed", lambda *recipes, **given: paced(*recipes, **(given | {"seconds": 2.0}))
    )
    monkeypatch.setattr(tune, "MIN_TIMEOUT_S", 10.0)
    monkeypatch.setattr(tune, "TIMEOUT_FRACTION", 0.01)
    monkeypatch.chdir(HELPERS)
    offered = [word for name in ("Hanging", "LighterSleep") for word in ("--with", f"./rank_methods.py:{name}")]
    argv = (
        f"tune rank_tasks.py:sluggish --processes 2 --budget 600s --margin 0.05 --methods ddp --out "
        f"{tmp_path}/out --json"
    )
    assert main([*argv.split(), *offered]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["verdict"] == "faster" and result["processes"] == 2, result["why"]
    assert set(result["recipe"]) - {"ddp"} == {"./rank_methods.py:LighterSleep"}
    assert result["one_process"]["median"] < 1
    hung = next(trial for trial in result["trials"] if "Hanging" in trial["what"])
    assert hung["verdict"] == "failed" and hung["why"].startswith("a measured process took longer than ")
    argv = (
        f"train rank_tasks.py:sluggish --recipe {result['recipe_file']} --with ./rank_methods.py:LighterSleep "
        f"--processes 2 --out {tmp_path}/run"
    )
    assert main(argv.split()) == 0
    assert json.loads((tmp_path / "run/environment.json").read_text())["processes"] == 2
