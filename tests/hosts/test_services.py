"""The stand-ins for workers: each takes the calls that the engine's own takes."""

import inspect

import pytest

from hasten.benchmarking.arm import Arm
from hasten.hosts.services import SERVICES
from hasten.tuning.trial import Description, Trial


@pytest.mark.parametrize(
    ("original", "methods"),
    [
        (Arm, ["build", "train", "evaluate", "peak_memory"]),
        (Description, ["facts"]),
        (Trial, ["run", "check_exactness"]),
    ],
)
def test_service_of_a_script_accepts_the_calls_of_the_engine(original, methods):
    stand_in = SERVICES[original.__name__]
    for method in methods:
        expected = inspect.signature(getattr(original, method)).parameters.keys()
        accepted = inspect.signature(getattr(stand_in, method)).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        assert takes_any or expected <= accepted.keys(), f"{stand_in.__name__}.{method}"
