"""The targets in the README of ``workloads/`` are those of the tasks."""

import re
from pathlib import Path

import pytest

import hasten.workloads
from hasten.engine.tasks import workload_names

README = Path(hasten.workloads.__file__).parent / "README.md"


@pytest.mark.parametrize("name", workload_names())
def test_readme_target_is_that_of_the_task(name):
    row = re.search(rf"^\| `{name}` \|.*\| ([0-9.]+) \|$", README.read_text(), re.MULTILINE)
    source = (README.parent / f"{name}.py").read_text()
    assert float(row[1]) == float(re.search(r"target=([0-9.]+)", source)[1])
