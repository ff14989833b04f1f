"""Graph networks: neighbor sampling and sparse aggregation. Requires ``pip install 'hasten[graph]'``."""

from hasten.core.errors import ConfigurationError

try:
    import numba  # noqa: F401
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise ConfigurationError(f"{error.name} is not installed; pip install 'hasten[graph]'") from None

from hasten.graph.aggregation.adjacency import Adjacency
from hasten.graph.aggregation.aggregate import aggregate
from hasten.graph.aggregation.cbsr import CBSR
from hasten.graph.aggregation.fused_layers import fuse_aggregation
from hasten.graph.aggregation.maxk import MaxK, compress, maxk
from hasten.graph.aggregation.maxk_layers import apply_maxk
from hasten.graph.features import InMemoryFeatures, MemoryMappedFeatures
from hasten.graph.partitions.exchange import RankExchange
from hasten.graph.partitions.loader import PartitionedLoader
from hasten.graph.partitions.partition import load_partition, partition_graph, relabel_graph, save_partition, take_part
from hasten.graph.partitions.remote_features import RemoteFeatures
from hasten.graph.partitions.sampler import HybridSampler, VanillaSampler
from hasten.graph.sampling.sampler import NeighborSampler

__all__ = [
    "CBSR",
    "Adjacency",
    "HybridSampler",
    "InMemoryFeatures",
    "MaxK",
    "MemoryMappedFeatures",
    "NeighborSampler",
    "PartitionedLoader",
    "RankExchange",
    "RemoteFeatures",
    "VanillaSampler",
    "aggregate",
    "apply_maxk",
    "compress",
    "fuse_aggregation",
    "load_partition",
    "maxk",
    "partition_graph",
    "relabel_graph",
    "save_partition",
    "take_part",
]
