"""The stand-ins for workers: each takes the calls that the engine's own takes."""

import inspect
import json
import sys
from types import SimpleNamespace

import pytest

from hasten.benchmarking.arm import Arm
from hasten.hosts import services
from hasten.hosts.inside import answers
from hasten.hosts.script_ref import ScriptRef
from hasten.hosts.services import SERVICES, ScriptDescription, _may_end_within
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
    monkeypatch.setattr(services, "watch_script", lambda *_: site_map)
    (tmp_path / "train.py").touch()
    keys = set()
    for choice in ({}, {"metric": "loss:min"}, {"vary": ["lr"]}):
        ref = ScriptRef.of_command([sys.executable, "train.py"], directory=str(tmp_path), **choice)
        keys.add(json.dumps(ScriptDescription(ref).facts(processes=1)["fingerprint"]))
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("watched", "limit", "steps", "total", "expected"),
    [
        (59.0, 70.0, 1, 1_000_000, True),  # its pace is not known yet
        (61.0, 70.0, 1, 1_000_000, False),  # it ends long after the limit
        (61.0, 110.0, 61, 100, True),  # it ends after 100 s, within the limit
        (99.0, 110.0, 99, 100, True),
        (109.0, 110.0, 222, 100, True),  # longer than its arguments say
        (500.0, 576.0, 1000, 1000, True),  # its last evaluation
        (500.0, 576.0, 1004, 1000, True),
        (301.0, 3_000.0, 6000, 100, False),  # 100 is the length of a part
        (61.0, 110.0, 61, None, True),
        (301.0, 3_000.0, 301, None, False),  # its length is unknown
    ],
)
def test_first_run_is_watched_to_its_end_where_that_fits_the_budget(watched, limit, steps, total, expected):
    assert _may_end_within(limit, watched, steps, total) is expected


@pytest.mark.parametrize(
    ("evaluations", "seconds", "every"),
    [
        ([(100, 1.0), (200, 1.0), (300, 6.0)], 1.0, 100),  # a test after the last validation
        ([(100, 1.0), (200, 1.0), (300, 1.0), (310, 1.0)], 1.0, 100),  # one at the end
        ([(0, 0.01)], None, None),  # a look at the shapes before the training
    ],
)
def test_usual_evaluation_counts(evaluations, seconds, every):
    models = SimpleNamespace(trains_in_eval_mode=False, evaluations=evaluations)
    found = answers._evaluations(SimpleNamespace(models=models))
    assert found == {"evaluation_seconds": seconds, "evaluation_every": every}
