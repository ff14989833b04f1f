"""Writes a run as straight lines: what ``plan.build`` and the loop would do for one recipe, and nothing that it does not use.

The lines still import hasten; ``flatten`` copies in what they name. Tests hold them and the engine together, to the bit.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import json
import keyword
import re

from torch.utils.data import DataLoader, IterableDataset

from hasten.contract.method import HOOKS, Method, hooks_of
from hasten.contract.task import Task, takes_steps
from hasten.engine import metrics, sources
from hasten.engine.plan import Program


def straight_lines(function, task: Task, program: Program, methods: list[Method], device: str | None) -> str:
    """The text of a program that trains ``task``, which ``function`` returns, with ``methods`` in their order.

    ``program``: the same, as the engine builds it; tells which parts of a step and of the loop are in use.
    """
    taken = {*dir(builtins), *keyword.kwlist, *_MAIN_NAMES}
    names = {id(method): _variable(method, taken) for method in methods}

    def wrapped(hook: str, thing: str = "") -> list[str]:
        """``optimizer_step = method.optimizer_step(optimizer_step, run)`` for every method with that hook; the first wraps ``thing``."""
        users = [method for method in sorted(methods, key=lambda m: hook not in m.card.replaces) if hook in hooks_of(method)]
        return [f"{hook} = {names[id(method)]}.{hook}({thing if thing and not i else hook}, run)" for i, method in enumerate(users)]

    there, plan, own, looks = program.task, program.plan, task.loss is None, task.validation_data is not None
    cut, stops, every = plan.microbatches > 1, plan.stop is not None, plan.evaluate_every is not None
    made = there.train_data is not task.train_data or there.validation_data is not task.validation_data
    process_context, grad_transform = wrapped("process_context", "nullcontext"), wrapped("grad_transform", "lambda: None")
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
        *[line.replace("parallelize =", "model =").replace("(parallelize,", "(model,") for line in wrapped("parallelize")],
        "run.model = run.unwrapped_model = model",
        "optimizer = " + ("lambda model: task.optimizer(model, plan.steps)" if takes_steps(task.optimizer) else "task.optimizer"),
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
        *(["    return loss(*call_model(model, batch, own=True))"] if own else ["    inputs, named, target = split(batch)", "    return loss(model(*inputs, **named), target)"]),
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
        "    return loss.detach()",
        "",
        *wrapped("forward_backward"),
        "forward_backward = accumulate_gradients(forward_backward, plan.microbatches, run.progress)" if cut else "",
        *grad_transform,
        "optimizer_step, zero_grad = run.optimizer.step, run.optimizer.zero_grad",
        *wrapped("optimizer_step"),
        *wrapped("zero_grad"),
        "",
        *(["def exported():", "    export = model", *[f"    {line}" for line in wrapped("export")], "    return export", ""] if wrapped("export") else []),
        "# the training",
        "progress, evaluations, began = run.progress, [], perf_counter()",
        *(_LOOK if looks else []),
        "done = False" if stops and looks else "",
        f"while progress.epoch < plan.epochs and (plan.steps is None or progress.step < plan.steps){' and not done' if stops and looks else ''}:",
        "    for each in train.epoch(progress.epoch, 0):",
        f"        each = {'batch_transform' if wrapped('batch_transform') else 'batch_to_device'}(each)",
        "        step_loss = forward_backward(each)",
        *(["        grad_transform()"] if grad_transform else []),
        "        optimizer_step()",
        "        zero_grad()",
        "        if schedule is not None:",
        "            schedule.step()",
        "        progress.step, progress.batch, progress.samples = progress.step + 1, progress.batch + 1, progress.samples + size(each)",
        *(["        if progress.samples // plan.evaluate_every > (progress.samples - size(each)) // plan.evaluate_every:", "            look()"] if looks and every else []),
        *(["            if plan.stop(evaluations):", "                done = True", "                break"] if looks and every and stops else []),
        "        if progress.step == plan.steps:",
        "            break",
        "    else:",
        "        progress.epoch, progress.batch = progress.epoch + 1, 0",
        '    print(f"{perf_counter() - began:.1f} s, step {progress.step}: loss {step_loss:.4g}")',
        "    look()" if looks and not every else "",
        "    done = plan.stop(evaluations)" if looks and stops and not every else "",
        *(["if evaluations[-1:] == [] or evaluations[-1].step != progress.step:", "    look()"] if looks and every else []),
        *(["for method, why in run.no_effect:", '    print(f"{method} had nothing to do: {why}")'] if methods else []),
        "torch.save(model.state_dict(), options.out)",
    ]  # fmt: skip
    exported = "exported()" if wrapped("export") else "model"
    metric = metrics.name_of(task)
    body = [line.replace("EXPORTED", exported).replace("METRIC", metric) for line in body]
    body[-1] = f"torch.save({exported}.state_dict(), options.out)"
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
    classes = [f"from {type(method).__module__} import {type(method).__name__} as METHOD_{i}" for i, method in enumerate(methods)]
    main = ["def main():", *[f"    {line}" if line else "" for line in [*opening, *inside]]]
    evaluation = _EVALUATE.replace("LOSS", "own_loss" if own else "task.loss").replace("OWN", str(own)) if looks else ""
    text = "\n".join(
        [_IMPORTS, f"from {function.__module__} import {function.__name__} as THE_TASK", *classes, "", *main, evaluation, _options(device)]
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _data_lines(task: Task, users: list[tuple[str, Method]]) -> list[str]:
    """The lines that make ``train`` and ``validation``, for the kind of data that the task has."""
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
    """The plan of steps before any method has touched it."""
    plan, data = sources.plan_of(task), "task.train_data.dataset" if sources.makes_batches(task.train_data) else "task.train_data"
    known = f", samples=len({data})" if plan.samples is not None else ""
    return f"TrainPlan(batch_size={plan.batch_size}, epochs={plan.epochs!r}, evaluate_every={plan.evaluate_every!r}{known})"


def _batches(which: str, data, task: Task) -> list[str]:
    """Samples by index, the usual case, are written out; a pipeline makes its own; what else a task may bring is left to ``sources``."""
    size = "plan.batch_size" if which == "train" else sources.plan_of(task).batch_size  # judged in the task's own batches
    if sources.makes_batches(data) and not isinstance(data, DataLoader):
        training = f"training={which == 'train'}"
        return [
            f"data = task.{which}_data.batches({size}, options.seed, {training})",
            f"{which} = Batches(epoch=data.epoch, length=data.length, {training})",
        ]
    if isinstance(data, (DataLoader, IterableDataset)) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return [f"{which} = {'training' if which == 'train' else 'sources.validation'}(task, {size}, options.seed)"]
    order, rest = f"shuffled(samples, {size}, options.seed)", "seed=options.seed"
    if which == "validation":
        order, rest = f"in_sequence(samples, {size})", "seed=derived(options.seed, 1), training=False"
    return [
        f"data = task.{which}_data",
        "samples = len(data)",
        f"{which} = from_samples(Samples(data, {order}, -(-samples // {size}), {rest}, build=from_samples))",
    ]


def _variable(method: Method, taken: set[str]) -> str:
    """What the script calls a method: its name, or for one from outside its class in small letters."""
    name = method.name if method.name.isidentifier() else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(method).__name__).lower()
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _made(method: Method, cls: str) -> str:
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    return f"{cls}({', '.join(f'{f.name}={literal(getattr(method, f.name))}' for f in fields if f.init)})"


def literal(value) -> str:
    """A setting as it is written in Python, texts in double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


_MAIN_NAMES = {
    *HOOKS, "options", "task", "device", "run", "train", "validation", "schedule", "batch_to_device", "exported", "progress",
    "evaluations", "began", "look", "done", "data", "samples", "each", "step_loss", "size", "main", "evaluate", "method", "why",
}  # fmt: skip

_IMPORTS = """\
import argparse
from contextlib import nullcontext
from time import perf_counter

import torch

from hasten.contract.batch import map_tensors, size, split
from hasten.contract.data import Batches, Samples
from hasten.contract.run_context import Evaluation, RunContext, TrainPlan
from hasten.contract.task import optimizer_and_schedule
from hasten.engine.forward import accumulate_gradients, call_model, own_loss
from hasten.engine.metrics import metric_of
from hasten.engine.seeds import derived, set_seeds, undisturbed
from hasten.engine import sources
from hasten.engine.sources import from_samples, in_sequence, opened, rewrapped, shuffled, training
"""

_LOOK = """
def look():
    evaluations.append(Evaluation(progress.step, progress.samples, evaluate(task, EXPORTED, validation, device)))
    print(f"{perf_counter() - began:.1f} s, step {progress.step}: METRIC {evaluations[-1].metric:.4g}")
""".splitlines()

_EVALUATE = '''

def evaluate(task, model, batches, device):
    """The metric over the validation data; the training does not notice."""
    metric, modes = metric_of(task), [(module, module.training) for module in model.modules()]
    model.eval()
    with undisturbed(), torch.inference_mode():
        for batch in batches.epoch(0, 0):
            batch = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
            output, target = call_model(model, batch, own=OWN)
            metric.update(output, target, LOSS(output, target), size(batch))
    for module, training in modes:
        module.training = training
    return metric.result().metric
'''


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
