"""PyTorch Geometric: its loaders get hasten's neighbor sampler where neither pyg-lib nor torch-sparse is installed.

Without one of them, and neither is at the package index, a script that uses ``NeighborLoader`` ends with an error.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.hosts.inside.frameworks import FrameworkLoop


def watch(module: Any, loop: FrameworkLoop) -> None:
    """``module`` is one of ``torch_geometric.loader`` that calls its ``NeighborSampler``."""
    available = sys.modules["torch_geometric.typing"]
    if available.WITH_PYG_LIB or available.WITH_TORCH_SPARSE:
        return
    module.NeighborSampler = _make_sampler


def _make_sampler(*args: Any, **options: Any) -> Any:
    """The sampler of hasten, imported at its first use: while PyTorch Geometric is being imported it cannot be."""
    from hasten.graph import NeighborSampler

    _say_once()
    return NeighborSampler(*args, **options)


@functools.cache
def _say_once() -> None:
    print("hasten: neighbors are sampled by hasten.graph, since pyg-lib is not installed", file=sys.stderr)
