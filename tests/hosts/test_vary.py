"""``--vary``: the arguments of a script are found, other values are tried, and a recipe sets them."""

import math
import shlex
import subprocess
import sys
import tomllib
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.cli.main import main
from hasten.core.errors import ConfigurationError
from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.hosts.inside.answers import _expected_steps, epochs_in_code, expected_steps
from hasten.hosts.process import ScriptProcess
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import ScriptDescription, ScriptTrial, _varied
from hasten.tuning.budget import Budget
from hasten.tuning.candidates import MethodSelection, candidates_for
from hasten.tuning.joint_search import search_jointly
from hasten.tuning.study import Study
from hasten.tuning.systems import Incumbents
from hasten.tuning.training import first_outcome
from hasten.tuning.training_stage import run_baseline
from hasten.tuning.trial_store import TrialStore
from hasten.tuning.tune import search_directory, tune

SCRIPTS = Path(__file__).with_name("scripts")
KNOWN = {"arguments": {"epochs": 12, "lr": 0.01, "data": "made", "dropout": 0.0}, "total_steps": 9, "metric": {}}
LONG = {"total_steps": None, "watched_seconds": 8.0, "watched_steps": 9, "expected_steps": 36, "metric_has_come": True}


def script(*arguments: str, vary: tuple[str, ...] = ()) -> ScriptRef:
    argv = [sys.executable, "schedule.py", *arguments]
    return ScriptRef.of_command(argv, directory=str(SCRIPTS), vary=vary)


def hasten(*argv: str, directory: Path = SCRIPTS) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "hasten", *argv], cwd=directory, capture_output=True, text=True)


@pytest.mark.parametrize("evidence", ["exact", "precision"])
def test_varied_arguments_are_refused_where_no_method_may_change_the_training(evidence):
    with pytest.raises(ConfigurationError, match="leave out --vary"):
        tune(script(vary=("lr",)), evidence=evidence)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "epoch",
            {},
            "schedule parses no argument 'epoch' with argparse, and its command gives it no number (did",
        ),
        ("lr", {"arguments": {}}, "; give its present value in the command, such as --lr=0.1 or lr=0.1"),
        ("data", {}, "data is 'made'; only a number above 0 can be varied"),
        ("dropout", {}, "dropout is 0.0; only a number above 0 can be varied"),
        ("lr", LONG, "8 s that it was watched (9 of about 36 steps, which take about 32 s); give --budget 9m"),
        ("lr", LONG | {"expected_steps": None}, "8 s that it was watched (9 steps); give more than --budget 5m"),
        ("lr", {"metric": None}, "--vary needs a metric"),
    ],
)
def test_argument_that_cannot_be_varied_is_refused_in_one_line(name, changes, message):
    with pytest.raises(ConfigurationError) as error:
        _varied(script(vary=(name,)), KNOWN | changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_names_are_those_of_the_parsed_attributes():
    ref = script(vary=("--batch-size", "lr"))
    assert ref.vary == ("batch_size", "lr")


@pytest.mark.parametrize(
    ("option", "message"),
    [("--vary", "--vary names arguments of your own command"), ("--metric", "--metric is for your own command")],
)
def test_option_of_scripts_is_refused_for_a_task(option, message):
    done = hasten("tune", "digits", option, "lr")
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_arguments_of_a_script_are_found_and_replaced():
    ref = script("--epochs", "3", vary=("epochs", "batch_size"))
    facts = ScriptDescription(ref).facts(processes=1)
    assert facts["varied"] == {"epochs": 3, "batch_size": 16} and facts["metric"] == "val loss"
    other = {"script_arguments": {"epochs": 2, "batch_size": 32}}
    runs = [ScriptTrial(ref, methods=methods, device="cpu", seed=0).run() for methods in ({}, other)]
    assert [len(run["evaluations"]) for run in runs] == [3, 2]
    assert [run["samples"] // run["steps"] for run in runs] == [16, 32]
    assert runs[0]["resolution"] == pytest.approx(1e-4)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_length_of_the_training_has_an_effect_that_the_first_steps_do_not_show():
    ref = script("--epochs", "4")
    changes = {"script_arguments": {"dropout": 0.5}}  # an argument that the training does not use
    check = ScriptTrial(ref, methods=changes).check_exactness({}, "CHANGES_TRAINING", 60.0)
    assert check["passed"] and "the script trains with dropout 0.5" in check["why"] and check["number"] == 0
    missing = {"script_arguments": {"layers": 3}}
    check = ScriptTrial(ref, methods=missing).check_exactness({}, "CHANGES_TRAINING", 60.0)
    assert not check["passed"] and "no effect" in check["why"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_shorter_training_with_a_higher_rate_is_found_trained_with_and_shown(tmp_path, monkeypatch, capfd):
    """The training stage of a search by itself, so that no budget ends it on a busy machine; then its recipe."""
    monkeypatch.setattr("hasten.tuning.joint_search.POINTS", (4, 4))
    monkeypatch.setattr("hasten.tuning.training_stage.BASELINE_SEEDS", 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configured.py").write_text((SCRIPTS / "configured.py").read_text())
    command = [sys.executable, "configured.py", "epochs=300", "--lr=0.0003"]
    ref = ScriptRef.of_command(command, vary=("lr", "epochs"))
    varied = ScriptDescription(ref).facts(processes=1)["varied"]
    study = Study(ref, "cpu", TrialStore(tmp_path, {}), Budget(10_000.0), no_progress, higher_is_better=False)
    diagnosis = {"advice": [{"method": "script_arguments", "bound": None}]}
    (item,) = candidates_for(diagnosis, MethodSelection.of(None, ()), study.refusal, varied).training
    baseline, incumbents = run_baseline(study, None), Incumbents()
    search_jointly(study, incumbents, [item], baseline, first_outcome(baseline))
    best = incumbents.best
    arguments = best.methods["script_arguments"]
    assert arguments["epochs"] < 300 and arguments["lr"] > 0.0003, study.trials

    directory = search_directory(ref)
    directory.mkdir(parents=True)
    (directory / "recipe.toml").write_text(best.to_toml())
    ref.write_sites(directory, best)
    tuned = [*command[:2], f"epochs={arguments['epochs']}", f"--lr={arguments['lr']}"]
    trained = hasten("train", "--recipe", str(directory / "recipe.toml"), "--", *command, directory=tmp_path)
    by_hand = subprocess.run(tuned, capture_output=True, text=True, check=True)
    assert trained.returncode == 0 and trained.stdout == by_hand.stdout != ""
    capfd.readouterr()
    assert main(["eject", "--", *command]) == 2, "there is nothing to edit"
    assert f"start the script as: {shlex.join(tuned)}" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_training_with_a_recipe_of_arguments_is_that_of_the_arguments(tmp_path):
    (tmp_path / "schedule.py").write_text((SCRIPTS / "schedule.py").read_text())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(Recipe({"script_arguments": {"epochs": 2, "lr": 0.016}}).to_toml())
    assert tomllib.loads(recipe.read_text())["methods"]["script_arguments"] == {"epochs": 2, "lr": 0.016}
    own = [sys.executable, "schedule.py"]
    trained = hasten("train", "--recipe", str(recipe), "--", *own, directory=tmp_path)
    by_hand = subprocess.run([*own, "--epochs=2", "--lr=0.016"], cwd=tmp_path, capture_output=True, text=True)
    assert trained.returncode == 0 and trained.stdout == by_hand.stdout != ""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_training_with_an_argument_that_is_not_declared_says_so(tmp_path):
    (tmp_path / "schedule.py").write_text((SCRIPTS / "schedule.py").read_text())
    argv = ("train", "--with", "script_arguments:layers=3", "--", sys.executable, "schedule.py", "--epochs", "1")
    done = hasten(*argv, directory=tmp_path)
    assert done.returncode == 0 and "script_arguments has no effect: the training has no argument layers" in (
        done.stderr
    )


def configured(*arguments: str, vary: tuple[str, ...] = ()) -> ScriptRef:
    argv = [sys.executable, "configured.py", *arguments]
    return ScriptRef.of_command(argv, directory=str(SCRIPTS), vary=vary)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_numbers_of_the_command_are_found_and_replaced_there():
    ref = configured("--lr=0.02", "epochs=3", vary=("lr", "epochs"))
    assert ScriptDescription(ref).facts(processes=1)["varied"] == {"lr": 0.02, "epochs": 3}
    other = {"script_arguments": {"epochs": 2, "lr": 0.03}}
    runs = [ScriptTrial(ref, methods=methods, device="cpu", seed=0).run() for methods in ({}, other)]
    assert [len(run["evaluations"]) for run in runs] == [3, 2]
    assert runs[0]["evaluations"][0]["metric"] != runs[1]["evaluations"][0]["metric"]
    check = ScriptTrial(ref, methods=other).check_exactness({}, "CHANGES_TRAINING", 60.0)
    assert check["passed"] and "the script trains with lr 0.03, epochs 2" in check["why"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_number_that_does_not_reach_the_script_has_no_effect(tmp_path):
    (tmp_path / "configured.py").write_text((SCRIPTS / "configured.py").read_text())
    (tmp_path / "run.sh").write_text(f"exec {sys.executable} configured.py epochs=2 $KEEP\n")
    argv = ("train", "--with", "script_arguments:lr=0.05", "--", "bash", "run.sh", "lr=0.01")
    done = hasten(*argv, directory=tmp_path)
    assert done.returncode == 0 and "no effect: the training has no argument lr" in done.stderr
    (tmp_path / "run.sh").write_text(f"exec {sys.executable} configured.py epochs=2 $@\n")
    done = hasten(*argv, directory=tmp_path)
    by_hand = [sys.executable, "configured.py", "epochs=2", "lr=0.05"]
    assert done.returncode == 0 and "no effect" not in done.stderr
    assert done.stdout == subprocess.run(by_hand, cwd=tmp_path, capture_output=True, text=True).stdout != ""


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"epochs": 10, "decay_epochs": 90, "warmup_epochs": 5}, 40),  # of 4 batches each
        ({"n_epochs": 10, "epoch": 0, "decay_epoch": 100}, 40),
        ({"epochs": 10, "inner_steps": 500}, 40),
        ({"max_steps": 300, "eval_steps": 1000, "epochs": -1}, 300),
        ({"pretraining_steps": 70}, 70),
        ({"max_steps": -1, "finetune_epochs": 10}, 40),
        ({"max_steps": math.inf, "epochs": 10}, 40),
        ({"max_train_steps": 20, "num_train_epochs": 10}, 20),
        ({"epochs": 0, "lr": 3, "batch_size": 8}, None),
    ],
)
def test_length_of_the_training_is_that_of_the_argument_with_the_plainest_name(arguments, steps):
    assert expected_steps(arguments, [range(4)], 1) == steps


TWO_PASSES = """
import argparse, torch
from torch.utils.data import DataLoader
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
epochs = parser.parse_args().epochs
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(torch.ones(64, 2), batch_size=4)
for epoch in range(epochs):
    for index, batch in enumerate(loader):
        for _ in range({passes}):
            model(batch).sum().backward()
        if index % {batches} == {batches} - 1:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("passes", "batches"), [(2, 1), (1, 2)], ids=["of one batch", "accumulation"])
def test_length_of_the_training_counts_batches_and_not_backward_passes(passes, batches, tmp_path):
    (tmp_path / "train.py").write_text(TWO_PASSES.format(passes=passes, batches=batches))
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    with ScriptProcess(ref, {}) as process:
        process.wait_until_trained(60.0, None)
        described = process.ask("describe", 60.0)
    assert described["expected_steps"] == 3 * 16 // batches and described["samples_per_step"] == 4 * batches


EPOCHS, WARMUP_EPOCHS = 7, 2


# no function that is read here contains an assert: as pytest rewrites it, it names locals


def train(num_epochs: int) -> tuple[dict, Any]:
    model = torch.nn.Linear(1, 1)
    reference, found = weakref.ref(model), epochs_in_code()
    del model
    return found, reference()


def step() -> dict:
    return epochs_in_code()


def quick(epochs: int) -> dict:
    return step()


def test_epochs_that_are_written_in_the_code_are_found_and_nothing_is_kept_alive():
    found, model = train(3)
    assert found == {"num_epochs": 3} and model is None


def test_epochs_of_a_module_count_where_no_function_has_any():
    assert step() == {"EPOCHS": 7} and quick(2) == {"epochs": 2}


def test_dictionary_of_its_variables_that_a_function_holds_stays_as_it_is():
    def train(epochs: int) -> dict:
        options = locals()
        epochs_in_code()
        return options

    assert train(3) == {"epochs": 3}


def test_epochs_of_a_fold_or_up_to_an_early_stop_are_not_those_of_the_training():
    def train(epochs: int, patience: int = 3) -> dict:
        return epochs_in_code()

    def validate(folds: int) -> list[dict]:
        return [(lambda epochs: epochs_in_code())(3) for _ in range(folds)]

    assert train(9) == {} and validate(1) == [{}]


def count(session: Any) -> list[tuple[int, int | None]]:
    found = list[tuple[int, int | None]]()
    for epochs in range(1, 4):
        found.append((epochs, _expected_steps(session, [range(4)])))
    return found


def test_counter_that_is_called_epochs_is_no_length():
    session: Any = SimpleNamespace(arguments={}, epochs={}, batches={}, steps=SimpleNamespace(count=1))
    assert count(session) == [(1, 4), (2, None), (3, None)]
