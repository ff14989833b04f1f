"""What a session answers at once, while the script stands still: what was found, its memory, its weights."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten._torch_compat_compile import cached_compile_seconds, compile_seconds
from hasten.hosts.inside.loaders import TRAINING, batch_size_of
from hasten.hosts.inside.sites import HIDDEN, frames_from, module_of
from hasten.utils.optimizers import fused_step_obstacle
from hasten.utils.parsed_arguments import names_length, names_whole_length
from hasten.utils.run_facts import hardware_facts, model_facts

if TYPE_CHECKING:
    from hasten.hosts.inside.session import Session


# names by which a function may hold the dictionary that its ``f_locals`` is before Python 3.13
REVEALING = {"locals", "exec", "f_locals"}  # not eval or vars: also ``model.eval()``, ``vars(args)``
# among the names that running code uses: its number of epochs is that of a part of the training, or a bound
NOT_WHOLE = re.compile(r"(^|_|k)folds?$|patience|early_?stop", re.IGNORECASE)
PACKAGES = {"site-packages", "dist-packages"}


def describe(session: Session) -> dict[str, Any]:
    """What was found so far: sites, steps, evaluations, and facts. Times are in seconds from the command's start."""
    models, loop, composition = session.models, session.loop, session.composition
    loaders = session.loaders.training_loaders()
    return {
        "sites": session.sites.records,
        "steps": session.steps.count,
        "seconds": time.perf_counter() - session.began,
        "imported": session.imported - session.began,
        "compile_seconds": compile_seconds(),
        "cached_compile_seconds": cached_compile_seconds(),
        "marks": [(at - session.began, *rest) for at, *rest in models.marks],
        "logged": [(at - session.began, *rest) for at, *rest in loop.logged] or session.logged,
        "monitor": session.monitor(),
        "no_effect": composition.without_effect(*session.seen()) if composition else [],
        "arguments": session.arguments,
        "main": session.sites.main(),
        "expected_steps": loop.length or _expected_steps(session, loaders),
        "facts": sorted(_facts(session, loaders)),
        "samples_per_step": _samples_per_step(session, loaders),
        "device": str(session.device()),
        "written_bytes": _written_bytes(),
        **_evaluations(session),
    }


def _written_bytes() -> int:
    """Bytes that this process has written to disks; 0 where the system does not count them."""
    with suppress(OSError, ValueError):
        return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["write_bytes"])
    return 0


def _facts(session: Session, loaders: Iterable[Any]) -> set[str]:
    """The facts of the run that method cards refer to: keys of ``hasten.core.card.FACTS``."""
    from hasten.engine.loaders import from_loader  # a script that is only watched needs these at the end
    from hasten.engine.resources import has_idle_cores

    models = session.models
    found = {*hardware_facts(session.device()), *session.loop.facts}
    found = found.union(*map(model_facts, models.roots))
    if not all(map(fused_step_obstacle, session.steps.optimizers)):
        found.add("unfused_optimizer")
    if "cpu" in found and has_idle_cores():
        found.add("idle_cores")
    if session.spec["vary"]:
        found.add("varied_arguments")
    if models.evaluations and not models.trains_in_eval_mode:
        found |= {"evaluations"} | ({"evaluation_gradients"} if models.records_gradients else set())
    of_torch = [loader for loader in loaders if isinstance(loader, DataLoader)]
    if any(from_loader(loader, None, loader.batch_size or 1, 0, True).spec is not None for loader in of_torch):
        found |= {"indexed_samples", "workers", "multiple_epochs"}
    return found


def _samples_per_step(session: Session, loaders: Iterable[Any]) -> int | None:
    sizes = [size for loader in loaders if (size := batch_size_of(loader))]
    if not sizes:  # a framework may have made and dropped them
        records = session.sites.records.get("loaders", ())
        sizes = [entry["batch_size"] for entry in records if entry["role"] == TRAINING and entry.get("batch_size")]
    return max(sizes) * _batches_per_step(session) if sizes else None


def _batches_per_step(session: Session) -> int:
    """Batches of one loader in a step: more under gradient accumulation; the passes of a GAN may share one."""
    return max(1, round(max(session.batches.values(), default=0) / max(1, session.steps.count)))


def _expected_steps(session: Session, loaders: Iterable[Any]) -> int | None:
    """The steps of the whole training by what the script has parsed or, where that does not state it, by its code."""
    batches = _batches_per_step(session)
    if steps := expected_steps(session.arguments, loaders, batches):
        return steps
    found = epochs_in_code()
    session.epochs = session.epochs or found
    same = {name: value for name, value in found.items() if session.epochs.get(name, value) == value}  # no counters
    return expected_steps(same, loaders, batches)


def epochs_in_code() -> dict[str, int]:
    """Numbers of epochs, such as ``EPOCHS = 20``, among the variables of the user's innermost running function that has
    any, or else of its innermost module.

    Empty where running code names folds or early stopping: the training may then be longer or shorter.
    """
    found, modules = dict[str, int](), list[dict[str, Any]]()
    for frame in frames_from(inspect.currentframe()):
        code, package = frame.f_code, module_of(frame).partition(".")[0]
        if package in {*HIDDEN, "hasten"} or PACKAGES & {*Path(code.co_filename).parts}:
            continue
        own, others = {*code.co_varnames, *code.co_cellvars}, {*code.co_names}
        if any(map(NOT_WHOLE.search, own | others)):
            return {}
        modules.append(frame.f_globals)
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
        if not found and is_function and any(map(_names_epochs, own)) and not REVEALING & others:
            variables = frame.f_locals
            found = _numbers_of_epochs(variables)
            if type(variables) is dict:  # before Python 3.13 a copy, which would keep all of the variables alive
                variables.clear()
    return next(filter(None, (found, *map(_numbers_of_epochs, modules))), {})


def _numbers_of_epochs(variables: Mapping[str, Any]) -> dict[str, int]:
    return {name: one for name, one in variables.items() if _names_epochs(name) and type(one) is int and one > 0}


def _names_epochs(name: str) -> bool:
    return name.lower().endswith("epochs") and names_whole_length(name)


def expected_steps(arguments: Mapping[str, Any], loaders: Iterable[Any], batches: int) -> int | None:
    """The steps of the whole training by numbers such as ``epochs``; None if none of them states it.

    Args:
        arguments: By their names, such as those that the script has parsed.
        loaders: Those for training, whose lengths are those of an epoch.
        batches: Of one loader, in a step.
    """
    lengths: list[int] = []
    for loader in loaders:
        if not isinstance(getattr(loader, "dataset", None), IterableDataset):  # torch warns later of a length asked for
            with suppress(Exception):  # a sampler of the user's
                lengths.append(len(loader))
    numbers = {name: value for name, value in arguments.items() if type(value) in (int, float) and 0 < value < math.inf}
    given = {name: value for name, value in numbers.items() if names_length(name)}
    whole = {name: value for name, value in given.items() if names_whole_length(name)}  # others may be those of a part
    found, most = list[float](), math.inf
    for name, value in (whole or given).items():
        if "epoch" not in name.lower():
            found.append(value)
            if name in whole and "max" in name.lower():  # it ends the training whatever the epochs are
                most = min(most, value)
        elif lengths:
            found.append(value * max(lengths) / batches)
    return int(min(most, max(found))) if found else None


def _evaluations(session: Session) -> dict[str, Any]:
    """``evaluation_seconds`` after an evaluated step; ``evaluation_every``: steps between two such. None if unknown.

    Both are medians: the last evaluation may come early, or test besides. Calls before the first step are none.
    """
    found = {} if session.models.trains_in_eval_mode else _seconds_by_step(session.models.evaluations)
    found.pop(0, None)
    if not found:
        return {"evaluation_seconds": None, "evaluation_every": None}
    every = sorted(later - step for step, later in pairwise([0, *found]))
    seconds = sorted(found.values())
    return {"evaluation_seconds": seconds[(len(seconds) - 1) // 2], "evaluation_every": every[len(every) // 2]}


def evaluation_seconds(session: Session, first: int = 0) -> list[float]:
    """Seconds spent on evaluations after each step that some followed, from evaluation number ``first`` on."""
    return list(_seconds_by_step(session.models.evaluations[first:]).values())


def _seconds_by_step(evaluations: Iterable[tuple[int, float]]) -> dict[int, float]:
    seconds: dict[int, float] = {}
    for step, each in evaluations:
        seconds[step] = seconds.get(step, 0.0) + each
    return seconds


def memory(session: Session, of_host: bool = False) -> dict[str, Any]:
    """Peak memory of this process in bytes, see ``memory_peak``: on its device or, with ``of_host``, on the host."""
    from hasten.engine.memory import memory_peak  # with packages that the script may not need

    return dict(memory_peak(torch.device("cpu") if of_host else session.device()))


def save(session: Session, path: str, gradients: bool = False) -> dict[str, Any]:
    """Writes name -> CPU tensor of the weights, or the gradients of the last step, to ``path``; returns the steps."""
    tensors = _gradients(session) if gradients else _weights(session)
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, path)
    return {"steps": session.steps.count}


def _weights(session: Session) -> dict[str, torch.Tensor]:
    """Everything that is trained, by name: the state of the roots, and parameters that belong to none of them."""
    tensors = {
        f"{index}.{name}": tensor
        for index, root in enumerate(session.models.roots)
        for name, tensor in root.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    known = {tensor.data_ptr() for tensor in tensors.values()}
    groups = [group for optimizer in session.steps.optimizers for group in optimizer.param_groups]
    loose = [parameter for group in groups for parameter in group["params"]]
    return tensors | {f"loose.{index}": one for index, one in enumerate(loose) if one.data_ptr() not in known}


def _gradients(session: Session) -> dict[str, torch.Tensor]:
    roots = enumerate(session.models.roots)
    named = [(f"{index}.{name}", one) for index, root in roots for name, one in root.named_parameters()]
    return {name: one.grad for name, one in named if one.grad is not None}


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "describe": describe,
    "memory": memory,
    "save": save,
}
