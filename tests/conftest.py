"""Set-up of all tests: the directory of real data, one thread per process, no GPU, and markers for the cost of a test.

No test sees a GPU, nor does a process that it starts, so that tests mean the same on every machine. The tests with the
marker ``gpu`` are the exception: ``make test-gpu`` sets HASTEN_GPU_TESTS=1, and then these are the only ones that run.
"""

import gc
import os
import zlib
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by processes that tests start; set before torch reads it
if os.environ.get("HASTEN_GPU_TESTS") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited as well

import pytest
import torch

from hasten.core.errors import HastenWarning

GPU_TESTS = os.environ.get("HASTEN_GPU_TESTS") == "1"
TESTS = Path(__file__).resolve().parent
BESIDE = TESTS.parents[1] / "shared" / "data"
HELPERS_THAT_START = {
    "netns_cluster": "launcher",
    "chaos": "launcher",
    "ranks": "multiprocess",
    "process": "multiprocess",
}

if "HASTEN_DATA" not in os.environ and BESIDE.is_dir():
    os.environ["HASTEN_DATA"] = str(BESIDE)
# Commands run by tests load task files that import helpers.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])

torch.set_num_threads(1)
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = (
    0.5  # a loader that is collected in a reference cycle cannot end its workers, and waits 5 s for each
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part K/N`` runs the tests of one of N parts, about equally many each: all parts are the whole suite."""
    parser.addoption("--part", default="1/1", metavar="K/N", help="run one of N parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Ignores hasten's own warnings: they are output for users, not faults of a test."""
    config.addinivalue_line("filterwarnings", f"default::{HastenWarning.__module__}.{HastenWarning.__qualname__}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each test one of the markers unit, multiprocess and launcher, unless it has one. Selects GPU tests.

    Selects those of ``--part``, too.
    """
    if GPU_TESTS:
        others = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("gpu")]
    part, parts = map(int, config.getoption("--part").split("/"))
    if parts > 1:
        others = {item for item in items if zlib.crc32(item.nodeid.encode()) % parts != part % parts}
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("unit", "multiprocess", "launcher")):
            item.add_marker(_kind(item))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            reason = "there is no NVIDIA GPU" if GPU_TESTS else "needs an NVIDIA GPU, and `make test-gpu`"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Exempts modules and collected tests from garbage collection, which visiting them makes ten times slower."""
    gc.collect()
    gc.freeze()


def _kind(item: pytest.Item) -> str:
    """Returns the marker, by directory, fixtures and the helpers that the test's module imports."""
    if item.path.parent.name == "launch" and "directory" in item.fixturenames:  # tests there run commands
        return "launcher"
    modules = {getattr(value, "__module__", "") for value in vars(item.module).values()}
    kinds = {kind for name, kind in HELPERS_THAT_START.items() if f"helpers.{name}" in modules}
    if "launcher" in kinds:
        return "launcher"
    return "multiprocess" if kinds or item.path.parent.name in ("launch", "benchmarking") else "unit"
