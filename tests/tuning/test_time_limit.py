"""A training that can no longer win is stopped, and what is kept of it."""

import time

import torch
from torch import nn

from hasten import Task
from hasten.core.recipe import Recipe
from hasten.engine.tasks import TaskRef
from hasten.tuning.trial import Trial

EPOCHS = 40


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


def test_trial_that_misses_the_target_within_its_limit_ends_early_and_keeps_its_curve():
    trial = Trial(TaskRef.of(f"{__file__}:slow_and_useless").to_json(), Recipe().methods, "cpu", 0)
    lost = trial.run(target=0.9, time_limit=0.2)
    assert lost["pruned"] and 1 <= len(lost["evaluations"]) < EPOCHS
    for target, limit in ((0.9, 1000.0), (0.4, 0.2)):  # there is time, or the target was reached
        done = trial.run(target=target, time_limit=limit)
        assert not done["pruned"] and len(done["evaluations"]) == EPOCHS
