"""The index of the records agrees with the record directories, and the stated speed-ups follow from the raw numbers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in ROOT.glob("records/*/result.json"))
WINNERS = [directory for directory in FOLDERS if json.loads((directory / "result.json").read_text()).get("speedup")]


def imported(path: Path):
    spec = importlib.util.spec_from_file_location(f"_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_index():
    return imported(ROOT / "benchmarks" / "make_index.py")


def test_index_equals_the_record_directories(make_index):
    assert make_index.read() == make_index.entries(), "run benchmarks/make_index.py"


def test_index_has_one_line_per_directory_and_its_fields(make_index):
    entries = make_index.read()
    assert [ROOT / entry["path"] for entry in entries] == FOLDERS
    for entry in entries:
        assert entry["status"] in ("current", "superseded", "missed") and entry["commit"] and entry["machine"]
        assert set(entry["methods"]) <= make_index.METHOD_FILES


def test_index_keeps_one_valid_record_per_subject(make_index):
    valid = [(e["claim"], e["workload"], e["machine"]) for e in make_index.read() if e["status"] != "superseded"]
    assert len(valid) == len(set(valid)) and len(valid) < len(FOLDERS)


def test_index_names_methods_by_their_present_names(make_index):
    """A trial is named after its methods or what it measures: the baseline, one process, or the search itself."""
    trials = [trial["what"] for entry in make_index.read() for trial in entry["trials"]]
    names = {name for what in trials for name in make_index._members(what)}
    assert names and names <= make_index.METHOD_FILES | {"baseline", "one process", "search"}


@pytest.mark.parametrize("directory", WINNERS, ids=lambda directory: directory.name)
def test_speedup_follows_from_the_raw_numbers(directory):
    stated = json.loads((directory / "result.json").read_text())["speedup"]
    assert imported(ROOT / "records" / "time_to_target.py").speedup(directory) == pytest.approx(stated, rel=1e-6)


def test_calculation_imports_numpy_only():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'scipy', 'hasten']))"
    run = (
        f"{blocked}; import runpy; sys.argv = ['x', {str(WINNERS[0])!r}]; "
        f"runpy.run_path('records/time_to_target.py', run_name='__main__')"
    )
    output = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output == "10.21x (6.05 to 17.24)\n"


def test_repository_contains_no_generated_page():
    assert not list(ROOT.glob("records/**/*.html"))
