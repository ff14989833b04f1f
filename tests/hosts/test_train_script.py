"""``hasten train -- COMMAND``: the command for real, whatever it does besides the training that the recipe is for."""

import sys
from pathlib import Path

import pytest

from hasten.core.errors import HastenWarning
from hasten.core.recipe import Recipe
from hasten.hosts.launch import train_script
from hasten.hosts.script_ref import ScriptRef


def train(directory: Path, text: str, recipe: str = "num_threads:count=1") -> int:
    """Writes a script and trains it with a recipe. Returns the exit code."""
    (directory / "train.py").write_text(text)
    script = ScriptRef.of_command([sys.executable, "train.py"], directory=str(directory))
    return train_script(script, Recipe.coerce(recipe), "cpu", None)


def test_command_that_imports_no_torch_trains_with_a_warning(tmp_path):
    with pytest.warns(HastenWarning, match="the recipe had no effect: the command imports no torch"):
        assert train(tmp_path, "exit(3)") == 3
