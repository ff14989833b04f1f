"""``eject``: the composed run as one flat PyTorch script that a person can read, run and own, without hasten.

The script is written in two moves. ``_program`` writes what ``plan.build`` and the loop would do for this very
recipe as straight lines: hooks that nobody overrides are not there, settings are literals. ``flatten`` then
copies in the source of whatever those lines name: the task, the methods, the few parts of the engine.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import json
import keyword
import re
import sys
from pathlib import Path

from torch.utils.data import DataLoader, IterableDataset

import hasten
from hasten.contract.errors import Refusal
from hasten.contract.method import HOOKS, Method, hooks_of
from hasten.contract.recipe import Recipe
from hasten.contract.task import Task, takes_steps
from hasten.engine import metrics, sources, tasks
from hasten.engine.devices import pick_device
from hasten.engine.find import make_methods
from hasten.engine.flatten import Flat, flatten
from hasten.engine.plan import in_order, refuse_conflicts

OURS = ("hasten", "hasten_workloads")


def eject(task, recipe=None, *, device: str | None = None) -> str:
    """The source of a script that trains ``task`` under ``recipe`` just as ``train`` does, to the bit.

    Args:
        task: a workload's name, ``file.py:function``, or a function at the top level of a file.
        recipe: anything that ``Recipe.read`` takes.
        device: what the script uses unless it is told otherwise; None: a GPU where there is one.

    Raises:
        Refusal: a task without source, methods that cannot go together.
    """
    if device is not None:
        pick_device(device)
    ref = tasks.TaskRef.of(task)
    function = _function_behind(ref)
    methods = in_order(make_methods(recipe := Recipe.read(recipe)))
    refuse_conflicts(methods)
    copied = {function.__module__, *(type(method).__module__ for method in methods)}

    def inline(module: str) -> bool:
        return module in copied or module.partition(".")[0] in OURS

    loaded = ref.load()
    flat = flatten(_program(function, loaded, methods, device), inline, _smaller_parts(loaded, methods))
    return _script(flat, f"{ref} under {recipe}", function)


def _function_behind(ref: tasks.TaskRef):
    """The function that returns the task, which has to stand at the top level of a file."""
    if isinstance(ref.given, Task):
        raise Refusal(f"the Task {ref.name} is an object without source; eject a workload's name or path/to/file.py:function")
    function = ref.given or (ref._from_file() if ref.file else tasks._workload(ref.name))
    module = sys.modules.get(getattr(function, "__module__", None))
    if getattr(module, getattr(function, "__qualname__", ""), None) is not function or not getattr(module, "__file__", None):
        raise Refusal(f"{ref.name} does not stand at the top level of a file, so its source cannot be written out")
    return function


# --- the program, still with imports of hasten ---------------------------------------------------------------------


def _program(function, task: Task, methods: list[Method], device: str | None) -> str:
    """The run as straight lines, in the order of ``plan.build``; tests hold the two together to the bit."""
    taken = {*dir(builtins), *keyword.kwlist, *_MAIN_NAMES}
    names = {id(method): _variable(method, taken) for method in methods}

    def wrapped(hook: str, thing: str = "") -> list[str]:
        """``update = ema.update(update, run)`` for every method with that hook; the first wraps ``thing``."""
        users = [method for method in sorted(methods, key=lambda m: hook not in m.card.replaces) if hook in hooks_of(method)]
        return [f"{hook} = {names[id(method)]}.{hook}({thing if thing and not i else hook}, run)" for i, method in enumerate(users)]

    source = "".join(inspect.getsource(type(method)) for method in methods)
    cut, stops, own = "microbatches" in source, ".stop" in source, task.loss is None
    plan, looks = sources.plan_of(task), task.validation_data is not None
    every = plan.evaluate_every is not None or "evaluate_every" in source
    process, gradients = wrapped("process", "nullcontext"), wrapped("gradients", "lambda: None")
    body = [
        "set_seeds(options.seed)",
        "",
        "# how many samples a step sees, and how many steps there are",
        f"loop = Loop(batch_size={plan.batch_size}, epochs={plan.epochs!r}, evaluate_every={plan.evaluate_every!r})",
        *wrapped("loop"),
        "run.loop = loop",
        "",
        "# where batches come from",
        *_data_lines(task, [(names[id(method)], method) for method in methods if "data" in hooks_of(method)]),
        "if loop.steps is None and train.length is not None:",
        "    loop.steps = max(1, round(loop.epochs * train.length))",
        "",
        "# the model, then its optimizer",
        "model = task.model()",
        *wrapped("model"),
        "model = model.to(device)",
        *[line.replace("shard =", "model =").replace("(shard,", "(model,") for line in wrapped("shard")],
        "run.model = model",
        "optimizer = " + ("lambda model: task.optimizer(model, loop.steps)" if takes_steps(task.optimizer) else "task.optimizer"),
        *wrapped("optimizer"),
        "run.optimizer, schedule = optimizer_and_schedule(optimizer(model))",
        "",
        "# the parts of a step",
        "def batch_to_device(batch):",
        "    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)",
        "",
        "batch = batch_to_device" if wrapped("batch") else "",
        *wrapped("batch"),
        f"loss = {'own_loss' if own else 'task.loss'}",
        *wrapped("loss"),
        "",
        "def forward(batch):",
        *(["    return loss(*call_model(model, batch, own=True))"] if own else ["    inputs, named, target = split(batch)", "    return loss(model(*inputs, **named), target)"]),
        "",
        *wrapped("forward"),
        "",
        "def backward(loss):",
        "    (loss * run.clock.share).backward()" if cut else "    loss.backward()",
        "",
        *wrapped("backward"),
        "",
        "def micro(batch):",
        "    loss = forward(batch)",
        "    backward(loss)",
        "    return loss.detach()",
        "",
        *wrapped("micro"),
        *(["if loop.microbatches > 1:", "    micro = _accumulated(micro, loop.microbatches, run.clock)"] if cut else []),
        *gradients,
        "update, clear = run.optimizer.step, run.optimizer.zero_grad",
        *wrapped("update"),
        *wrapped("clear"),
        "",
        *(["def exported():", "    export = model", *[f"    {line}" for line in wrapped("export")], "    return export", ""] if wrapped("export") else []),
        "# the training",
        "clock, evaluations, began = run.clock, [], perf_counter()",
        *(_LOOK if looks else []),
        "done = False" if stops and looks else "",
        f"while clock.epoch < loop.epochs and (loop.steps is None or clock.step < loop.steps){' and not done' if stops and looks else ''}:",
        "    for each in train.epoch(clock.epoch, 0):",
        f"        each = {'batch' if wrapped('batch') else 'batch_to_device'}(each)",
        "        step_loss = micro(each)",
        *(["        gradients()"] if gradients else []),
        "        update()",
        "        clear()",
        "        if schedule is not None:",
        "            schedule.step()",
        "        clock.step, clock.batch, clock.samples = clock.step + 1, clock.batch + 1, clock.samples + size(each)",
        *(["        if loop.evaluate_every and clock.samples // loop.evaluate_every > (clock.samples - size(each)) // loop.evaluate_every:", "            look()"] if looks and every else []),
        *(["            if loop.stop and loop.stop(evaluations):", "                done = True", "                break"] if looks and every and stops else []),
        "        if clock.step == loop.steps:",
        "            break",
        "    else:",
        "        clock.epoch, clock.batch = clock.epoch + 1, 0",
        '    print(f"{perf_counter() - began:.1f} s, step {clock.step}: loss {step_loss:.4g}")',
        *(["    if loop.evaluate_every is None:", "        look()"] if looks and every else ["    look()"] if looks else []),
        *(["    if loop.stop and loop.evaluate_every is None:", "        done = loop.stop(evaluations)"] if looks and stops else []),
        *(["if evaluations[-1:] == [] or evaluations[-1].step != clock.step:", "    look()"] if looks and every else []),
        *(["for method, why in run.idle:", '    print(f"{method} had nothing to do: {why}")'] if "nothing_to_do" in source else []),
        "torch.save(model.state_dict(), options.out)",
    ]  # fmt: skip
    exported = "exported()" if wrapped("export") else "model"
    metric = metrics.name_of(task)
    body = [line.replace("EXPORTED", exported).replace("METRIC", metric) for line in body]
    body[-1] = f"torch.save({exported}.state_dict(), options.out)"
    opening = [
        "options = read_options()",
        "task, device = THE_TASK(), torch.device(options.device)",
        "run = Run(device, task, seed=options.seed)",
        *[f"{names[id(method)]} = {_made(method, f'METHOD_{i}')}" for i, method in enumerate(methods)],
        *process,
    ]
    inside = ["with process():", *[f"    {line}" if line else "" for line in body]] if process else body
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
    for variable, method in users:
        for which in ("train", "validation") if task.validation_data is not None else ("train",):
            returns_batches = "Batches" in str(inspect.signature(type(method).data).return_annotation)
            lines.append(
                f"{which} = {variable}.data({which}, run)" if returns_batches else f"{which} = rewrapped({variable}, {which}, run)"
            )
    return lines


def _batches(which: str, data, task: Task) -> list[str]:
    """Samples by index, the usual case, are written out; what else a task may bring is left to ``sources``."""
    made = callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")
    data = sources._opened(data, f"{which}_data")
    if isinstance(data, (DataLoader, IterableDataset)) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return [f"{which} = {'training' if which == 'train' else 'sources.validation'}(task, loop.batch_size, options.seed)"]
    order, rest = "shuffled(samples, loop.batch_size, options.seed)", "seed=options.seed"
    if which == "validation":
        order, rest = "in_sequence(samples, loop.batch_size)", "seed=derived(options.seed, 1), training=False"
    return [
        f"data = task.{which}_data{'()' if made else ''}",
        "samples = len(data)",
        f"{which} = from_samples(Samples(data, {order}, -(-samples // loop.batch_size), {rest}, build=from_samples))",
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
    return f"{cls}({', '.join(f'{f.name}={_literal(getattr(method, f.name))}' for f in fields if f.init)})"


def _literal(value) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _smaller_parts(task: Task, methods: list[Method]) -> dict:
    """Other source for what the script needs only a little of."""
    fields = [
        f"    {f.name}: Any{'' if f.default is dataclasses.MISSING else f' = {_literal(f.default)}'}" for f in dataclasses.fields(Task)
    ]
    parts = {
        (Task.__module__, "Task"): "\n".join(
            ["@dataclass(frozen=True, kw_only=True)", "class Task:", '    """What is trained."""', "", *fields]
        ),
        (metrics.__name__, "METRICS"): f"METRICS = {{{_known_metric(task.metric)}}}",
    }
    if not any("super()" in inspect.getsource(type(method)) for method in methods):
        parts[Method.__module__, "Method"] = _METHOD
    return parts


def _known_metric(metric) -> str:
    """``"accuracy": Known(...)``, the one line of the table of metrics that this task needs."""
    if not isinstance(metric, str):
        return ""
    tree = ast.parse(text := inspect.getsource(metrics))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "METRICS")
    return next(
        f"{_literal(metric)}: {ast.get_source_segment(text, value)}"
        for key, value in zip(table.keys, table.values, strict=True)
        if key.value == metric
    )


# --- the script ----------------------------------------------------------------------------------------------------


def _script(flat: Flat, what: str, function) -> str:
    """Puts the pieces into one file: the training first, then what it is made of."""
    beside = Path(sys.modules[function.__module__].__file__).parent
    roots = sorted({line.split()[1].partition(".")[0] for line in flat.imports})
    own = [f"{root}.py" for root in roots if function.__module__.startswith(tasks.OWN_FILES) and (beside / f"{root}.py").exists()]
    keep = f"\nIt imports {' and '.join(own)} of yours: keep it beside." if own else ""
    head = [
        f'"""Trains {what}.\n\nWritten by `hasten eject` {hasten.__version__}; PyTorch is needed, hasten is not.{keep}\n"""',
        "from __future__ import annotations",
        "\n".join(flat.imports),
    ]
    parts = [f"# --- {_title(module)} ---\n\n\n{text}" for module, text in flat.modules]
    script = "\n\n".join(head) + "\n\n\n" + "\n\n\n".join([flat.main, *parts, 'if __name__ == "__main__":\n    main()']) + "\n"
    compile(script, "the ejected script", "exec")
    return script


def _title(module: str) -> str:
    room, _, name = module.removeprefix("hasten.").partition(".")
    return f"method: {name}" if room == "methods" else f"from the {room}: {name}" if module.startswith("hasten.") else "the task"


_MAIN_NAMES = {
    *HOOKS, "options", "task", "device", "run", "train", "validation", "schedule", "batch_to_device", "exported", "clock",
    "evaluations", "began", "look", "done", "data", "samples", "each", "step_loss", "size", "main", "evaluate", "method", "why",
}  # fmt: skip

_IMPORTS = """\
import argparse
from contextlib import nullcontext
from time import perf_counter

import torch

from hasten.contract.batch import map_tensors, size, split
from hasten.contract.data import Samples
from hasten.contract.method import Evaluation, Loop, Run
from hasten.contract.task import optimizer_and_schedule
from hasten.engine.metrics import metric_of
from hasten.engine.plan import _accumulated, call_model, own_loss
from hasten.engine.seeds import derived, set_seeds, undisturbed
from hasten.engine import sources
from hasten.engine.sources import from_samples, in_sequence, rewrapped, shuffled, training
"""

_LOOK = """
def look():
    evaluations.append(Evaluation(clock.step, clock.samples, evaluate(task, EXPORTED, validation, device)))
    print(f"{perf_counter() - began:.1f} s, step {clock.step}: METRIC {evaluations[-1].metric:.4g}")
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

_METHOD = '''
class Method:
    """What all methods have: a name, under which they keep what they remember."""

    def __init_subclass__(cls):
        cls.name = cls.__name__
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
