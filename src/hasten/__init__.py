"""hasten makes the training of neural networks faster, and proves it.

The public names are imported on first use, so that ``import hasten`` loads neither torch nor a device. Type checkers and
editors read the imports under ``TYPE_CHECKING``; ``tests/test_public_api.py`` holds the two lists together.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.benchmarking.compare import compare
    from hasten.core.card import Card, Exactness, WrapOrder
    from hasten.core.data import BatchSource
    from hasten.core.errors import ConfigurationError, HastenWarning, RunError
    from hasten.core.method import Method, option
    from hasten.core.recipe import Recipe
    from hasten.core.run_context import ParallelContext, RunContext, TrainPlan, TrainProgress
    from hasten.core.task import Task
    from hasten.core.types import (
        BackwardFn,
        Batch,
        BatchFn,
        ContextFactory,
        ForwardFn,
        LossFn,
        OptimizerFactory,
        StepFn,
    )
    from hasten.engine.train import train
    from hasten.export.eject import eject
    from hasten.profiling.diagnose import diagnose
    from hasten.reporting.report import report
    from hasten.tuning.tune import tune

__version__ = "0.1.0"

__all__ = [
    "BackwardFn",
    "Batch",
    "BatchFn",
    "BatchSource",
    "Card",
    "ConfigurationError",
    "ContextFactory",
    "Exactness",
    "ForwardFn",
    "HastenWarning",
    "LossFn",
    "Method",
    "OptimizerFactory",
    "ParallelContext",
    "Recipe",
    "RunContext",
    "RunError",
    "StepFn",
    "Task",
    "TrainPlan",
    "TrainProgress",
    "WrapOrder",
    "__version__",
    "compare",
    "diagnose",
    "eject",
    "option",
    "report",
    "train",
    "tune",
]

_MODULES = {  # public name: the module that defines it
    "BackwardFn": "hasten.core.types",
    "Batch": "hasten.core.types",
    "BatchFn": "hasten.core.types",
    "BatchSource": "hasten.core.data",
    "Card": "hasten.core.card",
    "ConfigurationError": "hasten.core.errors",
    "ContextFactory": "hasten.core.types",
    "Exactness": "hasten.core.card",
    "ForwardFn": "hasten.core.types",
    "HastenWarning": "hasten.core.errors",
    "LossFn": "hasten.core.types",
    "Method": "hasten.core.method",
    "OptimizerFactory": "hasten.core.types",
    "ParallelContext": "hasten.core.run_context",
    "Recipe": "hasten.core.recipe",
    "RunContext": "hasten.core.run_context",
    "RunError": "hasten.core.errors",
    "StepFn": "hasten.core.types",
    "Task": "hasten.core.task",
    "TrainPlan": "hasten.core.run_context",
    "TrainProgress": "hasten.core.run_context",
    "WrapOrder": "hasten.core.card",
    "compare": "hasten.benchmarking.compare",
    "diagnose": "hasten.profiling.diagnose",
    "eject": "hasten.export.eject",
    "option": "hasten.core.method",
    "report": "hasten.reporting.report",
    "train": "hasten.engine.train",
    "tune": "hasten.tuning.tune",
}


if not TYPE_CHECKING:  # or every misspelled name would have the type Any

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'hasten' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
