"""``hasten eject -- python train.py``: the patch of a script applies, and gives the bits of the tuned run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.hosts.launch import check_same_script
from hasten.hosts.script_patch import patch_script
from hasten.hosts.script_ref import ScriptRef

SCRIPT = """import hashlib
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 1, 8, 8), torch.randint(0, 3, (256,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
val_loader = DataLoader(data, batch_size=32)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def evaluate():
    model.eval()
    return sum((model(images).argmax(1) == labels).sum().item() for images, labels in val_loader)


for epoch in range(3):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    evaluate()
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
"""
SITES = {
    "loaders": [
        {"site": "train.py:8#1", "type": "DataLoader", "role": "training"},
        {"site": "train.py:9#1", "type": "DataLoader", "role": "evaluation"},
    ],
    "models": [{"site": "train.py:10#1", "type": "Sequential", "called": True}],
    "optimizers": [{"site": "train.py:11#1", "type": "Adam"}],
    "evaluations": [{"site": "train.py:16#1", "type": "Sequential", "no_grad": False}],
    "seeds": [],
}


def written(directory: Path, **changes) -> ScriptRef:
    """The script, and a recipe file with the site map beside it."""
    (directory / "train.py").write_text(SCRIPT)
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(directory))
    (directory / "sites.json").write_text(json.dumps({"fingerprint": ref.fingerprint(), **SITES, **changes}))
    return ref


def test_patch_edits_the_sites_that_the_recipe_acts_on(tmp_path):
    recipe = Recipe.parse("loader_workers:num_workers=2 + fused_optimizer + eval_no_grad")
    patch = patch_script(written(tmp_path), recipe, str(tmp_path / "recipe.toml"), None)
    added = [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == [
        "loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)",
        "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)",
        "@torch.no_grad()",
    ]


def test_arguments_are_changed_where_they_are_passed_or_typed(tmp_path):
    ref = written(tmp_path, framework_arguments=[{"site": "train.py:11#1", "type": "Adam", "names": ["eps", "lr"]}])
    recipe = Recipe({"script_arguments": {"lr": 0.004, "eps": 1e-6}})
    patch = patch_script(ref, recipe, str(tmp_path / "recipe.toml"), None)
    assert "+optimizer = torch.optim.Adam(model.parameters(), lr=0.004)" in patch.splitlines()
    assert "#     train.py:11: no call passes eps by its name; the edit is: eps=1e-06" in patch.splitlines()
    typed = ScriptRef.of_command([*ref.argv, "model.depth=4", "--lr", "0.1"], directory=str(tmp_path))
    sites = {"fingerprint": typed.fingerprint(), **SITES}  # without framework_arguments, as older ones are
    (tmp_path / "sites.json").write_text(json.dumps(sites))
    recipe = Recipe({"script_arguments": {"lr": 0.2, "model.depth": 2, "epochs": 3}})
    patch = patch_script(typed, recipe, str(tmp_path / "recipe.toml"), None)
    command = f"{sys.executable} train.py model.depth=2 --lr 0.2"
    assert patch.splitlines()[-1] == f"#     by hand: start the script as: {command}, and with epochs = 3"


@pytest.mark.parametrize(
    ("step", "call", "reason"),
    [
        ("scaler.step(optimizer)", "loss = model(x)", "is not updated by a call of its step()"),
        ("optimizer.step()", "loss = self.net(x)", "it is not clear what the model is called there"),
    ],
)
def test_gradient_clipping_is_left_to_the_reader_where_the_update_is_not_plain(tmp_path, step, call, reason):
    ref = written(tmp_path)
    text = f"import torch\nmodel = torch.nn.Linear(1, 1)\n{call}\n{step}\n"
    Path(str(ref.file)).write_text(text)
    sites = {
        "models": [{"site": "train.py:3#1", "type": "Linear", "called": True}],
        "optimizers": [{"site": "train.py:2#1", "type": "Adam", "step": "train.py:4"}],
    }
    sites = SITES | {"loaders": [], "evaluations": [], "fingerprint": ref.fingerprint()} | sites
    (tmp_path / "sites.json").write_text(json.dumps(sites))
    patch = patch_script(ref, Recipe.parse("gradient_clipping"), str(tmp_path / "recipe.toml"), None)
    assert reason in patch and "+++" not in patch


def test_module_that_runs_is_edited_where_the_command_names_no_file(tmp_path):
    written(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import train\n")
    ref = ScriptRef.of_command([sys.executable, "-m", "package"], directory=str(tmp_path))
    sites = {"fingerprint": ref.fingerprint(), "main": "package/__main__.py", **SITES}
    (tmp_path / "sites.json").write_text(json.dumps(sites))
    recipe = Recipe.parse("num_threads:count=2 + malloc_tuning")
    patch = patch_script(ref, recipe, str(tmp_path / "recipe.toml"), None)
    assert "+++ b/package/__main__.py" in patch and "Not in this patch" not in patch
    assert "+torch.set_num_threads(2)" in patch and "mallopt" in patch


def test_call_that_the_script_makes_itself_is_changed(tmp_path):
    ref = written(tmp_path)
    (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text() + "torch.set_num_threads(1)\n")
    patch = patch_script(ref, Recipe.parse("num_threads:count=2"), str(tmp_path / "recipe.toml"), None)
    # the call may be under a condition that does not hold
    assert (
        "-torch.set_num_threads(1)\n+torch.set_num_threads(2)" in patch
        and patch.count("+torch.set_num_threads(2)") == 2
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_module_that_runs_is_found_by_watching(tmp_path):
    written(tmp_path)
    (tmp_path / "run.sh").write_text(f"exec {sys.executable} -m package\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import train\n")
    ref = ScriptRef.of_command(["bash", "run.sh"], directory=str(tmp_path))
    patch = patch_script(ref, Recipe.parse("num_threads:count=2"), None, "cpu")
    assert "+++ b/package/__main__.py" in patch and "+torch.set_num_threads(2)" in patch


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("other.py", "import torch\n", "it was found with train.py, which is not what"),
        ("other.py", "from train import main\n", None),
        ("train.py", SCRIPT + "\n", None),
        ("gone", "", "it was found with train.py, which does not exist here"),
    ],
)
def test_recipe_of_another_script_is_refused_before_it_starts(tmp_path, command, text, message):
    sites = {"fingerprint": "of the search", "main": "train.py", **SITES}
    file = "other.py" if command == "gone" else command
    if command != "gone":
        (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / file).write_text(text)
    ref = ScriptRef.of_command([sys.executable, file], directory=str(tmp_path))
    if message is None:
        return check_same_script(ref, sites)
    with pytest.raises(ConfigurationError) as error:
        check_same_script(ref, sites)
    assert message in str(error.value) and "\n" not in str(error.value)
    return None


def test_eject_without_a_recipe_takes_that_of_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ref = written(tmp_path)
    command = ["eject", "--", *ref.argv]
    assert main(command) == 2
    assert "there is no recipe of this command in runs; tune it first" in capsys.readouterr().err
    (tmp_path / "runs" / "tune-train").mkdir(parents=True)
    (tmp_path / "runs" / "tune-train" / "recipe.toml").write_text("[methods.fused_optimizer]\n")
    (tmp_path / "sites.json").rename(tmp_path / "runs" / "tune-train" / "sites.json")
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "lr=1e-3, fused=True)" in shown.out
    assert "the recipe is that of the search, runs/tune-train/recipe.toml" in shown.err


def test_patch_of_a_method_that_changes_the_loop_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"batch_size needs .* train\.py owns its training loop"):
        patch_script(written(tmp_path), Recipe.parse("batch_size:factor=2"), str(tmp_path / "recipe.toml"), None)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_patched_script_ends_with_the_bits_of_the_tuned_run(tmp_path):
    ref = written(tmp_path, fingerprint="of an older script", optimizers=[])  # so that it is watched anew
    clipping = "gradient_clipping:max_norm=0.1"
    methods = ("in_memory_batches", "fused_optimizer", "channels_last", "eval_no_grad", clipping)
    recipe = [text for method in methods for text in ("--with", method)]
    command = [sys.executable, "train.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*argv: str) -> str:
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    hasten = [sys.executable, "-m", "hasten"]
    plain, tuned = run(*command), run(*hasten, "train", *recipe, "--", *command)
    patch = run(*hasten, "eject", *recipe, "--", *command)
    assert "Not in this patch" not in patch and ref.file
    assert "+        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n         optimizer.step()" in patch
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=patch.encode(), cwd=tmp_path, check=True, capture_output=True)
    assert "hasten" not in Path(ref.file).read_text()
    assert run(*command) == tuned != plain


def test_recipe_that_no_patch_can_hold_is_refused_with_what_to_do(tmp_path, capsys, monkeypatch):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text("[methods.cache_dataset]\n")
    assert main(["eject", "--recipe", "recipe.toml", "--", sys.executable, "train.py"]) == 2
    assert "cannot be written as a patch: cache_dataset: keep decoded samples" in capsys.readouterr().err


def test_what_is_to_be_done_beside_an_edit_is_not_called_left_out(tmp_path):
    patch = patch_script(
        written(tmp_path), Recipe.parse("loader_workers:num_workers=2"), str(tmp_path / "r.toml"), None
    )
    assert patch.startswith("# Beside this patch:\n#   loader_workers: ") and "Not in this patch" not in patch


def test_call_in_which_a_framework_makes_the_loader_is_left_as_it_is(tmp_path):
    loader = {"site": "train.py:25#1", "type": "DataLoader", "role": "training", "made_by": "transformers"}
    ref = written(tmp_path, loaders=[loader])
    recipe = Recipe.parse("loader_workers:num_workers=2 + fused_optimizer")
    patch = patch_script(ref, recipe, str(tmp_path / "recipe.toml"), None)
    assert "evaluate(num_workers=2)" not in patch and "fused=True" in patch
    assert "train.py:25: transformers makes it in this call; the edit is: num_workers=2" in patch
