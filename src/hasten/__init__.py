"""hasten makes the training of neural networks faster, and proves it.

The names below are loaded when they are first used, so that ``import hasten`` costs nothing: neither
torch nor a device is touched.
"""

from importlib import import_module

__version__ = "0.1.0"

_WHERE = {
    "Task": "hasten.contract.task",
    "Method": "hasten.contract.method",
    "Card": "hasten.contract.card",
    "Exactness": "hasten.contract.card",
    "WrapOrder": "hasten.contract.card",
    "option": "hasten.contract.method",
    "RunContext": "hasten.contract.run_context",
    "TrainPlan": "hasten.contract.run_context",
    "Recipe": "hasten.contract.recipe",
    "Refusal": "hasten.contract.errors",
    "Failure": "hasten.contract.errors",
    "train": "hasten.engine.train",
    "compare": "hasten.measure.compare",
    "diagnose": "hasten.diagnosis.diagnose",
    "tune": "hasten.tuning.tune",
    "report": "hasten.reporting.report",
    "eject": "hasten.engine.eject",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'hasten' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__():
    return sorted(__all__)
