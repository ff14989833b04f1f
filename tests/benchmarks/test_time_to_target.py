"""The table of the newest records, of which older ones lack keys that newer ones have."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "time_to_target.py"


def test_table_has_a_full_row_for_every_workload():
    done = subprocess.run([sys.executable, SCRIPT, "--table"], capture_output=True, text=True, check=True)
    header, _, *rows = done.stdout.splitlines()
    assert {row.split("|")[1].strip() for row in rows} >= {"digits", "adult", "fashion_mnist", "tiny_shakespeare"}
    assert all(row.count("|") == header.count("|") for row in rows)
