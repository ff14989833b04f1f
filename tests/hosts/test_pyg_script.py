"""A script that uses PyTorch Geometric's NeighborLoader runs without pyg-lib, by hasten's sampler."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch_geometric.typing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE,
        reason="the script runs by itself where pyg-lib or torch-sparse is installed",
    ),
]
SCRIPT = Path(__file__).with_name("scripts") / "pyg_sage.py"


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([*command, str(SCRIPT), "2"], capture_output=True, text=True, check=False)


def test_script_with_neighbor_loader_is_trained_where_it_cannot_run_alone():
    assert "requires either 'pyg-lib' or 'torch-sparse'" in run(sys.executable).stderr
    trained = run(sys.executable, "-m", "hasten", "train", "--", sys.executable)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr.count("neighbors are sampled by hasten.graph") == 1
    accuracies = [float(value) for value in re.findall(r"val_acc ([\d.]+)", trained.stdout)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.7
