"""A command as a task: what is refused before anything runs, its name, its fingerprint, and the hooks of its host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hasten.cli.main import split_command
from hasten.core.errors import ConfigurationError, RunError
from hasten.core.progress import no_progress
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_methods, method_names
from hasten.engine.tasks import TaskRef
from hasten.hosts import site_map
from hasten.hosts.inside.models import devices_of
from hasten.hosts.inside.sites import missing_sites
from hasten.hosts.script_ref import ScriptRef
from hasten.tuning.budget import Budget
from hasten.tuning.candidates import MethodSelection, candidates_for
from hasten.tuning.study import Study
from hasten.tuning.trial_store import TrialStore
from hasten.tuning.tune import latest_search, search_directory

SCRIPTS = Path(__file__).with_name("scripts")


def script(*arguments: str, name: str = "tensors.py") -> ScriptRef:
    return ScriptRef.of_command([sys.executable, name, *arguments], directory=str(SCRIPTS))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no command is given after --"),
        (["no-such-command"], "there is no command no-such-command"),
        (["tensors.py"], "write python tensors.py"),
        ([sys.executable, "missing.py"], "there is no file missing.py"),
        ([sys.executable], "Python without a script"),
        ([sys.executable, "-I", "tensors.py"], "-I (isolated mode) keeps hasten out"),
        ([sys.executable, "-uE", "tensors.py"], "-E (ignores PYTHON variables) keeps hasten out"),
        ([sys.executable, "-S", "tensors.py"], "-S (no site) keeps hasten out"),
    ],
)
def test_command_that_cannot_work_is_refused(argv, message):
    with pytest.raises(ConfigurationError) as error:
        ScriptRef.of_command(argv, directory=str(SCRIPTS))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([sys.executable, "tensors.py", "3"], "tensors"),
        ([sys.executable, "-u", "-W", "ignore", "./tensors.py"], "tensors"),
        ([sys.executable, "-m", "package.train", "--lr", "1"], "package.train"),
        (["bash", "-c", "python tensors.py"], "bash"),
    ],
)
def test_name_is_that_of_the_script(argv, name):
    assert str(ScriptRef.of_command(argv, directory=str(SCRIPTS))) == name


def test_reference_passes_through_task_ref():
    ref = script("3")
    assert TaskRef.of(ref) is ref


def test_fingerprint_depends_on_arguments_and_code(tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    argv = [sys.executable, "train.py"]
    first = ScriptRef.of_command(argv, directory=str(tmp_path)).fingerprint()
    assert first == ScriptRef.of_command(argv, directory=str(tmp_path)).fingerprint()
    assert first != ScriptRef.of_command([*argv, "--lr=1"], directory=str(tmp_path)).fingerprint()
    (tmp_path / "model.py").write_text("layers = 3")
    assert first != ScriptRef.of_command(argv, directory=str(tmp_path)).fingerprint()


def test_link_of_an_editor_to_nothing_is_no_code(tmp_path):
    (tmp_path / "train.py").write_text("")
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    before = ref.fingerprint()
    (tmp_path / ".#train.py").symlink_to("user@host.1234")  # Emacs, while the file is not saved
    assert ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path)).fingerprint() == before


def test_script_is_no_task():
    with pytest.raises(ConfigurationError, match="is a command, and this needs a task"):
        script().load()


@pytest.mark.parametrize(
    ("recipe", "hook"),
    [("cuda_graph", "forward_backward"), ("batch_size", "plan"), ("budgeted_schedule", "plan"), ("ema", "export")],
)
def test_method_that_needs_the_loop_is_refused(recipe, hook):
    with pytest.raises(ConfigurationError) as error:
        script().check_methods(make_methods(Recipe.parse(recipe)))
    message = str(error.value)
    assert message.startswith(f"{recipe} needs the hook {hook}, which the script host cannot offer: tensors.py owns")
    assert message.endswith("write the training as a hasten.Task, whose loop the engine runs")


def test_methods_of_the_script_host_are_accepted():
    def is_accepted(name: str) -> bool:
        try:
            script().check_methods(make_methods(Recipe().with_method(name)))
        except ConfigurationError:
            return False
        return True

    accepted = {name for name in method_names() if is_accepted(name)}
    assert accepted >= {
        *("num_threads", "malloc_tuning", "tf32", "flush_denormals", "loader_workers", "autotune_loader"),
        *("in_memory_batches", "cache_dataset", "prefetch_to_device", "channels_last", "compile", "bfloat16"),
        *("float16", "fused_optimizer", "gradient_clipping", "gradient_centralization", "znorm"),
        *("activation_checkpointing", "eval_no_grad"),
    }
    assert not accepted & {"ddp", "pipeline", "early_stopping"}


def test_several_processes_are_refused():
    with pytest.raises(ConfigurationError, match="leave --processes out"):
        script().start_worker("hasten.benchmarking.arm:Arm", 2, None, None)
    with pytest.raises(RunError, match="needs the loop of the engine"):
        script().start_worker("hasten.profiling.drift:DriftProbe", 1, None, None)


@pytest.mark.parametrize(
    ("argv", "own", "command"),
    [
        (["tune", "--json", "--", "python", "t.py", "--json"], ["tune", "--json"], ["python", "t.py", "--json"]),
        (["tune", "digits"], ["tune", "digits"], None),
        (["launch", "--", "train", "digits"], ["launch", "--", "train", "digits"], None),
        (["train", "--"], ["train"], []),
    ],
)
def test_command_begins_after_the_first_separator(argv, own, command):
    assert split_command(argv) == (own, command)


def test_missing_sites_name_what_did_not_come_again():
    loader = {"site": "train.py:8#1", "type": "DataLoader", "role": "training"}
    other = {"site": "train.py:9#1", "type": "DataLoader", "role": "evaluation"}
    model = {"site": "train.py:20#1", "type": "Net"}
    seen = {"loaders": [loader], "models": [model]}
    assert missing_sites({"loaders": [loader, other], "models": [model]}, seen) == ""
    assert missing_sites({"models": [{**model, "type": "Other"}]}, seen) == (
        "the model at train.py:20#1 (Other) did not come again"
    )
    assert "the training loader at train.py:8#1" in missing_sites({"loaders": [loader]}, {"models": [model]})


def test_candidates_that_a_script_cannot_run_are_left_out_with_the_reason(tmp_path):
    (tmp_path / "train.py").touch()
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    study = Study(ref, "cpu", TrialStore(tmp_path, {}), Budget(10.0), no_progress)
    diagnosis = {"advice": [{"method": name, "bound": 2.0} for name in ("batch_size", "in_memory_batches")]}
    found = candidates_for(diagnosis, MethodSelection.of(None, ()), study.refusal)
    assert [item.name for item in found.systems] == ["in_memory_batches"] and not found.training
    ((name, why),) = found.not_tried
    assert name == "batch_size" and "the hook plan" in why and "train.py owns its training loop" in why


def test_method_that_changes_the_optimizer_is_refused_where_the_first_run_had_none(tmp_path):
    """As under Keras, whose optimizers are its own."""
    (tmp_path / "train.py").touch()
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    study = Study(ref, "cpu", TrialStore(tmp_path, {}), Budget(10.0), no_progress)
    fused = Recipe.parse("fused_optimizer")
    assert study.refusal(fused) == "", "nothing is known before the first run"
    of_keras = {"site": "train.py:1#1", "type": "Adam", "made_by": "keras"}
    site_map.remember(ref, {"sites": {"optimizers": [of_keras]}, "watched_steps": 9})
    assert "train.py has none; leave the method out" in study.refusal(fused)
    assert study.refusal(Recipe.parse("in_memory_batches")) == ""


def test_search_beside_the_script_leaves_it_the_same_script(tmp_path):
    (tmp_path / "train.py").touch()
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    before = ref.fingerprint()
    for name in ("trials.jsonl", "lock", "recipe.toml"):
        (tmp_path / "tuned").mkdir(exist_ok=True)
        (tmp_path / "tuned" / name).write_text("[methods]")
    assert ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path)).fingerprint() == before
    (tmp_path / "config.toml").write_text("epochs = 3")
    assert ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path)).fingerprint() != before


def test_site_map_on_disk_holds_no_parsed_argument(tmp_path):
    (tmp_path / "train.py").touch()
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    site_map.remember(ref, {"sites": {}, "arguments": {"hub_token": "hf_secret"}})
    ref.write_sites(tmp_path, Recipe())
    assert "secret" not in (tmp_path / site_map.FILE).read_text()
    assert site_map.read_beside(str(tmp_path / "recipe.toml"))["fingerprint"] == ref.fingerprint()


def test_time_stamp_among_the_arguments_is_no_other_length_of_the_training():
    before = {"epochs": 3, "run_name": "10:31:05"}
    assert site_map.changed_numbers(before, {"epochs": 3, "run_name": "10:31:09"}) == {}
    assert site_map.changed_numbers(before, {"epochs": 2, "run_name": "10:31:09"}) == {"epochs": 2}


@pytest.mark.parametrize(
    ("assumed", "seen", "expected"),
    [
        ("cuda", None, "cuda"),  # before the first run
        ("cuda", "cpu", "cpu"),  # the script hides the GPU, or does not use it
        ("cuda", "cuda:1", "cuda:1"),
        ("cpu", "cuda:0", "cpu"),  # the site map comes from a machine with a GPU
    ],
)
def test_device_is_the_one_that_the_script_was_seen_to_train_on(assumed, seen, expected):
    assert site_map.device_of(assumed, {"device": seen}) == expected


def test_devices_of_a_script_are_those_of_its_parameters():
    models = [nn.Linear(2, 2, device="meta"), nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]
    assert devices_of(models) == [torch.device("meta"), torch.device("cpu")]
    assert devices_of([nn.ReLU()]) == []


@pytest.mark.slow
def test_check_on_a_gpu_asks_for_deterministic_algorithms():
    """In a process of its own: the mode is global."""
    code = (
        "import os, torch; from contextlib import nullcontext; from types import SimpleNamespace\n"
        "from hasten.hosts.exactness import Deterministic\n"
        "with Deterministic().process_context(nullcontext, SimpleNamespace(checkpoint_state={}))():\n"
        "    print(torch.are_deterministic_algorithms_enabled())\n"
        "    print(torch.is_deterministic_algorithms_warn_only_enabled())\n"
        "print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "True", ":4096:8"]


def test_search_of_another_command_has_a_directory_of_its_own(tmp_path, monkeypatch):
    """So that no result is replaced; the same command finds its own again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    small, large = (ScriptRef.of_command([sys.executable, "train.py", "--width", width]) for width in ("8", "512"))
    assert search_directory(small) == search_directory(large) == Path("runs/tune-train")
    for ref in (small, large):
        (directory := search_directory(ref)).mkdir(parents=True)
        (directory / "search.json").write_text(json.dumps({"command": ref.command}))
    assert [search_directory(ref).name for ref in (small, large, small)] == ["tune-train", "tune-train-2", "tune-train"]
    assert search_directory(large, "elsewhere") == Path("elsewhere")


def test_search_with_other_arguments_to_vary_has_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    command = [sys.executable, "train.py", "--lr", "1"]
    plain, varied = (ScriptRef.of_command(command, vary=vary) for vary in ((), ("lr",)))
    assert search_directory(varied, continues=True) == Path("runs/tune-train")
    (directory := search_directory(plain)).mkdir(parents=True)
    (directory / "search.json").write_text(json.dumps({"command": plain.command, "task": ["x", None, []]}))
    assert search_directory(varied, continues=True) == directory, "it is refused there, with what has changed"
    (directory := search_directory(varied)).mkdir()
    (directory / "search.json").write_text(json.dumps({"command": varied.command, "task": ["x", None, ["lr"]]}))
    for ref, name in ((plain, "tune-train"), (varied, "tune-train-2")):
        assert search_directory(ref).name == search_directory(ref, continues=True).name == name
    assert latest_search(plain).name == "tune-train-2"


def test_argument_that_is_longer_than_the_name_of_a_file_is_accepted():
    assert script("--config", json.dumps({"layers": list(range(200))})).fingerprint().startswith("tensors-")


def test_facts_of_evaluations_stay_known_when_a_later_run_has_not_evaluated_yet():
    """As at the start of a comparison; else a search would say that nothing records gradients."""
    ref = script("--facts", "9")
    site_map.remember(ref, {"sites": {}, "facts": ["cpu", "evaluation_gradients", "evaluations", "idle_cores"]})
    assert site_map.remember(ref, {"sites": {}, "facts": ["cpu"]})["facts"] == [
        "cpu",
        "evaluation_gradients",
        "evaluations",
    ]


def test_variable_before_a_command_is_refused_with_what_to_write():
    with pytest.raises(ConfigurationError, match="no command A=0; set variables before hasten, or write env A=0"):
        ScriptRef.of_command(["A=0", "python", "train.py"])


def test_warnings_that_the_user_has_silenced_stay_silenced(monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setattr(sys, "warnoptions", ["ignore"])  # as Python takes them from the variable
    assert script().environment["PYTHONWARNINGS"] == "ignore"
