"""Facts about a run that cards refer to: its hardware, model, data and plan."""

from pathlib import Path

import torch
from torch import nn

from hasten._torch_compat import Convolution
from hasten.engine.plan import Program

CPU_FLAGS = {  # names under which Linux lists the matrix units
    "bfloat16_hardware": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16_hardware": {"avx512_fp16", "amx_fp16"},
}
GPU_CAPABILITIES = {"float16_hardware": (7, 0), "bfloat16_hardware": (8, 0), "tf32_hardware": (8, 0)}


def facts_of(program: Program) -> frozenset[str]:
    """The facts (keys of ``hasten.core.card.FACTS``) that hold for a built run."""
    run, plan, source = program.run, program.plan, program.train
    model = run.model
    facts = {
        "convolutions": any(isinstance(module, Convolution) for module in model.modules()),
        "repeated_blocks": any(_has_repeated_blocks(module) for module in model.modules()),
        "matrix_weights": any(parameter.ndim >= 2 for parameter in model.parameters()),
        "indexed_samples": source.spec is not None,
        "workers": source.spec is not None or source.with_workers is not None,
        "multiple_epochs": plan.epochs > 1,
        "distributed": not run.ranks.is_single_process,
        "evaluations": program.validation is not None and _evaluation_count(program) > 1,
    }
    return hardware_facts(run.device) | {fact for fact, holds in facts.items() if holds}


def hardware_facts(device: torch.device) -> frozenset[str]:
    """The facts about the hardware: type of the device, and number formats that its matrix units support."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return frozenset({"cuda"} | {fact for fact, least in GPU_CAPABILITIES.items() if capability >= least})
    flags = _cpu_flags()
    return frozenset({"cpu"} | {fact for fact, names in CPU_FLAGS.items() if names & flags})


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: no matrix unit is claimed
        return set()
    flag_lines = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return {flag for line in flag_lines for flag in line.partition(":")[2].split()}


def _has_repeated_blocks(module: nn.Module) -> bool:
    """Whether a Sequential or ModuleList holds two modules of one class that have submodules themselves."""
    if not isinstance(module, (nn.Sequential, nn.ModuleList)):
        return False
    blocks = [type(child) for child in module if next(child.children(), None) is not None]
    return len(set(blocks)) < len(blocks)


def _evaluation_count(program: Program) -> float:
    """Number of evaluations in a whole run: one per epoch, or one per ``evaluate_every`` training samples."""
    plan, length = program.plan, program.train.length
    if plan.evaluate_every is None or length is None:
        return plan.epochs
    return plan.epochs * length * plan.batch_size / plan.evaluate_every
