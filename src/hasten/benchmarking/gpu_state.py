"""Clock, power, temperature and throttling of an NVIDIA GPU at the end of each block, read through NVML.

Without a GPU, or without nvidia-ml-py (``pip install nvidia-ml-py``), nothing is read.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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
# Key of ``gpu_summary`` -> the key of ``gpu_state``, and what is taken of all blocks.
SUMMARY: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "lowest_gpu_clock_mhz": ("gpu_clock_mhz", min),
    "highest_gpu_clock_mhz": ("gpu_clock_mhz", max),
    "highest_gpu_power_w": ("gpu_power_w", max),
    "highest_gpu_temperature_c": ("gpu_temperature_c", max),
    "gpu_processes": ("gpu_processes", max),
}


def gpu_state(device: torch.device) -> dict[str, float]:
    """The state of a GPU now: ``gpu_clock_mhz``, ``gpu_power_w``, ``gpu_temperature_c``, ``gpu_throttle_reasons`` (bits
    of nvmlClocksEventReasons), ``gpu_processes`` (number that compute on it). Without what cannot be read; {} on a CPU.

    Reading takes milliseconds, so it happens between blocks.
    """
    nvml, handle = _nvml_handle(device) if device.type == "cuda" else (None, None)
    if nvml is None:
        return {}
    readings: dict[str, Callable[[], float]] = {
        "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "gpu_throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "gpu_processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }
    state: dict[str, float] = {}
    for name, read in readings.items():
        with suppress(nvml.NVMLError):  # a part of a GPU (MIG) has no clock of its own, and some GPUs tell no power
            state[name] = read()
    return state


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
    """Extremes of the ``gpu_state`` of all blocks (keys of SUMMARY), and ``gpu_throttling`` in words; {} without any.

    A clock that falls from block to block, or throttling in one arm only, explains a ratio that later changes.
    """
    seen: dict[str, list[float]] = {}
    for block in blocks:
        for name, value in block.items():
            if name.startswith("gpu_"):
                seen.setdefault(name, []).append(value)
    summary: dict[str, float | str] = {
        key: function(seen[name]) for key, (name, function) in SUMMARY.items() if name in seen
    }
    if reasons := [int(bits) for bits in seen.get("gpu_throttle_reasons", ())]:
        counts = {name: sum(bool(bits & bit) for bits in reasons) for bit, name in THROTTLE_REASONS.items()}
        throttling = [f"{name} in {count / len(reasons):.0%} of the blocks" for name, count in counts.items() if count]
        summary["gpu_throttling"] = ", ".join(throttling) or "none"
    return summary
