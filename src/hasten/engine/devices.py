"""The device of a run."""

import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hasten.core.errors import ConfigurationError, HastenWarning


def synchronize(device: torch.device) -> None:
    """Waits for the work that was queued on a GPU; on the CPU nothing is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pick_device(name: str | None = None) -> str:
    """``name`` if this machine has that device; without a name "cuda" on a machine with an NVIDIA GPU, else "cpu".
    ConfigurationError if this machine has no such device, or hasten does not support it.
    """
    if name is None:
        if torch.cuda.is_available():
            return "cuda"
        if why := why_unusable():
            warnings.warn(f"{why}; this runs on the CPU (--device cpu)", HastenWarning, stacklevel=3)
        return "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"{name!r} is no name of a device; use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        why = why_unusable() or f"{torch.cuda.device_count()} CUDA devices"
        raise ConfigurationError(f"there is no device {name!r} on this machine ({why}); use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"the device {name!r} is not supported; use cpu or cuda")
    return name


def why_unusable(gpu_files: Path = Path("/dev")) -> str | None:
    """Why PyTorch cannot use the GPU of this machine; None if it has none, or none is to be used.

    torch itself warns of a driver that is too old, with both versions.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not list(gpu_files.glob("nvidia[0-9]*")):
        return None
    if torch.version.cuda is None:
        return "this machine has an NVIDIA GPU, but the installed PyTorch is a CPU build; install one with CUDA"
    advice = f"is its driver too old for CUDA {torch.version.cuda}?"
    return f"this machine has an NVIDIA GPU, but PyTorch cannot use it; {advice}"


def visible_gpus() -> tuple[str, list[str]]:
    """The name of this machine, and a unique name of each GPU, or part of one (MIG), that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    indices = range(torch.cuda.device_count())
    if len(named) == len(indices) and all(name.startswith("MIG-") for name in named):
        return socket.gethostname(), named
    cuda: Any = torch.cuda  # the properties have no types
    return socket.gethostname(), [str(cuda.get_device_properties(index).uuid) for index in indices]


def assign_gpus(visible: Sequence[tuple[str, Sequence[str]]], local_ranks: Sequence[int]) -> list[int]:
    """The index of the GPU of each rank, among those that the rank sees; ConfigurationError if there are too few.

    torchrun shows all GPUs of a node to all its ranks; Slurm, Kubernetes and MIG may show each rank its own one only.
    ``visible`` are the ``visible_gpus`` of each rank, ``local_ranks`` its indices on its node.
    """
    indices: list[int] = []
    users: dict[tuple[str, str], int] = {}
    remedy = "use fewer processes, give each a GPU of its own, or pass --device cpu"
    for rank, ((node, gpus), local_rank) in enumerate(zip(visible, local_ranks, strict=True)):
        index = 0 if len(gpus) == 1 else local_rank
        if index >= len(gpus):
            raise ConfigurationError(f"there are {len(gpus)} GPUs for {local_rank + 1} processes or more; {remedy}")
        other = users.setdefault((node, gpus[index]), rank)
        if other != rank:
            raise ConfigurationError(f"rank {other} and rank {rank} see the same single GPU of {node}; {remedy}")
        indices.append(index)
    return indices
