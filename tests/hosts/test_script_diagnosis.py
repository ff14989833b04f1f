"""What a diagnosis of a script shows: its evaluations, and the seconds of its steps."""

import sys
from pathlib import Path

import pytest

from hasten.core.recipe import Recipe
from hasten.hosts.script_ref import ScriptRef
from hasten.profiling.diagnose import diagnose
from hasten.profiling.step_profile import profile_steps

SCRIPTS = Path(__file__).with_name("scripts")


def test_diagnosis_counts_the_evaluations_that_come_within_its_blocks(tmp_path):
    text = (SCRIPTS / "tensors.py").read_text()  # an evaluation after 128 steps
    text = text.replace("    correct = 0\n", "    correct = 0\n    __import__('time').sleep(0.3)\n")
    (tmp_path / "train.py").write_text(text)
    ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path))
    found = diagnose(ref, budget=10.0, device="cpu")
    assert found["evaluation_seconds"] > 0.3 and found["phases"]["evaluation"] > 0.2


def test_seconds_of_a_step_are_those_of_the_steps_that_were_left():
    ref = ScriptRef.of_command([sys.executable, "gan.py", "2"], directory=str(SCRIPTS))  # 32 steps of 32 samples
    found = profile_steps(ref, Recipe(), device="cpu", seed=0, budget=4.0)
    assert found.step == pytest.approx(32 * found.sample)
