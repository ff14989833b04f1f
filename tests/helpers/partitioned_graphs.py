"""A small graph whose parts lie in the ranks of a job, and what ranks do with it in tests."""

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.graph.features import InMemoryFeatures
from hasten.graph.partitions.exchange import RankExchange
from hasten.graph.partitions.loader import PartitionedLoader
from hasten.graph.partitions.partition import partition_graph, relabel_graph, take_part
from hasten.graph.partitions.remote_features import RemoteFeatures
from hasten.graph.partitions.sampler import HybridSampler, VanillaSampler

NODES, WIDTH, CLASSES = 240, 5, 3


def start() -> None:
    """Begins the work of a rank."""
    dist.init_process_group("gloo")


def random_graph(nodes: int = NODES, mean_degree: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """indptr and indices of a graph; some nodes have no edges, some have self loops."""
    generator = numpy.random.default_rng(seed)
    degrees = generator.poisson(mean_degree, nodes)
    degrees[:: max(nodes // 6, 1)] = 0
    indptr = numpy.concatenate([[0], degrees.cumsum()])
    return torch.from_numpy(indptr), torch.from_numpy(generator.integers(0, nodes, int(indptr[-1])))


def graph_features(old_ids: Tensor) -> Tensor:
    """Features that are a function of the old id of a node."""
    return torch.sin(old_ids[:, None].double() * torch.arange(1, WIDTH + 1)).float()


def partitioned_loader(
    rank: int,
    world: int,
    scheme: str,
    *,
    fanouts=(4, 3, 2),
    seeds_of=None,
    batch_size: int = 10,
    timeout: float = 20,
    **options,
) -> PartitionedLoader:
    """The loader of a rank in the job of ``world`` ranks; ``seeds_of(rank, first, end)`` are its seeds."""
    partition = partition_graph(*random_graph(), world, "metis")
    indptr, indices, _ = relabel_graph(partition, *random_graph())
    first, end = partition.bounds(rank)
    exchange = RankExchange(partition.offsets, timeout, partition.old_ids)
    features = RemoteFeatures(InMemoryFeatures(graph_features(partition.old_ids[first:end])), exchange)
    if scheme == "hybrid":
        sampler = HybridSampler(indptr, indices, fanouts, seed=7)
    else:
        sampler = VanillaSampler(*take_part(partition, indptr, indices, rank), exchange, fanouts, seed=7)
    seeds = torch.arange(first, end)[:40] if seeds_of is None else seeds_of(rank, first, end)
    labels = partition.old_ids[first:end] % CLASSES
    return PartitionedLoader(sampler, features, labels, seeds, batch_size, **options)


class SmallGraphSage(nn.Module):
    """Two GraphSAGE layers with mean aggregation, on a whole sampled neighborhood."""

    def __init__(self, hidden: int = 8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * WIDTH, hidden), nn.Linear(2 * hidden, CLASSES)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
        for number, layer in enumerate(self.layers):
            mean = torch.zeros_like(x).index_add(0, target, x[source]) / degree
            x = layer(torch.cat([x, mean], 1))
            x = x.relu() if number == 0 else x
        return x
