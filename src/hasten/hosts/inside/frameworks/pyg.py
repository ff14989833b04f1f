"""PyTorch Geometric: its loaders get hasten's neighbor sampler where neither pyg-lib nor torch-sparse is installed.

Without one of them, and neither is at the package index, a script that uses ``NeighborLoader`` ends with an error.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hasten.hosts.inside.replace import replaces
from hasten.utils.graph_batch import graph_sampler, set_epoch

if TYPE_CHECKING:
    from hasten.hosts.inside.frameworks import FrameworkLoop
    from hasten.hosts.inside.sites import Sites

_epochs = WeakKeyDictionary[Any, Iterator[int]]()  # of the loaders of each sampler that was made here


def watch(module: Any, loop: FrameworkLoop) -> None:
    """Replaces the NeighborSampler of ``module``, a loader's, where neither pyg-lib nor torch-sparse is installed."""
    available = sys.modules["torch_geometric.typing"]
    if available.WITH_PYG_LIB or available.WITH_TORCH_SPARSE:
        return
    module.NeighborSampler = _make_sampler
    for name in ("NeighborLoader", "LinkNeighborLoader"):
        if loader_class := vars(module).get(name):
            replaces(loader_class, "__iter__")(partial(_count_epoch, loop.steps.sites))


def _count_epoch(sites: Sites, original: Callable[[Any], Any], loader: Any) -> Any:
    """``__iter__`` of a loader: sets its epoch, so that each one has other samples, as with pyg-lib.

    Epochs that hasten reads for a method are those of the script, and are not counted again.
    """
    sampler = graph_sampler(loader)
    if sampler in _epochs and sites.line() is not None:
        set_epoch(loader, next(_epochs[sampler]))
    return original(loader)


def _make_sampler(*args: Any, **options: Any) -> Any:
    """The sampler of hasten, imported at its first use: while PyTorch Geometric is being imported it cannot be."""
    from hasten.graph import NeighborSampler

    _print_once()
    sampler = NeighborSampler(*args, **options)
    _epochs[sampler] = itertools.count()
    return sampler


@functools.cache
def _print_once() -> None:
    print("hasten: neighbors are sampled by hasten.graph, since pyg-lib is not installed", file=sys.stderr)
