"""The device of a run."""

import torch

from hasten.core.errors import ConfigurationError


def synchronize(device: torch.device) -> None:
    """Waits for the work that was queued on a GPU; on the CPU nothing is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pick_device(name: str | None = None) -> str:
    """``name`` if this machine has that device; without a name "cuda" on a machine with an NVIDIA GPU, else "cpu".

    Raises:
        ConfigurationError: This machine has no such device, or hasten does not support it.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"{name!r} is no name of a device; use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        count = f"{torch.cuda.device_count()} CUDA devices"
        raise ConfigurationError(f"there is no device {name!r} on this machine ({count}); use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"the device {name!r} is not supported; use cpu or cuda")
    return name
