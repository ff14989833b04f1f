"""Versions, machine and device of a run. Stored with every result, which means little without them."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any, cast

import numpy
import psutil
import torch

import hasten


def environment(device: str = "cpu") -> dict[str, Any]:
    """Name -> value, as JSON data: versions (python, torch, ...), cpu, cores, threads, device and, on CUDA, the GPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu_names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    facts: dict[str, Any] = {
        "hasten": hasten.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu": next((name.strip() for name in cpu_names if name), platform.machine()),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if torch.device(device).type == "cuda":
        gpu = cast(Any, torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
        facts |= {
            "gpu": gpu.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gb": round(gpu.total_memory / 2**30, 1),
        }
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return facts


def machine_and_versions(device: str) -> dict[str, dict[str, Any]]:
    """``{"machine": {cpu, cores, device, ...}, "versions": {package: version}}`` of this process, for result.json."""
    facts = environment(device)
    machine = {key: facts.get(key) for key in ("cpu", "cores", "threads", "device", "gpu")}
    machine |= {key: facts[key] for key in ("gpus", "gpu_memory_gb") if key in facts}
    machine |= {"os": facts["system"], "memory_gb": round(psutil.virtual_memory().total / 2**30, 1)}
    packages = ("hasten", "python", "torch", "numpy", "cuda", "cudnn")
    return {"machine": machine, "versions": {key: facts[key] for key in packages if key in facts}}


def cores() -> int:
    """Number of CPUs of this process's affinity; ``resources.available_cpus`` also knows quotas and other ranks."""
    return len(os.sched_getaffinity(0))


def source_hash() -> str:
    """A hash, 16 hex digits, of hasten's own source files: measurements of different versions must not be compared."""
    digest = hashlib.sha256()
    for path in sorted(Path(hasten.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
