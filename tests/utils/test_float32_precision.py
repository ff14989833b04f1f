"""Float32 precision: read, changed and restored, whichever of PyTorch's two interfaces a program uses."""

import subprocess
import sys

import pytest

OLDER = ("torch.set_float32_matmul_precision('high')", "torch.backends.cudnn.allow_tf32 = False")
NEWER = (
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'ieee'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
)
PROGRAM = """
import torch
from hasten.benchmarking.process_state import differences, process_state, restored
from hasten.methods.tf32 import allow_tf32, allows_tf32
{task}
before = process_state()
for change in {changes}:
    with restored():
        exec(change)
    assert differences(before, process_state()) == [], change
with restored():
    allow_tf32()
    assert allows_tf32()
assert differences(before, process_state()) == [], "allow_tf32"
print("restored")
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pass", *OLDER, *NEWER, f"{OLDER[0]}; {NEWER[0]}", f"{NEWER[0]}; {OLDER[0]}"])
def test_float32_precision_of_either_interface_is_restored(task):
    """In a process of its own: once the newer settings are used, torch refuses to read the older ones."""
    program = PROGRAM.format(task=task, changes=(*OLDER, *NEWER))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "restored\n", done.stderr
