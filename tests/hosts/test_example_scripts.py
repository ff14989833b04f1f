"""The example scripts for hosts: plain PyTorch, with a metric that is found in what they print."""

import subprocess
import sys
from pathlib import Path

import pytest

from hasten.hosts.metric import Found, choose_metric
from hasten.hosts.metric_lines import series_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "name", "direction"),
    [("train_mnist_like.py", "validation accuracy", "max"), ("train_char_lm.py", "valid loss", "min")],
)
def test_example_script_prints_its_metric_and_writes_nothing(tmp_path, script, name, direction):
    command = [sys.executable, str(EXAMPLES / script), "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [(float(i), line, False) for i, line in enumerate(done.stdout.splitlines())]
    found = choose_metric(series_of(lines))
    assert isinstance(found, Found) and (found.name, found.direction, len(found.values)) == (name, direction, 2)
    assert list(tmp_path.iterdir()) == []
    assert "import hasten" not in (EXAMPLES / script).read_text()
