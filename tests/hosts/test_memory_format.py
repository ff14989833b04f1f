"""channels_last in scripts: what the script itself sees of outputs and of the state of its optimizer."""

import shutil
import subprocess
import sys

import pytest
import torch

from hasten.core.recipe import Recipe
from hasten.hosts.launch import train_script
from hasten.hosts.script_ref import ScriptRef

pytestmark = pytest.mark.slow
SCRIPT = """
import os, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
if os.path.exists("state.pt"):
    saved = torch.load("state.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for step in range(6):
    optimizer.zero_grad()
    output = model(torch.randn(4, 3, 8, 8))
    output.view(len(output), -1).pow(2).mean().backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
"""


def test_state_that_is_resumed_and_outputs_are_those_of_the_script_itself(tmp_path):
    """The fused kernel of the CPU reads state in the order of memory: it has to have the format of the weights."""
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = [sys.executable, "train.py"]
    for directory in (tmp_path / "plain", tmp_path / "channels_last"):
        directory.mkdir()
        shutil.copy(tmp_path / "train.py", directory)
        subprocess.run(plain, cwd=directory, check=True)
    subprocess.run(plain, cwd=tmp_path / "plain", check=True)
    ref = ScriptRef.of_command(plain, directory=str(tmp_path / "channels_last"))
    assert train_script(ref, Recipe.parse("channels_last"), "cpu", None) == 0
    expected, found = (torch.load(tmp_path / name / "state.pt") for name in ("plain", "channels_last"))
    for name, weight in expected["model"].items():
        torch.testing.assert_close(found["model"][name], weight, rtol=1e-4, atol=1e-5)
    assert all(state["exp_avg"].is_contiguous() for state in found["optimizer"]["state"].values())
