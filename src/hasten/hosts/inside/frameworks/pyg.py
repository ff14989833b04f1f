"""PyTorch Geometric: its loaders get hasten's neighbor sampler where neither pyg-lib nor torch-sparse is installed.

Without one of them, and neither is at the package index, a script that uses ``NeighborLoader`` ends with an error.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.hosts.inside.frameworks import FrameworkLoop


def watch(module: Any, loop: FrameworkLoop) -> None:
    """``module`` is one of ``torch_geometric.loader`` that calls its ``NeighborSampler``."""
    available = sys.modules["torch_geometric.typing"]
    if available.WITH_PYG_LIB or available.WITH_TORCH_SPARSE:
        return
    from hasten.graph import NeighborSampler

    module.NeighborSampler = NeighborSampler
    if "torch_geometric.loader.neighbor_loader" in module.__name__:  # say it once, though there are two modules
        print("hasten: neighbors are sampled by hasten.graph, since pyg-lib is not installed", file=sys.stderr)
