"""Repeated blocks: the layers of a transformer, the stages of a residual network."""

from __future__ import annotations

import torch


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Outermost modules with children that share a ModuleList or Sequential with another module of their class."""
    repeated: list[torch.nn.Module] = []
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)):
        classes = [type(child) for child in model]
        repeated = [child for child in model if classes.count(type(child)) > 1 and any(True for _ in child.children())]
    return repeated + [block for child in model.children() if child not in repeated for block in repeated_blocks(child)]
