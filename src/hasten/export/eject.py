"""``eject``: writes a run as one PyTorch script that works without hasten.

``generate_script`` writes what ``plan.build`` does for this recipe as straight lines: hooks that no method overrides
are left out, options are literals. ``inline_imports`` then copies in the source of everything that those lines name:
the task, the methods and the parts of the engine that the run uses, such as the training loop.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import hasten
from hasten.core.errors import ConfigurationError
from hasten.core.method import Method
from hasten.core.recipe import Recipe
from hasten.core.run_context import RunContext
from hasten.core.task import Task
from hasten.engine import data_adapters, metrics, tasks
from hasten.engine.composition import applicable_methods
from hasten.engine.devices import pick_device
from hasten.engine.error_messages import explain_error
from hasten.engine.plan import build
from hasten.engine.registry import FILE_MODULE_PREFIX, make_methods
from hasten.export.inline_imports import InlinedScript, inline_imports
from hasten.export.module_source import Symbol, defined_names, is_library
from hasten.export.script_writer import generate_script, literal
from hasten.utils.optimizers import OptimizerList

DATA = "hasten.data"  # stays an import, because it reads the data
IMPORTS_DATA = re.compile(r"^\s*(from|import) hasten\.data\b", re.MULTILINE)


def eject(
    task: tasks.TaskLike,
    recipe: Recipe | str | Path | Iterable[str] | None = None,
    *,
    device: str | None = None,
) -> str:
    """Returns the source of a script that trains ``task`` under ``recipe`` to the same bits as ``train``.

    The script does not import hasten, with one exception: for data that are a hasten.data pipeline it imports
    ``hasten.data`` and states so in its docstring.

    Args:
        task: A workload's name, ``file.py:function``, or a function at the top level of a file.
        recipe: Anything that ``Recipe.coerce`` accepts.
        device: The default of the script's ``--device``; None selects a GPU if there is one.

    Raises:
        ConfigurationError: The task has no source, ``train`` would reject it, or the recipe sets workers for a
            hasten.data pipeline.
        RunError: The run cannot be built.
    """
    ref = tasks.TaskRef.of(task)
    function = _task_function(ref)
    loaded = ref.load()
    metrics.higher_is_better(loaded)
    recipe, device_now = Recipe.coerce(recipe), pick_device(device)
    methods = applicable_methods(make_methods(recipe), RunContext(torch.device(device_now), loaded))
    copied = {function.__module__, *(type(method).__module__ for method in methods)}

    def inline(module: str) -> bool:
        return module in copied or (f"{module}.".startswith("hasten.") and not f"{module}.".startswith(f"{DATA}."))

    try:
        program = build(loaded, methods, device=device_now, trains=False)
    except Exception as error:
        raise explain_error(error, "building the run", loaded.batch_size or 0) from error
    _check_pipeline_workers(program.task, methods)
    try:
        text = generate_script(function, loaded, program, methods, device)
    except Exception as error:
        raise explain_error(error, "writing the script", loaded.batch_size or 0) from error
    sources = _shorter_sources(loaded, methods)
    if not isinstance(program.run.optimizer, OptimizerList):
        sources[OptimizerList.__module__, "optimizer_and_schedule"] = _OPTIMIZER_AND_SCHEDULE
    return _join(inline_imports(text, inline, sources), f"{ref} under {recipe}", function)


def _check_pipeline_workers(task: Task, methods: list[Method]) -> None:
    """Raises ``ConfigurationError`` for a method that sets workers of a hasten.data pipeline: a script cannot."""
    is_pipeline = not isinstance(task.train_data, DataLoader) and data_adapters.is_prebatched(task.train_data)
    if is_pipeline and (names := [method.name for method in methods if "workers" in method.card.applies_to]):
        advice = 'end the pipeline with .prefetch(processes=2) or .prefetch("auto") and leave the method out'
        raise ConfigurationError(f"{names[0]} cannot be written out for a pipeline of hasten.data; {advice}")


def _task_function(ref: tasks.TaskRef) -> Callable[[], Task]:
    """The function that returns the task; ConfigurationError unless it is at the top level of a file."""
    if isinstance(ref.obj, Task):
        advice = "eject a workload's name or path/to/file.py:function"
        raise ConfigurationError(f"the Task {ref.name} is an object without source; {advice}")
    function = ref.function()
    module = sys.modules.get(function.__module__)
    defined = getattr(module, getattr(function, "__qualname__", ""), None) is function
    if not defined or not getattr(module, "__file__", None):
        result = "so its source cannot be written out"
        raise ConfigurationError(f"{ref.name} is not defined at the top level of a file, {result}")
    return function


def _shorter_sources(task: Task, methods: list[Method]) -> dict[Symbol, str]:
    """(module, name) -> shorter source, for definitions of which the script needs only a part."""
    fields = "".join(
        f"    {f.name}: Any{'' if f.default is dataclasses.MISSING else f' = {literal(f.default)}'}\n"
        for f in dataclasses.fields(Task)
    )
    sources = {
        (Task.__module__, "Task"): _TASK + fields,
        (RunContext.__module__, "RunContext"): inspect.getsource(RunContext).replace("ParallelContext | None", "None"),
        (metrics.__name__, "METRICS"): f"METRICS = {{{_metrics_entry(task.metric)}}}",
    }
    classes = {cls for method in methods for cls in type(method).__mro__} - {Method, object}
    if not any("super()" in inspect.getsource(cls) for cls in classes):
        sources[Method.__module__, "Method"] = _METHOD
    return sources


def _metrics_entry(metric: Any) -> str:
    """``"accuracy": NamedMetric(...)``, the line of the table of metrics that this task needs."""
    if not isinstance(metric, str) or metric not in metrics.METRICS:  # else Task(evaluate=) computes it
        return ""
    text = inspect.getsource(metrics)
    assignments = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
    table: Any = next(node.value for node in assignments if defined_names(node) == ["METRICS"])
    values = {key.value: value for key, value in zip(table.keys, table.values, strict=True)}
    return f"{literal(metric)}: {ast.get_source_segment(text, values[metric])}"


def _join(script: InlinedScript, title: str, function: Callable[[], Task]) -> str:
    """Joins the parts into one file: the training first, then the source that it uses."""
    imports, copied, main = script
    directory = Path(sys.modules[function.__module__].__file__ or "").parent
    packages = sorted({line.split()[1].partition(".")[0] for line in imports})
    in_directory = [f"{name}.py" for name in packages if (directory / f"{name}.py").exists()]
    keep = ""
    if in_directory and function.__module__.startswith(FILE_MODULE_PREFIX):
        keep = f"\nIt imports {' and '.join(in_directory)}: keep it beside this file."
    needs = "PyTorch is needed, hasten is not"
    if any(IMPORTS_DATA.search(text) for text in (*imports, main, *(text for _, text in copied))):
        needs = f"besides PyTorch it needs {DATA}, which reads its data, and nothing else of hasten"
    head = [
        f'"""Trains {title}.\n\nWritten by `hasten eject` {hasten.__version__}; {needs}.{keep}\n"""',
        "from __future__ import annotations",
        "\n".join(imports),
    ]
    modules = [f"# --- {_module_title(module)} ---\n\n\n{text}" for module, text in copied]
    blocks = ["\n\n".join(head), main, *modules, 'if __name__ == "__main__":\n    main()']
    text = "\n\n\n".join(blocks) + "\n"
    compile(text, "the ejected script", "exec")
    return text


def _module_title(module: str) -> str:
    package, _, name = module.removeprefix("hasten.").partition(".")
    if not is_library(module):
        return "the task"
    return f"method: {name}" if package == "methods" else f"from hasten.{package}: {name}"


_TASK = '''
@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained."""

'''

_OPTIMIZER_AND_SCHEDULE = """
def optimizer_and_schedule(made):
    return made if isinstance(made, tuple) else (made, None)
"""

_METHOD = '''
class Method:
    """Base class of methods; their state is stored under their name."""

    def __init_subclass__(cls):
        cls.name = cls.__name__
'''
