"""Batches of a graph whose features and labels are partitioned among ranks, prefetched in a thread.

Hybrid partitioning of FastSample (arXiv 2311.17847): with the graph on every rank a batch costs two rounds, where the
usual partitioning (``VanillaSampler``) costs two rounds a layer.
"""

import atexit
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from torch import Tensor

from hasten.core.errors import ConfigurationError, PeerFailure
from hasten.graph.features import check_node_ids
from hasten.graph.partitions.background import BackgroundProducer
from hasten.graph.partitions.remote_features import RemoteFeatures
from hasten.graph.partitions.sampler import PartitionedSampler, SampledNeighborhood, VanillaSampler
from hasten.graph.sampling import kernels
from hasten.graph.sampling.checks import check_integer

Uneven = Literal["repeat", "drop", "keep"]
EXIT_WAIT_S = 10.0  # for exchanges that had begun when this process failed


@dataclass(frozen=True)
class PartitionedBatch(SampledNeighborhood):
    """A batch with the attributes of PyTorch Geometric's loaders: a sample, and the following.

    Attributes:
        x: features of the nodes, of shape (nodes, width).
        y: labels of the seeds, of shape (batch_size, ...).
        batch_size: number of seeds.
    """

    x: Tensor
    y: Tensor
    batch_size: int


class PartitionedLoader:
    """Iterates over this rank's seed nodes in batches. A collective: all ranks create it and iterate together.

    Args:
        sampler: ``HybridSampler``, or ``VanillaSampler`` on the exchange of the features.
        features: of all nodes.
        labels: of the nodes that this rank owns, in the order of their ids.
        seeds: int64: distinct nodes that this rank owns.
        batch_size: seeds per batch.
        shuffle: whether each epoch has another order, drawn from (seed of the sampler, epoch, rank).
        prefetch_factor: batches fetched while the training works on an earlier one; 0 fetches each when it is read.
        uneven: what happens where ranks have different numbers of batches. "repeat": ranks with fewer batches repeat
            their first ones. "drop": ranks with more batches leave out their last ones, others in each epoch. "keep":
            each rank yields its own batches; a rank that has no more answers the others in the background, and the
            training must allow for it (``torch.distributed.algorithms.Join``).

    Raises:
        ConfigurationError: on every rank, if on one a seed is not its own or occurs twice, labels have another length
            than its nodes, the batch size is below 1, or there are no seeds, unless ``uneven`` is "keep"; or if the
            ranks' graphs, fanouts, ``uneven``, ``prefetch_factor`` or seeds of the sampler differ. From the iterator,
            if another loader fetches batches over the same exchange: end its loop, or create an exchange for each.
    """

    def __init__(
        self,
        sampler: PartitionedSampler,
        features: RemoteFeatures,
        labels: Tensor,
        seeds: Tensor,
        batch_size: int,
        shuffle: bool = True,
        prefetch_factor: int = 1,
        uneven: Uneven = "repeat",
    ):
        self.sampler, self.features, self.labels, self.seeds = sampler, features, labels, seeds
        self.batch_size, self.shuffle, self.prefetch_factor, self.uneven = batch_size, shuffle, prefetch_factor, uneven
        self.exchange = features.exchange
        settings = {"values of uneven": uneven, "values of prefetch_factor": prefetch_factor} | sampler.shared_settings
        self.exchange.agree(settings, self._check)
        self.epoch = 0
        self._own_batches = -(-len(seeds) // batch_size)
        by_rank = self.exchange.gather(self._own_batches)
        self._exchanged_batches = min(by_rank) if uneven == "drop" else max(by_rank)
        if uneven != "keep" and not min(by_rank):
            advice = "use uneven='keep', or a partition that balances them"
            raise ConfigurationError(f"rank {by_rank.index(0)} has no seed nodes; {advice}")
        self._producer: BackgroundProducer[PartitionedBatch] | None = None
        # a rank that ends its last epoch first answers the others, and its thread ends before the interpreter does
        closing = weakref.WeakMethod(self.close_at_exit)
        atexit.register(lambda: (close := closing()) and close())

    def __len__(self) -> int:
        """Batches that this rank yields in an epoch."""
        return self._own_batches if self.uneven == "keep" else self._exchanged_batches

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, as after a resume; each epoch that is iterated counts by itself."""
        self.epoch = check_integer("epoch", epoch, 0, 2**63 - 1)

    def __iter__(self) -> Iterator[PartitionedBatch]:
        self.close()
        batches, epoch = self._batches_of(self.epoch), self.epoch
        nothing = self.seeds[:0]

        def make(index: int) -> PartitionedBatch:
            return self._make(batches[index] if index < len(batches) else nothing, epoch)

        if not self.prefetch_factor:
            self.epoch += 1
            for index in range(self._exchanged_batches):
                batch = make(index)
                if index < len(self):
                    yield batch
            return
        producer = BackgroundProducer(make, self._exchanged_batches, self.prefetch_factor)
        self.exchange.reserve(producer)
        self.epoch += 1
        self._producer = producer
        producer.thread.start()
        try:
            for _ in range(len(self)):
                yield producer.get()
            producer.permit_all()
        finally:
            producer.stop()  # where the loop is left early: a thread that waits for permission would never end
        if len(self) == self._exchanged_batches and self._producer is producer:  # else it still answers other ranks
            self.close()

    def close(self) -> None:
        """Waits for the exchanges that the last epoch began.

        Call it before the process group is destroyed after a loop that was left early.
        """
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.stop()
            producer.join()

    def close_at_exit(self) -> None:
        """As ``close``. After an epoch that was left early, or failed, it waits for other ranks a short time only.

        A thread that returns from a collective while Python ends would abort the process.
        """
        producer = self._producer
        if producer is not None:
            wait = None if producer.is_fully_permitted else EXIT_WAIT_S
            producer.stop()
            with suppress(PeerFailure):  # another rank has failed: it reports the cause, and this one is at its end
                producer.join(wait)

    def _batches_of(self, epoch: int) -> list[Tensor]:
        """The seeds of each batch that this rank yields in an epoch."""
        seeds = self.seeds
        if self.shuffle:
            key = kernels.key_of(numpy.uint64(self.sampler.seed % 2**64), numpy.array([epoch, self.exchange.rank]))
            seeds = seeds[torch.randperm(len(seeds), generator=torch.Generator().manual_seed(int(key) >> 1))]
        batches = list(seeds.split(self.batch_size)) if len(seeds) else []
        return [batches[index % len(batches)] for index in range(len(self))]

    def _make(self, seeds: Tensor, epoch: int) -> PartitionedBatch:
        found = self.sampler.sample(seeds, epoch)
        labels = self.labels[seeds - self.exchange.bounds[0]]
        return PartitionedBatch(**vars(found), x=self.features.rows(found.n_id), y=labels, batch_size=len(seeds))

    def _check(self) -> None:
        first, end = self.exchange.bounds
        rank = f"rank {self.exchange.rank}"
        if self.batch_size < 1 or self.prefetch_factor < 0:
            given = f"got {self.batch_size} and {self.prefetch_factor}"
            raise ConfigurationError(f"batch_size must be at least 1 and prefetch_factor at least 0; {given}")
        if isinstance(self.sampler, VanillaSampler) and self.sampler.exchange is not self.exchange:
            raise ConfigurationError("the sampler and the features must have the same RankExchange")
        if self.uneven not in ("repeat", "drop", "keep"):
            raise ConfigurationError(f"uneven must be repeat, drop or keep; got {self.uneven!r}")
        if len(self.labels) != end - first:
            given = f"got {len(self.labels)} labels"
            raise ConfigurationError(f"{rank} owns {end - first} nodes, but {given}; pass those of its own nodes")
        check_node_ids(self.seeds, self.sampler.num_nodes, "seed nodes")
        if len(self.seeds) and not bool(((self.seeds >= first) & (self.seeds < end)).all()):
            raise ConfigurationError(f"the seed nodes of {rank} must be its own, {first} to {end} (exclusive)")
        if len(self.seeds.unique()) != len(self.seeds):
            raise ConfigurationError(f"a seed node of {rank} occurs twice; pass each once")
