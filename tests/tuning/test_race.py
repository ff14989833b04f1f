"""The race against a recorded learning curve: when a training is stopped, and what is kept of it."""

import time

import pytest
import torch
from torch import nn

from hasten import Task
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.tuning.race import from_text, is_behind, to_text
from hasten.tuning.trial import Trial

EPOCHS = 40
CURVE = [(10.0, 0.6), (20.0, 0.7), (30.0, 0.8), (40.0, 0.9)]


@pytest.mark.parametrize(
    ("seconds", "metrics", "behind"),
    [
        (12.0, [0.1], False),  # too early
        (20.0, [0.59], True),  # the best recipe had 0.6 after 10 s
        (20.0, [0.61], False),
        (40.0, [0.69, 0.65], True),
        (40.0, [0.71, 0.65], False),  # its best metric counts
        (20.0, [], False),
    ],
)
def test_training_is_behind_if_the_best_was_there_in_half_the_time(seconds, metrics, behind):
    assert is_behind(CURVE, seconds, metrics, limit=45.0, sign=1) is behind
    lower_is_better = [(at, -metric) for at, metric in CURVE]
    assert is_behind(lower_is_better, seconds, [-metric for metric in metrics], 45.0, sign=-1) is behind
    assert not is_behind([], seconds, metrics, 45.0, sign=1)


def test_curve_survives_as_an_option_of_a_method():
    assert from_text(to_text(CURVE)) == CURVE
    assert from_text("") == []


def slow_and_useless() -> Task:
    """A training whose accuracy stays at a half; each evaluation takes 20 ms."""

    def metric(output, target) -> float:
        time.sleep(0.02)
        return 0.5

    data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))
    return Task(
        model=lambda: nn.Linear(2, 2),
        train_data=data,
        validation_data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        metric=metric,
        higher_is_better=True,
        batch_size=8,
        epochs=EPOCHS,
    )


def test_trial_that_is_behind_ends_early_and_keeps_its_curve():
    trial = Trial(TaskRef.of(f"{__file__}:slow_and_useless").to_json(), Recipe().methods, "cpu", 0)
    limits = {"target": 0.9, "time_limit": 1.0}
    lost = trial.run(**limits, race=to_text([(0.01, 0.6), (0.1, 0.8)]))
    assert lost["pruned"]
    assert 1 <= len(lost["evaluations"]) < EPOCHS
    ahead = trial.run(target=0.9, time_limit=1000.0, race=to_text([(0.01, 0.1), (0.1, 0.2)]))
    assert not ahead["pruned"]
    assert len(ahead["evaluations"]) == EPOCHS
