"""Writes a run as straight lines: what ``plan.build`` does for one recipe, without what the recipe does not use.

The lines are those of ``script.py.j2``. They import hasten; ``inline_imports`` copies in the source of what they
import. The training loop and the evaluation come from ``engine/loop.py`` and ``engine/evaluation.py``; only the calls
are written here. Tests compare the weights of script and engine bit for bit.
"""

import builtins
import dataclasses
import inspect
import json
import keyword
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch.utils.data import DataLoader, IterableDataset

from hasten.core.method import HOOKS, Method, hooks_of
from hasten.core.task import Task
from hasten.engine import data_adapters, metrics
from hasten.engine.plan import Program
from hasten.utils.batch import is_graph
from hasten.utils.optimizers import OptimizerList, takes_steps

_TEMPLATE = "script.py.j2"
_MAIN_NAMES = re.findall(
    r"\w+",
    """batch_to_device began data device done evaluate evaluations exported main method num_evaluated optimizer options
    own_step program progress reason run samples schedule step_loss task train update validation""",
)


def generate_script(
    function: Callable[[], Task], task: Task, program: Program, methods: list[Method], device: str | None
) -> str:
    """The text of a program that calls ``function`` for its task, and trains it.

    ``program`` is the run as the engine builds it: it states which parts of a step and of the loop are in use. The
    methods are sorted by wrap order. ``device`` is the default of ``--device``; None selects a GPU if there is one.
    """
    taken = {*dir(builtins), *keyword.kwlist, *HOOKS, *_MAIN_NAMES}
    variables = {id(method): _variable(method, taken) for method in methods}

    def users_of(hook: str) -> list[Method]:
        """The methods that override the hook, innermost first."""
        ordered = sorted(methods, key=lambda method: hook not in method.card.replaces)
        return [method for method in ordered if hook in hooks_of(method)]

    loaded = program.task
    makes_data = loaded.train_data is not task.train_data or loaded.validation_data is not task.validation_data
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined)
    templates.trim_blocks = templates.lstrip_blocks = True
    text = templates.get_template(_TEMPLATE).render(
        function=function,
        task=loaded,
        plan=program.plan,
        plan_arguments=_plan_arguments(program),
        makes_data=makes_data,
        kind_of_data=_kind_of_data,
        reads_graphs=_reads_graphs(program),
        validation_batch_size=data_adapters.initial_plan(loaded).batch_size,
        methods=[_method(method, variables[id(method)]) for method in methods],
        users=lambda hook: [variables[id(method)] for method in users_of(hook)],
        data_hooks=[(variables[id(method)], _returns_source(method)) for method in users_of("data")],
        optimizer_takes_steps=takes_steps(task.optimizer),
        several_optimizers=isinstance(program.run.optimizer, OptimizerList),
        metric=metrics.name_of(task),
        lower_is_better=methods and not metrics.higher_is_better(task),
        device=repr(device) if device else '"cuda" if torch.cuda.is_available() else "cpu"',
    )
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def _plan_arguments(program: Program) -> str:
    """The arguments of the script's ``TrainPlan(...)`` before the methods change it, as source text."""
    task, plan = program.task, data_adapters.initial_plan(program.task)
    is_counted = isinstance(task.train_data, DataLoader)  # by its sampler, which may draw fewer than the dataset has
    data = "task.train_data.dataset" if data_adapters.is_prebatched(task.train_data) else "task.train_data"
    number = plan.samples if is_counted else f"len({data})"
    samples = f", samples={number}" if plan.samples is not None else ""
    interval = "evaluation" if program.plan.schedule_interval == "evaluation" else task.schedule_interval
    when = f", schedule_interval={interval!r}" if interval != "step" else ""
    length = f"epochs={plan.epochs!r}, evaluate_every={plan.evaluate_every!r}"
    return f"batch_size={plan.batch_size}, {length}{samples}{when}"


def _kind_of_data(data: Any) -> str:
    """How the script reads data: map-style data "by index"; "batches" has them; the engine's adapter reads "other"."""
    if data_adapters.is_prebatched(data) and not isinstance(data, DataLoader):
        return "batches"
    by_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    is_other = isinstance(data, (DataLoader, IterableDataset)) or data_adapters.epoch_setters(data)
    return "by index" if by_index and not is_other else "other"


def _reads_graphs(program: Program) -> bool:
    """Whether the script passes graphs of PyTorch Geometric to the model; only ready batches can be graphs."""
    has_ready_batches = data_adapters.is_prebatched(program.task.train_data) and program.train.seekable
    calls_loss = program.task.loss is not None and program.task.step is None
    if not (has_ready_batches and calls_loss and "torch_geometric" in sys.modules):
        return False
    return is_graph(data_adapters.first_batch(program.train, program.validation))


def _returns_source(method: Method) -> bool:
    """Whether the hook ``data`` returns a BatchSource, not a generator of batches."""
    return "BatchSource" in str(inspect.signature(type(method).data).return_annotation)


def _method(method: Method, variable: str) -> dict[str, str]:
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    options = ", ".join(f"{f.name}={literal(getattr(method, f.name))}" for f in fields if f.init)
    cls = type(method)
    return {"variable": variable, "module": cls.__module__, "cls": cls.__name__, "options": options}


def _variable(method: Method, taken: set[str]) -> str:
    """The variable of a method: its name, or for a method from a file its class name in snake case."""
    name = method.name
    if not name.isidentifier():
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(method).__name__).lower()
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def literal(value: object) -> str:
    """The Python literal of an option's value, strings in double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
