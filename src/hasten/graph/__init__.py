"""Graph networks: neighbor sampling and sparse aggregation. Requires ``pip install 'hasten[graph]'``."""

from hasten.core.errors import ConfigurationError

try:
    import numba  # noqa: F401
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise ConfigurationError(f"{error.name} is not installed; pip install 'hasten[graph]'") from None

from hasten.graph.sampler import NeighborSampler

__all__ = ["NeighborSampler"]
