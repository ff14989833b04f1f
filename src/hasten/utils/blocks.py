"""Repeated blocks: the layers of a transformer, the stages of a residual network; state that a pass updates."""

from __future__ import annotations

import torch
from torch.nn import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Outermost modules with children that share a ModuleList or Sequential with another module of their class."""
    repeated: list[torch.nn.Module] = []
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)):
        classes = [type(child) for child in model]
        repeated = [child for child in model if classes.count(type(child)) > 1 and any(True for _ in child.children())]
    return repeated + [block for child in model.children() if child not in repeated for block in repeated_blocks(child)]


def state_updated_in_forward(model: torch.nn.Module) -> str | None:
    """What every forward pass of training updates, besides batch normalization, so that a second pass over the same
    samples computes or leaves other values; None if no layer of torch in the model is known to.
    """
    for module in model.modules():
        if isinstance(module, (InstanceNorm1d, InstanceNorm2d, InstanceNorm3d)) and module.track_running_stats:
            return "the running statistics of instance normalization"
        if _has_spectral_norm(module):
            return "the vectors of spectral normalization"
    return None


def _has_spectral_norm(module: torch.nn.Module) -> bool:
    """Whether the module is the parametrization, or has a weight with the hook, by which torch normalizes a weight."""
    weights, buffers = dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
    has_hook = any(f"{name.removesuffix('_orig')}_u" in buffers for name in weights if name.endswith("_orig"))
    return has_hook or type(module).__name__ == "_SpectralNorm"
