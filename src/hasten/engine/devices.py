"""Which device a run uses."""

import torch

from hasten.core.errors import ConfigurationError


def pick_device(name: str | None = None) -> str:
    """``name`` if it can be used here; without a name an NVIDIA GPU where there is one, else the CPU.

    Raises:
        Refusal: no such device on this machine.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"there is no device {name!r}; say cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigurationError(
            f"there is no device {name!r} on this machine ({torch.cuda.device_count()} CUDA devices); say --device cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"the device {name!r} is not supported; say cpu or cuda")
    return name
