"""The random state of a process (torch on every device, Python, NumPy): set, saved, restored, derived."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def set_seeds(seed: int) -> None:
    """Seeds torch (every device), Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that is a function of several integers, such as (seed, epoch, batch)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def get_rng_state() -> dict[str, Any]:
    """The state of all global generators, as tensors and plain lists (safe to load without executing code): {"torch",
    "python", "numpy"} and, if CUDA is in use, {"cuda" (of every GPU), "device" (of the current one)}.
    """
    version, words, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state()
    kind, keys, position, has_gauss, cached = numpy_state
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["device"] = torch.cuda.get_rng_state()  # of the run's GPU, which may have another number when it resumes
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Sets the global generators to what ``get_rng_state`` returned; ignores GPUs that this machine does not have."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    for device, device_state in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)
    if "device" in state and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["device"])


@contextmanager
def preserve_rng_state(*generators: torch.Generator) -> Iterator[None]:
    """Context manager: restores the global generators (torch on every device, Python, NumPy), and ``generators``."""
    state, generator_states = get_rng_state(), [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        set_rng_state(state)
        for generator, generator_state in zip(generators, generator_states, strict=True):
            generator.set_state(generator_state)


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Context manager: starts every CPU generator from ``seed``; restores torch's on exit. Python's and NumPy's are not
    restored: saving them costs more than reading a small batch, and models draw from torch's.
    """
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(state)
