"""hasten makes the training of neural networks faster, and proves it.

The public names are imported on first use, so that ``import hasten`` loads neither torch nor a device. Type checkers and
editors read the imports under ``TYPE_CHECKING``; ``tests/test_public_api.py`` holds the two lists together.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.contract.card import Card, Exactness, Order
    from hasten.contract.data import Batches
    from hasten.contract.errors import Failure, Notice, Refusal
    from hasten.contract.method import Loop, Method, Run, setting
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
    "Batches",
    "Card",
    "Exactness",
    "Failure",
    "Loop",
    "Method",
    "Notice",
    "Order",
    "Recipe",
    "Refusal",
    "Run",
    "Task",
    "__version__",
    "compare",
    "diagnose",
    "eject",
    "report",
    "setting",
    "train",
    "tune",
]

_MODULES = {  # public name: the module that defines it
    "Batches": "hasten.contract.data",
    "Card": "hasten.contract.card",
    "Exactness": "hasten.contract.card",
    "Failure": "hasten.contract.errors",
    "Loop": "hasten.contract.method",
    "Method": "hasten.contract.method",
    "Notice": "hasten.contract.errors",
    "Order": "hasten.contract.card",
    "Recipe": "hasten.contract.recipe",
    "Refusal": "hasten.contract.errors",
    "Run": "hasten.contract.method",
    "Task": "hasten.contract.task",
    "compare": "hasten.measure.compare",
    "diagnose": "hasten.diagnosis.diagnose",
    "eject": "hasten.export.eject",
    "report": "hasten.reporting.report",
    "setting": "hasten.contract.method",
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
