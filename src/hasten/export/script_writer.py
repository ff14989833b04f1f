"""Writes a run as straight lines: what ``plan.build`` does for one recipe, and nothing that the recipe does not use.

The lines import hasten; ``inline_imports`` copies in the source of what they import. The training loop and the evaluation are
copied from ``engine/loop.py``, so only the calls are written here. Tests compare the weights of script and engine bit for bit.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import json
import keyword
import re

from torch.utils.data import DataLoader, IterableDataset

from hasten.core.method import HOOKS, Method, hooks_of
from hasten.core.task import Task, takes_steps
from hasten.engine import data_adapters, metrics
from hasten.engine.plan import Program


def generate_script(function, task: Task, program: Program, methods: list[Method], device: str | None) -> str:
    """Returns the text of a program that trains a task.

    Args:
        function: returns the task; the program imports and calls it.
        task: the task itself.
        program: the run as the engine builds it; states which parts of a step and of the loop are in use.
        methods: the methods of the recipe, sorted by wrap order.
        device: the default of ``--device``; None selects a GPU where there is one.
    """
    taken = {*dir(builtins), *keyword.kwlist, *_MAIN_NAMES}
    names = {id(method): _variable(method, taken) for method in methods}

    def wrapped(hook: str, thing: str = "") -> list[str]:
        """``optimizer_step = method.optimizer_step(optimizer_step, run)`` for every method with that hook; the first wraps ``thing``."""
        users = [
            method for method in sorted(methods, key=lambda m: hook not in m.card.replaces) if hook in hooks_of(method)
        ]
        return [
            f"{hook} = {names[id(method)]}.{hook}({thing if thing and not i else hook}, run)"
            for i, method in enumerate(users)
        ]

    there, own, cut = program.task, task.loss is None, program.plan.microbatches > 1
    exported = "exported()" if wrapped("export") else "model"
    made = there.train_data is not task.train_data or there.validation_data is not task.validation_data
    process_context, grad_transform = (
        wrapped("process_context", "nullcontext"),
        wrapped("grad_transform", "lambda: None"),
    )
    body = [
        "set_seeds(options.seed)",
        "task = opened(task)" if made else "",
        "",
        "# how many samples a step sees, and how many steps there are",
        f"plan = {_plan(there)}",
        *wrapped("plan"),
        "run.plan = plan",
        "",
        "# where batches come from",
        *_data_lines(there, [(names[id(method)], method) for method in methods if "data" in hooks_of(method)]),
        "if plan.steps is None and train.length is not None:",
        "    plan.steps = max(1, round(plan.epochs * train.length))",
        "",
        "# the model, then its optimizer",
        "model = task.model()",
        *wrapped("model"),
        "model = model.to(device)",
        *[
            line.replace("parallelize =", "model =").replace("(parallelize,", "(model,")
            for line in wrapped("parallelize")
        ],
        "run.model = run.unwrapped_model = model",
        "optimizer = "
        + ("lambda model: task.optimizer(model, plan.steps)" if takes_steps(task.optimizer) else "task.optimizer"),
        *wrapped("optimizer"),
        "run.optimizer, schedule = optimizer_and_schedule(optimizer(model))",
        "",
        "# the parts of a step",
        "def batch_to_device(batch):",
        "    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)",
        "",
        "batch_transform = batch_to_device" if wrapped("batch_transform") else "",
        *wrapped("batch_transform"),
        f"loss = {'own_loss' if own else 'task.loss'}",
        *wrapped("loss"),
        "",
        "def forward(batch):",
        *(
            ["    return loss(*call_model(model, batch, own=True))"]
            if own
            else ["    inputs, named, target = split(batch)", "    return loss(model(*inputs, **named), target)"]
        ),
        "",
        *wrapped("forward"),
        "",
        "def backward(loss):",
        "    (loss * run.progress.microbatch_fraction).backward()" if cut else "    loss.backward()",
        "",
        *wrapped("backward"),
        "",
        "def forward_backward(batch):",
        "    loss = forward(batch)",
        "    backward(loss)",
        "    return loss",
        "",
        *wrapped("forward_backward"),
        "forward_backward = accumulate_gradients(forward_backward, plan.microbatches, run.progress)" if cut else "",
        *grad_transform,
        "optimizer_step, zero_grad = run.optimizer.step, run.optimizer.zero_grad",
        *wrapped("optimizer_step"),
        *wrapped("zero_grad"),
        "",
        *(
            [
                "def exported():",
                "    export = model",
                *[f"    {line}" for line in wrapped("export")],
                "    return export",
                "",
            ]
            if wrapped("export")
            else []
        ),
        "# the training",
        *_program_lines(
            program,
            "batch_transform" if wrapped("batch_transform") else "batch_to_device",
            "grad_transform" if grad_transform else "lambda: None",
        ),
        *_training_lines(program, exported, metrics.name_of(task)),
        *(["for method, why in run.no_effect:", '    print(f"{method} had nothing to do: {why}")'] if methods else []),
        f"torch.save({exported}.state_dict(), options.out)",
    ]
    opening = [
        "options = read_options()",
        "set_seeds(0)  # whatever the task's function draws is the same for every seed",
        "task, device = THE_TASK(), torch.device(options.device)",
        'if device.type == "cuda" and device.index:',
        "    torch.cuda.set_device(device)",
        "run = RunContext(device, task, seed=options.seed)",
        *[f"{names[id(method)]} = {_made(method, f'METHOD_{i}')}" for i, method in enumerate(methods)],
        *[f"{names[id(method)]}.setup(run)" for method in methods if "setup" in hooks_of(method)],
        *process_context,
    ]
    inside = ["with process_context():", *[f"    {line}" if line else "" for line in body]] if process_context else body
    classes = [
        f"from {type(method).__module__} import {type(method).__name__} as METHOD_{i}"
        for i, method in enumerate(methods)
    ]
    main = ["def main():", *[f"    {line}" if line else "" for line in [*opening, *inside]]]
    task_import = f"from {function.__module__} import {function.__name__} as THE_TASK"
    text = "\n".join([_IMPORTS, task_import, *classes, "", *main, _options(device)])
    return re.sub(r"\n{3,}", "\n\n", text)


def _program_lines(program: Program, move: str, gradients: str) -> list[str]:
    """The lines that collect what the copied training loop calls."""
    validation = "" if program.task.validation_data is None else "task=task, validation=validation, "
    return [
        f"program = SimpleNamespace(run=run, plan=plan, train=train, {validation}schedule=schedule)",
        f"program.to_device, program.forward_backward, program.grad_transform = {move}, forward_backward, {gradients}",
        "program.optimizer_step, program.zero_grad = optimizer_step, zero_grad",
        "progress, began = run.progress, perf_counter()",
    ]


def _training_lines(program: Program, exported: str, metric: str) -> list[str]:
    """The lines that drive the copied training loop: each epoch, with evaluations and stopping where the run has them."""
    evaluates = program.task.validation_data is not None
    by_samples = evaluates and program.plan.evaluate_every is not None
    stops = evaluates and program.plan.stop is not None
    look = [
        "def look():",
        f"    evaluations.append(Evaluation(progress.step, progress.samples, _measured(program, {exported}).metric))",
        f'    print(f"{{perf_counter() - began:.1f}} s, step {{progress.step}}: {metric} {{evaluations[-1].metric:.4g}}")',
    ]
    within_epoch = [
        "        if progress.samples // plan.evaluate_every > looks:",
        "            looks = progress.samples // plan.evaluate_every",
        "            look()",
        *(
            ["            if plan.stop(evaluations):", "                done = True", "                break"]
            if stops
            else []
        ),
    ]
    return [
        *(["evaluations = []", "", *look, ""] if evaluates else []),
        "looks = 0" if by_samples else "",
        "done = False" if stops else "",
        f"while not finished(program){' and not done' if stops else ''}:",
        "    for step_loss in rest_of_pass(program):",
        *(within_epoch if by_samples else ["        pass"]),
        '    print(f"{perf_counter() - began:.1f} s, step {progress.step}: loss {step_loss:.4g}")',
        "    look()" if evaluates and not by_samples else "",
        "    done = plan.stop(evaluations)" if stops and not by_samples else "",
        *(["if evaluations[-1:] == [] or evaluations[-1].step != progress.step:", "    look()"] if by_samples else []),
    ]


def _data_lines(task: Task, users: list[tuple[str, Method]]) -> list[str]:
    """Returns the lines that define ``train`` and ``validation`` for the kind of data that the task has."""
    lines = _batches("train", task.train_data, task)
    lines += _batches("validation", task.validation_data, task) if task.validation_data is not None else []
    if users:
        lines.append("with undisturbed():  # a method may read samples to know them")
    for variable, method in users:
        for which in ("train", "validation") if task.validation_data is not None else ("train",):
            returns_batches = "Batches" in str(inspect.signature(type(method).data).return_annotation)
            made = f"{variable}.data({which}, run)" if returns_batches else f"rewrapped({variable}, {which}, run)"
            lines.append(f"    {which} = {made}")
    return lines


def _plan(task: Task) -> str:
    """Returns the training plan of the task, before any method changes it."""
    plan, data = (
        data_adapters.initial_plan(task),
        "task.train_data.dataset" if data_adapters.is_prebatched(task.train_data) else "task.train_data",
    )
    known = f", samples=len({data})" if plan.samples is not None else ""
    return f"TrainPlan(batch_size={plan.batch_size}, epochs={plan.epochs!r}, evaluate_every={plan.evaluate_every!r}{known})"


def _batches(which: str, data, task: Task) -> list[str]:
    """Returns the lines that define one batch source. Map-style data are written out; other kinds call ``engine/data_adapters.py``."""
    size = (
        "plan.batch_size" if which == "train" else data_adapters.initial_plan(task).batch_size
    )  # judged in the task's own batches
    if data_adapters.is_prebatched(data) and not isinstance(data, DataLoader):
        training = f"training={which == 'train'}"
        return [
            f"data = task.{which}_data.batches({size}, options.seed, {training})",
            f"{which} = Batches(epoch=data.epoch, length=data.length, {training})",
        ]
    if isinstance(data, (DataLoader, IterableDataset)) or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        return [
            f"{which} = {'training' if which == 'train' else 'data_adapters.validation'}(task, {size}, options.seed)"
        ]
    order, rest = f"shuffled(samples, {size}, options.seed)", "seed=options.seed"
    if which == "validation":
        order, rest = f"in_sequence(samples, {size})", "seed=derived(options.seed, 1), training=False"
    return [
        f"data = task.{which}_data",
        "samples = len(data)",
        f"{which} = from_samples(Samples(data, {order}, -(-samples // {size}), {rest}, build=from_samples))",
    ]


def _variable(method: Method, taken: set[str]) -> str:
    """Returns the variable of a method: its name, or for a method from a file its class name in snake case."""
    name = (
        method.name
        if method.name.isidentifier()
        else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(method).__name__).lower()
    )
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _made(method: Method, cls: str) -> str:
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    return f"{cls}({', '.join(f'{f.name}={literal(getattr(method, f.name))}' for f in fields if f.init)})"


def literal(value) -> str:
    """Returns the Python literal of an option's value, strings in double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


_MAIN_NAMES = {
    *HOOKS,
    "options",
    "task",
    "device",
    "run",
    "train",
    "validation",
    "schedule",
    "batch_to_device",
    "exported",
    "progress",
    "evaluations",
    "began",
    "look",
    "looks",
    "done",
    "data",
    "samples",
    "step_loss",
    "main",
    "method",
    "why",
    "program",
}

_IMPORTS = """\
import argparse
from contextlib import nullcontext
from time import perf_counter
from types import SimpleNamespace

import torch

from hasten.utils.batch import map_tensors, split
from hasten.core.data import Batches, Samples
from hasten.core.run_context import Evaluation, RunContext, TrainPlan
from hasten.core.task import optimizer_and_schedule
from hasten.engine.forward import accumulate_gradients, call_model, own_loss
from hasten.engine.loop import _measured, finished, rest_of_pass
from hasten.utils.rng import derived, set_seeds, undisturbed
from hasten.engine import sources
from hasten.engine.data_adapters import from_samples, in_sequence, opened, rewrapped, shuffled, training
"""


def _options(device: str | None) -> str:
    usual = repr(device) if device else '"cuda" if torch.cuda.is_available() else "cpu"'
    return f"""

def read_options():
    parser = argparse.ArgumentParser(description="Trains, prints the progress, and writes the weights.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default={usual})
    parser.add_argument("--out", default="model.pt")
    return parser.parse_args()
"""
