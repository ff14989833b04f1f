"""``hasten train -- COMMAND``: the command for real, whatever it does besides the training that the recipe is for."""

import signal
import sys
from pathlib import Path

import pytest

from hasten.core.errors import HastenWarning
from hasten.core.recipe import Recipe
from hasten.hosts.launch import train_script
from hasten.hosts.script_ref import ScriptRef
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
