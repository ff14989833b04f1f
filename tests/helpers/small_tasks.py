"""The small tasks on which each method has an effect, so that generated tests contain no skipped case."""

import warnings
from functools import cache

import torch
from torch import nn

from hasten.benchmarking.process_state import restored
from hasten.core.recipe import Recipe
from hasten.core.task import Task
from hasten.engine.plan import build
from hasten.engine.registry import make_methods, method_class, method_names
from hasten.testing import tasks
from hasten.testing.models import ResidualBlock

SETTINGS = {
    # avoids half a minute of C++ compilation; the real backend has a slow test of its own
    "compile": {"backend": "eager"},
    "gradient_clipping": {"max_norm": 0.25},
    "num_threads": {"count": 2},  # tests run with one thread
}
UNAVAILABLE = {
    "distributed",
    "evaluation_gradients",
    "graph_layers",
    "keras",
    "keras_rnn",
    "loss_nan_filter",
    "varied_arguments",
} | (set() if torch.cuda.is_available() else {"cuda"})  # conditions that hold for no run here


def residual(**changes) -> Task:
    """The convolutional task with a residual network."""

    def model() -> nn.Module:
        blocks = (ResidualBlock(8), ResidualBlock(8))
        return nn.Sequential(
            nn.Conv2d(1, 8, 1), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, tasks.CLASSES)
        )

    return tasks.convolutional(model=model, **changes)


def without_batch_norm(**changes) -> Task:
    return tasks.convolutional(batch_norm=False, **changes)


TASKS = (tasks.perceptron, tasks.convolutional, tasks.transformer, without_batch_norm, residual)


@cache
def tasks_with_effect(name: str) -> tuple:
    """The tasks of ``TASKS`` on which the method has an effect in one process on this machine."""
    if method_class(name).card.applies_to & UNAVAILABLE:
        return ()
    return tuple(task for task in TASKS if not _no_effect(name, task()))


def names_with_effect() -> list[str]:
    return [name for name in method_names() if tasks_with_effect(name)]


def _no_effect(name: str, task: Task) -> list:
    with restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return build(task, make_methods(Recipe({name: SETTINGS.get(name, {})}))).run.no_effect
