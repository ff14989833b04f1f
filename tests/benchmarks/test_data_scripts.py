"""The data benchmarks: all are listed in the Makefile and the README, and the quick ones run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("data_*.py"))


def test_makefile_runs_and_readme_lists_all_scripts():
    (listed,) = re.findall(r"^BENCHMARKS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert [name for name in SCRIPTS if name not in listed.split() or f"`{name}.py" not in readme] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_states_figure_has_quick_and_ends_with_finish(name):
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    assert "\nFigure: " in text.partition('"""\n\n')[0]
    assert '"--quick"' in text and "return finish(" in text


def run_quickly(name: str, directory: Path) -> dict:
    """Returns the raw numbers of ``--quick``. Tests do not check whether a busy machine reaches the figure."""
    file = directory / f"{name}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", "--json", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode in (0, 1) and "Figure: " in done.stdout, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.slow
def test_data_place_quick_runs(tmp_path):
    result = run_quickly("data_place", tmp_path)
    assert (
        len(result["micro"]["hasten, position tracked"]) == 5
        and result["extra"]["hasten, position tracked"]["median"] < 100
    )


@pytest.mark.timing
@pytest.mark.slow
def test_data_wait_quick_runs(tmp_path, monkeypatch):
    """The textbook loader waits for most of a step of digits, batched loading for little; fractions lie in 0..1."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import data_wait

    # the third arm has 12 s to converge
    monkeypatch.setattr(data_wait, "METHODS", ("in_memory_batches", "loader_workers"))
    monkeypatch.setattr(
        sys, "argv", ["benchmarks/data_wait.py", "--quick", "--json", str(file := tmp_path / "data_wait.json")]
    )
    assert data_wait.main() in (0, 1)
    result = json.loads(file.read_text())
    arms = result["found"]["digits"]
    assert arms.keys() == {"textbook", "in_memory_batches", "loader_workers"} and not result["failed"]
    assert arms["in_memory_batches"]["wait"]["median"] < 0.5 * arms["textbook"]["wait"]["median"]
    for arm in arms.values():
        shares = arm["wait"]["low"], arm["wait"]["high"], arm["bound"], arm["wait_of_a_run"], arm["bound_of_a_run"]
        assert all(0 < share < 1 for share in shares), arm
        assert arm["bound"] < arm["bound_of_a_run"]
    for name in ("data_wait", "_common"):
        sys.modules.pop(name, None)
