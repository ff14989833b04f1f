"""The document about remote calls tells the truth: its script trains in two processes what one process trains."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

DOCUMENT = Path(__file__).parents[2] / "docs/rpc.md"


@pytest.mark.slow
def test_the_script_of_the_document_has_the_gradients_of_one_process(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (script := tmp_path / "rpc.py").write_text(code, encoding="utf-8")
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*agent, str(script), str(tmp_path / "gradients.pt")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = torch.load(tmp_path / "gradients.pt", weights_only=True)
    names: dict = {"__name__": "rpc_example"}
    exec(compile(code, str(script), "exec"), names)
    model = nn.Sequential(names["Half"](0, 6, 4), names["Half"](1, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=names["RATE"])
    assert len(told) == names["STEPS"]
    for number, halves in enumerate(told):
        inputs, labels = names["batch"](number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        for weight, gradient in zip(model.parameters(), [each for half in halves for each in half], strict=True):
            torch.testing.assert_close(gradient, weight.grad, rtol=1e-9, atol=1e-12)
        optimizer.step()
