"""Reads, compares and restores the global state of a process that a method could change."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from hasten.utils.denormals import flushes_denormals
from hasten.utils.float32_precision import get_float32_precision, set_float32_precision
from hasten.utils.rng import get_rng_state, set_rng_state
from hasten.utils.tree import bitwise_equal


def process_state() -> dict[str, Any]:
    """The global state that outlives a run, by name: flags, threads, environment variables, random state."""
    return {name: read() for name, (read, _) in _SETTINGS.items()} | {"random numbers": get_rng_state()}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the entries of two results of ``process_state`` that differ."""
    return [name for name in before if not bitwise_equal(before[name], after[name])]


@contextmanager
def restored() -> Generator[None]:
    """Context manager: restores the state in ``process_state`` (flags, threads, environment, ...) at its end."""
    before = process_state()
    try:
        yield
    finally:
        for name, (read, write) in _SETTINGS.items():
            if read() != before[name]:
                write(before[name])
        set_rng_state(before["random numbers"])


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _set_deterministic(state: Any) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


_SETTINGS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "denormal numbers": (flushes_denormals, torch.set_flush_denormal),
    "float32 precision": (get_float32_precision, set_float32_precision),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "cudnn benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "oneDNN": _attribute(torch.backends.mkldnn, "enabled"),
    "environment": (lambda: dict(os.environ), _set_environment),
}
