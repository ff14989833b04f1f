"""hasten makes the training of neural networks faster, and proves it.

The public names are imported on first use, so that ``import hasten`` loads neither torch nor a device. Type checkers
and editors read the imports under ``TYPE_CHECKING``; ``tests/test_public_api.py`` checks that both lists agree.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # "as" makes a name public
    from hasten.benchmarking.compare import compare as compare
    from hasten.core.card import Card as Card
    from hasten.core.card import Exactness as Exactness
    from hasten.core.card import WrapOrder as WrapOrder
    from hasten.core.data import BatchSource as BatchSource
    from hasten.core.data import LoaderSpec as LoaderSpec
    from hasten.core.data import WorkerConfig as WorkerConfig
    from hasten.core.errors import CollectiveTimeout as CollectiveTimeout
    from hasten.core.errors import ConfigurationError as ConfigurationError
    from hasten.core.errors import HastenWarning as HastenWarning
    from hasten.core.errors import MemoryExhaustedError as MemoryExhaustedError
    from hasten.core.errors import NoEffectError as NoEffectError
    from hasten.core.errors import PeerFailure as PeerFailure
    from hasten.core.errors import ProgressWarning as ProgressWarning
    from hasten.core.errors import RunError as RunError
    from hasten.core.errors import RunInterrupted as RunInterrupted
    from hasten.core.method import Method as Method
    from hasten.core.method import option as option
    from hasten.core.recipe import Recipe as Recipe
    from hasten.core.run_context import EngineServices as EngineServices
    from hasten.core.run_context import Evaluation as Evaluation
    from hasten.core.run_context import ParallelContext as ParallelContext
    from hasten.core.run_context import RunContext as RunContext
    from hasten.core.run_context import TrainPlan as TrainPlan
    from hasten.core.run_context import TrainProgress as TrainProgress
    from hasten.core.task import StepContext as StepContext
    from hasten.core.task import Task as Task
    from hasten.core.types import BackwardFn as BackwardFn
    from hasten.core.types import Batch as Batch
    from hasten.core.types import BatchFn as BatchFn
    from hasten.core.types import ContextFactory as ContextFactory
    from hasten.core.types import EffectCheck as EffectCheck
    from hasten.core.types import ForwardFn as ForwardFn
    from hasten.core.types import LossFn as LossFn
    from hasten.core.types import OptimizerFactory as OptimizerFactory
    from hasten.core.types import StepFn as StepFn
    from hasten.deploy.export import export_model as export_model
    from hasten.deploy.quantize import quantize as quantize
    from hasten.engine.train import train as train
    from hasten.export.eject import eject as eject
    from hasten.hosts.inside.attach import attach as attach
    from hasten.hosts.script import script as script
    from hasten.profiling.diagnose import diagnose as diagnose
    from hasten.reporting.report import report as report
    from hasten.serving.server import serve as serve
    from hasten.tuning.tune import tune as tune

_PUBLIC = {  # module: its public names
    "benchmarking.compare": "compare",
    "core.card": "Card Exactness WrapOrder",
    "core.data": "BatchSource LoaderSpec WorkerConfig",
    "core.errors": "CollectiveTimeout ConfigurationError HastenWarning MemoryExhaustedError NoEffectError"
    " PeerFailure ProgressWarning RunError RunInterrupted",
    "core.method": "Method option",
    "core.recipe": "Recipe",
    "core.run_context": "EngineServices Evaluation ParallelContext RunContext TrainPlan TrainProgress",
    "core.task": "StepContext Task",
    "core.types": "BackwardFn Batch BatchFn ContextFactory EffectCheck ForwardFn LossFn OptimizerFactory StepFn",
    "deploy.export": "export_model",
    "deploy.quantize": "quantize",
    "engine.train": "train",
    "export.eject": "eject",
    "hosts.inside.attach": "attach",
    "hosts.script": "script",
    "profiling.diagnose": "diagnose",
    "reporting.report": "report",
    "serving.server": "serve",
    "tuning.tune": "tune",
}
_MODULES = {name: f"hasten.{module}" for module, names in _PUBLIC.items() for name in names.split()}

if not TYPE_CHECKING:  # or every misspelled name would have the type Any
    __all__ = sorted([*_MODULES, "__version__"])

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'hasten' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return __all__
