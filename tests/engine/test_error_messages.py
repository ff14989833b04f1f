"""The line of an error is one of the user's code."""

from pathlib import Path

import pytest

import hasten
from hasten.engine.error_messages import line_in_users_code


def line_of_error_below(file: str) -> str | None:
    """The file that is named for an error in ``file`` of the package, called from this file."""
    path = Path(hasten.__file__).parent / file
    try:
        exec(compile("raise KeyError", str(path), "exec"))
    except KeyError as error:
        line = line_in_users_code(error)
        return line and line[0]


@pytest.mark.parametrize(
    "file",
    [
        "benchmarking/arm.py",
        "profiling/probe.py",
        "tuning/trial.py",
        "launch/__init__.py",
        "hosts/__init__.py",
        "engine/loop.py",
        "_torch_compat.py",
    ],
)
def test_error_below_a_package_names_the_line_of_its_caller(file):
    assert line_of_error_below(file) == __file__


def test_workload_is_the_code_of_a_user():
    assert str(line_of_error_below("workloads/digits.py")).endswith("workloads/digits.py")
