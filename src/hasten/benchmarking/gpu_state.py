"""Clock, power, temperature and throttling of an NVIDIA GPU at the end of each block, read through NVML.

Without a GPU, or without nvidia-ml-py (``pip install nvidia-ml-py``), nothing is read.
"""

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch

# Bits of nvmlClocksEventReasons (NVML API reference): what lowers the clock under load. Idleness and application
# clocks are no throttling.
THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature, by the hardware",
    0x80: "power brake",
}


def gpu_state(device: torch.device) -> dict[str, float]:
    """The state of a GPU now; {} if it cannot be read. Reading takes milliseconds, so it happens between blocks.

    ``gpu_throttle_reasons`` are the bits of nvmlClocksEventReasons, ``gpu_processes`` all that compute on the GPU.
    """
    nvml, handle = _nvml_handle(device) if device.type == "cuda" else (None, None)
    if nvml is None:
        return {}
    try:
        return {
            "gpu_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_throttle_reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            "gpu_processes": len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        }
    except nvml.NVMLError:  # a part of a GPU (MIG) has no clock of its own
        return {}


@cache
def _nvml_handle(device: torch.device) -> tuple[Any, Any]:
    """(the module pynvml, NVML's handle of the device), or (None, None)."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, None
    cuda: Any = torch.cuda  # the properties have no types
    try:
        nvml.nvmlInit()
        # by its UUID: NVML numbers all GPUs of the machine, CUDA those in CUDA_VISIBLE_DEVICES
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError:
        return None, None


def gpu_summary(blocks: Iterable[Mapping[str, float]]) -> dict[str, float | str]:
    """What the states of all blocks say about a measurement; {} if there are none.

    A clock that falls from block to block, or throttling in one arm only, explains a ratio that later changes.
    """
    states = [block for block in blocks if "gpu_clock_mhz" in block]
    if not states:
        return {}
    clocks = [state["gpu_clock_mhz"] for state in states]
    reasons = [int(state["gpu_throttle_reasons"]) for state in states]
    counts = {name: sum(bool(bits & bit) for bits in reasons) for bit, name in THROTTLE_REASONS.items()}
    throttling = [f"{name} in {count / len(states):.0%} of the blocks" for name, count in counts.items() if count]
    return {
        "lowest_gpu_clock_mhz": min(clocks),
        "highest_gpu_clock_mhz": max(clocks),
        "highest_gpu_power_w": max(state["gpu_power_w"] for state in states),
        "highest_gpu_temperature_c": max(state["gpu_temperature_c"] for state in states),
        "gpu_throttling": ", ".join(throttling) or "none",
        "gpu_processes": max(state["gpu_processes"] for state in states),
    }
