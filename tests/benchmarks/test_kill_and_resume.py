"""The kill-and-resume benchmark, which runs a test helper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kill_and_resume.py"


@pytest.mark.slow
def test_kill_and_resume_one_kill_is_bit_identical(tmp_path):
    argv = [sys.executable, str(SCRIPT), "--kills", "1", "--json", str(tmp_path / "kills.json")]
    done = subprocess.run(
        argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "kills.json").read_text())["kills"] == [
        {"seed": 0, "model.safetensors": True, "log.jsonl": True}
    ]
