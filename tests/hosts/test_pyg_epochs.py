"""The epochs of PyTorch Geometric's NeighborLoader in a script: other samples in each, the same in a repeated run."""

from functools import partial

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from hasten.engine.loaders import from_loader
from hasten.hosts.inside.frameworks import pyg
from hasten.hosts.inside.replace import replaces
from hasten.hosts.inside.sites import Sites


class CountedLoader(NeighborLoader):
    """A NeighborLoader as the host changes it."""


replaces(CountedLoader, "__iter__")(partial(pyg._count_epoch, Sites(".")))


def loader(**options) -> CountedLoader:
    torch.manual_seed(0)
    graph = Data(edge_index=torch.randint(200, (2, 4_000)), num_nodes=200)
    return CountedLoader(graph, [3, 3], batch_size=50, neighbor_sampler=pyg._make_sampler(graph, [3, 3]), **options)


def same(first: list, second: list) -> bool:
    return all(torch.equal(a.n_id, b.n_id) and torch.equal(a.e_id, b.e_id) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.multiprocess)]
)
def test_epochs_of_a_script_differ_and_a_repeated_run_is_the_same(options):
    counted, again = loader(**options), loader(**options)
    first, second, third = (list(counted) for _ in range(3))
    assert not same(first, second) and not same(second, third) and not same(first, third)
    assert same(first, list(again)) and same(second, list(again))


def test_epochs_that_hasten_reads_for_a_method_are_those_of_the_script():
    plain, source = loader(), from_loader(loader(), None, 50, 0, True)
    for epoch in range(3):
        assert same(list(plain), list(source.epoch(epoch, 0)))


def test_loader_with_another_sampler_is_not_counted():
    counted = loader()
    del pyg._epochs[counted.node_sampler]
    assert same(list(counted), list(counted))
