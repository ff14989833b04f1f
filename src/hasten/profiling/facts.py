"""What holds for a run, in the words of the cards: the machine, the model, the data and the plan."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hasten._torch_compat import Convolution
from hasten.engine.plan import Program

CONVOLUTIONS = (Convolution,)
CPU_FLAGS = {  # matrix units by the names under which Linux lists them
    "bfloat16_hardware": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16_hardware": {"avx512_fp16", "amx_fp16"},
}
GPU_CAPABILITIES = {"float16_hardware": (7, 0), "bfloat16_hardware": (8, 0), "tf32_hardware": (8, 0)}


def facts_of(program: Program) -> frozenset[str]:
    """The facts (keys of ``contract.card.FACTS``) that hold for a built run."""
    run, plan = program.run, program.plan
    samples = program.train.spec
    held = {
        "convolutions": any(isinstance(module, CONVOLUTIONS) for module in run.model.modules()),
        "repeated_blocks": any(_has_like_blocks(module) for module in run.model.modules()),
        "matrix_weights": any(parameter.ndim >= 2 for parameter in run.model.parameters()),
        "indexed_samples": samples is not None,
        "workers": samples is not None or program.train.with_workers is not None,
        "multiple_epochs": plan.epochs > 1,
        "distributed": not run.ranks.is_single_process,
        "evaluations": program.validation is not None and _evaluations(program) > 1,
    }
    return hardware_facts(run.device) | {fact for fact, holds in held.items() if holds}


def hardware_facts(device: torch.device) -> frozenset[str]:
    """Which device it is, and the number formats that its matrix units take."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return frozenset({"cuda"} | {fact for fact, least in GPU_CAPABILITIES.items() if capability >= least})
    flags = _cpu_flags()
    return frozenset({"cpu"} | {fact for fact, names in CPU_FLAGS.items() if names & flags})


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: nothing is claimed
        return set()
    return {
        word
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for word in line.partition(":")[2].split()
    }


def _has_like_blocks(module: nn.Module) -> bool:
    """A list of modules with two of one class that are made of parts themselves."""
    if not isinstance(module, (nn.Sequential, nn.ModuleList)):
        return False
    made_of_parts = [type(child) for child in module if next(child.children(), None) is not None]
    return len(set(made_of_parts)) < len(made_of_parts)


def _evaluations(program: Program) -> float:
    """How many times the metric is measured in a whole run."""
    plan, length = program.plan, program.train.length
    if plan.evaluate_every is None or length is None:
        return plan.epochs
    return plan.epochs * length * plan.batch_size / plan.evaluate_every
