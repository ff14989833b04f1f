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

EPOCHS = """
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

torch.manual_seed(0)
graph = Data(x=torch.randn(300, 4), edge_index=torch.arange(6_000).reshape(2, 3_000) * 7 % 300)
loader = NeighborLoader(graph, [3, 3], batch_size=100)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    drawn = 0
    for batch in loader:
        model(batch.x).mean().backward()
        optimizer.step()
        drawn = hash((drawn, *batch.e_id.tolist()))
    print(f"epoch {epoch} val_acc 0.5 drawn {drawn}", flush=True)
"""


def run(*command: str, script: Path = SCRIPT) -> subprocess.CompletedProcess:
    return subprocess.run([*command, str(script), "2"], capture_output=True, text=True, check=False)


def test_script_with_neighbor_loader_is_trained_where_it_cannot_run_alone():
    assert "requires either 'pyg-lib' or 'torch-sparse'" in run(sys.executable).stderr
    trained = run(sys.executable, "-m", "hasten", "train", "--", sys.executable)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr.count("neighbors are sampled by hasten.graph") == 1
    accuracies = [float(value) for value in re.findall(r"val_acc ([\d.]+)", trained.stdout)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.7


def test_script_without_shuffle_has_other_neighbors_in_each_epoch_and_the_same_in_each_run(tmp_path):
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS)
    runs = [run(sys.executable, "-m", "hasten", "train", "--", sys.executable, script=script) for _ in range(2)]
    drawn = [re.findall(r"drawn (-?\d+)", trained.stdout) for trained in runs]
    assert len(set(drawn[0])) == 3, runs[0].stderr
    assert drawn[0] == drawn[1]
