"""Exactness of a script that amplifies rounding: its first steps decide, if rounding explains the rest."""

import shutil
import sys

import pytest

from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import ScriptTrial, watch_script
from helpers import amplified_rounding

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
SCRIPT = """
import torch
from amplified_rounding import Logistic

torch.manual_seed(0)
model = Logistic()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for step in range(40):
    optimizer.zero_grad()
    model(1 - 0.03 * torch.rand(8)).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("name", "passed"), [("RoundsOtherwise", True), ("ActsEarly", False)])
def test_script_that_amplifies_rounding_is_judged_by_its_first_steps(name, passed, tmp_path):
    shutil.copy(amplified_rounding.__file__, tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    watch_script(ref)
    method = f"{amplified_rounding.__file__}:{name}"
    check = ScriptTrial(ref, methods={method: {}}).check_exactness({}, "EQUIVALENT_MATH", 60.0)
    assert check["passed"] is passed, check["why"]
    assert ("after 5 steps" in check["why"] and "grows to" in check["why"]) is passed, check["why"]
