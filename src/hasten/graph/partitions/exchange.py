"""Exchanges between all ranks in rounds: a request (ids, sorted by the rank that owns them) and a response to it.

A round is one message from every rank to every other. A request takes two collective calls, since the ranks do not know
how much they will receive: the sizes, then the ids. A response of known size takes one call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.core.errors import ConfigurationError
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S
from hasten.distributed.process_group import translate_peer_errors
from hasten.graph.partitions.background import BackgroundProducer
from hasten.graph.partitions.partition import array_checksum

LOST = "another rank ended during an exchange of graph data; its own output has the cause"


@dataclass(frozen=True)
class Request:
    """What this rank asked of the others, and they of it, in one round.

    Attributes:
        order: int64: positions of this rank's ids, sorted by owner; those that this rank owns are not among them.
        own: int64: positions of the ids that this rank owns itself.
        sent: number of ids sent to each rank.
        ids: int64: the ids that the other ranks ask of this one, by rank.
        received: number of ids received from each rank.
        keys: int64, of shape (ranks,): the number that each rank sent along.
    """

    order: Tensor
    own: Tensor
    sent: list[int]
    ids: Tensor
    received: list[int]
    keys: Tensor


class RankExchange:
    """Exchanges over a gloo process group of its own, so that its messages never mix with those of the training.

    All ranks must create it at the same point of the program, and call its methods in the same order. Only one thread
    may use it at a time: while a loader fetches batches in the background, any other use is refused, since the ranks
    would exchange in different orders. A loader that was left early, or has asked for its last batch, is waited for.

    Args:
        offsets: int64, of shape (ranks + 1,): rank r owns the ids ``offsets[r]`` to ``offsets[r + 1]`` (exclusive).
        timeout: seconds to wait for a rank that does not answer. One that has ended is noticed at once.
        old_ids: of the partition, to be compared among the ranks: partitions with equal offsets may have other nodes.

    Attributes:
        rounds: number of rounds so far.
        calls: number of collective calls so far.
        sent_bytes: bytes that this rank sent to others so far.

    Raises:
        ConfigurationError: there is no default process group, the partition is for another number of ranks, or the
            partitions of the ranks differ.
    """

    def __init__(self, offsets: Tensor, timeout: float = DEFAULT_TIMEOUT_S, old_ids: Tensor | None = None):
        if not dist.is_available() or not dist.is_initialized():
            advice = "call torch.distributed.init_process_group first, in processes started by torchrun"
            raise ConfigurationError(f"features in other ranks require a process group; {advice}")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.offsets, self.timeout = offsets, timeout
        self.rounds = self.calls = self.sent_bytes = 0
        self._holder: BackgroundProducer[Any] | None = None
        with translate_peer_errors(self.timeout, LOST):
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        ids = None if old_ids is None else array_checksum(old_ids)
        settings = {"offsets of the partition": offsets.tolist(), "old ids of the partition (checksums)": ids}
        self.agree(settings, self._check_offsets)
        self._id_dtype = torch.int32 if int(offsets[-1]) < 2**31 else torch.int64  # of ids in messages

    @property
    def bounds(self) -> tuple[int, int]:
        """The first id that this rank owns, and the id after its last."""
        return int(self.offsets[self.rank]), int(self.offsets[self.rank + 1])

    def request(self, ids: Tensor, key: int = 0) -> Request:
        """Sends each id to the rank that owns it. One round: two collective calls.

        Args:
            ids: int64, of shape (N,), in the range of the offsets.
            key: an int64 that every other rank receives along.
        """
        owners = torch.bucketize(ids, self.offsets[1:], right=True)
        is_own = owners == self.rank
        others = (~is_own).nonzero().flatten()
        order = others[torch.argsort(owners[others], stable=True)]
        sent = torch.bincount(owners[others], minlength=self.world_size)
        header = torch.stack([sent, torch.full_like(sent, key)], 1)
        headers = self._all_to_all(header, [1] * self.world_size, [1] * self.world_size)
        received = headers[:, 0].tolist()
        asked = self._all_to_all_ids(ids[order], sent.tolist(), received)
        self.rounds += 1
        return Request(order, is_own.nonzero().flatten(), sent.tolist(), asked, received, headers[:, 1])

    def respond(self, request: Request, rows: Tensor) -> Tensor:
        """Sends one row for each id that was received. One round: one collective call.

        Args:
            request: of the round before.
            rows: of shape (len(request.ids), ...), in the order of ``request.ids``.

        Returns:
            The rows of the ids that this rank sent, in the order of ``request.order``.
        """
        self.rounds += 1
        return self._all_to_all(rows, request.received, request.sent)

    def respond_ids(self, request: Request, counts: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As ``respond``, ``counts[i]`` ids of nodes for id number i. One round: two collective calls.

        Returns:
            The counts, and the ids of all one after the other, both int64, in the order of ``request.order``.
        """
        found = self._all_to_all_ids(counts, request.received, request.sent)
        sent = [int(part.sum()) for part in counts.split(request.received)]
        expected = [int(part.sum()) for part in found.split(request.sent)]
        self.rounds += 1
        return found, self._all_to_all_ids(ids, sent, expected)

    def agree(self, settings: Mapping[str, Any], check: Callable[[], None]) -> None:
        """Compares settings that must be equal on all ranks, and calls ``check``, before the ranks act on them.

        A rank that raised an error alone would leave the others waiting. One collective operation, which counts as no
        round.

        Args:
            settings: by name; values that pickle.
            check: raises ConfigurationError if the arguments of this rank are wrong.

        Raises:
            ConfigurationError: on every rank, if ``check`` failed on one rank or a setting differs.
        """
        problem = None
        try:
            check()
        except ConfigurationError as error:
            problem = str(error)
        found = self.gather((dict(settings), problem))
        if problem is not None:
            raise ConfigurationError(problem)
        for rank, (_, other_problem) in enumerate(found):
            if other_problem is not None:
                raise ConfigurationError(f"rank {rank} failed: {other_problem}")
        for name, first in found[0][0].items():
            for rank, (other, _) in enumerate(found):
                if other.get(name) != first:
                    values = f"{first!r:.80} on rank 0, {other.get(name)!r:.80} on rank {rank}"
                    raise ConfigurationError(f"the ranks have different {name}: {values}; pass the same on every rank")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; they must pickle. One collective operation, which counts as no round."""
        values: list[Any] = [None] * self.world_size
        self._check_holder()
        with translate_peer_errors(self.timeout, LOST):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def reserve(self, producer: BackgroundProducer[Any]) -> None:
        """Reserves the exchange for the thread of ``producer``, which has not started, until that thread ends.

        Raises:
            ConfigurationError: the thread of another producer exchanges data, and ends at no known point.
        """
        self._check_holder()
        self._holder = producer

    def _all_to_all_ids(self, ids: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """As ``_all_to_all`` for ids or numbers of edges, int64, in 32 bits where the graph allows it."""
        return self._all_to_all(ids.to(self._id_dtype), sent, received).long()

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends ``sent[r]`` rows to rank r, and returns the ``received[r]`` rows that each rank sent to this one."""
        self._check_holder()
        result = rows.new_empty([sum(received), *rows.shape[1:]])
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
        self.sent_bytes += row_bytes * (len(rows) - sent[self.rank])
        self.calls += 1
        with translate_peer_errors(self.timeout, LOST):
            dist.all_to_all_single(_as_bytes(result), _as_bytes(rows), received, sent, group=self._group)
        return result

    def _check_holder(self) -> None:
        holder = self._holder
        if holder is None or holder.is_current_thread:
            return
        if not holder.will_end:
            advice = "end its loop, call its close(), or take another RankExchange"
            raise ConfigurationError(f"a loader still exchanges data over this RankExchange; {advice}")
        self._holder = None
        holder.join()

    def _check_offsets(self) -> None:
        offsets = self.offsets
        if offsets.ndim != 1 or offsets.dtype != torch.int64:
            shape = tuple(offsets.shape)
            raise ConfigurationError(f"offsets must be int64 of one dimension; got {offsets.dtype} of shape {shape}")
        if len(offsets) - 1 != self.world_size:
            parts = len(offsets) - 1
            problem = f"the partition has {parts} parts, but there are {self.world_size} ranks"
            raise ConfigurationError(f"{problem}; start {parts} ranks, or make a partition for {self.world_size}")
        if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
            raise ConfigurationError(f"the offsets of a partition must ascend from 0; got {offsets.tolist()!r:.80}")


def _as_bytes(rows: Tensor) -> Tensor:
    """The same memory as uint8, of shape (rows, bytes per row): gloo does not support all dtypes."""
    if not rows.numel():
        return torch.empty([len(rows), 1], dtype=torch.uint8)
    return rows.contiguous().view(torch.uint8).reshape(len(rows), -1)
