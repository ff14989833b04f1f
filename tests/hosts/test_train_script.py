"""``hasten train -- COMMAND``: the command for real, whatever it does besides the training that the recipe is for."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.core.errors import HastenWarning
from hasten.core.recipe import Recipe
from hasten.hosts import site_map
from hasten.hosts.launch import train_script
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.site_map import KINDS
from hasten.utils.signals import handle_signals


def train(directory: Path, text: str, recipe: str = "num_threads:count=1") -> int:
    """Writes a script and trains it with a recipe. Returns the exit code."""
    (directory / "train.py").write_text(text)
    script = ScriptRef.of_command([sys.executable, "train.py"], directory=str(directory))
    return train_script(script, Recipe.coerce(recipe), "cpu", None)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--seed 3", "sets its own seeds"),
        ("--checkpoint-every 10s", "writes and resumes its own files"),
        ("--max-restarts 1", "starts its own processes"),
        ("--max-bad-rows 2", "reads its own data"),
    ],
)
def test_option_of_tasks_is_refused_in_one_line(option, reason, tmp_path, capsys):
    (tmp_path / "train.py").touch()
    assert main(["train", *option.split(), "--", sys.executable, str(tmp_path / "train.py")]) == 2
    error = capsys.readouterr().err
    assert f"{option.split()[0]} is for tasks; train {reason}; leave it out" in error and error.count("\n") == 1


WITHOUT_TORCH = """
import sys
from hasten.cli.main import main
assert main(["train", "--recipe", "runs/recipe.toml", "--", sys.executable, "train.py", "--seed=7"]) == 0
print("torch" in sys.modules)
"""


def test_recipe_that_the_search_has_checked_is_not_checked_again(tmp_path):
    """To do so imports torch, which takes as long as the script needs to import it. The seed is another one now."""
    (tmp_path / "train.py").touch()
    script = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    site_map.remember(script, {"sites": {}, "device": "cpu"})
    recipe = Recipe.parse("num_threads:count=1")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "recipe.toml").write_text(recipe.to_toml())
    script.write_sites(tmp_path / "runs", recipe)

    def imports_torch() -> str:
        command = [sys.executable, "-c", WITHOUT_TORCH]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert imports_torch() == "False"
    (tmp_path / "runs" / "recipe.toml").write_text(Recipe.parse("num_threads:count=2").to_toml())
    assert imports_torch() == "True", "the search has not seen this one"


def test_command_that_imports_no_torch_trains_with_a_warning(tmp_path):
    with pytest.warns(HastenWarning, match="the recipe had no effect: the command imports no torch"):
        assert train(tmp_path, "exit(3)") == 3


SIGNALLED = """
import os, signal, time
numbers, seen = [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2], []
for number in numbers:
    signal.signal(number, lambda number, _: seen.append(number))
for number in numbers:
    os.kill(os.getppid(), number)
    for _ in range(500):
        if number not in seen:
            time.sleep(0.01)
exit(0 if seen == numbers else 1)
"""


def test_signals_of_a_scheduler_reach_the_script(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    with handle_signals(numbers, lambda *_: None):  # they must not end the tests
        assert train(tmp_path, SIGNALLED, "baseline") == 0


FAILS_LATER = """
import torch
from torch.utils.data import DataLoader

class HeldOut(torch.utils.data.Dataset):
    is_ready = False
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if not self.is_ready:
            raise ValueError("not ready\\nyet")
        return torch.ones(2)

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(8, 2), batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
held_out = HeldOut()
batches = iter(DataLoader(held_out, batch_size=2))
held_out.is_ready = True
print(len(list(batches)), "batches,", len(list(DataLoader([], batch_size=2))), "of no samples")
"""


@pytest.mark.slow
def test_method_that_fails_in_the_middle_of_a_training_leaves_it_alone(tmp_path, capfd):
    assert train(tmp_path, FAILS_LATER, "in_memory_batches") == 0
    output = capfd.readouterr()
    assert output.out == "2 batches, 0 of no samples\n"
    assert "ValueError: not ready yet; train.py:20 continues without this method\n" in output.err


STAGE = """
import sys, torch
model = torch.nn.Linear(2, 1)
if sys.argv[1:]:
    optimizer = torch.optim.Adam(model.parameters())
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print(torch.get_num_threads(), "threads")
"""
SITES = {
    "fingerprint": "another",
    "main": "pretrain.py",
    "device": "cpu",
    **{kind: [] for kind in KINDS},
    "optimizers": [{"site": "pretrain.py:7#1", "type": "SGD"}],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "threads", "message"),
    [
        ("finetune.py", 2, "the recipe was found with pretrain.py; finetune.py trains without it"),
        (
            "pretrain.py adam",
            1,
            "the optimizer at pretrain.py:7#1 (SGD) did not come again; pretrain.py trains with a recipe that was not "
            "tuned for it",
        ),
    ],
)
def test_second_stage_of_a_command_trains_to_its_end(second, threads, message, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name in ("pretrain.py", "finetune.py"):
        (tmp_path / name).write_text(STAGE)
    (tmp_path / "run.sh").write_text(f"set -e\n{sys.executable} pretrain.py\n{sys.executable} {second}\n")
    script = ScriptRef.of_command(["bash", "run.sh"], directory=str(tmp_path))
    assert train_script(script, Recipe.parse("num_threads:count=1"), "cpu", SITES) == 0
    output = capfd.readouterr()
    assert output.out == f"1 threads\n{threads} threads\n" and output.err.count("hasten: ") == 1
    assert f"hasten: {message}\n" in output.err


@pytest.mark.slow
def test_first_stage_at_other_sites_is_another_script(tmp_path, capfd):
    (tmp_path / "pretrain.py").write_text(STAGE)
    script = ScriptRef.of_command([sys.executable, "pretrain.py", "adam"], directory=str(tmp_path))
    assert train_script(script, Recipe.parse("num_threads:count=1"), "cpu", SITES) == 2
    assert "the recipe is for another script: the optimizer at pretrain.py:7#1 (SGD)" in capfd.readouterr().err


FOLDS = """
import gc, torch, weakref
states, models = [], []
for fold in range(2):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        optimizer.zero_grad()
        (model(torch.ones(3, 4)) - 1).square().mean().backward()
        optimizer.step()
    states.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    models.append(weakref.ref(model))
gc.collect()
print(torch.equal(*states), states[0].abs().max().item() < 2, models[0]() is None)
"""
BESIDE = """
import torch
torch.manual_seed(0)
make = lambda: (model := torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.01))
model, optimizer = make()
for step in range(10):
    if step == 4:
        second, second_optimizer = make()
    out = model(torch.ones(3, 4))
    out = out if step < 4 else second(out)
    out.square().mean().backward()
    for one in [optimizer] if step < 4 else [optimizer, second_optimizer]:
        one.step()
        one.zero_grad()
print(max(parameter.abs().max().item() for one in (model, second) for parameter in one.parameters()) < 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gradient_clipping:max_norm=0.1", "float16 + gradient_clipping:max_norm=0.1"])
def test_methods_act_in_all_folds_alike(recipe, tmp_path, capfd):
    assert train(tmp_path, FOLDS, recipe) == 0
    output = capfd.readouterr()
    assert output.out == "True True True\n" and output.err == ""


@pytest.mark.slow
def test_second_model_that_comes_later_is_not_updated_with_a_scaled_loss(tmp_path, capfd):
    assert train(tmp_path, BESIDE, "float16") == 0
    output = capfd.readouterr()
    assert output.out == "True\n"
    assert "train.py trains several models, such as Linear, and" in output.err and output.err.count("\n") == 1


INTERRUPTED = """
import os, signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
print("ready", flush=True)
if sys.argv[1:]:
    os.kill(os.getppid(), signal.SIGINT)
until = time.monotonic() + 10
while time.monotonic() < until and not (seen and time.monotonic() > seen[0] + 0.3):
    time.sleep(0.01)
exit(len(seen))
"""
TRAINS = """
import sys
from hasten.core.recipe import Recipe
from hasten.hosts.launch import train_script
from hasten.hosts.script_ref import ScriptRef
script = ScriptRef.of_command([sys.executable, "train.py", *sys.argv[1:]])
sys.exit(train_script(script, Recipe.coerce("baseline"), "cpu", None))
"""


def test_interrupt_that_only_hasten_gets_reaches_the_script(tmp_path):
    """As from ``kill -INT`` or a supervisor: there is no terminal that sends it to both."""
    (tmp_path / "train.py").write_text(INTERRUPTED)
    command = [sys.executable, "-c", TRAINS, "by itself"]
    assert subprocess.run(command, cwd=tmp_path, start_new_session=True, timeout=60).returncode == 1


def test_interrupt_from_a_terminal_reaches_the_script_once(tmp_path):
    (tmp_path / "train.py").write_text(INTERRUPTED)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", TRAINS])
    output = b""
    while b"ready" not in output:
        output += os.read(terminal, 1024)
    os.write(terminal, b"\x03")  # Ctrl-C
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    os.close(terminal)
