"""hasten makes the training of neural networks faster, and proves it.

The public names are imported on first use, so that ``import hasten`` loads neither torch nor a device. Type checkers
and editors read the imports under ``TYPE_CHECKING``; ``tests/test_public_api.py`` checks that both lists agree.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.benchmarking.compare import compare
    from hasten.core.card import Card, Exactness, WrapOrder
    from hasten.core.data import BatchSource, LoaderSpec, WorkerConfig
    from hasten.core.errors import (
        CollectiveTimeout,
        ConfigurationError,
        HastenWarning,
        NoEffectError,
        PeerFailure,
        ProgressWarning,
        RunError,
        RunInterrupted,
    )
    from hasten.core.method import Method, option
    from hasten.core.recipe import Recipe
    from hasten.core.run_context import (
        EngineServices,
        Evaluation,
        ParallelContext,
        RunContext,
        TrainPlan,
        TrainProgress,
    )
    from hasten.core.task import StepContext, Task
    from hasten.core.types import (
        BackwardFn,
        Batch,
        BatchFn,
        ContextFactory,
        EffectCheck,
        ForwardFn,
        LossFn,
        OptimizerFactory,
        StepFn,
    )
    from hasten.engine.train import train
    from hasten.export.eject import eject
    from hasten.hosts.inside.attach import attach
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
    "CollectiveTimeout",
    "ConfigurationError",
    "ContextFactory",
    "EffectCheck",
    "EngineServices",
    "Evaluation",
    "Exactness",
    "ForwardFn",
    "HastenWarning",
    "LoaderSpec",
    "LossFn",
    "Method",
    "NoEffectError",
    "OptimizerFactory",
    "ParallelContext",
    "PeerFailure",
    "ProgressWarning",
    "Recipe",
    "RunContext",
    "RunError",
    "RunInterrupted",
    "StepContext",
    "StepFn",
    "Task",
    "TrainPlan",
    "TrainProgress",
    "WorkerConfig",
    "WrapOrder",
    "__version__",
    "attach",
    "compare",
    "diagnose",
    "eject",
    "option",
    "report",
    "train",
    "tune",
]

_PUBLIC = {  # module: its public names
    "benchmarking.compare": "compare",
    "core.card": "Card Exactness WrapOrder",
    "core.data": "BatchSource LoaderSpec WorkerConfig",
    "core.errors": "CollectiveTimeout ConfigurationError HastenWarning NoEffectError PeerFailure"
    " ProgressWarning RunError RunInterrupted",
    "core.method": "Method option",
    "core.recipe": "Recipe",
    "core.run_context": "EngineServices Evaluation ParallelContext RunContext TrainPlan TrainProgress",
    "core.task": "StepContext Task",
    "core.types": "BackwardFn Batch BatchFn ContextFactory EffectCheck ForwardFn LossFn OptimizerFactory StepFn",
    "engine.train": "train",
    "export.eject": "eject",
    "hosts.inside.attach": "attach",
    "profiling.diagnose": "diagnose",
    "reporting.report": "report",
    "tuning.tune": "tune",
}
_MODULES = {name: f"hasten.{module}" for module, names in _PUBLIC.items() for name in names.split()}


if not TYPE_CHECKING:  # or every misspelled name would have the type Any

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'hasten' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
