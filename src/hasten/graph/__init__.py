"""Graph networks: neighbor sampling and sparse aggregation. Requires ``pip install 'hasten[graph]'``."""

from hasten.core.errors import ConfigurationError

try:
    import numba  # noqa: F401
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise ConfigurationError(f"{error.name} is not installed; pip install 'hasten[graph]'") from None

from hasten.graph.adjacency import Adjacency
from hasten.graph.cbsr import CBSR
from hasten.graph.features import InMemoryFeatures, MemoryMappedFeatures
from hasten.graph.maxk import MaxK, aggregate, compress, maxk
from hasten.graph.maxk_layers import apply_maxk
from hasten.graph.partition import partition_graph, relabel_graph, take_part
from hasten.graph.partition_file import load_partition, save_partition
from hasten.graph.partitioned_loader import PartitionedLoader
from hasten.graph.partitioned_sampler import HybridSampler, VanillaSampler
from hasten.graph.rank_exchange import RankExchange
from hasten.graph.remote_features import RemoteFeatures
from hasten.graph.sampler import NeighborSampler

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
    "load_partition",
    "maxk",
    "partition_graph",
    "relabel_graph",
    "save_partition",
    "take_part",
]
