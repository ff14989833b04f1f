"""The random state of a process, as one thing: set, saved, restored, derived."""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager

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


def get_rng_state() -> dict:
    """Everything that draws random numbers, as tensors and plain lists (safe to load without executing code)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    for device, own in enumerate(
        state.get("cuda", [])[: torch.cuda.device_count()]
    ):  # there may have been more of them
        torch.cuda.set_rng_state(own, device)


@contextmanager
def preserve_rng_state(*generators: torch.Generator):
    """Whatever draws random numbers inside, from the process's generators or from ``generators``, outside nothing has happened."""
    state, own = get_rng_state(), [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        set_rng_state(state)
        for generator, before in zip(generators, own, strict=True):
            generator.set_state(before)


@contextmanager
def seeded_rng(seed: int):
    """Inside, every generator starts from ``seed``; torch's goes on afterwards as if nothing had happened.

    Python's and NumPy's are left where they are: saving them costs more than reading a small batch, and
    a model draws from torch's.
    """
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(state)
