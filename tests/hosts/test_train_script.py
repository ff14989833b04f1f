"""``hasten train -- COMMAND``: the command for real, whatever it does besides the training that the recipe is for."""

import signal
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from hasten.core.errors import HastenWarning
from hasten.core.recipe import Recipe
from hasten.engine.loaders import from_loader
from hasten.hosts.launch import train_script
from hasten.hosts.script_ref import ScriptRef
from hasten.loading.probe import is_deterministic, probe_samples
from hasten.utils.signals import handle_signals


def train(directory: Path, text: str, recipe: str = "num_threads:count=1") -> int:
    """Writes a script and trains it with a recipe. Returns the exit code."""
    (directory / "train.py").write_text(text)
    script = ScriptRef.of_command([sys.executable, "train.py"], directory=str(directory))
    return train_script(script, Recipe.coerce(recipe), "cpu", None)


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
    assert "hasten: ValueError: not ready yet; train.py:20 continues without this method\n" in output.err


def test_empty_dataset_has_no_samples_to_probe():
    spec = from_loader(DataLoader([], batch_size=2), None, 2, 0, training=False).spec
    assert probe_samples(spec) == [] and is_deterministic(spec)
