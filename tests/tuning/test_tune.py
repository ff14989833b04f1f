"""The tuner on a small real task: a gain is proven, harm refused, a killed search continues, budgets hold."""

import json
import time

import pytest

import hasten
from hasten import ConfigurationError, RunError
from hasten.core.errors import HastenWarning
from hasten.tuning import study, tune
from helpers.process import start_process

TASK = """
import torch
from torch import nn
from hasten import Task

class Points(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 12, generator=generator)
        self.y = (self.x[:, :3].sum(1) + self.x[:, 3] * self.x[:, 4] > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return (self.x[index] - 0.1) / 1.1, int(self.y[index])

def points():
    return Task(
        model=lambda: nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2)),
        train_data=Points(800, 0), validation_data=Points(1000, 1), loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
        metric="accuracy", target=0.9, batch_size=16, epochs=8)
"""

HARM = """
import torch
from hasten import Method, Card, Exactness

class Slow(Method):
    card = Card(summary="lr / 30", exactness=Exactness.EQUIVALENT_MATH, accelerates={"backward"})

    def optimizer(self, make, run):
        def slowed(model):
            optimizer = make(model)
            for group in optimizer.param_groups:
                group["lr"] /= 30
            return optimizer
        return slowed

class Honest(Slow):
    card = Card(summary="claims so", exactness=Exactness.CHANGES_TRAINING, accelerates={"backward"})
"""
BUDGET = 600  # seconds, for a busy machine; mostly unused


@pytest.fixture
def task(tmp_path) -> str:
    (tmp_path / "points.py").write_text(TASK)
    return f"{tmp_path / 'points.py'}:points"


@pytest.fixture
def short(monkeypatch):
    """Full runs are unchanged; measurements that would use the budget are short."""
    diagnosed, paced = tune.diagnose, study.Study.compare_speed
    monkeypatch.setattr(tune, "diagnose", lambda task, **given: diagnosed(task, **(given | {"budget": 1.0})))
    monkeypatch.setattr(
        study.Study, "compare_speed", lambda *recipes, **given: paced(*recipes, **(given | {"seconds": 1.0}))
    )
    monkeypatch.setattr(study, "PROFILE_SECONDS", 0.5)


@pytest.mark.timing
@pytest.mark.slow
def test_tune_finds_and_confirms_a_gain(task, tmp_path):
    answer = hasten.tune(task, budget=90, methods=["in_memory_batches", "gradient_clipping"], out=tmp_path / "out")
    assert answer["verdict"] == "faster", answer["why"]
    assert set(answer["recipe"]) == {"in_memory_batches"}
    assert answer["speedup"]["low"] > 1.01
    assert answer["quality"]["passed"]
    assert answer["evidence"] == "exact" and answer["quality"]["tuned"] is None, "an exact method needs no training"
    assert hasten.Recipe.load(tmp_path / "out" / "recipe.toml").methods == answer["recipe"]
    assert json.loads((tmp_path / "out" / "result.json").read_text())["why"] == answer["why"]
    again = hasten.tune(task, budget=90, methods=["in_memory_batches", "gradient_clipping"], out=tmp_path / "out")
    assert again["remembered_trials"] > 5
    assert again["speedup"] == answer["speedup"], "a finished search is not measured again"


@pytest.mark.slow
def test_tune_refuses_silent_harm_of_any_claimed_class(task, tmp_path, short):
    (tmp_path / "harm.py").write_text(HARM)
    offered = [f"{tmp_path / 'harm.py'}:{name}" for name in ("Slow", "Honest")]
    result = hasten.tune(task, budget=BUDGET, methods=["tf32"], extra=offered, out=tmp_path / "out")
    assert not result["recipe"]
    assert [fate["method"] for fate in result["offered"]] == offered
    assert all(not fate["accepted"] and fate["why"] for fate in result["offered"]), result["offered"]


def test_tune_refuses_at_once_what_it_could_never_confirm(task, tmp_path):
    with pytest.raises(ConfigurationError, match=r"^local_sgd:warmup_steps=20 makes the first steps differ"):
        hasten.tune(task, processes=2, methods=["local_sgd:warmup_steps=20"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def search(task, out):
    return hasten.tune(task, budget=BUDGET, methods=["tf32"], out=out)


@pytest.mark.slow
def test_tune_killed_resumes_without_losing_a_finished_trial(task, tmp_path, short):
    trials, process, deadline = (
        tmp_path / "out" / "trials.jsonl",
        start_process(search, task, tmp_path / "out"),
        time.monotonic() + BUDGET,
    )
    while (
        (not trials.exists() or trials.read_text().count("\n") < 2)
        and process.is_alive()
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert process.is_alive(), "the search was over before it could be killed"
    process.kill()
    process.join()
    finished = trials.read_text().splitlines()
    result = search(task, tmp_path / "out")
    assert result["remembered_trials"] >= 2
    assert trials.read_text().splitlines()[: len(finished) - 1] == finished[:-1]


@pytest.mark.timing
@pytest.mark.slow
def test_tune_exceeds_its_budget_by_at_most_one_trial(task, tmp_path):
    result = hasten.tune(task, budget=20, out=tmp_path / "out")
    longest = max(
        json.loads(line)["outcome"]["trial_seconds"]
        for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()
    )
    assert result["search_seconds"] <= 20 + longest + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["no_such"]}, "no method"),
        ({"extra": ["./missing.py:Thing"]}, "no file"),
        ({"methods": ["batch_size:factor=1"]}, "factor"),
    ],
)
def test_tune_invalid_request_is_refused(task, tmp_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        hasten.tune(task, out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_tune_for_a_proof_without_validation_data_is_refused(tmp_path):
    (tmp_path / "points.py").write_text(TASK.replace("validation_data=Points(1000, 1), ", ""))
    with pytest.raises(ConfigurationError, match="evidence=proven needs a metric on held-out data"):
        hasten.tune(f"{tmp_path / 'points.py'}:points", out=tmp_path / "out", evidence="proven")


@pytest.mark.timing
@pytest.mark.slow
def test_tune_without_validation_data_answers_within_its_budget(tmp_path):
    (tmp_path / "points.py").write_text(TASK.replace("validation_data=Points(1000, 1), ", ""))
    began = time.monotonic()
    result = hasten.tune(f"{tmp_path / 'points.py'}:points", out=tmp_path / "out", budget=20)
    assert time.monotonic() - began < 35
    assert result["verdict"] in ("faster", "no improvement") and result["evidence"] in ("exact", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "+10m"}, "there is no search in .* to continue"),
        ({"evidence": "certain"}, "evidence must be one of exact, precision, proven, estimated"),
    ],
)
def test_tune_impossible_request_for_evidence_is_refused(task, tmp_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        hasten.tune(task, out=tmp_path / "out", **arguments)


def test_tune_with_data_that_take_longer_than_the_budget_ends_with_advice(tmp_path):
    (tmp_path / "slow.py").write_text("def slow():\n    import time\n    time.sleep(60)\n")
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="the budget of 1 s was not enough to prepare the data"):
        hasten.tune(f"{tmp_path / 'slow.py'}:slow", out=tmp_path / "out", budget=1)
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_tune_unreachable_target_is_stated_and_task_warnings_shown_once(tmp_path, short):
    """Also in a resumed search that finds every trial in its store."""
    warn = 'warnings.warn("a column is rounded", hasten.core.errors.HastenWarning, stacklevel=1)'
    noticing = f"def points():\n    import warnings\n    {warn}"
    source = TASK.replace("target=0.9", "target=0.9999").replace("def points():", noticing)
    (tmp_path / "points.py").write_text("import hasten.core.errors\n" + source)
    measured = []
    for _ in ("measured", "remembered"):
        with pytest.warns(HastenWarning) as error, pytest.raises(RunError, match=r"never held its target 0\.9999"):
            hasten.tune(f"{tmp_path / 'points.py'}:points", budget=BUDGET, methods=["ema"], out=tmp_path / "out")
        assert [str(each.message) for each in error if each.category is HastenWarning] == ["a column is rounded"]
        measured.append((tmp_path / "out" / "trials.jsonl").read_text())
    assert measured[0] == measured[1]


def test_second_task_of_a_notebook_has_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = tune.search_directory(lambda: None)
    first.mkdir(parents=True)
    (first / "result.json").write_text("{}")
    assert tune.search_directory(lambda: None) == first.with_name(f"{first.name}-2")
    assert tune.search_directory(lambda: None, continues=True) == first


SETTINGS = {"task": ["a"], "margin": None, "machine": {"cpu": "x", "threads": 2}, "code": "1"}


def answered(directory, evidence="exact"):
    """A directory with a search that has found a recipe."""
    found = {"recipe": {"malloc_tuning": {}}, "evidence": evidence}
    row = found | {"speedup": {"median": 2.0, "low": 1.9, "high": 2.1}, "why": "", "quality": None}
    (directory / "result.json").write_text(json.dumps(found | {"frontier": [row], "budget_seconds": 60.0}))
    (directory / "search.json").write_text(json.dumps(SETTINGS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": {"cpu": "x", "threads": 1}}, r"these changed: threads \(2 before, 1 now\); give"),
        ({"margin": 0.1}, r"these changed: margin \(None before, 0.1 now\); give"),
        ({"task": ["b"]}, r"these changed: the task or script, or what it was asked for; give"),
    ],
)
def test_search_of_another_task_or_machine_is_not_continued(tmp_path, changes, message):
    answered(tmp_path)
    assert tune._earlier_result(tmp_path, SETTINGS)["recipe"]
    with pytest.raises(ConfigurationError, match=message):
        tune._earlier_result(tmp_path, SETTINGS | changes)


@pytest.mark.parametrize(
    ("evidence", "level", "stays"),
    [("exact", None, True), ("estimated", None, False), ("estimated", "estimated", True)],
)
def test_search_that_is_started_again_and_stopped_keeps_the_answer(task, tmp_path, monkeypatch, evidence, level, stays):
    def stop(*_):
        raise KeyboardInterrupt

    answered(tmp_path, evidence)
    monkeypatch.setattr(tune, "_settings", lambda *_: SETTINGS)
    monkeypatch.setattr(tune, "_diagnose", stop)
    with pytest.raises(tune.SearchInterrupted) as stopped:
        hasten.tune(task, out=tmp_path, budget=30, device="cpu", evidence=level)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["recipe"] == stopped.value.result["recipe"] == ({"malloc_tuning": {}} if stays else {})
    assert result["is_partial"] and ("malloc_tuning" in (tmp_path / "recipe.toml").read_text()) is stays


def test_answer_with_a_method_whose_file_has_changed_does_not_stay(task, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    (tmp_path / "mine.py").write_text(HARM)
    name, result = f"{tmp_path / 'mine.py'}:Slow", tmp_path / "result.json"
    answered(tmp_path)
    result.write_text(result.read_text().replace('{"malloc_tuning": {}}', json.dumps({name: {}})))
    (tmp_path / "search.json").write_text(json.dumps(SETTINGS | {"methods": {name: "0" * 16}}))
    monkeypatch.setattr(tune, "_settings", lambda *_: SETTINGS)
    monkeypatch.setattr(tune, "_diagnose", stop)
    with pytest.raises(tune.SearchInterrupted):
        hasten.tune(task, out=tmp_path, budget=30, device="cpu", extra=[name])
    assert json.loads(result.read_text())["recipe"] == {}


def test_answer_stays_when_another_method_is_offered(task, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    answered(tmp_path)
    (tmp_path / "mine.py").write_text(HARM)
    monkeypatch.setattr(tune, "_settings", lambda *_: SETTINGS)
    monkeypatch.setattr(tune, "_diagnose", stop)
    with pytest.raises(tune.SearchInterrupted) as stopped:
        hasten.tune(task, out=tmp_path, budget=30, device="cpu", extra=[f"{tmp_path / 'mine.py'}:Slow"])
    assert stopped.value.result["recipe"] == {"malloc_tuning": {}}


def test_estimate_that_was_not_the_answer_is_none_of_a_search_that_is_started_again(task, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    answered(tmp_path, "estimated")
    result = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(result | {"recipe": {}}))
    monkeypatch.setattr(tune, "_settings", lambda *_: SETTINGS)
    monkeypatch.setattr(tune, "_diagnose", stop)
    with pytest.raises(tune.SearchInterrupted) as stopped:
        hasten.tune(task, out=tmp_path, budget=30, device="cpu", evidence="estimated")
    assert stopped.value.result["recipe"] == {}
