"""The stand-ins for workers: each takes the calls that the engine's own takes."""

import inspect
import json
import sys

import pytest

from hasten.benchmarking.arm import Arm
from hasten.hosts import services
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import SERVICES, ScriptDescription
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


def test_stored_trials_of_another_metric_or_other_varied_arguments_are_not_reused(tmp_path, monkeypatch):
    site_map = {"total_steps": 9, "metric": {"name": "loss", "direction": "min"}, "arguments": {"lr": 0.1}}
    monkeypatch.setattr(services, "watch_script", lambda script, deadline: site_map)
    (tmp_path / "train.py").touch()
    keys = set()
    for choice in ({}, {"metric": "loss:min"}, {"vary": ["lr"]}):
        ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path), **choice)
        keys.add(json.dumps(ScriptDescription(ref).facts(processes=1)["fingerprint"]))
    assert len(keys) == 3
