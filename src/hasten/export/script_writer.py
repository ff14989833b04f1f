"""Writes a run as straight lines: what ``plan.build`` does for one recipe, without what the recipe does not use.

The lines import hasten; ``inline_imports`` copies in the source of what they import. The training loop and the
evaluation come from ``engine/loop.py`` and ``engine/evaluation.py``; only the calls are written here. Tests compare the
weights of script and engine bit for bit.
"""

import builtins
import dataclasses
import inspect
import json
import keyword
import re
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hasten.core.method import HOOKS, Method, hooks_of
from hasten.core.task import Task
from hasten.engine import data_adapters, metrics
from hasten.engine.plan import Program
from hasten.utils.optimizers import OptimizerList, takes_steps

_IMPORTS = """\
import argparse
from contextlib import nullcontext
from time import perf_counter
from types import SimpleNamespace

import torch

from hasten.utils.batch import call_model, map_tensors, split_inputs_target
from hasten.core.data import BatchSource, LoaderSpec
from hasten.utils.rng import derive_seed, preserve_rng_state, set_seeds
from hasten.core.run_context import Evaluation, RunContext, TrainPlan
from hasten.engine import data_adapters
from hasten.engine.data_adapters import apply_data_hook, from_spec, in_sequence, load_data, shuffled, training
from hasten.engine.forward import accumulate_gradients, own_loss
from hasten.engine.evaluation import _measure
from hasten.engine.loop import is_finished, train_epoch
from hasten.engine.optimizer import with_clipping
from hasten.utils.optimizers import optimizer_and_schedule
from hasten.engine.own_step import OwnStep"""

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
    return _ScriptWriter(function, task, program, methods).script(device)


class _ScriptWriter:
    def __init__(self, function: Callable[[], Task], task: Task, program: Program, methods: list[Method]) -> None:
        self.function, self.task, self.program, self.methods = function, task, program, methods
        taken = {*dir(builtins), *keyword.kwlist, *HOOKS, *_MAIN_NAMES}
        self.variables = {id(method): _variable(method, taken) for method in methods}
        self.exported = "exported()" if self._wrapped("export") else "model"

    def script(self, device: str | None) -> str:
        process_context = self._wrapped("process_context", "nullcontext")
        body = [*self._plan(), *self._data(), *self._model(), *self._step(), *self._program(), *self._training()]
        if process_context:
            body = ["with process_context():", *_indented(body)]
        types = [type(method) for method in self.methods]
        classes = [f"from {cls.__module__} import {cls.__name__} as METHOD_{i}" for i, cls in enumerate(types)]
        default = repr(device) if device else '"cuda" if torch.cuda.is_available() else "cpu"'
        task_import = f"from {self.function.__module__} import {self.function.__name__} as THE_TASK"
        main = ["def main():", *_indented([*self._opening(), *process_context, *body])]
        text = "\n".join([_IMPORTS, task_import, *classes, "", *main, *_options(default)])
        return re.sub(r"\n{3,}", "\n\n", text)

    def _users(self, hook: str) -> list[tuple[str, Method]]:
        """(variable, method) of each method that overrides the hook, innermost first."""
        methods = sorted(self.methods, key=lambda method: hook not in method.card.replaces)
        return [(self.variables[id(method)], method) for method in methods if hook in hooks_of(method)]

    def _wrapped(self, hook: str, first: str = "") -> list[str]:
        """A line ``HOOK = method.HOOK(HOOK, run)`` per method that overrides ``hook``; the innermost gets ``first``."""
        things = [first or hook] + [hook] * len(self.methods)
        users = zip(self._users(hook), things, strict=False)
        return [f"{hook} = {variable}.{hook}({thing}, run)" for (variable, _), thing in users]

    def _opening(self) -> list[str]:
        return [
            "options = read_options()",
            "set_seeds(0)  # what the task's function draws is the same for every seed",
            "task, device = THE_TASK(), torch.device(options.device)",
            'if device.type == "cuda" and device.index:',
            "    torch.cuda.set_device(device)",
            "run = RunContext(device, task, seed=options.seed)",
            *[f"{self.variables[id(m)]} = {_constructor(m, f'METHOD_{i}')}" for i, m in enumerate(self.methods)],
            *[f"{variable}.setup(run)" for variable, _ in self._users("setup")],
        ]

    def _plan(self) -> list[str]:
        task = self.program.task
        plan = data_adapters.initial_plan(task)
        data = "task.train_data.dataset" if data_adapters.is_prebatched(task.train_data) else "task.train_data"
        samples = f", samples=len({data})" if plan.samples is not None else ""
        by_metric = self.program.plan.schedule_interval == "evaluation"
        interval = "evaluation" if by_metric else task.schedule_interval
        when = f", schedule_interval={interval!r}" if interval != "step" else ""
        factories = task.train_data is not self.task.train_data or task.validation_data is not self.task.validation_data
        return [
            "set_seeds(options.seed)",
            "task = load_data(task)" if factories else "",
            "",
            "# how many samples a step sees, and how many steps there are",
            f"plan = TrainPlan(batch_size={plan.batch_size}, epochs={plan.epochs!r}, "
            f"evaluate_every={plan.evaluate_every!r}{samples}{when})",
            *self._wrapped("plan"),
            "run.plan = plan",
            "",
        ]

    def _data(self) -> list[str]:
        """The lines that define ``train`` and ``validation`` for the kind of data that the task has."""
        task = self.program.task
        lines = ["# where batches come from", *_batch_source("train", task.train_data, task)]
        sources = ["train"]
        if task.validation_data is not None:
            sources.append("validation")
            lines += _batch_source("validation", task.validation_data, task)
        if users := self._users("data"):
            lines.append("with preserve_rng_state():  # a method may read samples to inspect them")
        for variable, method in users:
            for source in sources:
                returns_source = "BatchSource" in str(inspect.signature(type(method).data).return_annotation)
                adapted = f"apply_data_hook({variable}, {source}, run)"
                lines.append(f"    {source} = {f'{variable}.data({source}, run)' if returns_source else adapted}")
        return [
            *lines,
            "if plan.steps is None and train.length is not None:",
            "    plan.steps = max(1, round(plan.epochs * train.length))",
            "",
        ]

    def _model(self) -> list[str]:
        make_optimizer = "task.optimizer"
        if takes_steps(self.task.optimizer):
            make_optimizer = "lambda model: task.optimizer(model, plan.steps)"
        return [
            "# the model, then its optimizer",
            "model = task.model()",
            *self._wrapped("model"),
            "model = model.to(device)",
            *[f"model = {variable}.parallelize(model, run)" for variable, _ in self._users("parallelize")],
            "run.model = run.unwrapped_model = model",
            f"optimizer = {make_optimizer}",
            *self._wrapped("optimizer"),
            "run.optimizer, schedule = optimizer_and_schedule(optimizer(model))",
            "",
        ]

    def _step(self) -> list[str]:
        accumulates = self.program.plan.microbatches > 1
        accumulate = "forward_backward = accumulate_gradients(forward_backward, plan.microbatches, run.progress)"
        batch_transform, export = self._wrapped("batch_transform"), self._wrapped("export", "model")
        return [
            "# the functions of a step",
            "def batch_to_device(batch):",
            "    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)",
            "",
            "batch_transform = batch_to_device" if batch_transform else "",
            *batch_transform,
            *self._forward(),
            "",
            *self._wrapped("forward"),
            "",
            "def backward(loss):",
            "    (loss * run.progress.microbatch_fraction).backward()" if accumulates else "    loss.backward()",
            "",
            *self._wrapped("backward"),
            "",
            "def forward_backward(batch):",
            "    loss = forward(batch)",
            "    backward(loss)",
            "    return loss",
            "",
            *self._wrapped("forward_backward"),
            accumulate if accumulates else "",
            *self._wrapped("grad_transform", "lambda: None"),
            *self._clipping(),
            "optimizer_step, zero_grad = run.optimizer.step, run.optimizer.zero_grad",
            *self._wrapped("optimizer_step"),
            *self._wrapped("zero_grad"),
            *self._several_updates(),
            "",
            *(["def exported():", *_indented(export), "    return export", ""] if export else []),
        ]

    @property
    def _transforms_gradients(self) -> bool:
        return bool(self._users("grad_transform")) or self.task.clip_grad_norm is not None

    def _forward(self) -> list[str]:
        """The lines that define ``forward``: the task's own step, else model and loss."""
        if self.task.step is not None:
            several = isinstance(self.program.run.optimizer, OptimizerList)
            return ["own_step = OwnStep(run)", f"forward = own_step.{'next_loss' if several else 'forward'}"]
        own = self.task.loss is None
        forward = [
            "    args, kwargs, target = split_inputs_target(batch)",
            "    return loss(model(*args, **kwargs), target)",
        ]
        if own:
            forward = ["    return loss(*call_model(model, batch, own=True))"]
        loss = f"loss = {'own_loss' if own else 'task.loss'}"
        return [loss, *self._wrapped("loss"), "", "def forward(batch):", *forward]

    def _clipping(self) -> list[str]:
        if self.task.clip_grad_norm is None:
            return []
        inner = "grad_transform" if self._users("grad_transform") else "lambda: None"
        return [f"grad_transform = with_clipping({inner}, task.clip_grad_norm, run)"]

    def _several_updates(self) -> list[str]:
        if not isinstance(self.program.run.optimizer, OptimizerList):
            return []
        transform = "grad_transform" if self._transforms_gradients else "lambda: None"
        return [
            f"forward_backward = own_step.update_each(forward_backward, {transform}, optimizer_step, zero_grad)",
            "grad_transform = optimizer_step = zero_grad = lambda: None",
        ]

    def _program(self) -> list[str]:
        """The lines that build the ``program`` object, whose functions the copied training loop calls."""
        validation = "" if self.program.task.validation_data is None else "task=task, validation=validation, "
        to_device = "batch_transform" if self._users("batch_transform") else "batch_to_device"
        grad_transform = "grad_transform" if self._transforms_gradients else "lambda: None"
        return [
            "# the training",
            f"program = SimpleNamespace(run=run, plan=plan, train=train, {validation}schedule=schedule)",
            f"program.to_device, program.forward_backward = {to_device}, forward_backward",
            f"program.grad_transform = {grad_transform}",
            "program.optimizer_step, program.zero_grad = optimizer_step, zero_grad",
            "progress, began = run.progress, perf_counter()",
        ]

    def _training(self) -> list[str]:
        """The lines that drive the copied training loop, with evaluations and early stopping where the run has them."""
        plan, metric = self.program.plan, metrics.name_of(self.task)
        evaluates = self.program.task.validation_data is not None
        by_samples = evaluates and plan.evaluate_every is not None
        stops = evaluates and plan.stop is not None
        define_evaluate = [
            "evaluations = []",
            "",
            "def evaluate():",
            f"    result = _measure(program, {self.exported})",
            "    evaluations.append(Evaluation(progress.step, progress.samples, result.metric))",
            *(["    schedule.step(result.metric)"] if plan.schedule_interval == "evaluation" else []),
            f'    print(f"{{perf_counter() - began:.1f}} s, step {{progress.step}}: {metric} {{result.metric:.4g}}")',
            "",
        ]
        in_epoch = [
            "        if progress.samples // plan.evaluate_every > num_evaluated:",
            "            num_evaluated = progress.samples // plan.evaluate_every",
            "            evaluate()",
        ]
        if stops:
            in_epoch += [
                "            if plan.stop(evaluations):",
                "                done = True",
                "                break",
            ]
        after_epoch = ["    evaluate()", *(["    done = plan.stop(evaluations)"] if stops else [])]
        report_no_effect = ["for method, reason in run.no_effect:", '    print(f"{method} had no effect: {reason}")']
        return [
            *(define_evaluate if evaluates else []),
            "num_evaluated = 0" if by_samples else "",
            "done = False" if stops else "",
            f"while not is_finished(program){' and not done' if stops else ''}:",
            "    for step_loss in train_epoch(program):",
            *(in_epoch if by_samples else ["        pass"]),
            '    print(f"{perf_counter() - began:.1f} s, step {progress.step}: loss {step_loss:.4g}")',
            *(after_epoch if evaluates and not by_samples else []),
            *(["if not evaluations or evaluations[-1].step != progress.step:", "    evaluate()"] if by_samples else []),
            *(report_no_effect if self.methods else []),
            f"torch.save({self.exported}.state_dict(), options.out)",
        ]


def _batch_source(name: str, data: Any, task: Task) -> list[str]:
    """The lines that define one batch source. Map-style data are written out; other kinds call ``data_adapters.py``."""
    batch_size = "plan.batch_size" if name == "train" else data_adapters.initial_plan(task).batch_size
    if data_adapters.is_prebatched(data) and not isinstance(data, DataLoader):
        training = f"training={name == 'train'}"
        return [
            f"data = task.{name}_data.batches({batch_size}, options.seed, {training})",
            f"{name} = BatchSource(epoch=data.epoch, length=data.length, {training})",
        ]
    by_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, (DataLoader, IterableDataset)) or not by_index:
        function = "training" if name == "train" else "data_adapters.validation"
        return [f"{name} = {function}(task, {batch_size}, options.seed)"]
    order, rest = f"shuffled(samples, {batch_size}, options.seed)", "seed=options.seed"
    if name == "validation":
        order, rest = f"in_sequence(samples, {batch_size})", "seed=derive_seed(options.seed, 1), training=False"
    return [
        f"data = task.{name}_data",
        "samples = len(data)",
        f"{name} = from_spec(LoaderSpec(data, {order}, -(-samples // {batch_size}), {rest}, build=from_spec))",
    ]


def _options(device: str) -> list[str]:
    return [
        "",
        "",
        "def read_options():",
        '    parser = argparse.ArgumentParser(description="Trains, prints the progress, and writes the weights.")',
        '    parser.add_argument("--seed", type=int, default=0)',
        f'    parser.add_argument("--device", default={device})',
        '    parser.add_argument("--out", default="model.pt")',
        "    return parser.parse_args()",
        "",
    ]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _variable(method: Method, taken: set[str]) -> str:
    """The variable of a method: its name, or for a method from a file its class name in snake case."""
    name = method.name
    if not name.isidentifier():
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(method).__name__).lower()
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _constructor(method: Method, cls: str) -> str:
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    return f"{cls}({', '.join(f'{f.name}={literal(getattr(method, f.name))}' for f in fields if f.init)})"


def literal(value: object) -> str:
    """The Python literal of an option's value, strings in double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
