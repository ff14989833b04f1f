"""What a session answers at once, while the script stands still: what was found, its memory, its weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hasten._torch_compat import cached_compile_seconds, compile_seconds
from hasten.hosts.inside import facts

if TYPE_CHECKING:
    from hasten.hosts.inside.session import Session


def describe(session: Session) -> dict[str, Any]:
    """What was found so far: sites, steps, evaluations, and facts about the run."""
    models, loop, composition, steps = session.models, session.loop, session.composition, session.steps
    of_loop = {*loop.facts, *(["varied_arguments"] if session.spec["vary"] else [])}
    loaders = session.loaders.training_loaders()
    return {
        "sites": session.sites.records,
        "steps": steps.count,
        "seconds": time.perf_counter() - session.began,
        "compile_seconds": compile_seconds(),
        "cached_compile_seconds": cached_compile_seconds(),
        "marks": [(at - session.began, *rest) for at, *rest in models.marks],
        "logged": [(at - session.began, *rest) for at, *rest in loop.logged] or session.logged,
        "monitor": session.monitor(),
        "no_effect": composition.without_effect(*session.seen()) if composition else [],
        "backwards_per_step": steps.backwards,
        "skipped": steps.skipped,
        "arguments": session.arguments,
        "main": session.sites.main(),
        "expected_steps": facts.expected_steps(session.arguments, loaders, steps),
        **evaluations(session),
        **facts.describe(models, loaders, steps, session.phases.device, of_loop),
    }


def evaluations(session: Session) -> dict[str, Any]:
    """Seconds of an evaluation and the steps between two; None until one was seen."""
    found = [] if session.models.trains_in_eval_mode else session.models.evaluations
    if not found:
        return {"evaluation_seconds": None, "evaluation_every": None}
    steps = sorted({step for step, _ in found if step > 0})
    every = steps[-1] - steps[-2] if len(steps) > 1 else steps[0] if steps else None
    return {"evaluation_seconds": evaluation_seconds(session)[-1], "evaluation_every": every}


def evaluation_seconds(session: Session, first: int = 0) -> list[float]:
    """Seconds spent on evaluations after each step that some followed, from evaluation number ``first`` on."""
    seconds: dict[int, float] = {}
    for step, each in session.models.evaluations[first:]:
        seconds[step] = seconds.get(step, 0.0) + each
    return list(seconds.values())


def memory(session: Session) -> dict[str, Any]:
    """The peak of the memory of this process."""
    from hasten.engine.memory import memory_peak  # with packages that the script may not need

    return dict(memory_peak(session.device()))


def host_memory(session: Session) -> dict[str, Any]:
    """The peak of the host's memory that this process has taken, also if it trains on a GPU."""
    from hasten.engine.memory import memory_peak

    return dict(memory_peak(torch.device("cpu")))


def hash_weights(session: Session) -> dict[str, Any]:
    """SHA-256 of the weights."""
    digest = hashlib.sha256()
    weights = _weights(session)
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return {"hash": digest.hexdigest(), "tensors": len(weights), "steps": session.steps.count}


def save(session: Session, path: str, gradients: bool = False) -> dict[str, Any]:
    """Saves the weights, or the gradients of the step that has just ended, to a file."""
    tensors = _gradients(session) if gradients else _weights(session)
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, path)
    return {"tensors": len(tensors), "steps": session.steps.count}


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
    "host_memory": host_memory,
    "hash": hash_weights,
    "save": save,
}
