"""Facts about the hardware and the model of a run that cards refer to; keys of ``hasten.core.card.FACTS``."""

from pathlib import Path

import torch
from torch import nn

from hasten._torch_compat import Convolution
from hasten.utils.blocks import repeated_blocks

CPU_FLAGS = {  # names under which Linux lists the matrix units
    "bfloat16_hardware": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16_hardware": {"avx512_fp16", "amx_fp16"},
}
GPU_CAPABILITIES = {"float16_hardware": (7, 0), "bfloat16_hardware": (8, 0), "tf32_hardware": (8, 0)}


def model_facts(model: nn.Module) -> frozenset[str]:
    """Which of "convolutions", "repeated_blocks", "graph_layers" (PyG) and "matrix_weights" the model has."""
    facts = {
        "convolutions": any(isinstance(module, Convolution) for module in model.modules()),
        "repeated_blocks": bool(repeated_blocks(model)),
        "graph_layers": any(type(module).__module__.startswith("torch_geometric.nn") for module in model.modules()),
        "matrix_weights": any(parameter.ndim >= 2 for parameter in model.parameters()),
    }
    return frozenset(fact for fact, holds in facts.items() if holds)


def hardware_facts(device: torch.device) -> frozenset[str]:
    """The facts about the hardware: "cpu" or "cuda", "several_gpus" if so, and such as "float16_hardware" for each
    number format that the matrix units of the device support.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        facts = {"cuda"} | ({"several_gpus"} if torch.cuda.device_count() > 1 else set[str]())
        return frozenset(facts | {fact for fact, least in GPU_CAPABILITIES.items() if capability >= least})
    flags = _cpu_flags()
    return frozenset({"cpu"} | {fact for fact, names in CPU_FLAGS.items() if names & flags})


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flag_lines = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return {flag for line in flag_lines for flag in line.partition(":")[2].split()}
