"""``eject``: writes the composed run as one PyTorch script that a person can read, run and own, without hasten.

``generate_script`` writes what ``plan.build`` does for this recipe as straight lines: hooks that no method overrides are left
out, options are literals. ``inline_imports`` then copies in the source of everything that those lines name: the task, the
methods and the parts of the engine that the run uses, the training loop among them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path

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
from hasten.engine.registry import make_methods
from hasten.export.inline_imports import InlinedScript, inline_imports
from hasten.export.module_source import is_library
from hasten.export.script_writer import generate_script, literal

DATA = "hasten.data"  # stays an import: it reads the data, for the run as for the script
IMPORTS_DATA = re.compile(r"^\s*(from|import) hasten\.data\b", re.MULTILINE)


def eject(task, recipe=None, *, device: str | None = None) -> str:
    """Returns the source of a script that trains ``task`` under ``recipe`` to the same bits as ``train``.

    The script does not import hasten, with one exception: a task whose data are a hasten.data pipeline keeps ``import hasten.data``,
    and the docstring of the script says so.

    Args:
        task: a workload's name, ``file.py:function``, or a function at the top level of a file.
        recipe: anything that ``Recipe.read`` takes.
        device: the default of the script's ``--device``; None selects a GPU where there is one.

    Raises:
        Refusal: the task has no source, ``train`` would refuse it, or the recipe sets workers for a hasten.data pipeline.
        Failure: the run cannot be built.
    """
    ref = tasks.TaskRef.of(task)
    function = _function_behind(ref)
    loaded = ref.load()
    metrics.higher_is_better(loaded)
    recipe, device_now = Recipe.coerce(recipe), pick_device(device)
    methods = applicable_methods(make_methods(recipe), RunContext(torch.device(device_now), loaded))
    copied = {function.__module__, *(type(method).__module__ for method in methods)}

    def inline(module: str) -> bool:
        return module in copied or (module.partition(".")[0] == "hasten" and not f"{module}.".startswith(f"{DATA}."))

    try:
        program = build(loaded, methods, device=device_now)
    except Exception as error:
        raise explain_error(error, "building the run", loaded.batch_size or 0) from error
    _refuse_others_workers(program.task, methods)
    script = inline_imports(
        generate_script(function, loaded, program, methods, device), inline, _smaller_parts(loaded, methods)
    )
    return _script(script, f"{ref} under {recipe}", function)


def _refuse_others_workers(task: Task, methods: list[Method]) -> None:
    """A hasten.data pipeline states its own workers, and a script cannot change them: refuses methods that would."""
    pipeline = not isinstance(task.train_data, DataLoader) and data_adapters.is_prebatched(task.train_data)
    if pipeline and (names := [method.name for method in methods if "workers" in method.card.applies_to]):
        instead = 'end the pipeline with .prefetch(processes=2) or .prefetch("auto") and leave the method out'
        raise ConfigurationError(f"{names[0]} cannot be written out for a pipeline of hasten.data; {instead}")


def _function_behind(ref: tasks.TaskRef):
    """The function that returns the task; it must be defined at the top level of a file."""
    if isinstance(ref.given, Task):
        raise ConfigurationError(
            f"the Task {ref.name} is an object without source; eject a workload's name or path/to/file.py:function"
        )
    function = ref.function()
    module = sys.modules.get(getattr(function, "__module__", None))
    if getattr(module, getattr(function, "__qualname__", ""), None) is not function or not getattr(
        module, "__file__", None
    ):
        raise ConfigurationError(
            f"{ref.name} does not stand at the top level of a file, so its source cannot be written out"
        )
    return function


def _smaller_parts(task: Task, methods: list[Method]) -> dict:
    """Shorter source for definitions of which the script needs only a part."""
    fields = [
        f"    {f.name}: Any{'' if f.default is dataclasses.MISSING else f' = {literal(f.default)}'}"
        for f in dataclasses.fields(Task)
    ]
    parts = {
        (Task.__module__, "Task"): "\n".join(
            ["@dataclass(frozen=True, kw_only=True)", "class Task:", '    """What is trained."""', "", *fields]
        ),
        (RunContext.__module__, "RunContext"): inspect.getsource(RunContext).replace("ParallelContext | None", "None"),
        (metrics.__name__, "METRICS"): f"METRICS = {{{_known_metric(task.metric)}}}",
    }
    classes = {cls for method in methods for cls in type(method).__mro__} - {Method, object}
    if not any("super()" in inspect.getsource(cls) for cls in classes):
        parts[Method.__module__, "Method"] = _METHOD
    return parts


def _known_metric(metric) -> str:
    """``"accuracy": Known(...)``, the one line of the table of metrics that this task needs."""
    if not isinstance(metric, str):
        return ""
    tree = ast.parse(text := inspect.getsource(metrics))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "METRICS")
    return next(
        f"{literal(metric)}: {ast.get_source_segment(text, value)}"
        for key, value in zip(table.keys, table.values, strict=True)
        if key.value == metric
    )


def _script(flat: InlinedScript, what: str, function) -> str:
    """Puts the parts into one file: the training first, then the source that it uses."""
    beside = Path(sys.modules[function.__module__].__file__).parent
    roots = sorted({line.split()[1].partition(".")[0] for line in flat.imports})
    own = [
        f"{root}.py"
        for root in roots
        if function.__module__.startswith(tasks.OWN_FILES) and (beside / f"{root}.py").exists()
    ]
    keep = f"\nIt imports {' and '.join(own)} of yours: keep it beside." if own else ""
    head = [
        f'"""Trains {what}.\n\nWritten by `hasten eject` {hasten.__version__}; {_needed(flat)}.{keep}\n"""',
        "from __future__ import annotations",
        "\n".join(flat.imports),
    ]
    parts = [f"# --- {_title(module)} ---\n\n\n{text}" for module, text in flat.modules]
    script = (
        "\n\n".join(head)
        + "\n\n\n"
        + "\n\n\n".join([flat.main, *parts, 'if __name__ == "__main__":\n    main()'])
        + "\n"
    )
    compile(script, "the ejected script", "exec")
    return script


def _needed(flat: InlinedScript) -> str:
    """States which packages the script needs."""
    if any(
        IMPORTS_DATA.search(text) for text in ("\n".join(flat.imports), flat.main, *(text for _, text in flat.modules))
    ):
        return f"besides PyTorch it needs {DATA}, which reads its data, and nothing else of hasten"
    return "PyTorch is needed, hasten is not"


def _title(module: str) -> str:
    room, _, name = module.removeprefix("hasten.").partition(".")
    return (
        f"method: {name}" if room == "methods" else f"from hasten.{room}: {name}" if is_library(module) else "the task"
    )


_METHOD = '''
class Method:
    """What all methods have: a name, under which they keep what they remember."""

    def __init_subclass__(cls):
        cls.name = cls.__name__
'''
