"""hasten makes the training of neural networks faster, and proves it.

The public names are imported on first use, so that ``import hasten`` loads neither torch nor a device. Type checkers and
editors read the imports under ``TYPE_CHECKING``; ``tests/test_public_api.py`` holds the two lists together.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.contract.card import Card, Exactness, WrapOrder
    from hasten.contract.data import BatchSource
    from hasten.contract.errors import RunError, HastenWarning, ConfigurationError
    from hasten.contract.method import Method, option
    from hasten.contract.run_context import ParallelContext, RunContext, TrainPlan, TrainProgress
    from hasten.contract.types import BackwardFn, Batch, BatchFn, ContextFactory, ForwardFn, LossFn, OptimizerFactory, StepFn
    from hasten.contract.recipe import Recipe
    from hasten.contract.task import Task
    from hasten.diagnosis.diagnose import diagnose
    from hasten.engine.train import train
    from hasten.export.eject import eject
    from hasten.measure.compare import compare
    from hasten.reporting.report import report
    from hasten.tuning.tune import tune

__version__ = "0.1.0"

__all__ = [
    "BackwardFn",
    "Batch",
    "BatchFn",
    "BatchSource",
    "Card",
    "ContextFactory",
    "Exactness",
    "RunError",
    "ForwardFn",
    "LossFn",
    "Method",
    "HastenWarning",
    "OptimizerFactory",
    "ParallelContext",
    "Recipe",
    "ConfigurationError",
    "RunContext",
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
    "BackwardFn": "hasten.contract.types",
    "Batch": "hasten.contract.types",
    "BatchFn": "hasten.contract.types",
    "Batches": "hasten.contract.data",
    "Card": "hasten.contract.card",
    "ContextFactory": "hasten.contract.types",
    "Exactness": "hasten.contract.card",
    "Failure": "hasten.contract.errors",
    "ForwardFn": "hasten.contract.types",
    "LossFn": "hasten.contract.types",
    "Method": "hasten.contract.method",
    "Notice": "hasten.contract.errors",
    "OptimizerFactory": "hasten.contract.types",
    "ParallelContext": "hasten.contract.run_context",
    "Recipe": "hasten.contract.recipe",
    "Refusal": "hasten.contract.errors",
    "RunContext": "hasten.contract.run_context",
    "StepFn": "hasten.contract.types",
    "Task": "hasten.contract.task",
    "TrainPlan": "hasten.contract.run_context",
    "TrainProgress": "hasten.contract.run_context",
    "WrapOrder": "hasten.contract.card",
    "compare": "hasten.measure.compare",
    "diagnose": "hasten.diagnosis.diagnose",
    "eject": "hasten.export.eject",
    "option": "hasten.contract.method",
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
