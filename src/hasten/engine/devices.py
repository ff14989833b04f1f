"""The device of a run."""

import os
import re
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hasten.core.errors import ConfigurationError, HastenWarning

# NVIDIA driver by CUDA version: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
MIN_DRIVERS = {"11": 450, "12": 525, "13": 580}
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def synchronize(device: torch.device) -> None:
    """Waits for the work that was queued on a GPU; on the CPU nothing is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pick_device(name: str | None = None) -> str:
    """``name``; by default "cuda" if PyTorch can use a GPU, else "cpu", with a warning if there is one that it cannot.
    ConfigurationError if ``name`` is no CPU or GPU of this machine.
    """
    if name is None:
        if torch.cuda.is_available():
            return "cuda"
        if why := _why_unusable():
            warnings.warn(f"{why}; this runs on the CPU (--device cpu)", HastenWarning, stacklevel=3)
        return "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"{name!r} is no name of a device; use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        why = _why_unusable() or f"{torch.cuda.device_count()} CUDA devices"
        raise ConfigurationError(f"there is no device {name!r} on this machine ({why}); use --device cpu")
    if device.type == "cpu" and device.index:
        raise ConfigurationError(f"there is no device {name!r} on this machine, only one CPU of all cores; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"the device {name!r} is not supported; use cpu or cuda")
    return name


def why_unusable(driver: str | None, built_for: str | None) -> str | None:
    """Why PyTorch cannot use the GPU of a machine; None without a GPU (``driver`` is None; "": its version is unknown).

    ``built_for`` is the CUDA version that PyTorch was built for; None for a CPU build.
    """
    if driver is None:
        return None
    if built_for is None:
        return "this machine has an NVIDIA GPU, but the installed PyTorch is a CPU build; install one with CUDA"
    oldest = MIN_DRIVERS.get(built_for.partition(".")[0])
    version = re.match(r"\d+", driver)
    if oldest and version and int(version.group()) < oldest:
        return (
            f"the NVIDIA driver {driver} is too old for the installed PyTorch (CUDA {built_for} needs {oldest} or "
            "newer); update the driver, or install a PyTorch for an older CUDA"
        )
    return f"this machine has an NVIDIA GPU (driver {driver or 'unknown'}), but PyTorch cannot use it"


def _why_unusable() -> str | None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not list(Path("/dev").glob("nvidia[0-9]*")):
        return None  # hidden on purpose, or there is none
    version = re.search(r"\d{3,}\.\d[\d.]*", DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
    return why_unusable(version.group() if version else "", torch.version.cuda)


def visible_gpus() -> tuple[str, list[str]]:
    """The name of this machine, and a unique name of each GPU, or part of one (MIG), that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    indices = range(torch.cuda.device_count())
    if len(named) == len(indices) and all(name.startswith("MIG-") for name in named):
        return socket.gethostname(), named
    cuda: Any = torch.cuda  # the properties have no types
    return socket.gethostname(), [str(cuda.get_device_properties(index).uuid) for index in indices]


def assign_gpus(visible: Sequence[tuple[str, Sequence[str]]]) -> list[int]:
    """The index of each rank's GPU among the GPUs that the rank sees: the first one that no lower rank uses.

    ``visible`` has (node, names of the GPUs) for each rank. torchrun shows all GPUs of a node to all its ranks; Slurm,
    Kubernetes and MIG may show each rank its own one only. ConfigurationError if ranks would share a GPU.
    """
    indices: list[int] = []
    users: dict[tuple[str, str], int] = {}
    remedy = "use fewer processes, give each a GPU of its own, or pass --device cpu"
    for rank, (node, gpus) in enumerate(visible):
        index = next((index for index, gpu in enumerate(gpus) if (node, gpu) not in users), None)
        if index is None and len(gpus) == 1:
            other = users[node, gpus[0]]
            raise ConfigurationError(f"rank {other} and rank {rank} see the same single GPU of {node}; {remedy}")
        if index is None:
            raise ConfigurationError(f"there are {len(gpus)} GPUs for {len(gpus) + 1} processes or more; {remedy}")
        users[node, gpus[index]] = rank
        indices.append(index)
    return indices
