"""Features that are partitioned among ranks: this rank's rows are local, those of other ranks are fetched."""

import torch
from torch import Tensor

from hasten.core.errors import ConfigurationError
from hasten.graph.features import FeatureSource, check_node_ids
from hasten.graph.partitions.exchange import RankExchange


class RemoteFeatures(FeatureSource):
    """The features of all nodes, of which this rank holds those that it owns.

    All ranks must create it together. ``rows`` is a collective of two rounds, request and response, in three collective
    calls: all ranks must call it equally often. Ids may be empty.

    Args:
        local: the rows of the nodes that this rank owns, in the order of their ids.
        exchange: who owns which id, and the process group.

    Raises:
        ConfigurationError: on every rank, if the ``local`` of one has another number of rows than this rank has nodes,
            or the ranks' features differ in width or dtype.
    """

    def __init__(self, local: FeatureSource, exchange: RankExchange):
        super().__init__((int(exchange.offsets[-1]), local.width), local.dtype)
        self.local, self.exchange = local, exchange
        exchange.agree({"widths of features": local.width, "dtypes of features": str(local.dtype)}, self._check)

    def rows(self, node_ids: Tensor) -> Tensor:
        check_node_ids(node_ids, len(self))
        first, _ = self.exchange.bounds
        request = self.exchange.request(node_ids)
        found = self.exchange.respond(request, self.local.rows(request.ids - first))
        result = torch.empty([len(node_ids), self.width], dtype=self.dtype)
        result[request.own] = self.local.rows(node_ids[request.own] - first)
        result[request.order] = found
        return result

    def _check(self) -> None:
        first, end = self.exchange.bounds
        if len(self.local) != end - first:
            owned = f"rank {self.exchange.rank} owns {end - first} nodes ({first} to {end}, exclusive)"
            advice = "pass the rows of its own nodes"
            raise ConfigurationError(f"{owned}, but its features have {len(self.local)} rows; {advice}")
