"""What a process has that a method could change and leave changed: read, compared, put back."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch

from hasten.engine.seeds import random_state, restore_random_state


def process_state() -> dict[str, object]:
    """Everything global that outlives a run, by name: flags, threads, environment, and the random numbers."""
    return {name: read() for name, (read, _) in _SWITCHES.items()} | {"random numbers": random_state()}


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names of what is not as it was."""
    return [name for name in before if not same(before[name], after[name])]


@contextmanager
def restored():
    """Whatever happens inside, outside nothing has changed."""
    before = process_state()
    try:
        yield
    finally:
        for name, (read, write) in _SWITCHES.items():
            if read() != before[name]:
                write(before[name])
        restore_random_state(before["random numbers"])


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _flag(owner, name: str):
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


_SWITCHES = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "matrix product precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "cudnn TF32": _flag(torch.backends.cudnn, "allow_tf32"),
    "cudnn benchmark": _flag(torch.backends.cudnn, "benchmark"),
    "cudnn deterministic": _flag(torch.backends.cudnn, "deterministic"),
    "oneDNN": _flag(torch.backends.mkldnn, "enabled"),
    "environment": (lambda: dict(os.environ), _set_environment),
}


def same(a, b) -> bool:
    """Equal, looking into dicts and lists of tensors and numbers."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
