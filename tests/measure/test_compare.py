"""Comparisons by real processes: a thing with itself, a planted speed-up of known size, wrong requests."""

import time

import pytest
import torch

import hasten
from hasten import Failure, Refusal, Task


class Sleepy(torch.utils.data.Dataset):
    """256 samples; every eighth waits ``pause`` seconds."""

    def __init__(self, pause: float):
        self.pause = pause

    def __len__(self):
        return 256

    def __getitem__(self, index):
        if index % 8 == 0:
            time.sleep(self.pause)
        return torch.full((4,), index / 256), index % 2


def sleepy(pause: float = 0.002) -> Task:
    return Task(
        model=lambda: torch.nn.Linear(4, 2),
        train_data=Sleepy(pause),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=8,
        epochs=2,
    )


@pytest.mark.slow
def test_a_thing_with_itself_is_not_called_different():
    told = hasten.compare(sleepy(), budget=6)
    assert told["verdict"] in ("no difference", "unsure")
    assert told["ratio"]["low"] < 1.02
    assert told["ratio"]["high"] > 0.98


@pytest.mark.slow
def test_a_planted_speed_up_is_found_with_its_size():
    """The cache takes the wait away; what is left is measured on a task that never waits."""
    slow, fast = sleepy(0.004), sleepy(0.0)
    gained = hasten.compare(slow, "baseline", "cache_dataset", budget=8)
    rest = hasten.compare(fast, "cache_dataset", "cache_dataset", budget=3)["seconds_per_1000_samples"]["a"]
    planted = (rest + 1000 * 0.004 / 8) / rest
    assert gained["verdict"] == "faster"
    assert gained["ratio"]["median"] == pytest.approx(planted, rel=0.35)
    assert gained["ratio"]["low"] > 2


def test_a_method_with_nothing_to_act_on_is_no_arm():
    with pytest.raises(Failure, match=r"channels_last .*nothing to act on"):
        hasten.compare(sleepy(), "baseline", "channels_last", budget=3)


@pytest.mark.parametrize("recipe", ["no_such_method", "threads:count=many", "missing.toml", "batched_fetch+cache_dataset"])
def test_wrong_requests_are_refused_before_anything_starts(recipe):
    with pytest.raises(Refusal):
        hasten.compare(sleepy(), "baseline", recipe, budget=3)
